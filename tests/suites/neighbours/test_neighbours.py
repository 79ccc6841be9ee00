"""The default suite beside other people's processes: twice at once, a live podwatch, and a holder of /dev/nvidia0.

Needs root for a /dev of its own. Of the default suite it takes what starts podwatch or looks at processes; with
NEIGHBOURS=all (`make nightly`) all of it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import namespaces
from tests.support.asking import confirmed, status
from tests.support.nvml import NoCompiler, build_nvml
from tests.support.own_dev import own_dev
from tests.support.rig import Rig

pytestmark = [pytest.mark.root, pytest.mark.timeout(2400)]

ROOT = Path(__file__).parents[3]
SOME = ["tests/blackbox", "tests/cli", "tests/app", "tests/sensors"]
WHAT = ["tests"] if os.environ.get("NEIGHBOURS") == "all" else SOME

HOLDER = """
import os, signal, sys, time
def note(number, frame):
    with open(sys.argv[2], "a") as log:
        log.write(f"{number}\\n")
for number in range(1, signal.NSIG):
    try:
        signal.signal(number, note)
    except (OSError, ValueError):
        pass  # SIGKILL and SIGSTOP
card = open("/dev/nvidia0")
out = open(os.path.join(sys.argv[1], "log"), "w")  # a training of its own, by every sign
print("ready", flush=True)
while True:
    time.sleep(1)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of our user that holds /dev/nvidia0, as somebody's training does; it notes each signal it gets."""
    output = tmp_path / "somebody"
    output.mkdir()
    command = [sys.executable, "-c", HOLDER, str(output), str(tmp_path / "signals")]
    with own_dev(tmp_path / "dev", ("nvidia0", "nvidiactl")):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()
        process.wait()


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Rig]:
    """A run named bs4, as in the README, guarded by a podwatch with the directories of an installed one."""
    try:
        library = build_nvml(tmp_path / "nvml")
    except NoCompiler as missing:
        pytest.skip(str(missing))
    rig = Rig(tmp_path / "live", library)
    rig.run_id = "bs4"
    yield rig
    rig.close()


def test_two_runs_of_the_suite_beside_a_live_podwatch_touch_nothing(
    tmp_path: Path, live: Rig, holder: subprocess.Popen[str]
) -> None:
    daemon = live.daemon(trainer__supervise="start")
    runtime = Path("/run/podwatch")
    subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)  # in this namespace
    daemon.environ["PODWATCH_RUNTIME_DIR"] = str(runtime)
    daemon.runtime = runtime
    daemon.start()
    confirmed(daemon)
    trainer, engine = live.trainer_pid, live.engine_pid

    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    with tempfile.TemporaryDirectory(prefix="two-") as base:  # a short path: a socket's may have 107 characters
        suites = [_suite(log, Path(base) / log.stem) for log in logs]
        codes = [suite.wait() for suite in suites]

    assert codes == [0, 0], "\n".join(log.read_text(errors="replace")[-6000:] for log in logs)
    assert holder.poll() is None, "the holder of /dev/nvidia0 was ended"
    assert not (tmp_path / "signals").exists(), "the holder of /dev/nvidia0 got a signal"
    assert (live.trainer_pid, live.engine_pid, len(live.starts)) == (trainer, engine, 1)
    assert status(daemon)["training"]["state"] == "running"
    assert not any(e["podwatch_event"] == "incident-opened" for e in daemon.events()), daemon.tail()
    assert [path.name for path in runtime.iterdir()] == ["bs4"], "another podwatch was there"


def _suite(log: Path, base: Path) -> "subprocess.Popen[bytes]":
    """`make test` in its own words, with a directory of its own for what tests write."""
    command = [sys.executable, "-m", "pytest", "-q", "--parallel", "2", "-p", "no:cacheprovider"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PODWATCH_"))}
    with log.open("wb") as out:
        return subprocess.Popen(
            [*command, f"--basetemp={base}", *WHAT],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )


@pytest.mark.parametrize("how", [(), ("--parallel", "2"), ("-n", "1")], ids=["one", "parallel", "xdist"])
def test_nothing_lives_on_when_pytest_is_killed(tmp_path: Path, how: tuple[str, ...]) -> None:
    """Neither the daemon of a test nor its training: the kernel ends them with the process that ran the test."""
    log = tmp_path / "log"
    options = [*how, "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'base'}"]
    command = [sys.executable, "-m", "pytest", *options, "tests/blackbox/test_life.py"]
    with log.open("wb") as out:
        suite = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
    try:
        _until(lambda: len(_of_a_test(tmp_path)) >= 2, log)  # a daemon and a trainer at least
    finally:
        suite.send_signal(signal.SIGKILL)
        suite.wait()
    _until(lambda: not _of_a_test(tmp_path), log)


@pytest.mark.parametrize("gate", [False, True])
def test_where_no_namespace_can_be_made_tests_are_skipped_in_one_line_and_the_gate_fails(
    tmp_path: Path, gate: bool
) -> None:
    plugin = "from tests.support import namespaces\nnamespaces.why_impossible = lambda: 'not on this machine'\n"
    (tmp_path / "no_namespaces.py").write_text(plugin)
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "TESTS_MUST_ISOLATE": "1" if gate else ""}
    options = ["-p", "no_namespaces", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'base'}"]
    tests = ["tests/blackbox/test_life.py", "tests/cli/test_status.py", "tests/domain/test_safe_links.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests], cwd=ROOT, env=environ, capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    if gate:
        assert done.returncode != 0
        assert "not on this machine" in done.stderr
    else:
        assert done.returncode == 0, done.stdout
        assert len(lines) == 1, lines
        assert " passed" in done.stdout, "what starts nothing runs all the same"


def _of_a_test(base: Path) -> list[str]:
    """The commands of living processes that name a file below this directory, but pytest's own."""
    found = []
    for pid in namespaces.others():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
            if str(base) in words and " pytest " not in words:
                found.append(words)
    return found


def _until(condition: Callable[[], bool], log: Path) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, log.read_text(errors="replace")[-3000:]
        time.sleep(0.05)
