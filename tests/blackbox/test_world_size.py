"""A checkpoint of another number of processes, in a layout that cannot be loaded by any other number."""

import shutil
import sys
from pathlib import Path

from tests.support.asking import reasons, status
from tests.support.daemon import DaemonProcess
from tests.support.resuming import quarantines, steps_of
from tests.support.rig import Rig

SAVED = Path(__file__).parents[1] / "checkpoints" / "golden" / "deepspeed-zero3"
"""By DeepSpeed itself: step 2, saved by two processes."""
TORCHRUN = """
import json, os, pathlib, sys, time
control = pathlib.Path(sys.argv[1])
step = int(sys.argv[sys.argv.index("--resume") + 1]) if "--resume" in sys.argv else None
with (control / "starts.jsonl").open("a") as out:
    out.write(json.dumps({"pid": os.getpid(), "step": step, "argv": sys.argv}) + "\\n")
(control / "trainer.pid").write_text(str(os.getpid()))
while True:
    time.sleep(1)
"""


def with_processes(rig: Rig, count: int) -> DaemonProcess:
    """`torchrun` with so many of them, in a directory with these checkpoints."""
    shutil.copytree(SAVED, rig.output)
    launcher = rig.root / "torchrun"
    launcher.write_text(f"#!{sys.executable} -S\n{TORCHRUN}")
    launcher.chmod(0o755)
    command = [str(launcher), "--nproc-per-node", str(count), "train.py"]
    (rig.output.parent / "train.py").write_text("")
    launcher.write_text(launcher.read_text().replace("sys.argv[1]", repr(str(rig.control)), 1))
    daemon = rig.daemon(
        trainer__layout="deepspeed", trainer__command=command, trainer__resume_args=["--resume", "{step}"],
        checkpoints__settle_weak="0.2s", checkpoints__settle_tracker="0.2s",
    )  # fmt: skip
    return daemon.start("--adopt-existing")


def test_the_same_number_resumes(rig: Rig) -> None:
    daemon = with_processes(rig, 2)
    daemon.wait_for(lambda: rig.starts, 60, "it starts")
    assert steps_of(rig) == [2]


def test_another_number_waits_for_a_person_who_can_insist(rig: Rig) -> None:
    daemon = with_processes(rig, 3)
    daemon.wait_for(lambda: rig.starts or "blocked" in reasons(daemon), 60, "podwatch has decided")
    assert rig.starts == []
    said = reasons(daemon)["blocked"]
    assert said["severity"] == "critical"
    assert "2 processes" in said["summary"] or "2 data-parallel ranks" in said["summary"]
    assert status(daemon)["recovery"]["phase"] == "blocked"
    assert (rig.output / "global_step2").exists()
    assert quarantines(daemon) == {}, "nothing is set aside"
    started = daemon.command("start", "--step", "2")
    assert started.returncode == 0, started.stdout + started.stderr
    daemon.wait_for(lambda: rig.starts, 60, "it starts")
    assert steps_of(rig) == [2]
