"""Rounds of restores that are killed at random moments, under random trouble of the store.

A program of its own (forks before any thread exists): ``python -m tests.support.restore_rounds DIRECTORY b2|file KILLS
SEED``. After each kill: what the trainer would look at is absent, what was there before, or whole. At the end of each
restore: every byte is right, and no more came over the line than the save and what was on its way at each kill.
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

from podwatch.sync.restore import stage_and_put_in_place as staging_module
from podwatch.sync.restore.restore import Restorer, StorePlace
from podwatch.sync.restore.start_child import FetchProcess

from podwatch.checkpoints.records import RecordFiles
from podwatch.domain.errors import PodwatchError
from podwatch.domain.run import IntentKind
from podwatch.journal.journal import Journal
from podwatch.system import procfs
from podwatch.system.own_directories import Workspace
from podwatch.system.pinned_directories import PinnedTree
from tests.support.b2server import BUCKET, B2Server
from tests.support.forking import kill
from tests.support.stored_set import put_set
from tests.sync.conftest import World

CONNECTIONS, PIECE, STEP = 2, 5_000_000, 10
MANIFEST = 20_000
"""Bytes: manifest and pointer at most, which each start reads."""
LINE = 12e6
"""Bytes per second of each connection: a restore takes about a second."""

Tree = dict[str, tuple[object, ...]]


def tree(root: Path) -> Tree:
    found: Tree = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            found[name] = (str(path.readlink()),)
        elif path.is_file():
            found[name] = (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_mode)
    return found


def restore(pod: World) -> None:
    """What a podwatch does; ours is the process that is killed."""
    Restorer(
        StorePlace(pod.store, pod.keys, pod.store_url, "w2"), pod.layout, Workspace(pod.output), pod.journal,
        FetchProcess(pod.credentials), RecordFiles(pod.output.parent / "records"), connections=CONNECTIONS,
    ).fetch()  # fmt: skip


STEPS = (
    (Journal, ("open_intent", "settle", "note_published", "learn")),
    (staging_module, ("move_aside", "drop_empty", "reachable")),
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


def fork(source: World, name: str, at: int | None) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    if at is not None:
        fuse(at)
    try:
        restore(source.other(name, writer_id="w2"))
        code = 0
    except PodwatchError as error:
        os.write(2, f"{error}\n".encode())
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def staged(staging: Path) -> int:
    """Bytes of the large file that are on this disk."""
    try:
        return sum(p.stat().st_blocks * 512 for p in staging.glob("restore-*/checkpoint/model.bin"))
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


def one(source: World, name: str, chance: random.Random, counts: dict[str, int]) -> None:
    whole = tree(source.output / "checkpoints" / f"step_{STEP}")
    total = sum(len(v[0]) for v in whole.values() if isinstance(v[0], bytes))
    target = source.directory.parent / name / "out" / "checkpoints" / f"step_{STEP}"
    old: Tree = {}
    if chance.random() < 0.3:
        pod = source.other(name)
        pod.write_set(STEP, size=50)
        pod.journal.close()
        old = tree(target)
    server, kills = source.server, 0
    began = server.sent() if server else 0
    allowed = total + (trouble(server, chance) if server else 0)
    staging = Workspace(target.parents[1]).staging
    while True:
        way = chance.choice(["step", "bytes", "bytes", "time", "never"])
        pid = fork(source, name, chance.randrange(24) if way == "step" else None)
        after = {"bytes": chance.uniform(0, total), "time": chance.uniform(0, 1.5 if server else 0.5)}.get(way, 0.0)
        began_at, code = time.monotonic(), None
        while code is None:
            found, status = os.waitpid(pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if found else None
            here = staged(staging) if way == "bytes" else time.monotonic() - began_at
            if code is None and way in ("bytes", "time") and here >= after:
                victim = child_of(pid) if chance.random() < 0.4 else pid
                kill(victim or pid)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            time.sleep(0.005)
        kills += code != 0
        counts[way] = counts.get(way, 0) + (code != 0)
        seen = tree(target) if target.exists() else {}
        assert seen in ({}, old, whole), f"{name}: something that looks like a checkpoint and is none: {sorted(seen)}"
        if code == 0:
            break
        assert kills < 100, f"{name}: never comes to an end"
    assert seen == whole, name
    if server:
        server.admin("clear")
        came = server.sent() - began
        again = kills * CONNECTIONS * PIECE + (kills + 1) * MANIFEST
        assert came <= allowed + again, f"{name}: {came} bytes after {kills} kills"
        counts["again"] += max(0, came - total)
    pod = source.other(name)
    pod.scan()
    (found_set,) = pod.catalogue.sets
    assert found_set.complete
    assert [(p.step, p.save_id) for p in pod.journal.published()] == [(STEP, found_set.save_id)], "not sent again"
    assert pod.journal.open_intents(IntentKind.RESTORE) == []
    assert not list(Workspace(pod.output).staging.iterdir())
    aside = [tree(p) for p in Workspace(pod.output).quarantine.glob("*/*-step_*")]
    assert aside == ([old] if old else []), "what was in the way is kept"
    pod.journal.close()
    counts["kills"] += kills
    counts["restores"] += 1


def main(directory: Path, kind: str, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    server = B2Server(directory / "b2").start() if kind == "b2" else None
    try:
        url = f"b2://{BUCKET}" if server else f"file://{directory}/store"
        source = World(directory / "source", url, server.url if server else "", server)
        source.write_set(STEP, size=22_000_000)
        (source.output / "checkpoints" / f"step_{STEP}" / "model.bin").chmod(0o640)
        source.scan()
        store = source.store()
        put_set(store, source.keys, source.catalogue, STEP, layout="custom", part_size=PIECE)
        store.close()
        source.journal.close()
        counts = {"restores": 0, "kills": 0, "again": 0}
        if server:
            server.pace(rate=LINE)
        while counts["kills"] < kills:
            one(source, f"pod{counts['restores']}", chance, counts)
        assert server is None or not server.violations()
        print(json.dumps({"kind": kind, "seed": seed, **counts}))
    finally:
        if server:
            server.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
