"""The trial load of NVIDIA's library: real child processes over the stand-in, which hangs, aborts or crashes."""

import json
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
from podwatch.sensors import gpu
from podwatch.sensors.gpu import ReaderUnavailable, TrialLoad
from podwatch.system import procfs
from tests.support import nvml
from tests.support.nvml import NvmlWorld

pytestmark = pytest.mark.slow

PATIENT = 60.0
HUNG = 1.5
"""Deadline of a trial that is meant to hang; one that starts late on a busy machine hangs as well."""


@pytest.fixture
def outside(nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NvmlWorld:
    """A world that the child sees; this process counts as one that has no library yet."""
    world = NvmlWorld(tmp_path / "world", devices=2)
    for name, value in world.environment(nvml_library).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(gpu, "loaded_here", lambda: False)
    return world


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    yield
    left = [pid for pid in trials() if (stat := procfs.read_stat(pid)) is not None and stat.parent_pid == os.getpid()]
    assert not left


def trials() -> list[int]:
    return [pid for pid in procfs.all_pids() if any("nvml_trial_child" in word for word in procfs.command(pid))]


def refused(trial: TrialLoad) -> ReaderUnavailable:
    with pytest.raises(ReaderUnavailable) as caught:
        trial.check()
    return caught.value


def test_a_healthy_library_passes(outside: NvmlWorld) -> None:
    TrialLoad(wait=PATIENT, deadline=PATIENT).check()


@pytest.mark.parametrize("code", [nvml.DRIVER_NOT_LOADED, nvml.NO_PERMISSION, nvml.UNKNOWN])
def test_an_error_of_nvmlinit_is_left_to_the_reader_who_explains_it(outside: NvmlWorld, code: int) -> None:
    outside.fail_library(code)
    TrialLoad(wait=PATIENT, deadline=PATIENT).check()


@pytest.mark.parametrize(
    ("how", "words"), [("abort", "SIGABRT"), ("crash", "SIGSEGV"), ("exit", "exit status 7")]
)  # fmt: skip
@pytest.mark.parametrize("where", ["loading", "initializing"])
def test_a_library_that_ends_its_process_is_named_and_tried_again(
    outside: NvmlWorld, where: str, how: str, words: str
) -> None:
    trial = TrialLoad(wait=PATIENT, deadline=PATIENT)
    getattr(outside, where)(how)
    error = refused(trial)
    assert error.state is SensorState.BLIND
    stage = "while loading" if where == "loading" else "in nvmlInit"
    assert f"libnvidia-ml.so.1 ended its child process {stage} ({words})" in str(error)
    assert "tries again within 60 s" in str(error)
    getattr(outside, where)("")
    trial.check()


@pytest.mark.parametrize("where", ["while loading", "in nvmlInit"])
def test_a_library_that_hangs_is_killed_named_and_tried_again(
    outside: NvmlWorld, nvml_library: Path, where: str
) -> None:
    def hang(on: bool) -> None:
        outside.hang_init(on) if where == "in nvmlInit" else outside.loading("hang" if on else "")

    hang(True)
    # The child must have reached the library before its deadline, however busy the machine.
    for seconds in (HUNG, 4 * HUNG, PATIENT):
        error = refused(trial := TrialLoad(wait=seconds, deadline=seconds))
        if where in str(error) and str(nvml_library) in str(error):
            break
    assert error.state is SensorState.BLIND
    assert f"libnvidia-ml.so.1 ({nvml_library}) hangs {where}: no answer within" in str(error)
    assert "tries again" in str(error)
    hang(False)
    TrialLoad(wait=PATIENT, deadline=PATIENT).check()
    assert trial._child is None


def test_a_slow_library_is_pending_and_the_next_look_continues_with_the_same_child(outside: NvmlWorld) -> None:
    outside.loading("hang")
    trial = TrialLoad(wait=0.05, deadline=PATIENT)
    assert refused(trial).state is SensorState.PENDING
    first = trial._child
    assert first is not None
    assert refused(trial).state is SensorState.PENDING
    assert trial._child is first
    outside.loading("")
    first.process.wait(PATIENT)
    trial.check()
    assert trial._child is None


def test_a_child_that_cannot_be_killed_stays_the_only_one(outside: NvmlWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """State D cannot be made without a driver: here the kill has no effect until the test lets it."""
    outside.loading("hang")
    trial = TrialLoad(wait=0.2, deadline=0.2)
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
    TrialLoad(wait=PATIENT, deadline=PATIENT).check()
    assert time.monotonic() - began < 20, "not until the other one ends"
    for pid in trials():
        if str(outside.path) == procfs.environment_value(pid, "NVML_STANDIN"):
            os.kill(pid, signal.SIGKILL)


def test_threads_that_look_at_once_share_one_child(outside: NvmlWorld) -> None:
    """After a hung look another thread looks while the first is still inside."""
    outside.loading("hang")
    trial = TrialLoad(wait=PATIENT, deadline=PATIENT)
    first = threading.Thread(target=trial.check)
    first.start()
    while trial._child is None:
        time.sleep(0.001)
    assert "another thread" in str(refused(trial))
    outside.loading("")
    first.join()
    trial.check()


@pytest.mark.parametrize(
    ("content", "state", "words"),
    [(None, SensorState.ABSENT, "was not found"), (b"", SensorState.BLIND, "file too short"),
     (b"not a library" * 9, SensorState.BLIND, "invalid ELF header")],
)  # fmt: skip
def test_a_library_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, state: SensorState, words: str
) -> None:
    monkeypatch.setattr(gpu, "loaded_here", lambda: False)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    name = "libpodwatch-test.so.1"
    if content is not None:
        (tmp_path / name).write_bytes(content)
    error = refused(TrialLoad(name, wait=PATIENT, deadline=PATIENT))
    assert error.state is state
    assert name in str(error)
    assert words in str(error)


def test_no_interpreter_and_no_process_are_blind(outside: NvmlWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = TrialLoad(wait=PATIENT, deadline=PATIENT)
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
    trial = TrialLoad(wait=0.05, deadline=PATIENT)
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
    child.process.wait(PATIENT)
    trial.check()


FROZEN = """
import json, threading, time
from podwatch.sensors import gpu
gpu.loaded_here  # imported before the hang
beats = 0
def beat():
    global beats
    while True:
        time.sleep(0.02)
        beats += 1
threading.Thread(target=beat, daemon=True).start()
threading.Thread(target=gpu.load_here, daemon=True).start()
while not gpu.loaded_here():
    time.sleep(0.01)
before = beats
time.sleep(0.5)
print(json.dumps(beats - before), flush=True)
import os; os._exit(0)
"""


def test_a_hang_inside_this_process_stops_one_thread_only(nvml_library: Path, tmp_path: Path) -> None:
    """The second line of defence: a library that passes its trial and hangs a moment later."""
    world = NvmlWorld(tmp_path / "world")
    world.loading("hang")
    done = subprocess.run(
        [sys.executable, "-c", FROZEN], env=os.environ | world.environment(nvml_library), stdout=subprocess.PIPE,
        timeout=PATIENT,
    )  # fmt: skip
    assert json.loads(done.stdout) > 2
