"""Restores that are killed, again and again, until each is done: what is visible is whole at every moment.

``python -m tests.support.restore_rounds DIRECTORY KIND KILLS SEED``
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from podwatch.checkpoints.records import RecordFiles, RecordSource
from podwatch.domain.errors import PodwatchError
from podwatch.store.keys import RunKeys
from podwatch.store.objects.b2 import B2Access
from podwatch.store.restore import staging
from podwatch.store.restore.restore import StoreOfRun
from podwatch.system import procfs
from podwatch.system.pinned_directories import PinnedTree
from tests.store.restore_world import RestorePod, RestoreWorld
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server
from tests.support.forking import kill
from tests.support.stored_save import PIECE, tree, write_checkpoint

CONNECTIONS, STEP = 2, 10
DOCUMENTS = 20_000
"""Bytes of the manifest and the pointers, which each start reads."""
LINE = 12e6
"""Bytes per second of each connection: a restore takes about a second."""
STEPS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (RecordFiles, ("write",)),
    (staging, ("drop_empty", "move_aside", "reachable")),
    (PinnedTree, ("make", "rename", "sync", "remove_tree", "write", "rmdir")),
)


def fuse(at: int) -> None:
    """This process dies before or after the ``at``-th of the steps that change something."""
    count = 0

    def burn() -> None:
        nonlocal count
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            burn()
            result = call(*args, **kwargs)
            burn()
            return result

        return guarded

    for owner, names in STEPS:
        for name in names:
            setattr(owner, name, around(getattr(owner, name)))


def fork(pod: RestorePod, at: int | None) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if at is not None:
            fuse(at)
        pod.restorer().fetch()
        code = 0
    except PodwatchError as error:
        os.write(2, f"{error}\n".encode())
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def staged(pod: RestorePod) -> int:
    """Bytes of the large file that are on this disk."""
    try:
        found = pod.workspace.staging.glob("restore-*/checkpoint/model.bin")
        return sum(p.stat().st_blocks * 512 for p in found)
    except OSError:
        return 0


def child_of(pid: int) -> int | None:
    for other in procfs.all_pids():
        stat = procfs.read_stat(other)
        if stat is not None and stat.parent_pid == pid:
            return other
    return None


def trouble(server: B2Server, chance: random.Random) -> int:
    """Faults for one restore; how many bytes they may cost twice."""
    cost = 0
    for _ in range(chance.randrange(3)):
        skip = chance.randrange(6)
        match chance.choice(["status", "reset", "lost", "flip", "none"]):
            case "status":
                server.fault("b2_download", "status", skip=skip, retry_after="0")
            case "reset":
                server.fault("b2_download", "reset", skip=skip)
            case "lost":
                server.fault("b2_download", "lost", skip=skip, after_bytes=chance.randrange(1, PIECE))
            case "flip":
                server.fault("b2_download", "flip", skip=skip)
                cost += PIECE
    return cost


def one(world: RestoreWorld, server: B2Server | None, chance: random.Random, counts: dict[str, int]) -> None:
    whole = tree(world.source(STEP))
    total = world.shelf.put[STEP].total_bytes
    pod = world.pod()
    target, old = pod.step(STEP), {}
    if chance.random() < 0.3:
        old = tree(write_checkpoint(target, 50))
    began = server.sent() if server else 0
    allowed = total + (trouble(server, chance) if server else 0)
    kills = 0
    while True:
        way = chance.choice(["step", "bytes", "bytes", "time", "never"])
        pid = fork(pod, chance.randrange(24) if way == "step" else None)
        after = {"bytes": chance.uniform(0, total), "time": chance.uniform(0, 1.5 if server else 0.5)}.get(way, 0.0)
        began_at, code = time.monotonic(), None
        while code is None:
            found, status = os.waitpid(pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if found else None
            now = staged(pod) if way == "bytes" else time.monotonic() - began_at
            if code is None and way in ("bytes", "time") and now >= after:
                kill((child_of(pid) if chance.random() < 0.4 else pid) or pid)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            time.sleep(0.005)
        kills += code != 0
        counts[way] = counts.get(way, 0) + (code != 0)
        seen = tree(target) if target.exists() else {}
        assert seen in ({}, old, whole), f"something that looks like a checkpoint and is none: {sorted(seen)}"
        if code == 0:
            break
        assert kills < 100, "never comes to an end"
    assert seen == whole
    if server:
        server.admin("clear")
        came = server.sent() - began
        assert came <= allowed + kills * CONNECTIONS * PIECE + (kills + 1) * DOCUMENTS, f"{came} bytes, {kills} kills"
        counts["again"] += max(0, came - total)
    _is_known(pod, old)
    counts["kills"] += kills
    counts["restores"] += 1


def _is_known(pod: RestorePod, old: dict[str, Any]) -> None:
    (found,) = pod.catalogue().sets
    assert found.complete
    own = {r.key for r in pod.records.read() if r.source is RecordSource.RESTORED}
    assert (STEP, found.save_id) in own, "it is this run's"
    assert not list(pod.workspace.staging.iterdir())
    moved = [tree(p) for p in pod.workspace.quarantine.glob("*/*-step_*")]
    assert moved == ([old] if old else []), "what was in the way is in quarantine"


def main(directory: Path, kind: str, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    server = B2Server(directory / "b2").start() if kind == "b2" else None
    try:
        access = B2Access(KEY_ID, KEY, server.url) if server else None
        if server is None:
            (directory / "store").mkdir()
        url = f"b2://{BUCKET}" if server else f"file://{directory}/store"
        world = RestoreWorld(directory, StoreOfRun(url, RunKeys("run"), lambda: access, CONNECTIONS))
        world.shelf.save(STEP, {"checkpoint": write_checkpoint(world.source(STEP), 22_000_000)})
        counts = {"restores": 0, "kills": 0, "again": 0}
        if server:
            server.pace(rate=LINE)
        while counts["kills"] < kills:
            one(world, server, chance, counts)
        print(json.dumps({"kind": kind, "seed": seed, **counts}))
    finally:
        if server:
            server.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
