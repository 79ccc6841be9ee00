# ruff: noqa: E501, PT017
"""Rounds of two racing podwatches and random SIGKILLs around one start: never two trainers (promise 4).

A program of its own (forks before any thread exists): ``python crash_rounds.py DIRECTORY ROUNDS SEED``. Every trainer
tries to take a lock that it holds for its whole life; one that finds it taken writes to ``double``.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from podwatch.checkpoints.trainers import process_names
from podwatch.domain.errors import PodwatchError
from podwatch.system import procfs
from podwatch.system.clock import SystemClock
from podwatch.trainer.process_roles import Roles
from podwatch.trainer.start_and_adopt import StartPlan, SupervisorLauncher, SupervisorOptions

RUN = f"crash-{os.getpid()}"  # inherited by the forks
NEVER = {"grace": 10.0, "save_grace": 10.0, "saving": lambda: False}


def launcher(root: Path, state: str) -> SupervisorLauncher:
    options = SupervisorOptions(beside=root, linger=0.2)
    return SupervisorLauncher(
        RUN, root / "out", root / state, SystemClock(), use_systemd=False, roles=Roles(process_names()), options=options
    )


def plan(root: Path, start_id: str) -> StartPlan:
    script = f"exec 9>>{root}/alive; flock -n 9 || echo {start_id} >> {root}/double; echo {start_id} >> {root}/ran; exec sleep 60"
    return StartPlan(start_id, ("sh", "-c", script), str(root), {"PATH": os.environ["PATH"], "HOME": "/"})


async def podwatch(root: Path, state: str, start_id: str) -> None:
    """What a podwatch does at its start: adopt, else start."""
    mine = launcher(root, state)
    if (await mine.look()).handle is None:
        await mine.start(plan(root, start_id))


async def settle(root: Path, states: list[str], number: int) -> tuple[int, str]:
    """The next podwatch: whatever was left, it ends with exactly one trainer, which it can stop and replace."""
    handles = []
    for state in states:
        mine = launcher(root, state)
        handle = (await mine.look()).handle
        if handle is not None:
            handles.append((mine, handle))
    living = [handle for _, handle in handles if await handle.exit_status() is None]
    outcome = f"{len(living)} alive" + "".join(f", {handle.supervision}" for handle in living)
    for _, handle in handles:
        report = await handle.stop(**NEVER)  # type: ignore[arg-type]
        assert not report.survivors, report
        await handle.release()
    left = [p for p in procfs.all_pids() if procfs.environment_value(p, "PODWATCH_RUN") == RUN]
    left = [p for p in left if (s := procfs.read_stat(p)) is not None and s.state != "Z"]
    assert not left, f"round {number}: processes that no look() found: {left}"
    deadline = time.monotonic() + 60
    while True:  # a supervisor that had nothing to keep may hold the lock for another moment
        try:
            handle = await launcher(root, states[0]).start(plan(root, f"final-{number}"))
            break
        except PodwatchError as error:
            assert time.monotonic() < deadline, f"round {number}: can never start again: {error}"
            await asyncio.sleep(0.02)
    await handle.stop(**NEVER)  # type: ignore[arg-type]
    await handle.release()
    return len(living), outcome


def fork(work: object) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            asyncio.run(work)  # type: ignore[arg-type]
        except PodwatchError:
            pass
        finally:
            os._exit(0)
    work.close()  # type: ignore[attr-defined]
    return pid


def main(root: Path, rounds: int, seed: int) -> None:
    chance = random.Random(seed)
    outcomes: dict[str, int] = {}
    for number in range(rounds):
        states = ["state"] if chance.random() < 0.6 else ["state", "state2"]  # two may have state apart
        starters = [fork(podwatch(root, states[n % len(states)], f"r{number}-{n}")) for n in range(2)]
        time.sleep(chance.choice([chance.uniform(0.0, 0.3), chance.uniform(0.2, 0.8)]))
        victims = chance.choice(["one", "both", "supervisors", "all", "none"])
        if victims in ("one", "both", "all"):
            for pid in starters[: 1 if victims == "one" else 2]:
                os.kill(pid, signal.SIGKILL)
        if victims in ("supervisors", "all"):
            for pid in procfs.all_pids():
                line = " ".join(procfs.command(pid))
                if "supervise.py" in line and str(root) in line:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        for pid in starters:
            os.waitpid(pid, 0)
        time.sleep(0.05 if victims != "none" else 0)
        wait_for_supervisors(root)
        count, outcome = asyncio.run(settle(root, states, number))
        assert count <= 1, f"round {number} ({victims}): {outcome}"
        assert not (root / "double").exists(), f"round {number} ({victims}): {(root / 'double').read_text()}"
        key = f"{victims}: {outcome}"
        outcomes[key] = outcomes.get(key, 0) + 1
    print(json.dumps({"rounds": rounds, "seed": seed, "outcomes": dict(sorted(outcomes.items()))}))


def wait_for_supervisors(root: Path) -> None:
    """Until every supervisor still alive has decided: its result is written."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        undecided = False
        for pid in procfs.all_pids():
            argv = procfs.command(pid)
            if len(argv) > 3 and "supervise.py" in argv[-4] and argv[-2].startswith(str(root)):
                undecided |= not Path(argv[-2], f"result-{argv[-1]}.json").exists()
        if not undecided:
            return
        time.sleep(0.01)
    raise AssertionError("a supervisor never decided")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
