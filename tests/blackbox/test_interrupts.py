"""Ctrl-C and signals sent by hand: the operator ends training, and podwatch does not start it against their will."""

import contextlib
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import interruptible
from tests.support.asking import lived, messages, reasons, status
from tests.support.daemon import DaemonProcess
from tests.support.rig import Rig, alive

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("attaching")]

TEARDOWN = 12.0
"""Seconds that the trainer takes after the engine is gone: more than the 8 s of the default hold."""
PROGRAM = Path(interruptible.__file__)


def command(rig: Rig) -> list[str]:
    """As ``rl``, so that it is known as a launcher, with the run's output_dir in its arguments."""
    launcher = rig.root / "rl"
    code = f"import runpy\nrunpy.run_path({str(PROGRAM)!r}, run_name='__main__')\n"
    launcher.write_text(f"#!{sys.executable} -S\n{code}")
    launcher.chmod(0o755)
    return [str(launcher), str(rig.control), str(rig.output), str(TEARDOWN)]


def pid_of(rig: Rig, what: str) -> int:
    try:
        return int((rig.control / f"{what}.pid").read_text())
    except (OSError, ValueError):
        return 0


def armed(daemon: DaemonProcess, rig: Rig) -> None:
    """podwatch would miss the engine from now on."""
    daemon.wait_event("detector-armed", 40, detector="silent-death:gpu0")
    lived(rig.engine_pid)
    daemon.wait_for(lambda: "engine-process" in status(daemon)["daemon"]["second_signals"], 20, "knows the engine")


def left_to_the_operator(daemon: DaemonProcess, rig: Rig, launcher: int, words: str) -> None:
    """From the interrupt until the whole tree is gone, and after that: announced, and nothing is done."""
    daemon.wait_for(lambda: not rig.engine_pid, 20, "the engine is gone")
    assert alive(pid_of(rig, "trainer")), "it takes its time"

    def announced(kind: str) -> str:
        return str(reasons(daemon).get(kind, {}).get("suggestion", ""))

    daemon.wait_for(lambda: "podwatch restarts training in" in announced("silent-death"), 10, "the engine is missed")
    assert alive(pid_of(rig, "trainer")), "it is announced while the trainer still ends"
    daemon.wait_for(lambda: not alive(launcher), TEARDOWN + 10, "the launcher is gone")
    daemon.wait_for(lambda: "podwatch restarts training in" in announced("trainer-exited"), 20, "its end is announced")
    assert words in announced("trainer-exited")
    assert not messages(daemon, "incident-opened")
    assert len(rig.starts) == 1
    assert daemon.command("stop-training").returncode == 0
    daemon.wait_for(lambda: status(daemon)["training"]["state"] == "stopped", 30, "stopped")
    assert len(rig.starts) == 1


@contextlib.contextmanager
def terminal(argv: list[str], cwd: Path) -> Iterator[int]:
    """A real pseudo-terminal with this command as its foreground job; the master side. Its shell is gone, so that the
    job has none of this test's processes above it."""
    master, slave = pty.openpty()
    name = os.ttyname(slave)
    script = f"setsid --ctty {shlex.join(argv)} < {name} > {name} 2>&1 &"
    subprocess.run(["sh", "-c", script], check=True, cwd=cwd)
    os.close(slave)
    os.set_blocking(master, False)
    try:
        yield master
    finally:
        os.close(master)


def drain(master: int) -> None:
    """What the job prints must not fill the terminal."""
    with contextlib.suppress(OSError):
        while os.read(master, 65_536):
            pass


def test_ctrl_c_in_the_terminal_of_an_attached_trainer(rig: Rig) -> None:
    argv = command(rig)
    rig.output.mkdir(parents=True, exist_ok=True)
    with terminal(argv, rig.output.parent) as master:
        end = time.monotonic() + 60
        while not (rig.engine_pid and rig.trainer_pid and pid_of(rig, "launcher")):
            assert time.monotonic() < end
            drain(master)
            time.sleep(0.05)
        launcher = pid_of(rig, "launcher")
        logs = rig.output / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        daemon = rig.daemon(trainer__command=argv, trainer__logs=[str(logs / "*.log")]).start()
        assert daemon.wait_event("trainer-attached", 60)["pid"] == launcher, "nothing above it is ever the trainer"
        step = 0

        def step_made() -> bool:
            nonlocal step
            step += 1
            drain(master)
            with (logs / "trainer.log").open("a") as log:  # its output goes to the terminal, which podwatch cannot read
                log.write(f"{time.strftime('%H:%M:%S')} SUCCESS Step {step} | Time: 0.1s | Loss: 0.5\n")
            return any(e["podwatch_event"] == "detector-armed" for e in daemon.events())

        daemon.wait_for(step_made, 40, "the engine is watched")
        armed(daemon, rig)
        drain(master)
        os.write(master, b"\x03")
        left_to_the_operator(daemon, rig, launcher, "podwatch did not start this trainer")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_launcher_of_ours_that_receives_a_signal_by_hand(rig: Rig, number: signal.Signals) -> None:
    daemon = rig.daemon(trainer__command=command(rig)).start()
    daemon.wait_event("trainer-confirmed", 60)
    armed(daemon, rig)
    launcher = pid_of(rig, "launcher")
    os.kill(launcher, number)
    left_to_the_operator(daemon, rig, launcher, f"signal {int(number)}")


def test_a_real_silent_death_of_ours_is_not_left_to_anybody(rig: Rig) -> None:
    daemon = rig.daemon(trainer__command=command(rig), trainer__stop_grace="1s").start()
    daemon.wait_event("trainer-confirmed", 60)
    armed(daemon, rig)
    rig.kill("engine")
    assert daemon.wait_event("incident-opened", 20)["kind"] == "silent-death"
    daemon.wait_for(lambda: len(rig.starts) == 2, 60, "started again")
