"""Rounds of one restart with a real supervisor and a real process tree, in which somebody is SIGKILLed (promises 4,
10).

A program of its own (it forks before any thread exists): ``python restart_rounds.py DIRECTORY WHAT COUNT SEED``.
``podwatch`` kills podwatch at each point where its journal or its record is written, ``supervisor`` kills the
supervisor there, until the restart goes through without being hit; ``random`` kills either, both, or the trainer too,
at COUNT random moments. After each kill the next podwatch must end with one trainer, resumed from the same step,
nothing lost, nothing left open; and when it then stops training, no process of the run may live.

The trainer starts a daemon that leaves its session. Both hold one lock: a trainer that finds it taken (a second
trainer, or an orphan of the first) says so in ``double``.
"""

import asyncio
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from podwatch.domain.finding import FindingKind
from podwatch.domain.process import ProcessIdentity
from podwatch.recovery import Phase, stale_files
from podwatch.system import procfs
from podwatch.system.clock import SystemClock
from podwatch.system.pinned_directories import PinnedTree
from podwatch.system.procfs import is_alive
from podwatch.trainer.start_and_adopt import SupervisorLauncher, SupervisorOptions
from tests.support import forking
from tests.support.known_trainers import ROLES
from tests.support.recovery_world import Killer, Podwatch, World, death

TRAINER = """exec 9>>"$1/../alive"
flock -n 9 || echo "$@" >> "$1/../double"
echo "$@" >> "$1/../ran"
setsid sleep 600 > /dev/null 2>&1 < /dev/null &
exec sleep 600
"""
SAVED = 15
MARK = os.getpid()
WORKERS = 3
PATIENCE = 60.0


class Striker(Killer):
    """Really kills, once, at point ``target``: podwatch itself, or its supervisor."""

    def __init__(self, root: Path, target: int, victim: str) -> None:
        super().__init__()
        self.root, self.hit, self.victim = root, target, victim

    def point(self, name: str) -> None:
        self.count += 1
        if self.count == self.hit:
            (self.root / "struck").write_text(name)
            if self.victim == "podwatch":
                os.kill(os.getpid(), signal.SIGKILL)
            kill_supervisors(self.root)


def kill_supervisors(root: Path) -> None:
    for pid in procfs.all_pids():
        argv = procfs.command(pid)
        if any(a.endswith("supervise.py") for a in argv) and any(a.startswith(f"{root}/") for a in argv):
            forking.kill(pid)


def run_id(root: Path) -> str:
    return f"rounds-{MARK}-{root.name}"


def a_life(root: Path, killer: Killer | None = None) -> Podwatch:
    world = World(root)
    command = ["sh", str(root / "trainer.sh"), str(world.output)]
    world.settings_extra = {"trainer": {"command": command, "stop_grace": 5}}
    options = SupervisorOptions(beside=root, grace=1.0, linger=2.0)
    launcher = SupervisorLauncher(
        run_id(root), world.output, root / "state", SystemClock(), use_systemd=False, roles=ROLES, options=options
    )
    life = Podwatch(world, killer=killer)
    object.__setattr__(life.recovery.context.tools, "launcher", launcher)
    life.environment.variables = dict(os.environ)
    if killer is not None:
        real = PinnedTree.rename

        def rename(self: PinnedTree, *args: Any, **kwargs: Any) -> bool:
            killer.point("before rename")
            moved = real(self, *args, **kwargs)
            killer.point("after rename")
            return moved

        PinnedTree.rename = rename  # type: ignore[method-assign]
    return life


async def first(root: Path) -> None:
    """A trainer that runs, confirmed, with step 15 saved, step 20 cut off, and notes ahead."""
    life = a_life(root)
    await life.recovery.begin()
    await life.until(Phase.CONFIRMING, seconds=PATIENCE)
    for step in (5, 10, SAVED):
        life.world.save(step)
    life.see(SAVED + 1)
    assert life.recovery.state.phase is Phase.RUNNING
    await came_up(root, "")
    await life.leave()
    life.world.save(20, whole=False)


async def victim(root: Path, killer: Killer | None = None) -> None:
    life = a_life(root, killer)
    await life.recovery.begin()
    life.see(SAVED + 2, finding=death(FindingKind.HANG))
    await life.until(Phase.CONFIRMING, Phase.RUNNING, seconds=PATIENCE)
    await life.leave()


async def heir(root: Path) -> None:
    """Whatever was left: one trainer from step 15 on; then none."""
    life = a_life(root)
    recovery = life.recovery
    await recovery.begin()
    await life.until(Phase.CONFIRMING, Phase.RUNNING, seconds=PATIENCE)
    if recovery.handle is None or not await resumed(root, recovery.handle.launcher):
        # killed before the verdict was acted upon: it comes again
        life.see(SAVED + 2, finding=death(FindingKind.HANG))
        await life.until(Phase.CONFIRMING, seconds=PATIENCE)
    elif recovery.handle is not None and await recovery.handle.exit_status() is not None:  # as the sensing loop finds
        life.see(finding=death())
        await life.until(Phase.CONFIRMING, seconds=PATIENCE)
    handle = recovery.handle
    assert handle is not None
    assert await handle.exit_status() is None, "no trainer runs"
    await came_up(root, "--resume")
    assert ran(root).splitlines()[-1].endswith(f"--resume {SAVED}")
    assert not (life.world.output / "checkpoints" / "step_20").exists()
    assert (life.world.output / "checkpoints" / f"step_{SAVED}" / "done").exists()
    assert life.run.stopping is None
    life.see(SAVED + 1)
    assert recovery.state.phase is Phase.RUNNING, recovery.state
    assert recovery.context.run.history.streak_count <= 2, (
        "one death, and at most one trainer that died with its supervisor"
    )
    await recovery.requests.stop()
    await life.until(Phase.STOPPED, seconds=PATIENCE)
    await life.leave()


def ran(root: Path) -> str:
    """What each trainer was started with, a line each."""
    path = root / "ran"
    return path.read_text() if path.exists() else ""


async def came_up(root: Path, word: str) -> None:
    """The trainer's first line may be a moment behind its start."""
    deadline = time.monotonic() + PATIENCE
    while word not in (said := ran(root)) or not said:
        assert time.monotonic() < deadline, "the trainer never said that it runs"
        await asyncio.sleep(0.01)


async def resumed(root: Path, trainer: ProcessIdentity) -> bool:
    """Whether this one, which may not have said anything yet, was started by the restart."""
    deadline = time.monotonic() + PATIENCE
    while is_alive(trainer) and (argv := procfs.command(trainer.pid))[:1] != ("sleep",):
        if str(root / "trainer.sh") in argv:
            return "--resume" in argv
        assert time.monotonic() < deadline, f"it never became the trainer: {argv}"
        await asyncio.sleep(0.001)  # in the middle of its exec
    return "--resume" in ran(root)


def fork(work: Callable[[], Awaitable[None]]) -> int:
    return forking.fork(lambda: asyncio.run(work()))  # type: ignore[arg-type]


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def living(root: Path) -> list[int]:
    marked = [p for p in procfs.all_pids() if procfs.environment_value(p, "PODWATCH_RUN") == run_id(root)]
    return [p for p in marked if (stat := procfs.read_stat(p)) is not None and stat.state != "Z"]


def one_round(root: Path, strike: Callable[[Path], str]) -> str:
    """Returns what was struck, and where; empty if the restart went through unhurt."""
    try:
        return the_round(root, strike)
    finally:
        kill_supervisors(root)
        for pid in living(root):
            forking.kill(pid)


def the_round(root: Path, strike: Callable[[Path], str]) -> str:
    root.mkdir(parents=True)
    (root / "trainer.sh").write_text(TRAINER)
    world = World(root)
    world.output.mkdir()
    assert ended(fork(lambda: first(root))) == 0
    before = world.contents()
    struck = strike(root)
    assert not (root / "double").exists(), f"{struck}: two at a time: {(root / 'double').read_text()}"
    assert not (lost := before - world.contents()), f"{struck}: lost: {lost}"
    assert ended(fork(lambda: heir(root))) == 0, f"{struck}: the next podwatch failed"
    assert not (root / "double").exists(), f"{struck}: two at a time: {(root / 'double').read_text()}"
    assert not (lost := before - world.contents()), f"{struck}: lost: {lost}"
    deadline = time.monotonic() + 60
    while left := living(root):
        assert time.monotonic() < deadline, f"{struck}: left alive: {[procfs.command(p) for p in left]}"
        time.sleep(0.01)
    shutil.rmtree(root)
    return struck


def at_point(target: int, who: str) -> Callable[[Path], str]:
    def strike(root: Path) -> str:
        code = ended(fork(lambda: victim(root, Striker(root, target, who))))
        if not (root / "struck").exists():
            assert code == 0
            return ""
        return f"{who} at point {target}, {(root / 'struck').read_text()}"

    return strike


def at_random(chance: random.Random) -> Callable[[Path], str]:
    def strike(root: Path) -> str:
        delay = chance.uniform(0.0, 0.5)
        whom = chance.choice(["podwatch", "podwatch", "supervisor", "both", "trainer", "all"])
        pid = fork(lambda: victim(root))
        time.sleep(delay)
        if whom in ("podwatch", "both", "all"):
            os.kill(pid, signal.SIGKILL)
        if whom in ("supervisor", "both", "all"):
            kill_supervisors(root)
        if whom in ("trainer", "all"):
            for other in living(root):
                if procfs.command(other)[:1] == ("sleep",):
                    forking.kill(other)
        ended(pid)
        return f"{whom} after {delay:.3f} s"

    return strike


def work(root: Path, what: str, count: int, seed: int, worker: int) -> None:
    """This worker's share; a line of JSON at the end."""
    done: Counter[str] = Counter()
    reached = 0
    for number in range(worker, count if what == "random" else sys.maxsize, WORKERS):
        if what == "random":
            struck = one_round(root / str(number), at_random(random.Random(f"{seed}-{number}")))
        else:
            struck = one_round(root / str(number), at_point(number + 1, what))
            if not struck:
                break
        reached = number + 1
        done[struck.split(",")[-1].strip() if what != "random" else struck.partition(" ")[0]] += 1
    (root / f"said-{worker}.json").write_text(json.dumps({"reached": reached, "done": done}))


def main(root: Path, what: str, count: int, seed: int) -> int:
    # A test says nothing about what lies in this machine's /dev/shm.
    stale_files.PLACES = []  # type: ignore[misc]

    def share(worker: int) -> Callable[[], Awaitable[None]]:
        async def nothing() -> None: ...

        def run() -> Awaitable[None]:
            work(root, what, count, seed, worker)
            return nothing()

        return run

    workers = [fork(share(n)) for n in range(WORKERS)]
    codes = [ended(pid) for pid in workers]
    if any(codes):
        return 1
    said = [json.loads((root / f"said-{n}.json").read_text()) for n in range(WORKERS)]
    total: Counter[str] = sum((Counter(s["done"]) for s in said), Counter())
    print(json.dumps({"what": what, "rounds": total.total(), "seed": seed, "struck": dict(sorted(total.items()))}))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
