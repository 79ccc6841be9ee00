"""Two real daemons with trainers, one run, one store: a paused pod, its replacement, and what happens when it wakes."""

import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.asking import messages
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server
from tests.support.daemon import DaemonProcess
from tests.support.rig import Rig
from tests.support.store_layout import violations

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
QUICK = {"sync__heartbeat": "5s", "sync__holder_patience": "12s", "sync__claim_wait": "2s"}


class Run:
    """A store, and pods that train one run in it."""

    def __init__(self, url: str, make_rig: Callable[[], Rig], server: B2Server | None, root: Path) -> None:
        self.url, self.server, self.root = url, server, root
        self._make = make_rig
        self.run_id = ""

    def pod(self, **changes: str) -> tuple[Rig, DaemonProcess]:
        rig = self._make()
        self.run_id = rig.run_id = self.run_id or rig.run_id
        rig.trainer_flags = ["--step-seconds=0.5", "--ckpt.interval=10"]
        environ: dict[str, str] = {}
        if self.server is not None:
            environ = {"B2_APPLICATION_KEY_ID": KEY_ID, "B2_APPLICATION_KEY": KEY, "B2_ENVIRONMENT": self.server.url}
        return rig, rig.daemon(environ, sync__store=self.url, **(QUICK | changes))

    def holds(self) -> None:
        """What the store promises, at this moment and (B2) at every moment so far."""
        if self.server is not None:
            assert self.server.violations() == []
        else:
            assert violations(self.root, self.run_id) == []


@pytest.fixture
def second_file_system(tmp_path: Path) -> Iterator[Path | None]:
    """A directory that outlives the pods (``shared`` names it before ``make_rig``), which write into it to the end."""
    if not os.access("/dev/shm", os.W_OK) or Path("/dev/shm").stat().st_dev == tmp_path.stat().st_dev:
        yield None
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="podwatch-two-pods-") as root:
        yield Path(root)


@pytest.fixture(params=["file", "b2"])
def shared(
    request: pytest.FixtureRequest, tmp_path: Path, second_file_system: Path | None, make_rig: Callable[[], Rig]
) -> Iterator[Run]:
    if request.param == "file":
        if second_file_system is None:
            pytest.skip("no second file system to keep a store on")
        yield Run(f"file://{second_file_system}", make_rig, None, second_file_system)
        return
    with B2Server(tmp_path / "b2") as server:
        yield Run(f"b2://{BUCKET}", make_rig, server, tmp_path)


def standing(daemon: DaemonProcess) -> dict[str, Any]:
    status = daemon.status()
    return {} if status is None else {**status["sync"], "reasons": {r["kind"] for r in status["reasons"]}}


def test_a_paused_pod_loses_its_run_and_gives_way_when_it_wakes(shared: Run) -> None:
    first, first_daemon = shared.pod()
    first_daemon.start()
    first_daemon.wait_for(lambda: first.trainer_pid, 60, "the first pod trains, without a wait")
    first_daemon.wait_for(lambda: standing(first_daemon).get("standing") == "holding", 60, "it holds the run")
    assert standing(first_daemon)["generation"] == 1

    second, second_daemon = shared.pod()
    second_daemon.start()
    assert second_daemon.process is not None
    assert second_daemon.process.wait(90) == 75, "the other pod is alive: this one must not train"
    said = second_daemon.events()
    assert any(e["podwatch_event"] == "run-held-elsewhere" for e in said), second_daemon.tail()
    assert "podwatch run --take-over" in second_daemon.log.read_text()
    assert not second.starts, "it never started a trainer"
    assert first.trainer_pid
    assert standing(first_daemon)["standing"] == "holding"

    first_daemon.freeze()  # first: it starts and ends processes of its own
    paused = []
    for pid in first.members():
        with contextlib.suppress(ProcessLookupError):  # one of them that was just ending
            os.kill(pid, signal.SIGSTOP)
            paused.append(pid)
    second_daemon.start()
    second_daemon.wait_for(lambda: standing(second_daemon).get("standing") == "watching", 60, "it watches first")
    assert not second.starts
    second_daemon.wait_for(lambda: second.trainer_pid, 120, "the replacement takes the run over and trains")
    second_daemon.wait_event("run-claimed", 60)
    assert standing(second_daemon)["generation"] == 2

    for pid in paused:
        os.kill(pid, signal.SIGCONT)
    first_daemon.thaw()
    first_daemon.wait_for(lambda: standing(first_daemon).get("standing") == "superseded", 90, "it sees that it lost")
    first_daemon.wait_for(lambda: not first.trainer_pid, 60, "and stops its trainer")
    first_daemon.wait_event("superseded", 30)
    stopped = first_daemon.wait_event("trainer-stopped", 60)
    starts = len(first.starts)
    first_daemon.wait_for(lambda: "superseded" in standing(first_daemon)["reasons"], 30, "says so")
    refused = first_daemon.command("start")
    assert refused.returncode == 75, refused
    assert "--take-over" in refused.stderr
    first_daemon.wait_for(lambda: "SUPERSEDED" in first_daemon.command("status").stdout, 20, "status says so")
    assert stopped
    assert len(first.starts) == starts, "and does not start again"
    assert second.trainer_pid
    assert standing(second_daemon)["standing"] == "holding"
    shared.holds()

    assert first_daemon.stop() == 0
    first_daemon.start("--take-over")
    first_daemon.wait_for(lambda: first.trainer_pid, 60, "by hand it takes the run back at once")
    second_daemon.wait_for(lambda: not second.trainer_pid, 90, "and the other one gives way")
    shared.holds()


def seconds_between(daemon: DaemonProcess, first: str, last: str) -> float:
    at = [next(e["timestamp"] for e in daemon.events() if e["podwatch_event"] == name) for name in (first, last)]
    began, ended = map(datetime.fromisoformat, at)
    return (ended - began).total_seconds()


@pytest.mark.parametrize("shared", ["file"], indirect=True)
def test_a_job_stands_by_beside_a_living_pod_and_ends_although_its_daemon_is_killed(shared: Run) -> None:
    """The standby is longer than the time until the other pod's heartbeat changes."""
    first, first_daemon = shared.pod()
    first_daemon.start()
    first_daemon.wait_for(lambda: first.trainer_pid, 60, "the first pod trains")
    first_daemon.wait_for(lambda: standing(first_daemon).get("standing") == "holding", 60, "it holds the run")
    second, job = shared.pod(recovery__standby="25s", sync__holder_patience="5m")
    job.start("--job")
    job.wait_for(lambda: any("is alive" in text for text in messages(job, "run-held-elsewhere")), 60, "it lives")
    job.wait_for(lambda: standing(job).get("standing") == "watching", 30, "it watches on")
    endpoint = next(job.runtime.glob("*/endpoint.json"))
    os.kill(json.loads(endpoint.read_text())["pid"], signal.SIGKILL)
    assert job.process is not None
    assert job.process.wait(180) == 86, job.tail()
    assert [(e["outcome"], e["exit_code"]) for e in job.events() if e["podwatch_event"] == "run-ended"] == [
        ("held", 86)
    ]
    assert 23 < seconds_between(job, "run-held-elsewhere", "run-ended") < 45, "over the restart of its daemon"
    assert len(messages(job, "daemon-started")) == 2, "killed once, and never left"
    assert second.starts == []
    assert first.trainer_pid
    shared.holds()


@pytest.mark.parametrize("leaves", [True, False], ids=("leaves", "dies"))
@pytest.mark.parametrize("shared", ["file"], indirect=True)
def test_a_job_that_stands_by_trains_when_the_other_pod_ends(shared: Run, leaves: bool) -> None:
    first, first_daemon = shared.pod()
    first_daemon.start()
    first_daemon.wait_for(lambda: first.trainer_pid, 60, "the first pod trains")
    first_daemon.wait_for(lambda: standing(first_daemon).get("standing") == "holding", 60, "it holds the run")
    second, job = shared.pod(recovery__standby="10m")
    job.start("--job")
    job.wait_for(lambda: any("is alive" in text for text in messages(job, "run-held-elsewhere")), 60, "it lives")
    assert not second.starts
    if leaves:
        assert first_daemon.command("preempt").returncode == 0
    first_daemon.end_training()
    job.wait_for(lambda: second.trainer_pid, 120, "the job trains")
    assert len(messages(job, "daemon-started")) == 1
    assert standing(job)["generation"] == 2
    shared.holds()
    assert job.process is not None
    job.process.terminate()
    assert job.process.wait(60) == 86


def in_store(daemon: DaemonProcess) -> list[dict[str, Any]]:
    """The checkpoints in the store, as this pod lists them."""
    found: list[dict[str, Any]] = json.loads(daemon.command("checkpoints", "--json").stdout)["remote"]
    return found


def pinned_in_store(daemon: DaemonProcess) -> set[int]:
    return {save["step"] for save in in_store(daemon) if save["pinned"]}


def test_a_pod_that_says_goodbye_is_not_waited_for(shared: Run) -> None:
    first, first_daemon = shared.pod()
    first_daemon.start()
    first_daemon.wait_for(lambda: first.trainer_pid, 60, "the first pod trains")
    first_daemon.wait_for(lambda: standing(first_daemon).get("standing") == "holding", 60, "it holds the run")
    first_daemon.wait_for(lambda: standing(first_daemon).get("last_step"), 90, "a checkpoint is in the store")
    pinned = standing(first_daemon)["last_step"]
    assert first_daemon.command("checkpoints", "pin", str(pinned), "--reason", "the best").returncode == 0
    first_daemon.wait_for(lambda: pinned in pinned_in_store(first_daemon), 60, "the pin is in the store")
    assert first_daemon.command("preempt").returncode == 0
    assert first_daemon.process is not None
    first_daemon.process.wait(60)
    second, second_daemon = shared.pod()
    second_daemon.start()
    second_daemon.wait_for(lambda: second.trainer_pid, 60, "the next pod trains")
    kinds = [e["podwatch_event"] for e in second_daemon.events()]
    assert "run-held-elsewhere" not in kinds, "without watching"
    second_daemon.wait_for(lambda: standing(second_daemon).get("standing") == "holding", 60, "it holds the run")
    assert standing(second_daemon)["generation"] == 2

    (record,) = (second.root / "state").rglob("run.json")

    def pins() -> dict[str, str]:
        found: dict[str, str] = json.loads(record.read_text())["pins"]
        return found

    adopted = {str(pinned): "on an earlier pod"}
    second_daemon.wait_for(lambda: pins() == adopted, 30, "what was pinned stays pinned")
    assert {save["generation"] for save in in_store(second_daemon)} >= {1}, "what the first pod has stored is seen"
    assert second_daemon.command("checkpoints", "unpin", str(pinned)).returncode == 0
    second_daemon.wait_for(lambda: pinned not in pinned_in_store(second_daemon), 60, "the pin leaves the store")

    # The same pod again, podwatch restarted: each life claims a generation of its own, and does not wait to train.
    assert second_daemon.stop() == 0
    second_daemon.start()
    second_daemon.wait_for(lambda: standing(second_daemon).get("standing") == "holding", 30, "at once")
    assert standing(second_daemon)["generation"] == 3
    assert pins() == {}, "an unpin is final"

    # People want it stopped, and then not.
    if shared.server is None:
        key = f"{second.run_id}/podwatch/control.json"
        (shared.root / key).write_text('{"desired": "stopped", "reason": "the data are wrong"}')
        second_daemon.wait_for(lambda: not second.trainer_pid, 60, "it stops")
        second_daemon.wait_event("control-changed", 10)
        refused = second_daemon.command("start")
        assert refused.returncode == 75
        assert "the data are wrong" in refused.stderr
        (shared.root / key).unlink()
        second_daemon.wait_for(lambda: second.trainer_pid, 60, "it goes on")
    shared.holds()
