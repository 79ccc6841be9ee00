"""What an operator reads about training while something is wrong: status, findings, notices, incidents."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.asking import looks, messages, reasons, running, wait_reason
from tests.support.daemon import DaemonProcess
from tests.support.rig import TRAINER, Rig

pytestmark = pytest.mark.slow


def incidents(daemon: DaemonProcess) -> list[dict[str, Any]]:
    """The newest first."""
    found: list[dict[str, Any]] = json.loads(daemon.command("incidents", "--json").stdout)["incidents"]
    return found


def test_a_kill_is_not_explained_by_a_line_of_an_earlier_start(rig: Rig) -> None:
    daemon = rig.daemon().start()
    running(daemon, rig, step=5)
    rig.order(say=["OSError: [Errno 28] No space left on device"], exit=1, once=True)
    seen = len(daemon.events())
    daemon.wait_event("trainer-confirmed", 60, after=seen)
    first = incidents(daemon)
    assert len(first) == 1
    assert "No space left" in json.dumps(first[0]), "the line explains the end of the start that wrote it"
    seen = len(daemon.events())
    rig.kill("trainer")
    daemon.wait_event("incident-opened", 60, after=seen)
    daemon.wait_event("trainer-confirmed", 60, after=seen)
    newest, *older = incidents(daemon)
    assert len(older) == 1
    about = [newest["summary"], *(str(e.get("event")) for e in daemon.events()[seen:])]
    assert not [text for text in about if "No space left" in text], about


def critical(daemon: DaemonProcess, after: int) -> list[tuple[str, str]]:
    raised = [e for e in daemon.events()[after:] if e["podwatch_event"] == "finding-raised"]
    return [(e["finding"], e["subject"]) for e in raised if e["level"] == "critical"]


def test_one_death_is_one_critical_finding(rig: Rig) -> None:
    daemon = rig.daemon().start()
    running(daemon, rig, step=5)
    seen = len(daemon.events())
    rig.order(exit=1, once=True)
    daemon.wait_event("trainer-confirmed", 60, after=seen)
    assert len(critical(daemon, seen)) == 1, critical(daemon, seen)
    assert len(incidents(daemon)) == 1


def test_the_end_of_a_restart_is_told_whatever_was_told_before(rig: Rig, tmp_path: Path) -> None:
    told = tmp_path / "told"
    daemon = rig.daemon(notify__command=["/bin/sh", "-c", f"cat >> {told}"], notify__per_hour=2).start()
    running(daemon, rig, step=5)
    seen = len(daemon.events())
    rig.kill("trainer")
    daemon.wait_event("trainer-confirmed", 60, after=seen)

    def changes() -> list[str]:
        return [json.loads(line)["change"] for line in told.read_text().splitlines()] if told.exists() else []

    daemon.wait_for(lambda: len(changes()) >= 2, 30, f"two notices, not {changes()}")
    assert changes() == ["opened", "closed"]


def test_a_limit_of_open_files_below_what_training_wants_is_shown(rig: Rig) -> None:
    daemon = rig.daemon(trainer__nofile=65_536)
    limits = ("prlimit", "--nofile=9461:9461")
    daemon.wrapper = ("setpriv", "--bounding-set", "-sys_resource", "--inh-caps", "-sys_resource", *limits)
    daemon.start()
    daemon.wait_event("start-warning", 60)
    assert re.search("9,?461", wait_reason(daemon, "files-low", 30)["summary"])


def test_a_trainer_of_hugging_face_that_never_saves_is_a_finding(rig: Rig) -> None:
    rig.trainer_flags = ["--no-saves"]
    daemon = rig.daemon(trainer__layout="hf", resources__overdue_floor="1s").start()
    daemon.wait_for(lambda: rig.trainer_pid, 60, "training starts")
    kinds = {"checkpoint-overdue", "saves-nothing"}
    looks(daemon, 50)
    assert kinds & reasons(daemon).keys()


def test_a_command_for_hugging_face_without_saves_is_a_finding(rig: Rig) -> None:
    rig.trainer_flags = ["--no-saves", "--", "--save_strategy", "no"]
    daemon = rig.daemon(trainer__layout="hf").start()
    assert wait_reason(daemon, "saves-nothing")["severity"] == "warning"


def launcher(rig: Rig) -> list[str]:
    """prime-rl's own launcher, by its name, in the command of a version before run directories."""
    path = rig.root / "rl"
    run = f"import runpy\nrunpy.run_path({str(TRAINER)!r}, run_name='__main__')\n"
    path.write_text(f"#!{sys.executable} -S\n{run}")
    path.chmod(0o755)
    return [str(path), *rig.command()[3:]]


def test_a_restart_that_just_resumed_is_not_called_impossible(rig: Rig) -> None:
    daemon = rig.daemon(trainer__command=launcher(rig)).start()
    running(daemon, rig, step=5)
    assert daemon.command("stop-training").returncode == 0
    daemon.wait_event("trainer-stopped", 60)
    daemon.stop()
    seen = len(daemon.events())
    daemon.start()
    daemon.wait_event("daemon-started", 60, after=seen)
    assert daemon.command("start").returncode == 0
    running(daemon, rig, after=seen)
    assert rig.starts[-1]["step"] in rig.saved
    assert "restart-impossible" not in reasons(daemon)


def test_a_refused_start_says_how_it_ended(rig: Rig) -> None:
    """The program is not there."""
    daemon = rig.daemon(trainer__command=[str(rig.root / "no-such-program")]).start()
    daemon.wait_event("trainer-starting", 60)
    daemon.wait_event("incident-opened", 60)
    assert not messages(daemon, "trainer-started")
