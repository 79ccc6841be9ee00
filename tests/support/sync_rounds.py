"""Rounds of one save's way into a store that has faults, in which somebody is SIGKILLed (promises 1, 2 and 10).

A program of its own (it forks before any thread exists): ``python sync_rounds.py DIRECTORY ROUNDS SEED``. In each round
a new set is saved; podwatch, its upload child, or both are killed one to three times at random moments of uploading,
publishing and store retention, while the store delays, resets, refuses and loses answers; the last podwatch is left
alone. Then the pointer names this set, nothing is left open, and what was sent again is counted: at most the parts that
were on their way at a kill or whose answer a fault took.
"""

import asyncio
import functools
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from podwatch.domain.run import IntentKind
from podwatch.journal import open_database
from podwatch.sync import store_session
from podwatch.sync.store_removal import RemoteRetention
from podwatch.system import procfs
from tests.support.b2server import BUCKET, B2Server
from tests.support.forking import fork, kill
from tests.support.hurry import children, hurry
from tests.sync.conftest import World

WORKERS = 3
PATIENCE = 240.0
"""Seconds; a life takes a few. Both cores may be busy with others all the while."""
KEEP = 2
MB = 1_000_000
CALLS = (
    "b2_upload_part", "b2_upload_part", "b2_upload_file", "b2_start_large_file", "b2_finish_large_file",
    "b2_get_upload_part_url", "b2_get_upload_url", "b2_list_file_versions", "b2_get_file_info", "b2_list_parts",
    "b2_delete_file_version", "b2_download", "*",
)  # fmt: skip
FAULTS: tuple[dict[str, Any], ...] = (
    {"action": "status", "status": 503},
    {"action": "status", "status": 429, "code": "too_many_requests", "retry_after": "0"},
    {"action": "status", "status": 401, "code": "expired_auth_token"},
    {"action": "reset"},
    {"action": "slow", "seconds": 0.1},
    {"action": "lost"},
    {"action": "late", "status": 500, "code": "internal_error"},
)


def a_pod(root: Path, server: B2Server) -> World:
    return World(root / "pod", f"b2://{BUCKET}", server.url, server, keep_last=KEEP)


async def podwatch(root: Path, server: B2Server, step: int, *, tidy: bool = False) -> None:
    """One life: from its start until this step is in the store, and with ``tidy`` until the older ones have left it."""
    world = a_pod(root, server)
    world.scan()
    sync = world.syncer()
    await sync.start()
    deadline = time.monotonic() + PATIENCE
    while True:
        journal = world.journal
        stored = sync.status().last_step == step and not journal.open_intents()
        if stored and (not tidy or len(saves_in(server)) <= KEEP):
            break
        if time.monotonic() >= deadline:
            mine = [(p, procfs.command(p)[-3:]) for p in children(os.getpid())]
            last = [{k: v for k, v in e.items() if k != "n"} for e in server.events()[-12:]]
            told = [e.message for e in world.events[-6:]]
            seen = (journal.open_intents(), sync.status(), told, mine, saves_in(server), last)
            raise AssertionError(f"step {step} never got there:\n" + "\n".join(str(x) for x in seen))
        hurry(os.getpid())
        await asyncio.sleep(0.01)
    await sync.stop()
    assert world.journal.open_intents(IntentKind.PUBLISH) == []
    assert world.journal.begun() == {}
    world.journal.close()


def saves_in(server: B2Server) -> set[str]:
    return {v["name"].split("/")[2] for v in server.versions() if "/step_" in v["name"] and v["action"] == "upload"}


def stored(server: B2Server, step: int) -> bool:
    return any(f"/step_{step}/" in v["name"] and v["name"].endswith("/manifest.json") for v in server.versions())


def sent_parts(server: B2Server) -> Counter[tuple[str, int]]:
    return Counter((e["name"], e["part"]) for e in server.events() if e["ep"] == "b2_upload_part")


def one_round(root: Path, server: B2Server, step: int, chance: random.Random) -> Counter[str]:
    save(root, step)
    server.pace(latency=chance.choice([0.0, 0.0, 0.005, 0.03]), rate=chance.choice([0.0, 10e6, 40e6]))
    faults = chance.randrange(0, 5)
    for _ in range(faults):
        server.fault(chance.choice(CALLS), skip=chance.randrange(6), **chance.choice(FAULTS))
    told: Counter[str] = Counter(rounds=1, faults=faults)
    for _ in range(chance.randint(1, 3)):
        if stored(server, step):
            break  # the last podwatch has a save to publish: only after that is the store tidied
        whom = chance.choice(["podwatch", "child", "both"])
        pid = fork(lambda: asyncio.run(podwatch(root, server, step)))
        wait_for_events(server, pid, chance.choice([0, 2, 4, 8, 16, 30, 45]))
        time.sleep(chance.uniform(0.0, 0.05))
        family = children(pid)
        if whom in ("podwatch", "both"):
            os.kill(pid, signal.SIGKILL)
        if whom in ("child", "both"):
            for child in family:
                kill(child)
        told[f"{whom} killed"] += 1
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, -signal.SIGKILL), f"step {step}: podwatch failed"
        wait_for_end(family)
        assert server.violations() == [], f"step {step}, {whom} killed"
    server.admin("clear")
    pid = fork(lambda: asyncio.run(podwatch(root, server, step, tidy=True)))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, f"step {step}: the last podwatch failed"
    assert server.violations() == [], f"step {step}"
    pointer = [v for v in server.versions("podwatch/latest.json") if v["action"] == "upload"]
    assert pointer, "no pointer"
    again = sum(count - 1 for (name, _), count in sent_parts(server).items() if f"/step_{step}/" in name)
    kills = sum(count for key, count in told.items() if key.endswith("killed"))
    most = kills * 2 + faults  # two connections, and what a fault's lost answer costs
    assert again <= most, f"step {step}: {again} parts sent again, at most {most} expected"
    told["parts sent again"] += again
    return told


def wait_for_events(server: B2Server, pid: int, more: int) -> None:
    """Until so much has happened in the store since now, or podwatch has done its work: however busy this machine is,
    kills then fall into each part of it."""
    goal = server.admin("count")["events"] + more
    while server.admin("count")["events"] < goal:
        if (stat := procfs.read_stat(pid)) is None or stat.state == "Z":
            return
        time.sleep(0.005)


def wait_for_end(pids: list[int]) -> None:
    """A child ends when podwatch does: nothing goes on writing into the store behind the next one's back."""
    deadline = time.monotonic() + 60
    while any((stat := procfs.read_stat(p)) is not None and stat.state != "Z" for p in pids):
        assert time.monotonic() < deadline, "an upload child outlived its podwatch"
        time.sleep(0.01)


def save(root: Path, step: int) -> None:
    directory = root / "pod" / "out" / "checkpoints" / f"step_{step}"
    (directory / "sub").mkdir(parents=True)
    (directory / "model.bin").write_bytes(os.urandom(24 * MB))
    (directory / "sub" / "optim.bin").write_bytes(os.urandom(11 * MB))
    for number in range(10):
        (directory / "sub" / f"{number}.bin").write_bytes(os.urandom(500))
    (directory / "DONE").write_text("1")


def work(root: Path, rounds: int, seed: int, worker: int) -> None:
    total: Counter[str] = Counter()
    with B2Server(root / "b2") as server:
        for number, step in enumerate(range(worker, rounds, WORKERS)):
            try:
                total += one_round(root, server, step + 1, random.Random(f"{seed}-{step}"))
            except AssertionError as error:
                raise AssertionError(f"worker {worker}, its round {number}: {error}") from error
            for old in (root / "pod" / "out" / "checkpoints").iterdir():
                remove(old)
    (root / "said.json").write_text(json.dumps(total))


def remove(directory: Path) -> None:
    for path in sorted(directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    directory.rmdir()


def main(root: Path, rounds: int, seed: int) -> int:
    open_database.RESERVED_PAGES, open_database.BALLAST_BYTES = 8, 4096  # full disks are the journal's own tests
    # What was superseded may go at once and not after six hours: its going is part of what is struck.
    store_session.RemoteRetention = functools.partial(RemoteRetention, grace_seconds=0.0)  # type: ignore[assignment,misc]
    roots = [root / str(n) for n in range(WORKERS)]
    for each in roots:
        each.mkdir()
    pids = [fork(lambda n=n: work(roots[n], rounds, seed, n)) for n in range(WORKERS)]  # type: ignore[misc]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        return 1
    total = sum((Counter(json.loads((each / "said.json").read_text())) for each in roots), Counter())
    print(json.dumps({"seed": seed, **dict(sorted(total.items()))}))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
