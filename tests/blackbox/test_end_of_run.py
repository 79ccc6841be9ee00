"""The end of a run in its order: final sync, last evaluation, hooks of the last checkpoint, `ended`, `[end_pod]`, exit
code. Each step writes a line, and takes its time before it does."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import DaemonProcess
from tests.support.rig import Rig

pytestmark = pytest.mark.slow

LAST = 12
NOTE = """
import json, os, sys, time
name, lines, store, seconds = sys.argv[1:5]
document = json.load(sys.stdin) if name == "hook" else {}
time.sleep(float(seconds))
try:
    (latest,) = [os.path.join(at, f) for at, _, names in os.walk(store) for f in names
                 if f == "latest.json" and ".podwatch-store" not in at]
    stored = json.load(open(latest))["step"]
except ValueError:
    stored = None
line = {"name": document.get("event", name), "step": document.get("step"), "stored": stored}
with open(lines, "a") as out:
    out.write(json.dumps(line) + chr(10))
"""


class End:
    """A run of 12 steps with a hook at each checkpoint and at the end, which take some seconds."""

    def __init__(self, rig: Rig, store: Path, **changes: Any) -> None:
        self.rig, self.file, self.store = rig, rig.root / "lines", store
        self.script = rig.root / "note.py"
        self.script.write_text(NOTE)
        rig.trainer_flags = ["--max-steps", str(LAST), "--ckpt.interval", str(LAST)]
        made: DaemonProcess = rig.daemon(sync__store=f"file://{store}", **changes)
        hook = {"name": "note", "on": ["checkpoint", "ended"], "command": self.command("hook"), "cwd": "/"}
        lines = [f"{key} = {json.dumps(value)}" for key, value in hook.items()]
        made.config.write_text("\n".join([made.config.read_text(), "[[hooks]]", *lines, ""]))
        self.daemon = made

    def command(self, name: str, seconds: float = 4) -> list[str]:
        return command(self.rig, self.store, name, seconds)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []

    def names(self) -> list[str]:
        return [line["name"] for line in self.lines()]

    def ends(self) -> int:
        assert self.daemon.process is not None
        return self.daemon.process.wait(180)


def command(rig: Rig, store: Path, name: str, seconds: float = 4) -> list[str]:
    return [sys.executable, "-S", str(rig.root / "note.py"), name, str(rig.root / "lines"), str(store), str(seconds)]


def test_a_job_ends_after_its_hooks(rig: Rig, elsewhere: Path) -> None:
    end = End(rig, elsewhere)
    end.daemon.start("--job")
    assert end.ends() == 0, end.daemon.tail()
    assert end.names() == ["checkpoint", "ended"]
    assert [line["stored"] for line in end.lines()][-1] == LAST, "`ended` comes after the final sync"


def test_podwatch_that_ends_with_the_run_ends_after_its_hooks(rig: Rig, elsewhere: Path) -> None:
    end = End(rig, elsewhere, recovery__on_finished="exit")
    end.daemon.start()
    assert end.ends() == 0, end.daemon.tail()
    assert end.names() == ["checkpoint", "ended"]
    assert [line["stored"] for line in end.lines()][-1] == LAST


def test_the_machine_is_ended_after_the_hooks(rig: Rig, elsewhere: Path) -> None:
    end = End(rig, elsewhere, end_pod__command=command(rig, elsewhere, "machine", 0), end_pod__tries=1)
    end.daemon.start()
    end.daemon.wait_for(lambda: "machine" in end.names(), 120, "the machine is ended")
    assert end.names() == ["checkpoint", "ended", "machine"]
    assert [line["stored"] for line in end.lines()][-1] == LAST


def test_the_last_evaluation_comes_before_ended(rig: Rig, elsewhere: Path) -> None:
    evaluation = {"command": command(rig, elsewhere, "evaluation"), "cwd": "/", "reserve": "1MB", "at_end": True}
    end = End(rig, elsewhere, **{f"evaluation__{key}": value for key, value in evaluation.items()})
    end.daemon.start("--job")
    assert end.ends() == 0, end.daemon.tail()
    names = end.names()
    assert sorted(names) == ["checkpoint", "ended", "evaluation"]
    assert names[-1] == "ended"


def test_a_run_that_is_given_up_says_so_before_it_ends(rig: Rig, elsewhere: Path) -> None:
    end = End(rig, elsewhere)
    rig.order(exit=2, say=["train.py: error: unrecognized arguments: --foo"])
    end.daemon.start("--job")
    assert end.ends() == 65, end.daemon.tail()
    assert end.names() == ["ended"]


def test_an_evaluation_without_room_stops_no_training(rig: Rig) -> None:
    rig.trainer_flags = ["--ckpt.interval", "10"]
    evaluation = {
        "command": ["true"], "cwd": "/", "gpus": "stop-training", "every_saves": 1, "reserve": "1000TB",
    }  # fmt: skip
    pod = rig.daemon(**{f"evaluation__{key}": value for key, value in evaluation.items()}).start()

    def decided() -> bool:
        names = [event["podwatch_event"] for event in pod.events()]
        return "trainer-stopping" in names or names.count("checkpoint-complete") >= 6

    pod.wait_for(decided, 120, "six saves without a stop, or a stop")
    assert "trainer-stopping" not in {event["podwatch_event"] for event in pod.events()}
    assert len(rig.starts) == 1
