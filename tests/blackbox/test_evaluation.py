"""Evaluations of a real daemon beside and instead of training."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.asking import published, running
from tests.support.daemon import DaemonProcess
from tests.support.mounts import small_mount
from tests.support.rig import Rig, alive

pytestmark = pytest.mark.slow

ACCURACY = "import json,os,sys; json.dump({'acc': 1 / float(sys.argv[1])}, open(sys.argv[2] + '/results.json', 'w'))"


def command(text: str) -> list[str]:
    return [sys.executable, "-S", "-c", text, "{step}", "{output}", "{checkpoint}"]


def daemon(rig: Rig, text: str, environ: dict[str, str] | None = None, **evaluation: Any) -> DaemonProcess:
    known = {"command": command(text), "cwd": "/", "reserve": "1MB", "metric": "acc", **evaluation}
    sections = {name if "__" in name else f"evaluation__{name}": value for name, value in known.items()}
    return rig.daemon(environ, **sections)


def table(pod: DaemonProcess) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in json.loads(pod.command("eval", "--json").stdout)["results"]}


def test_beside_training_on_the_cpu_here_and_from_the_store(rig: Rig, tmp_path: Path, elsewhere: Path) -> None:
    """Training is not touched. The best one is pinned; a checkpoint that is only in the store is fetched for it."""
    saw = tmp_path / "saw"
    note = f"open('{saw}', 'a').write(os.environ['CUDA_VISIBLE_DEVICES'] + sys.argv[3] + chr(10)); "
    text = ACCURACY.replace("json.dump", note + "assert os.listdir(sys.argv[3]); json.dump")
    rig.trainer_flags = ["--max-steps", "20", "--ckpt.interval", "5"]
    pod = daemon(rig, text, every_saves=1, coalesce=False, sync__store=f"file://{elsewhere}").start()
    for step in (5, 10, 15, 20):
        pod.wait_event("evaluation-done", 60, step=step, source="local")
    published(pod, 60, step=20)
    assert "best evaluation: acc 0.2" in pod.command("checkpoints", "--json").stdout
    rows = table(pod)
    assert [step for step, row in rows.items() if row["best"]] == [5]
    stored = [e["step"] for e in pod.events() if e["podwatch_event"] == "published"]
    shutil.rmtree(rig.output / "checkpoints" / f"step_{stored[0]}")

    def from_store() -> bool:
        """Asked until podwatch has seen that the checkpoint is no longer here."""
        asked = pod.command("eval", "--steps", str(stored[0]))
        assert asked.returncode == 0, asked.stderr
        done = [e for e in pod.events() if e["podwatch_event"] == "evaluation-done"]
        return any((e["step"], e["source"]) == (stored[0], "store") for e in done)

    pod.wait_for(from_store, 60, "an evaluation of a checkpoint that is only in the store")
    assert pod.command("eval", "--steps", "4711").returncode != 0
    local = [line.startswith(str(rig.output)) for line in saw.read_text().splitlines()]
    assert (local[:4], local[-1]) == ([True] * 4, False), "without CUDA devices, and each in its own place"
    assert len(rig.starts) == 1
    assert pod.stop() == 0


FAR = """
import os, subprocess, sys, time
place = sys.argv[4]
far = subprocess.Popen(['sleep', '600'], start_new_session=True)
open(place + '.new', 'w').write('%d %d %d' % (os.getppid(), os.getpid(), far.pid))
os.rename(place + '.new', place)
time.sleep(600)
"""


def started(pod: DaemonProcess, place: Path) -> tuple[int, int, int]:
    """Worker, command and grandchild of the next evaluation."""
    pod.wait_for(place.exists, 60, "an evaluation runs")
    worker, own, far = map(int, place.read_text().split())
    place.unlink()
    assert alive(far)
    return worker, own, far


def test_podwatch_killed_in_the_middle_of_an_evaluation(rig: Rig, tmp_path: Path) -> None:
    """It is interrupted, and runs again, three times at most. Nothing of an old one runs beside a new one. Training is
    not touched."""
    place = tmp_path / "place"
    rig.trainer_flags = ["--ckpt.interval", "5"]
    pod = daemon(rig, FAR, command=[*command(FAR), str(place)], at_end=True).start()
    trainer = running(pod, rig, step=5)
    assert pod.command("eval", "--steps", "5").returncode == 0
    ended: list[int] = []
    for _ in range(3):
        worker, own, far = started(pod, place)
        assert not any(map(alive, ended)), "nothing of the one before runs beside it"
        ended += [own, far]
        assert pod.process is not None
        pod.process.send_signal(signal.SIGKILL)
        pod.process.wait()
        pod.start()
        pod.wait_for(lambda pids=(worker, own, far): not any(map(alive, pids)), 60, "its worker ended it all")
    failed = pod.wait_event("evaluation-failed", 60, step=5)
    assert "not repeated" in failed["event"]
    assert not place.exists()
    assert pod.command("eval", "--steps", "5").returncode == 0
    worker, own, far = started(pod, place)
    before = len(pod.events())
    os.kill(worker, signal.SIGKILL)
    pod.wait_event("evaluation-failed", 60, after=before, step=5)
    assert not alive(own)
    assert not alive(far), "what waits for the worker ended what that left"
    assert rig.trainer_pid == trainer
    assert len(rig.starts) == 1
    assert pod.stop() == 0


FILL = """
import os, sys, time
with open(os.path.join(sys.argv[2], 'big'), 'wb', buffering=0) as file:
    while True:
        file.write(bytes(1 << 20))
        time.sleep(0.01)
"""


def test_an_evaluation_that_fills_the_file_system_that_training_saves_to(rig: Rig) -> None:
    """Up to 100 MB a second, without an end. podwatch ends it and deletes what it wrote before a save fails."""
    with small_mount(rig.output.parent, 256 << 20) as mounted:
        if not mounted:
            pytest.skip("needs root: mounts a file system of its own")
        rig.trainer_flags = ["--ckpt.interval", "5"]
        place = rig.output.parent / "evaluations"
        pod = daemon(rig, FILL, dir=str(place), at_end=True, reserve="160MB").start()
        trainer = running(pod, rig, step=5)
        assert pod.command("eval", "--steps", "5").returncode == 0
        failed = pod.wait_event("evaluation-failed", 60, step=5)
        assert "free on the disk; podwatch keeps" in failed["event"]
        pod.wait_for(lambda: not list(place.glob("*/step-*")), 30, "what it wrote is deleted")
        before = len(pod.events())
        pod.wait_event("checkpoint-complete", 60, after=before)
        saved = rig.saved
        assert saved == list(range(5, saved[-1] + 1, 5)), "every save succeeded"
        assert rig.trainer_pid == trainer
        assert len(rig.starts) == 1, "training was not touched"
        assert pod.stop() == 0


GATED = "import os,time\nwhile not os.path.exists(sys.argv[4]): time.sleep(0.1)\n"


def gated(rig: Rig, gate: Path, **changes: Any) -> DaemonProcess:
    """A run that finishes at step 12; the evaluation of its end waits for ``gate``."""
    rig.trainer_flags = ["--max-steps", "12", "--ckpt.interval", "4"]
    text = "import sys\n" + GATED + ACCURACY
    return daemon(rig, text, command=[*command(text), str(gate)], at_end=True, **changes).start()


def names(pod: DaemonProcess) -> list[str]:
    return [e["podwatch_event"] for e in pod.events()]


def ended(pod: DaemonProcess) -> int:
    assert pod.process is not None
    return pod.process.wait(timeout=180)


def test_the_end_waits_for_the_evaluation_of_the_last_checkpoint(rig: Rig, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    pod = gated(rig, gate, recovery__on_finished="exit")
    pod.wait_for(lambda: "waits for the evaluation of step 12" in pod.command("status").stdout, 120, "status says so")
    assert "run-ended" not in names(pod)
    gate.touch()
    assert ended(pod) == 0
    assert names(pod).index("evaluation-done") < names(pod).index("run-ended")
    assert list(table(pod)) == [12]


def test_the_machine_is_ended_after_the_evaluation_at_the_end(rig: Rig, tmp_path: Path) -> None:
    gate, gone = tmp_path / "gate", tmp_path / "gone"
    pod = gated(rig, gate, end_pod__command=["/bin/sh", "-c", f"touch {gone}"])
    pod.wait_event("evaluation-started", 120, step=12)
    assert not gone.exists()
    gate.touch()
    pod.wait_for(gone.exists, 120, "the command that ends the machine")
    assert "evaluation-done" in names(pod)


def test_one_that_hangs_is_waited_for_no_longer_than_final_sync(rig: Rig, tmp_path: Path) -> None:
    pod = gated(rig, tmp_path / "never", recovery__on_finished="exit", recovery__final_sync="3s")
    assert ended(pod) == 0
    assert any("no longer waits" in e["event"] for e in pod.events() if e["podwatch_event"] == "final-sync")


def test_a_stop_of_podwatch_does_not_wait_for_it(rig: Rig, tmp_path: Path) -> None:
    pod = gated(rig, tmp_path / "never", recovery__on_finished="exit")
    pod.wait_event("evaluation-started", 120, step=12)
    assert pod.stop() == 0
