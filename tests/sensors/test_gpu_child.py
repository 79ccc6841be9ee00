"""The child that reads NVML: real processes over the stand-in, which hangs, aborts or crashes."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwatch.domain.snapshot import SensorState
from podwatch.sensors.gpu import NvmlReader, ReaderUnavailable
from podwatch.system import procfs
from tests.support import nvml
from tests.support.nvml import NvmlWorld

pytestmark = pytest.mark.slow

PATIENT = 60.0
HUNG = 1.5
"""Deadline of a trial that is meant to hang; one that starts late on a busy machine hangs as well."""


@pytest.fixture
def outside(nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NvmlWorld:
    """A world that the child sees."""
    world = NvmlWorld(tmp_path / "world", devices=2)
    for name, value in world.environment(nvml_library).items():
        monkeypatch.setenv(name, value)
    return world


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    yield
    assert not [pid for pid in readers() if parent(pid) == os.getpid()]


def readers() -> list[int]:
    return [pid for pid in procfs.all_pids() if any("podwatch/sensors/gpu_child" in w for w in procfs.command(pid))]


def parent(pid: int) -> int | None:
    stat = procfs.read_stat(pid)
    return stat.parent_pid if stat is not None else None


def children() -> list[int]:
    return [pid for pid in readers() if parent(pid) == os.getpid()]


def refused(reader: NvmlReader) -> ReaderUnavailable:
    with pytest.raises(ReaderUnavailable) as caught:
        reader.read()
    return caught.value


def answers(reader: NvmlReader) -> bool:
    """Whether it reads the two devices of the world; its child ends with it."""
    try:
        return len(reader.read()) == 2
    finally:
        reader.close()


def patient() -> NvmlReader:
    return NvmlReader(wait=PATIENT, deadline=PATIENT)


def test_one_child_reads_for_good_and_ends_with_its_reader(outside: NvmlWorld) -> None:
    reader = patient()
    for size in (5, 7, 9):
        outside.set_memory(1, size)
        assert [gpu.memory_used_bytes for gpu in reader.read()] == [0, size]
        assert reader._child is not None
        assert children() == [reader._child.process.pid]
    assert answers(reader)
    assert children() == []


@pytest.mark.parametrize(
    ("code", "state"), [(nvml.DRIVER_NOT_LOADED, SensorState.ABSENT), (nvml.NO_PERMISSION, SensorState.DENIED)]
)
def test_an_error_of_nvmlinit_ends_the_child_and_the_next_one_tries_again(
    outside: NvmlWorld, code: int, state: SensorState
) -> None:
    reader = patient()
    outside.fail_library(code)
    assert refused(reader).state is state
    assert children() == []
    outside.fail_library(0)
    assert answers(reader)


@pytest.mark.parametrize(
    ("how", "words"), [("abort", "SIGABRT"), ("crash", "SIGSEGV"), ("exit", "exit status 7")]
)  # fmt: skip
@pytest.mark.parametrize("where", ["loading", "initializing"])
def test_a_library_that_ends_its_process_is_named_and_tried_again(
    outside: NvmlWorld, where: str, how: str, words: str
) -> None:
    reader = patient()
    getattr(outside, where)(how)
    error = refused(reader)
    assert error.state is SensorState.BLIND
    stage = "while loading" if where == "loading" else "in nvmlInit"
    assert f"libnvidia-ml.so.1 ended its child process {stage} ({words})" in str(error)
    assert "tries again within 60 s" in str(error)
    getattr(outside, where)("")
    assert answers(reader)


def test_a_library_that_ends_its_process_in_a_later_reading(outside: NvmlWorld) -> None:
    """As a library that aborts when its device is gone."""
    reader = patient()
    reader.read()
    assert reader._child is not None
    os.kill(reader._child.process.pid, signal.SIGABRT)
    error = refused(reader)
    assert error.state is SensorState.BLIND
    assert "ended its child process in a reading (SIGABRT)" in str(error)
    assert answers(reader)


@pytest.mark.parametrize("where", ["while loading", "in nvmlInit"])
def test_a_library_that_hangs_is_killed_named_and_tried_again(
    outside: NvmlWorld, nvml_library: Path, where: str
) -> None:
    def hang(on: bool) -> None:
        outside.hang_init(on) if where == "in nvmlInit" else outside.loading("hang" if on else "")

    hang(True)
    # The child must have reached the library before its deadline, however busy the machine.
    for seconds in (HUNG, 4 * HUNG, PATIENT):
        error = refused(reader := NvmlReader(wait=seconds, deadline=seconds))
        if where in str(error) and str(nvml_library) in str(error):
            break
    assert error.state is SensorState.BLIND
    assert f"libnvidia-ml.so.1 ({nvml_library}) hangs {where}: no answer within" in str(error)
    assert "tries again" in str(error)
    hang(False)
    assert reader._child is None
    assert answers(patient())


def test_a_driver_that_hangs_later_is_blind_at_once_and_heals_with_the_same_child(outside: NvmlWorld) -> None:
    reader = NvmlReader(wait=PATIENT, deadline=PATIENT)
    reader.read()
    child = reader._child
    outside.hang(1)
    reader._wait = 0.3
    error = refused(reader)
    assert (error.state, error.underway) == (SensorState.BLIND, True)
    assert "no answer" in str(error)
    outside.hang(1, False)
    reader._wait = PATIENT
    assert len(reader.read()) == 2
    assert reader._child is child
    reader.close()


def test_a_slow_library_is_pending_and_the_next_look_continues_with_the_same_child(outside: NvmlWorld) -> None:
    outside.loading("hang")
    reader = NvmlReader(wait=0.05, deadline=PATIENT)
    assert refused(reader).state is SensorState.PENDING
    first = reader._child
    assert refused(reader).state is SensorState.PENDING
    assert reader._child is first
    outside.loading("")
    reader._wait = PATIENT
    assert len(reader.read()) == 2
    assert reader._child is first
    reader.close()


def test_a_child_that_cannot_be_killed_stays_the_only_one(outside: NvmlWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """State D cannot be made without a driver: here the kill has no effect until the test lets it."""
    outside.loading("hang")
    trial = NvmlReader(wait=0.2, deadline=0.2)
    with monkeypatch.context() as patched:
        patched.setattr(subprocess.Popen, "kill", lambda self: None)
        error = refused(trial)
    child = trial._child
    assert child is not None
    assert f"process {child.process.pid} hangs" in str(error)
    assert "cannot be killed" in str(error)
    began = time.monotonic()
    for _ in range(20):
        assert "cannot be killed" in str(refused(trial))
        assert trial._child is child
    assert time.monotonic() - began < 5, "nothing waits for it"
    child.process.kill()
    child.process.wait()
    assert trial._child is child
    trial._wait = trial._deadline = PATIENT
    outside.loading("crash")
    assert "tries again within" in str(refused(trial)), "a new child, with a verdict of its own"


def test_a_process_that_the_library_starts_holds_nothing_up(outside: NvmlWorld) -> None:
    """As nvidia-modprobe: it inherits the pipe, and may stay."""
    outside.loading("fork")
    began = time.monotonic()
    assert answers(patient())
    assert time.monotonic() - began < 20, "not until the other one ends"
    for pid in readers():
        if str(outside.path) == procfs.environment_value(pid, "NVML_STANDIN"):
            os.kill(pid, signal.SIGKILL)


def test_threads_that_look_at_once_share_one_child(outside: NvmlWorld) -> None:
    """After a hung look another thread looks while the first is still inside."""
    outside.loading("hang")
    trial = patient()
    first = threading.Thread(target=trial.read)
    first.start()
    while trial._child is None:
        time.sleep(0.001)
    assert "another thread" in str(refused(trial))
    outside.loading("")
    first.join()
    assert answers(trial)


@pytest.mark.parametrize(
    ("content", "state", "words"),
    [(None, SensorState.ABSENT, "was not found"), (b"", SensorState.BLIND, "file too short"),
     (b"not a library" * 9, SensorState.BLIND, "invalid ELF header")],
)  # fmt: skip
def test_a_library_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, state: SensorState, words: str
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    name = "libpodwatch-test.so.1"
    if content is not None:
        (tmp_path / name).write_bytes(content)
    error = refused(NvmlReader(library=name, wait=PATIENT, deadline=PATIENT))
    assert error.state is state
    assert name in str(error)
    assert words in str(error)


def test_no_interpreter_and_no_process_are_blind(outside: NvmlWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = patient()
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert "(No such file or directory)" in str(refused(trial))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert "could not run (exit status 1)" in str(refused(trial))


def test_the_child_has_none_of_our_secrets_and_no_open_files(
    outside: NvmlWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("B2_APPLICATION_KEY", "secret")
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/x")
    outside.loading("hang")
    trial = NvmlReader(wait=0.05, deadline=PATIENT)
    with (tmp_path / "ours").open("wb") as ours:
        os.set_inheritable(ours.fileno(), True)
        assert refused(trial).state is SensorState.PENDING
        child = trial._child
        assert child is not None
        links = [str(entry.readlink()) for entry in Path(f"/proc/{child.process.pid}/fd").iterdir()]
    assert str(tmp_path / "ours") not in links
    names = {line.partition("=")[0] for line in Path(f"/proc/{child.process.pid}/environ").read_text().split("\0")}
    assert "NVML_STANDIN" in names
    assert not {"B2_APPLICATION_KEY", "NOTIFY_SOCKET"} & names
    outside.loading("")
    trial._wait = PATIENT
    assert answers(trial)


def test_it_ends_when_podwatch_is_gone(outside: NvmlWorld) -> None:
    reader = patient()
    reader.read()
    assert reader._child is not None
    process = reader._child.process
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(PATIENT) == 0
    reader.close()
