"""What the daemon says and reads of trainers other than the rig's own."""

import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.asking import confirmed, status, wait_reason
from tests.support.daemon import DaemonProcess
from tests.support.rig import Rig

pytestmark = pytest.mark.slow

BAR = """
import sys, time
for n in range(41, 10**6):
    bar = f"\\rSteps:  40%|####      | {n}/1000000 [00:01<00:02,  5.00it/s, loss=0.5]"
    bar += "\\rEvaluating:  40%|####      | 900000/999999 [00:01<00:02,  5.00it/s]"
    print(bar, end="", file=sys.stderr, flush=True)
    time.sleep(0.05)
"""


def _script(rig: Rig) -> list[str]:
    script = rig.output.parent / "train.py"
    script.write_text(BAR)
    return [sys.executable, "-S", str(script)]


def _daemon(rig: Rig, **changes: object) -> DaemonProcess:
    quiet = {"gpu__inference": None, "gpu__trainer": None}
    return rig.daemon(trainer__command=_script(rig), **quiet, **changes).start()


def test_a_restart_that_cannot_resume_is_said_at_start_and_steps_come_from_a_bar(rig: Rig) -> None:
    daemon = _daemon(rig, trainer__layout="accelerate")
    said = wait_reason(daemon, "restart-impossible")
    assert said["severity"] == "warning"
    assert "resume_args" in said["suggestion"]
    daemon.wait_for(lambda: (status(daemon)["training"]["step"] or 0) > 45, 30, "steps from the bar")
    assert status(daemon)["training"]["step"] < 900_000, "the evaluation's bar is no step"
    assert status(daemon)["training"]["step_source"] == "step-line"
    # the reason ends with the reload that corrects it
    config: Path = daemon.config
    config.write_text(config.read_text().replace("[gpu]", 'resume_args = ["--resume", "{checkpoint}"]\n[gpu]', 1))
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait_for(
        lambda: all(r["kind"] != "restart-impossible" for r in status(daemon)["reasons"]), 30, "the warning ends"
    )


def test_a_step_line_of_the_operators_own(rig: Rig) -> None:
    line = r"Evaluating: .* (\d+)/999999 "
    daemon = _daemon(
        rig,
        trainer__layout="custom",
        trainer__resume_args="none",
        **{"checkpoints.custom__parts": "ckpt_{step}", "checkpoints.custom__step_line": line},
    )
    daemon.wait_for(lambda: status(daemon)["training"]["step"] == 900_000, 30, "steps from the pattern")


def test_the_end_of_a_process_with_a_role_by_the_operators_own_pattern(rig: Rig) -> None:
    """A launcher that starts a server whose name says nothing, and does not notice when it ends."""
    command = ["sh", "-c", 'sleep 987654 & exec "$@"', "sh", *rig.command()]
    daemon = rig.daemon(
        trainer__layout="custom",
        trainer__command=command,
        trainer__resume_args="none",
        **{"checkpoints.custom.processes__inference": [r"^sleep 987654$"]},
    ).start()
    confirmed(daemon)
    tree = psutil.Process(rig.trainer_pid)
    (server,) = [p for p in tree.children() if p.name() == "sleep"]
    daemon.wait_for(lambda: status(daemon)["training"]["processes"] == 3, 30, "launcher, engine and server are seen")
    turns = status(daemon)["counters"]["turns"]
    daemon.wait_for(lambda: status(daemon)["counters"]["turns"] > turns + 20, 30, "it is seen for more than a moment")
    server.kill()
    told = wait_reason(daemon, "required-child-exited")
    assert "sleep (inference)" in told["summary"]
