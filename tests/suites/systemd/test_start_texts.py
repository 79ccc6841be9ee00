"""The start texts of examples/pods for machines with systemd, run as they are: Lambda's user_data, and Prime's text."""

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
from tests.suites.systemd.machine import MISSING, REPO, Machine, booted
from tests.support import own_times
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server

pytestmark = [pytest.mark.timeout(900), pytest.mark.skipif(bool(MISSING), reason=MISSING)]

RUN, ROOT, TIMES = "vm-run", "/srv/pod", "/srv/test-times.toml"
OUTPUT = f"{ROOT}/work/outputs"
CONFIG, QUICK = own_times.split(f"""
run_id = "{RUN}"
[trainer]
layout = "prime-rl"
output_dir = "{OUTPUT}"
cwd = "{ROOT}/work"
command = ["/usr/bin/python3", "-S", "{REPO}/tests/support/fake_trainer.py", "--output-dir", "{OUTPUT}",
           "--control", "{ROOT}/control"]
[sync]
store = "b2://{BUCKET}"
heartbeat = "5s"
holder_patience = "10s"
claim_wait = "1s"
""")
"""Each test is another machine: it waits until the one before it counts as gone."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[B2Server]:
    with B2Server(tmp_path_factory.mktemp("b2")) as made:
        loaded = load_text(CONFIG, Path("/etc/podwatch/podwatch.toml"), environ={"PODWATCH_DIRECTORY": "/"})
        store = open_objects(f"b2://{BUCKET}", B2Access(KEY_ID, KEY, made.url))
        EvidenceKeeper(store, RunKeys(RUN)).put(start_evidence(replace(start_of(loaded), directory="/")))
        store.close()
        yield made


@pytest.mark.parametrize("text", ["lambda-user-data.sh", "prime-start.sh"])
def test_a_machine_ends_up_with_a_guarding_service(text: str, server: B2Server, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(tmp_path), str(REPO)]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("podwatch-*.whl")
    variables = {
        "B2_APPLICATION_KEY_ID": KEY_ID, "B2_APPLICATION_KEY": KEY, "B2_ENVIRONMENT": server.url, "POD_RUN": RUN,
        "POD_STORE": f"b2://{BUCKET}", "POD_TRUST": "--trust", "POD_SOURCE": f"/srv/{wheel.name}",
        own_times.VARIABLE: TIMES,
    }  # fmt: skip
    with booted() as machine:
        machine.show_boot_id()
        machine.run("mkdir", "-p", f"{ROOT}/work", f"{ROOT}/control")
        machine.write(TIMES, QUICK)
        test = f"[Service]\nEnvironment={own_times.VARIABLE}={TIMES}\n"
        machine.write("/etc/systemd/system/podwatch.service.d/50-test.conf", test)
        (machine.root / "srv" / wheel.name).write_bytes(wheel.read_bytes())
        script = "".join(f"export {name}='{value}'\n" for name, value in variables.items())
        machine.write("/root/start.sh", script + (REPO / "examples/pods" / text).read_text())
        # as cloud-init: no HOME, no terminal
        said = machine.run("env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "sh", "/root/start.sh", timeout=400)
        try:
            machine.wait(lambda: training(machine) == "running", 90, "training runs, guarded")
        except AssertionError as error:
            journal = machine.run("journalctl", "-u", "podwatch", "-n", "40", "--no-pager", check=False)
            raise AssertionError(f"{error}\n{said}\n{journal}") from None
        assert machine.run("systemctl", "is-enabled", "podwatch").strip() == "enabled"
        assert machine.run("stat", "-c", "%a", "/etc/podwatch/podwatch.env").strip() == "600"
        for path in ("/etc/podwatch/podwatch.toml", "/etc/systemd/system/podwatch.service"):
            assert KEY not in machine.run("cat", path)
        again = machine.run("sh", "/root/start.sh", timeout=200)
        assert "already: nothing to do" in again, again
        assert training(machine) == "running"


def training(machine: Machine) -> str:
    shown = machine.run("/opt/podwatch/bin/podwatch", "status", "--json", check=False)
    return "running" if '"state": "running"' in shown.partition('"training"')[2][:400] else ""
