# ruff: noqa: PTH109, PTH123
"""Identity by start ticks, and reading /proc, on real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from podwatch.system import procfs


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_alive_gone_and_zombie(child: subprocess.Popen[bytes]) -> None:
    me = procfs.identify(child.pid)
    assert me is not None
    assert me.boot_id
    assert me.pid_namespace
    assert procfs.is_alive(me)
    child.kill()
    deadline = time.monotonic() + 60
    while procfs.is_alive(me) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not procfs.is_alive(me)  # a zombie: not reaped yet
    assert procfs.exists(me)
    child.wait()
    assert not procfs.exists(me)
    assert procfs.identify(child.pid) is None


def test_a_signal_never_reaches_a_stranger(child: subprocess.Popen[bytes]) -> None:
    me = procfs.identify(child.pid)
    assert me is not None
    for stranger in (
        replace(me, start_ticks=me.start_ticks + 1),
        replace(me, boot_id="another-boot"),
        replace(me, pid_namespace=1),
    ):
        assert not procfs.send_signal(stranger, signal.SIGKILL)
        assert not procfs.is_alive(stranger)
    assert child.poll() is None
    assert procfs.send_signal(me, signal.SIGTERM)
    assert child.wait(60) == -signal.SIGTERM
    assert not procfs.send_signal(me, signal.SIGTERM)


def test_stat_names_with_spaces_and_parentheses() -> None:
    line = "42 (a) b (c) R 1 2 3 4 5 0 0 0 0 0 0 0 0 0 0 0 0 0 777 0 0"
    # fields after the name: state ppid pgrp session tty tpgid flags minflt cminflt majflt cmajflt utime stime ...
    parsed = procfs.parse_stat("42 (a) b (c)) S 1 2 3 4 -1 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20 21")
    assert (parsed.name, parsed.state, parsed.parent_pid, parsed.start_ticks) == ("a) b (c)", "S", 1, 4711)
    assert procfs.parse_stat(line).state == "R"
    with pytest.raises(ValueError):
        procfs.parse_stat("42 (short) S 1")


def test_hostile_comm_is_read_right() -> None:
    code = "import ctypes,sys; ctypes.CDLL(None).prctl(15, b') R 1 1 (', 0, 0, 0); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        status = procfs.read_stat(process.pid)
        assert status is not None
        assert status.name == ") R 1 1 ("
        assert status.parent_pid == os.getpid()


def test_children_and_descendants_command_environment() -> None:
    script = "FOO='a b' sleep 60 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        sleeper = int(shell.stdout.readline())
        try:
            deadline = time.monotonic() + 60
            while procfs.command(sleeper) != ("sleep", "60") and time.monotonic() < deadline:
                time.sleep(0.005)
            assert procfs.children(shell.pid) == [sleeper]
            assert sleeper in procfs.descendants(os.getpid())
            assert procfs.command(sleeper) == ("sleep", "60")
            assert procfs.environment_value(sleeper, "FOO") == "a b"
            assert procfs.working_directory(sleeper) == os.getcwd()
        finally:
            os.kill(sleeper, signal.SIGKILL)
    assert procfs.command(sleeper) == ()
    assert procfs.open_files(sleeper) is None
    assert procfs.cuda_use(sleeper) is None


def test_open_files_for_writing(tmp_path: "os.PathLike[str]") -> None:
    out, src = f"{os.fspath(tmp_path)}/out", f"{os.fspath(tmp_path)}/in"
    with open(out, "w") as writer, open(out) as reader:
        links = procfs.open_files(os.getpid())
        assert links is not None
        assert links[writer.fileno()] == out
        assert links[reader.fileno()] == out
        assert procfs.open_for_writing(os.getpid(), {writer.fileno(): out}) == [out]
        assert procfs.open_for_writing(os.getpid(), {reader.fileno(): src}) == []


@pytest.mark.parametrize(
    ("targets", "context", "gpus"),
    [
        (["/dev/nvidia0", "/dev/nvidiactl"], False, {0}),
        (["/dev/nvidia-uvm", "/dev/nvidia3", "/dev/nvidia12"], True, {3, 12}),
        (["/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"], False, set()),
        (["/dev/null", "/x/dev/nvidia0"], False, set()),
    ],
)
def test_cuda_use(targets: list[str], context: bool, gpus: set[int]) -> None:
    assert procfs.cuda_use_of(targets) == procfs.CudaUse(context, frozenset(gpus))
