"""A whole pod dies: from the outside, ``podwatch runs check`` notices, and the dead-man's switch goes silent. Real
daemon, real trainer, real B2 server."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server
from tests.support.daemon import DaemonProcess
from tests.support.ping_service import Service
from tests.support.rig import Rig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_pod_that_disappears_is_noticed(rig: Rig, tmp_path: Path) -> None:
    rig.trainer_flags = ["--step-seconds=0.5", "--ckpt.interval=10"]
    with B2Server(tmp_path / "b2") as server:
        environ = {"B2_APPLICATION_KEY_ID": KEY_ID, "B2_APPLICATION_KEY": KEY, "B2_ENVIRONMENT": server.url}
        daemon = rig.daemon(environ, sync__store=f"b2://{BUCKET}", sync__heartbeat="5s")

        def check(*options: str) -> tuple[int, str]:
            done = daemon.command("runs", "check", rig.run_id, "--store", f"b2://{BUCKET}", *options)
            assert "Traceback" not in done.stderr
            return done.returncode, done.stdout

        assert check()[0] == 3, "nothing is there yet"
        daemon.start()
        daemon.wait_event("published", 120)
        daemon.wait_for(lambda: "is stored" in check()[1] and " step " in check()[1], 60, "it is seen from outside")
        assert "CRITICAL" not in check()[1], check()
        die(daemon, rig)

        def noticed() -> str:
            code, line = check("--dead-after", "12s")
            return line if code == 2 else ""

        line = daemon.wait_for(noticed, 60, "its silence is noticed")
        assert line.startswith(f"CRITICAL {rig.run_id}: dead: no heartbeat from pod "), line
        assert "is stored" in line


def die(daemon: DaemonProcess, rig: Rig) -> None:
    """Everything at once and without a word, as a machine dies: first the daemon, which could report it."""
    assert daemon.process is not None
    daemon.process.kill()
    daemon.process.wait()
    for pid in rig.members():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def test_the_dead_mans_switch_is_called_while_the_run_is_well(rig: Rig) -> None:
    service = Service()
    try:
        daemon = rig.daemon(notify__heartbeat_urls=[service.url], notify__heartbeat_every="5s").start()
        daemon.wait_for(lambda: any(path.endswith("/start") for _, path, _ in service.seen), 60, "it has started")
        called = daemon.wait_for(lambda: [c for c in service.seen if "running, step" in c[2]], 60, "the run is well")
        assert called[0][1] == "/ping/T0K3N-4711"
        assert "T0K3N-4711" not in daemon.log.read_text()
        die(daemon, rig)
        before = len(service.seen)
        time.sleep(7.0)
        assert len(service.seen) == before, "nothing calls it any more"
    finally:
        service.close()
