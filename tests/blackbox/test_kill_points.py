"""SIGKILL for podwatch, its supervisor and its upload child right before and after what they change: the promises hold.

One life without a kill shows the points. Each round then repeats that life, ends one process at one point, starts the
next podwatch, and holds it to the promises. The gate takes a few points spread over each role's life;
``PODWATCH_KILL_POINTS=all`` takes every kind of point, a number that many of each role.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.asking import published, reasons
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server
from tests.support.daemon import DaemonProcess
from tests.support.hurry import hurry
from tests.support.killpoints import Call, KillPoints, When, build_killpoints
from tests.support.nvml import NoCompiler
from tests.support.rig import Rig

ASKED = os.environ.get("PODWATCH_KILL_POINTS", "")
pytestmark = pytest.mark.timeout(7200 if ASKED else 900)
MOST = 10_000 if ASKED == "all" else int(ASKED or 4)
"""Points of each role."""
OF_TRAINING = {"checkpoints", "run_default", "rollouts", "logs"}
"""What the fake trainer makes in its output directory."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build_killpoints(tmp_path_factory.mktemp("killpoints"))
    except NoCompiler as missing:
        pytest.skip(str(missing))


@dataclass
class Life:
    """A pod, its store and its kill points."""

    rig: Rig
    server: B2Server
    library: Path
    points: KillPoints = field(init=False)
    daemon: DaemonProcess = field(init=False)

    def __post_init__(self) -> None:
        self.points = KillPoints(self.rig.root / "kill", below=[self.rig.root], library=self.library)
        store = {"B2_APPLICATION_KEY_ID": KEY_ID, "B2_APPLICATION_KEY": KEY, "B2_ENVIRONMENT": self.server.url}
        environ = {**store, **self.points.environment()}
        self.daemon = self.rig.daemon(environ, sync__store=f"b2://{BUCKET}", sync__upload_gap="0s")

    def live(self) -> None:
        """Start, save, publish; the trainer dies and starts again; publish. Ends early where the kill comes."""
        self.daemon.start()
        self.until(lambda: self.happened("trainer-confirmed"))
        self.until(lambda: self.happened("published"))
        seen = len(self.daemon.events())
        self.rig.order(exit=3, once=True)
        self.until(lambda: self.happened("incident-closed", seen))
        self.until(lambda: self.happened("published", seen))

    def until(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        """Wait for it, or for the kill."""
        if self.points.fired:
            return
        daemon, process = self.daemon, self.daemon.process
        assert process is not None
        end = time.monotonic() + seconds
        while not (self.points.fired or condition()):
            hurry(process.pid)
            assert time.monotonic() < end, daemon.tail()
            time.sleep(0.05)

    def happened(self, event: str, after: int = 0) -> bool:
        return any(e["podwatch_event"] == event for e in self.daemon.events()[after:])

    def promises(self) -> None:
        """At this moment."""
        self.rig.never_two()
        assert self.server.violations() == []
        found = {path.name for path in self.rig.output.iterdir()} if self.rig.output.exists() else set()
        assert found <= OF_TRAINING, "something foreign in the trainer's directory"
        assert not list(self.rig.output.rglob("*podwatch*"))

    def recover(self) -> None:
        """The next podwatch makes the run whole, guards it and publishes."""
        self.rig.obey()
        before, seen = set(self.rig.saved), len(self.daemon.events())
        assert self.daemon.process is not None
        if self.points.victim == self.daemon.process.pid:
            self.daemon.process.wait(20)
        if self.daemon.process.poll() is not None:
            self.daemon.start()
        self.daemon.wait_for(lambda: self.trains() and not self.blocked(), 60, "the run comes back")
        self.promises()
        if before:
            kept = {*self.rig.saved, *self.quarantined()}
            assert max(before) in kept, "the newest complete checkpoint was deleted"
        starts, newest = len(self.rig.starts), max(self.rig.saved, default=0)
        published(self.daemon, 60) if not newest else self.saved_and_published(seen)
        self.rig.order(exit=3, once=True)
        self.daemon.wait_for(lambda: len(self.rig.starts) > starts and self.trains(), 60, "it is guarded")
        self.promises()

    def end(self) -> None:
        """End the pod. What a child says whose parent was killed before it asked is no fault of the daemon's."""
        self.daemon.end_training()
        said = re.sub(r"Traceback(?:(?!Traceback).)*?EOFError: Ran out of input\n", "", self.log(), flags=re.S)
        self.daemon.log.write_text(said)
        self.server.stop()

    def log(self) -> str:
        return self.daemon.log.read_text(errors="replace")

    def saved_and_published(self, seen: int) -> None:
        self.daemon.wait_for(lambda: self.happened("published", seen), 60, "something newer is published")

    def trains(self) -> bool:
        """The trainer lives, and podwatch knows this one."""
        document = self.daemon.status() or {}
        training = document.get("training") or {}
        pid = self.rig.trainer_pid
        return bool(pid and training.get("alive") and document["recovery"]["phase"] == "running")

    def blocked(self) -> bool:
        return any(kind in reasons(self.daemon) for kind in ("blocked", "gave-up", "state-unavailable"))

    def quarantined(self) -> set[int]:
        found = self.rig.root.rglob("*quarantine*/**/step_*")
        return {int(path.name[5:]) for path in found if path.name[5:].isdigit()}


@pytest.fixture
def lives(make_rig: Callable[[], Rig], tmp_path: Path, library: Path) -> Iterator[Callable[[], Life]]:
    servers: list[B2Server] = []

    def make() -> Life:
        servers.append(B2Server(tmp_path / f"b2-{len(servers)}").start())
        rig = make_rig()
        rig.trainer_flags = ["--step-seconds=0.2"]
        return Life(rig, servers[-1], library)

    yield make
    for server in servers:
        server.stop()


@dataclass(frozen=True)
class Moment:
    """The ``at``-th call of this name and path (patterns)."""

    call: str
    path: str
    at: int


def moments_of(trace: list[Call], root: Path) -> list[Moment]:
    """In their order: of each kind of call the first, and one in the middle where there are several. A kind leaves out
    of the path what differs from life to life."""
    seen: dict[tuple[str, str], list[int]] = {}
    for position, call in enumerate(trace):
        below = call.path.removeprefix(str(root))
        within = str(root) if below != call.path else ""
        kind = call.call, within + re.sub(r"(?<![\w-])(?!b2)[\w-]*\d[\w-]*", "*", below)
        seen.setdefault(kind, []).append(position)
    found: list[tuple[int, Moment]] = []
    for (name, path), positions in seen.items():
        for at in {0, len(positions) // 2}:
            found.append((positions[at], Moment(name, path, at + 1)))
    return [moment for _, moment in sorted(found, key=lambda one: one[0])]


def spread(found: list[Moment], most: int) -> list[Moment]:
    """At most so many, evenly over the life."""
    return [found[n * len(found) // most] for n in range(most)] if len(found) > most else found


@pytest.mark.parametrize("role", ["daemon", "supervisor", "transfer"])
@pytest.mark.slow
def test_a_kill_at_any_point_breaks_no_promise(lives: Callable[[], Life], role: str) -> None:
    first = lives()
    first.live()
    first.promises()
    first.end()
    moments = spread(moments_of(first.points.trace(role), first.rig.root), MOST)
    assert len(moments) >= 3, moments
    fired = 0
    for number, moment in enumerate(moments):
        when: When = "after" if number % 2 and moment.call != "exec" else "before"
        fired += round_with_a_kill(lives(), first.rig.root, role, moment, when)
    assert fired > len(moments) // 2, "the kills did not come"


def round_with_a_kill(life: Life, root: Path, role: str, moment: Moment, when: When) -> bool:
    """Whether the process was killed: where threads race, a moment does not come in each life."""
    path = moment.path.replace(str(root), str(life.rig.root))
    print(f"{role}: {when} {moment}", flush=True)
    life.points.kill(role=role, at=moment.at, when=when, call=moment.call, path=path)
    life.live()
    life.promises()
    if fired := life.points.fired:
        life.recover()
    life.end()
    return fired


# -- the instrument itself --------------------------------------------------------------------------------------------

PROGRAM = """
import os, subprocess, sys
for n in range(5):
    open(f"a{n}", "w").close()
    os.rename(f"a{n}", f"b{n}")
open("/dev/null", "w").close()
print(subprocess.run(["env"], env={"PATH": os.environ["PATH"], "A": "1"}, capture_output=True, text=True).stdout)
subprocess.run([sys.executable, "-I", "-S", "-c", "open('c', 'w')  # the child"], env={"A": "1"})
"""


def run(points: KillPoints, where: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-I", "-S", "-c", PROGRAM, "the parent"]
    environ = {"PATH": os.environ["PATH"], **points.environment()}
    return subprocess.run(command, cwd=where, env=environ, capture_output=True, text=True)


@pytest.fixture
def points(tmp_path: Path, library: Path) -> KillPoints:
    (tmp_path / "work").mkdir()
    roles = {"parent": "* the parent", "child": "*# the child"}
    return KillPoints(tmp_path / "kill", below=[tmp_path / "work"], roles=roles, library=library)


def test_it_counts_in_roles_only_and_hides_from_other_programs(points: KillPoints, tmp_path: Path) -> None:
    done = run(points, tmp_path / "work")
    assert done.returncode == 0, done.stderr
    assert "A=1" in done.stdout
    assert "LD_PRELOAD" not in done.stdout
    found = [(one.number, one.call, one.path) for one in points.trace("parent")]
    opened = [(2 * n + 1, "open", f"{tmp_path}/work/a{n}") for n in range(5)]
    renamed = [(2 * n + 2, "rename", f"{tmp_path}/work/b{n}") for n in range(5)]
    assert found[:10] == sorted(opened + renamed)
    assert [call for _, call, _ in found[10:]] == ["exec", "exec"]
    assert [(one.number, one.path) for one in points.trace("child")] == [(1, f"{tmp_path}/work/c")]
    assert not points.armed
    assert not points.fired


@pytest.mark.parametrize(("when", "left"), [("before", ["a2", "b0", "b1"]), ("after", ["b0", "b1", "b2"])])
def test_it_kills_once_before_or_after(points: KillPoints, tmp_path: Path, when: When, left: list[str]) -> None:
    points.kill(role="parent", at=3, when=when, call="rename", path="*/work/b*")
    assert points.armed
    assert run(points, tmp_path / "work").returncode == -signal.SIGKILL
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == left
    assert points.fired
    assert points.victim
    assert not points.armed
    assert run(points, tmp_path / "work").returncode == 0, "the next one lives"


def test_a_kill_at_an_exec_ends_the_parent(points: KillPoints, tmp_path: Path) -> None:
    points.kill(role="parent", at=1, call="exec")
    assert run(points, tmp_path / "work").returncode == -signal.SIGKILL
