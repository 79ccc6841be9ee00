"""The real daemon beside what others run: a trainer that loads, another user's process, an operator's shell."""

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.support import processes
from tests.support.asking import running, says, status
from tests.support.daemon import DaemonProcess
from tests.support.ptys import terminal
from tests.support.rig import TRAINER, Rig, alive

pytestmark = pytest.mark.usefixtures("attaching")

LOADING = """
import ctypes, os, sys, time
control, save = sys.argv[1], sys.argv[2]
while not os.path.exists(control):
    time.sleep(0.05)
held = open(save, "w")
ctypes.CDLL(None).prctl(15, b"PRIME-RL::Train")  # its title, cut by the kernel
time.sleep(987)
"""


@contextlib.contextmanager
def loading(rig: Rig) -> Iterator[subprocess.Popen[bytes]]:
    """``python train.py --output_dir OUT``: no role and no open checkpoint until ``rig.control/save`` exists."""
    save = rig.output / "checkpoints" / "step_3" / "shard.distcp"
    save.parent.mkdir(parents=True, exist_ok=True)
    rig.made_by_others(save)
    script = rig.root / "train.py"
    script.write_text(LOADING)
    argv = [sys.executable, "-S", "train.py", str(rig.control / "save"), str(save), "--output_dir", str(rig.output)]
    with subprocess.Popen(argv, cwd=rig.root, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


def files(rig: Rig) -> set[str]:
    return {str(path.relative_to(rig.output)) for path in rig.output.rglob("*") if path.is_file()}


def asked(daemon: DaemonProcess) -> str:
    found = [f for f in status(daemon)["reasons"] if f["kind"] == "ambiguous-trainers"]
    return f"{found[0]['severity']}: {found[0]['summary']} {found[0]['suggestion']}" if found else ""


@pytest.mark.slow
def test_a_trainer_that_only_loads_yet_is_waited_for_and_then_attached_to(rig: Rig) -> None:
    with loading(rig) as process:
        only = rig.output / "checkpoints" / "step_7" / "trainer"
        only.mkdir(parents=True)
        (only / "__0_0.distcp").write_bytes(b"its only checkpoint, half written")
        before = files(rig)
        daemon = rig.daemon().start()
        daemon.wait_for(lambda: str(process.pid) in asked(daemon), 60, "the question")
        assert f"warning: podwatch waits before it starts training: pid {process.pid}" in asked(daemon)
        assert f"podwatch start --attach {process.pid}" in asked(daemon)
        first = says(daemon, 1)  # until the patience ends
        assert first.startswith("TRAINING IS NOT STARTED YET: podwatch waits"), first
        assert str(process.pid) in first, first
        dry = daemon.command("clean", "--yes")
        assert (dry.returncode, str(process.pid) in dry.stderr) == (75, True), dry.stderr
        time.sleep(4)  # more looks: every three seconds
        assert (rig.starts, files(rig)) == ([], before)
        (rig.control / "save").touch()
        daemon.wait_event("trainer-attached", 60)
        daemon.wait_for(lambda: status(daemon)["training"]["pid"] == process.pid, 30, "its pid")
        assert asked(daemon) == ""
        assert (rig.starts, process.poll()) == ([], None)


@pytest.mark.slow
def test_training_starts_once_what_loaded_has_ended(rig: Rig) -> None:
    with loading(rig) as process:
        daemon = rig.daemon(trainer__startup_patience="1s").start()
        daemon.wait_for(lambda: asked(daemon).startswith("critical: Training is not running"), 60, "the question")
        assert says(daemon, 2).startswith("TRAINING IS DOWN and BLOCKED")
        assert rig.starts == []
        process.kill()
        process.wait()
        daemon.wait_event("trainer-started", 60)
        assert asked(daemon) == ""


def test_the_operator_starts_training_beside_what_is_none(rig: Rig) -> None:
    with loading(rig) as process:
        daemon = rig.daemon().start()
        daemon.wait_for(lambda: str(process.pid) in asked(daemon), 60, "the question")
        assert daemon.command("start", "--ignore", "1").returncode == 64
        told = daemon.command("start", "--ignore", str(process.pid))
        assert told.returncode == 0, told.stderr
        daemon.wait_event("trainer-started", 60)
        assert process.poll() is None


@pytest.mark.root
def test_another_users_process_changes_nothing_and_is_left_alone(rig: Rig) -> None:
    """``exec -a torchrun sleep`` in output_dir, with a checkpoint of the run open: once it was adopted, then killed."""
    save = rig.output / "checkpoints" / "step_3" / "shard.distcp"
    save.parent.mkdir(parents=True)
    with save.open("w") as held, subprocess.Popen(
        ["torchrun", "987"], executable=shutil.which("sleep"), cwd=rig.output, stdout=held, user=47_115, group=47_115
    ) as stranger:  # fmt: skip
        try:
            daemon = rig.daemon().start()
            first = running(daemon, rig, step=5)
            assert first != stranger.pid
            seen = len(daemon.events())
            assert daemon.command("restart").returncode == 0
            daemon.wait_event("trainer-started", 60, after=seen)
            assert daemon.command("stop-training").returncode == 0
            daemon.wait_event("trainer-stopped", 60, after=seen)
            assert stranger.poll() is None
            assert not [e for e in daemon.events() if e["podwatch_event"] == "trainer-attached"]
        finally:
            stranger.kill()


@pytest.mark.parametrize("shell", [["bash", "--norc"], ["bash", "--rcfile", "/dev/null", "-i"], ["sh"]], ids=" ".join)
@pytest.mark.slow
def test_an_operators_shell_outlives_what_podwatch_does_to_the_trainer_in_it(rig: Rig, shell: list[str]) -> None:
    launcher = rig.root / "rl"
    launcher.write_text(f"#!{sys.executable} -S\nimport runpy\nrunpy.run_path({str(TRAINER)!r}, run_name='__main__')\n")
    launcher.chmod(0o755)
    part = rig.output / "checkpoints" / ".step_0.part"
    part.parent.mkdir(parents=True)
    rig.made_by_others(part)
    words = " ".join([str(launcher), *rig.command()[3:]])
    with terminal(shell, str(rig.output)) as tty:
        assert tty.answers()
        tty.type(f"{words} > {rig.root}/rl.log 2>&1 9> {part} &")
        daemon = rig.daemon().start()
        daemon.wait_event("trainer-attached", 60)
        pid = daemon.wait_for(lambda: status(daemon)["training"]["pid"], 30, "its pid")
        parent = processes.read_stat(pid)
        assert parent is not None
        assert parent.parent_pid == tty.pid
        before = len(rig.saved)
        daemon.wait_for(lambda: len(rig.saved) >= before + 2, 60, "a save that podwatch saw being written")
        seen = len(daemon.events())
        assert daemon.command("restart").returncode == 0
        daemon.wait_event("trainer-started", 90, after=seen)
        assert not alive(pid)
        assert tty.answers()
        assert tty.answers()
