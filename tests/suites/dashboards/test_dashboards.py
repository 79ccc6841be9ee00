"""config/prometheus and config/grafana: the rules by promtool, each query by a real Prometheus on a simulated night."""

import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from podwatch.domain.finding import FindingKind
from tests.packaging.test_pages import anchors
from tests.suites.dashboards import night

ROOT = Path(__file__).parents[3]
RULES = ROOT / "config" / "prometheus" / "alerts.yml"
DASHBOARD = json.loads((ROOT / "config" / "grafana" / "podwatch.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [
    (f"{panel['title']}: {target['legendFormat']}", target["expr"]) for panel in PANELS for target in panel["targets"]
]
QUERIES += [(f"annotation {a['name']}", a["expr"]) for a in DASHBOARD["annotations"]["list"]]
ALERTS = re.findall(r"alert: (\w+)", RULES.read_text())
OCCUR = {
    "PodwatchUnreachable", "PodwatchGaveUp", "PodwatchTrainingDown", "PodwatchRestartsOften", "PodwatchBackupOld",
    "PodwatchCriticalFinding", "PodwatchWarning", "PodwatchNodeMissing",
}  # fmt: skip
"""Alerts whose condition is met at some time of the night. For the others tests/suites/dashboards/alerts_test.yml is
all the proof."""


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: prometheus)")
    return found


def promtool(*arguments: str | Path) -> str:
    command = [tool("promtool"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_rules_are_valid_and_pass_their_unit_tests() -> None:
    promtool("check", "rules", RULES)
    promtool("test", "rules", Path(__file__).parent / "alerts_test.yml")


def test_every_alert_has_a_unit_test_and_a_place_in_the_runbook() -> None:
    tested = (Path(__file__).parent / "alerts_test.yml").read_text()
    there = anchors((ROOT / "docs" / "runbook.md").read_text())
    assert set(FindingKind) <= there
    for alert, runbook in zip(
        ALERTS, re.findall(r"runbook: \"?docs/runbook.md#([^\"\n]*)", RULES.read_text()), strict=True
    ):
        assert re.search(rf"alertname: {alert}\n +exp_alerts:\n", tested), f"{alert} is never tested to fire"
        assert runbook in there or runbook == "{{ $labels.kind }}", alert


# -- a real Prometheus, with the night in its database


@dataclass
class Prometheus:
    url: str

    def get(self, path: str, **parameters: object) -> list[dict[str, object]]:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as answer:
            document = json.load(answer)
        assert document["status"] == "success", document
        (found,) = [value for value in document["data"].values() if isinstance(value, list)]
        return list(found)

    def over_the_night(self, expr: str) -> list[dict[str, object]]:
        return self.get("query_range", query=expr, start=night.START, end=night.START + night.MINUTES * 60, step=60)

    def until(self, path: str, wanted: str, **parameters: object) -> list[dict[str, object]]:
        """Ask until the answer contains ``wanted``."""
        while wanted not in json.dumps(found := self.get(path, **parameters)):
            time.sleep(0.1)
        return found


class Pod(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        text = night.metrics(night.MINUTES).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def pod() -> Iterator[ThreadingHTTPServer]:
    """A pod that serves the last minute of the night."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pod)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def prometheus(pod: ThreadingHTTPServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    program, root = tool("prometheus"), tmp_path_factory.mktemp("prometheus")
    (root / "night.txt").write_text("\n".join(night.openmetrics()) + "\n")
    promtool("tsdb", "create-blocks-from", "openmetrics", root / "night.txt", root / "data")
    (root / "prometheus.yml").write_text(
        f"global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: ['{RULES}']\nscrape_configs:\n"
        f"  - job_name: podwatch\n    static_configs:\n"
        f"      - {{targets: ['127.0.0.1:{pod.server_address[1]}'], labels: {{run: live}}}}\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = (root / "log").open("w")
    process = subprocess.Popen(
        [program, f"--config.file={root / 'prometheus.yml'}", f"--storage.tsdb.path={root / 'data'}",
         f"--web.listen-address=127.0.0.1:{port}", "--storage.tsdb.retention.time=100y"],
        stdout=log, stderr=log,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert process.poll() is None, (root / "log").read_text()
            try:
                urllib.request.urlopen(f"{url}/-/ready", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield Prometheus(url)
    finally:
        process.terminate()
        process.wait(30)
        log.close()


def resolved(expr: str) -> str:
    """The query as Grafana sends it."""
    return expr.replace("$instance", ".+").replace("$__rate_interval", "5m")


@pytest.mark.parametrize(("name", "expr"), QUERIES, ids=[name for name, _ in QUERIES])
def test_every_query_of_the_dashboard_shows_the_night(prometheus: Prometheus, name: str, expr: str) -> None:
    assert prometheus.over_the_night(resolved(expr)), f"{name}: no data for {expr}"


def exposed() -> set[str]:
    lines = (line for minute in (100, night.MINUTES) for line in night.metrics(minute).splitlines())
    return {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}


def test_every_metric_is_on_the_dashboard_and_no_other() -> None:
    shown = " ".join([*(expr for _, expr in QUERIES), DASHBOARD["templating"]["list"][1]["definition"]])
    assert set(re.findall(r"\bpodwatch_[a-z_]+", shown)) == exposed()
    assert set(re.findall(r"\bpodwatch_[a-z_]+", RULES.read_text())) <= exposed()


def test_the_night_is_on_the_timeline_as_it_was(prometheus: Prometheus) -> None:
    found = prometheus.over_the_night('podwatch_training_state{run="bs4"} == 1')
    states = {str(series["metric"]["state"]): len(series["values"]) for series in found}  # type: ignore[index,arg-type]
    assert states.keys() == {"running", "recovering", "gave-up"}
    assert states["recovering"] == len(night.DEAD) + len(night.CRASHING)
    assert states["gave-up"] == len(night.GAVE_UP)


@pytest.mark.parametrize("alert", ALERTS)
def test_the_condition_of_each_alert_is_met_in_the_night_or_not(prometheus: Prometheus, alert: str) -> None:
    (group,) = prometheus.get("rules")
    (query,) = [rule["query"] for rule in group["rules"] if rule["name"] == alert]  # type: ignore[attr-defined]
    assert bool(prometheus.over_the_night(query)) is (alert in OCCUR)


def test_a_live_pod_is_scraped_and_its_death_noticed(prometheus: Prometheus, pod: ThreadingHTTPServer) -> None:
    """Last: it ends the pod."""
    prometheus.until("query", '"1"', query='up{run="live"} == 1')
    found = prometheus.until("alerts", "PodwatchGaveUp")
    assert any(alert["labels"]["run"] == "live" for alert in found)  # type: ignore[index]
    pod.shutdown()
    pod.server_close()
    prometheus.until("alerts", "PodwatchUnreachable")
