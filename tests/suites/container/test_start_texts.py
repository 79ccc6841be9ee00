"""The start texts of examples/pods, run as they are in a bare container: from nothing but the provider's variables to
training. The one for virtual machines runs on a real systemd (tests/suites/systemd/test_start_texts.py)."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from podwatch.app.backup.post_mortem import start_of
from podwatch.config.loading import load_text
from podwatch.store.evidence import EvidenceKeeper
from podwatch.store.keys import RunKeys
from podwatch.store.objects.b2 import B2Access
from podwatch.store.objects.open import open_objects
from podwatch.store.runs.start import start_evidence
from tests.suites.container.container import TIMES, Container
from tests.suites.container.images import MISSING, REPO, Rootfs, own_root
from tests.support import own_times
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server

pytestmark = [pytest.mark.timeout(900), pytest.mark.skipif(bool(MISSING), reason=MISSING)]

PODS = REPO / "examples" / "pods"
RUN = "pod-run"
OUTPUT = "/srv/work/outputs"
TRAINER = "/srv/tests/support/fake_trainer.py"
CONFIG, QUICK = own_times.split(f"""
run_id = "{RUN}"
[trainer]
layout = "prime-rl"
output_dir = "{OUTPUT}"
cwd = "/srv/work"
command = ["/usr/bin/python3", "-S", "{TRAINER}", "--output-dir", "{OUTPUT}", "--control", "/srv/control"]
[sync]
store = "b2://{BUCKET}"
heartbeat = "5s"
holder_patience = "10s"
claim_wait = "1s"
""")
"""Each test is another pod: it waits until the one before it counts as gone."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(made), str(REPO)]
    subprocess.run(command, check=True)
    (built,) = made.glob("podwatch-*.whl")
    return built


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[B2Server]:
    """A store in which an earlier pod has left the start of its run."""
    with B2Server(tmp_path_factory.mktemp("b2")) as made:
        loaded = load_text(CONFIG, Path("/etc/podwatch/podwatch.toml"), environ={"PODWATCH_DIRECTORY": "/"})
        store = open_objects(f"b2://{BUCKET}", B2Access(KEY_ID, KEY, made.url))
        EvidenceKeeper(store, RunKeys(RUN)).put(start_evidence(replace(start_of(loaded), directory="/")))
        store.close()
        yield made


@pytest.fixture(scope="module")
def rootfs() -> Iterator[Rootfs]:
    with own_root() as made:
        yield replace(made, podwatch="/opt/podwatch/bin/podwatch")


class Pod(Container):
    """A container as a provider gives it: variables, the trainer's image, no podwatch."""

    def __init__(self, rootfs: Rootfs, log: Path, wheel: Path, server: B2Server) -> None:
        super().__init__(rootfs, log)
        for gone in ("etc/podwatch", "opt/podwatch", "workspace"):
            subprocess.run(["rm", "-rf", str(rootfs.path / gone)], check=True)
        self.write(TIMES, QUICK)
        (rootfs.path / "srv" / wheel.name).write_bytes(wheel.read_bytes())
        self.variables = {
            "B2_APPLICATION_KEY_ID": KEY_ID, "B2_APPLICATION_KEY": KEY, "B2_ENVIRONMENT": server.url,
            "POD_STORE": f"b2://{BUCKET}", "POD_RUN": RUN, "POD_TRUST": "--trust", "POD_SOURCE": f"/srv/{wheel.name}",
            own_times.VARIABLE: TIMES,
        }  # fmt: skip

    def text(self, name: str) -> str:
        """The start text, with the provider's variables before it."""
        script = "".join(f"export {name}='{value}'\n" for name, value in self.variables.items())
        self.write("/srv/start.sh", f"{script}{(PODS / name).read_text()}")
        return "/srv/start.sh"

    def boot(self, name: str, path: str = "") -> str:
        """What the provider's process 1 does with the text."""
        command = f"cd /; {f'PATH={path}:$PATH ' if path else ''}exec sh {self.text(name)}"
        return self.run("sh", "-c", command, seconds=400)

    def wait_guarded(self) -> None:
        self.wait(lambda: self.status().get("training", {}).get("state") == "running", 120, "training runs, guarded")


@pytest.fixture
def pod(rootfs: Rootfs, tmp_path: Path, wheel: Path, server: B2Server) -> Iterator[Pod]:
    made = Pod(rootfs, tmp_path / "container.log", wheel, server)
    yield made
    made.close()


def test_the_texts_share_one_way_to_install_and_fit_their_fields() -> None:
    texts = {path.name: path.read_text() for path in PODS.glob("*.sh")}
    assert set(texts) == {"vast-onstart.sh", "runpod-start.sh", "prime-start.sh", "lambda-user-data.sh"}
    blocks = {text.partition("# podwatch, in an environment")[2].partition("\n\n")[0] for text in texts.values()}
    assert len(blocks) == 1
    assert "python3 -m venv /opt/podwatch" in blocks.pop()
    assert len(texts["vast-onstart.sh"]) <= 4096, "Vast's limit"
    readme = (PODS / "README.md").read_text()
    assert all(name in readme for name in texts)


def test_vast_runs_the_text_at_every_start(pod: Pod) -> None:
    pod.start("sleep", "3600")  # in the ssh mode process 1 is the provider's
    said = pod.boot("vast-onstart.sh")
    assert "podwatch runs in the background" in said, said
    pod.wait_guarded()
    trainer = pod.trainer
    assert "guards run pod-run on this pod already" in pod.boot("vast-onstart.sh")
    assert pod.trainer == trainer
    assert KEY not in pod.read("/etc/podwatch/podwatch.toml")
    shown = pod.run("sh", "-c", "tr '\\0' ' ' </proc/*/cmdline 2>/dev/null || cat /proc/[0-9]*/cmdline", check=False)
    assert KEY not in shown
    environment = pod.run("sh", "-c", f"tr '\\0' '\\n' </proc/{trainer}/environ")
    assert "B2_APPLICATION_KEY" not in environment, "training does not get the store's key"


def test_an_image_whose_python_is_too_old(pod: Pod) -> None:
    """uv finds or brings another one; here another one lies on the path, which needs no download."""
    old = next(iter(sorted(Path.home().glob(".pyenv/versions/3.[89].*/bin"))), None)
    if old is None:
        pytest.skip("no Python older than 3.10 here")
    pod.start("sleep", "3600")
    pod.variables["SSL_CERT_FILE"] = "/etc/ssl/certs/ca-certificates.crt"  # uv ignores it otherwise
    said = pod.boot("vast-onstart.sh", path=str(old))
    assert "podwatch runs in the background" in said, said
    assert not pod.run("sh", "-c", f"{old}/python3 --version").startswith("Python 3.1")
    assert pod.run("/opt/podwatch/bin/python", "--version").startswith("Python 3.1")
    pod.wait_guarded()


def test_runpod_podwatch_is_process_1_and_waits_for_you_where_it_cannot_start(pod: Pod) -> None:
    pod.variables["POD_TRUST"] = f"--digest {'0' * 64}"
    pod.start("sh", pod.text("runpod-start.sh"))
    pod.wait(lambda: "podwatch did not start training" in pod.said(), 200, "it says why")
    assert "another start than the digest" in pod.said()
    pod.wait(lambda: pod.processes()[1][1].startswith("sleep"), 20, "the pod stays reachable")
    assert not pod.trainer
    pod.close()

    pod.variables["POD_TRUST"] = "--trust"
    pod.start("sh", pod.text("runpod-start.sh"))
    pod.wait_guarded()
    assert "supervise.py init" in pod.processes()[1][1]
    assert pod.read("/workspace/podwatch/podwatch.toml")
    assert pod.stop() == 0, "SIGTERM is a preemption"


def test_prime_in_a_container(pod: Pod) -> None:
    pod.start("sleep", "3600")
    assert "podwatch runs in the background" in pod.boot("prime-start.sh")
    pod.wait_guarded()
    document = json.loads(pod.podwatch("status", "--json"))
    assert document["run_id"] == RUN
