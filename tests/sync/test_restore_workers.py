"""The worker processes of a restore: any of them may be killed at any moment, nothing is lost or counted twice, and no
process is left behind."""

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podwatch.domain.errors import HostError, IntegrityError
from podwatch.domain.manifest import Manifest
from podwatch.stores.base import ObjectStore
from podwatch.sync.restore import worker_processes
from podwatch.sync.restore.child_job import Fetched, FetchJob
from podwatch.sync.restore.fetch import Fetching
from podwatch.sync.restore.pieces_on_disk import COMPLETE, DIFFERS, PIECE, Pieces, StagedFile
from podwatch.sync.restore.start_child import FetchProcess
from podwatch.sync.restore.worker_processes import MOST_DEATHS, Order, Workers, how_many
from podwatch.system import procfs
from podwatch.system.environment_without_secrets import scrubbed_environment
from tests.support.stored_set import put_set
from tests.sync.conftest import World
from tests.sync.test_fetch import PIECE as PIECE_SIZE
from tests.sync.test_fetch import fetch, job, same, stored
from tests.sync.test_restore import damage

pytestmark = pytest.mark.slow

SEEDS = int(os.environ.get("PODWATCH_FETCH_SEEDS", "3"))


@pytest.fixture(autouse=True)
def several_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many workers on any machine; for those that are forked here."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(3)))


def children(pid: int) -> list[int]:
    stats = ((other, procfs.read_stat(other)) for other in procfs.all_pids())
    return [other for other, stat in stats if stat is not None and stat.parent_pid == pid and stat.state != "Z"]


def gone(pids: list[int]) -> bool:
    stats = [procfs.read_stat(pid) for pid in pids]
    return all(stat is None or stat.state == "Z" for stat in stats)


def open_files(pid: int) -> list[str]:
    """Empty once it runs no code of its own any more: the kernel takes a process's files before it is a zombie."""
    try:
        return os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208
    except OSError:
        return []


def wait_for(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def shot(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def test_how_many() -> None:
    assert how_many(cores=2, connections=8, pieces=40) == 2
    assert how_many(cores=64, connections=8, pieces=40) == 4, "no more than the line can feed"
    assert how_many(cores=4, connections=2, pieces=40) == 2, "each has a connection"
    assert how_many(cores=4, connections=8, pieces=1) == 1
    assert how_many(cores=4, connections=8, pieces=0) == 1


class Shooting:
    """A restore by the real child; ``victims`` chooses whom to kill when so many bytes have left the store."""

    def __init__(self, world: World, wanted: FetchJob) -> None:
        self.world, self.wanted = world, wanted
        self.process = FetchProcess(world.credentials)
        self.seen: set[int] = set()
        self.told: list[tuple[int, int]] = []

    def run(self, shots: list[int], choose: Callable[[list[int]], int]) -> Fetched:
        """Raises what the restore raises. ``shots``: bytes that the store has sent when one of the workers is shot."""
        server = self.world.server
        assert server is not None
        began, left, over = server.sent(), sorted(shots), threading.Event()

        def shoot() -> None:
            while left and not over.is_set():
                pid = self.process.pid
                workers = children(pid) if pid is not None else []
                self.seen.update(workers)
                if workers and server.sent() - began >= left[0]:
                    left.pop(0)
                    shot(choose(workers))
                time.sleep(0.003)

        gunman = threading.Thread(target=shoot)
        gunman.start()
        try:
            return self.process.fetch(self.wanted, lambda *told: self.told.append(told))
        finally:
            over.set()
            gunman.join(30)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_workers_killed_at_any_moment(b2: World, tmp_path: Path, seed: int) -> None:
    assert b2.server is not None
    chance = random.Random(seed)
    manifest = stored(b2, size=31_000_000)
    b2.server.pace(rate=6e6)
    b2.server.fault("b2_download", "lost", skip=chance.randrange(6), after_bytes=chance.randrange(1, PIECE_SIZE))
    shots = [chance.randrange(1, 28_000_000) for _ in range(MOST_DEATHS - 1)]  # no piece can be in one more death
    shooting = Shooting(b2, job(b2, manifest, tmp_path / "s"))
    done = shooting.run(shots, chance.choice)
    assert done.staged == ("checkpoint",)
    assert same(b2, tmp_path / "s"), f"seed {seed}"
    assert done.downloaded >= manifest.total_bytes
    assert done.downloaded <= manifest.total_bytes + len(shots) * 8 * PIECE_SIZE, "only what was on its way comes again"
    assert max(here for here, _ in shooting.told) <= manifest.total_bytes, "no piece counts twice"
    assert len(shooting.seen) >= 2, "a worker that died has a successor"
    assert gone(list(shooting.seen))


def test_what_is_here_is_counted_exactly_after_a_death(
    b2: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, where every count is heard: its last one is the set's size, not more and not less.

    The store holds back the rest of each whole piece until all workers are shot, so that none finishes one before."""
    assert b2.server is not None
    server, manifest = b2.server, stored(b2)
    server.pace(rate=4e6)
    server.fault("b2_download", "stall", count=1000, after_bytes=PIECE_SIZE // 2, seconds=60.0)
    others = set(children(os.getpid()))
    told: list[tuple[int, int]] = []
    shots: list[int] = []

    hear = Workers._hear

    def hear_and_shoot(workers: Workers, worker: worker_processes._Worker, boss: Fetching) -> None:
        hear(workers, worker, boss)
        fetched = [order for each in workers._workers for order in each.hand.values() if order.length == PIECE_SIZE]
        if not shots and any(boss._coming.get(order[:3]) for order in fetched):
            server.admin("clear")
            shots.extend(each.pid for each in workers._workers)
            for pid in shots:
                shot(pid)

    monkeypatch.setattr(Workers, "_hear", hear_and_shoot)
    done = Fetching(job(b2, manifest, tmp_path / "s"), b2.store, lambda *counts: told.append(counts)).run()
    assert 1 < len(shots) < MOST_DEATHS, "a piece that is dealt to one of them after the other survives them all"
    assert told[-1] == (manifest.total_bytes, done.downloaded)
    assert any(after[0] < before[0] for before, after in itertools.pairwise(told)), "what was lost is taken off"
    assert same(b2, tmp_path / "s")
    assert set(children(os.getpid())) == others


def test_deaths_that_repeat_end_with_a_clear_error(local: World, tmp_path: Path) -> None:
    manifest = stored(local)
    others = set(children(os.getpid()))

    def die() -> ObjectStore:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    with pytest.raises(HostError, match=rf"{MOST_DEATHS} restore workers ended early .*signal 9") as caught:
        Fetching(job(local, manifest, tmp_path / "s"), die, lambda _here, _came: None).run()
    assert "continues from there" in caught.value.fix
    assert set(children(os.getpid())) == others
    assert fetch(local, job(local, manifest, tmp_path / "s")).staged == ("checkpoint",)
    assert same(local, tmp_path / "s")


def test_a_machine_that_lets_only_one_worker_start(
    local: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = stored(local)
    real, started = os.fork, []

    def fork() -> int:
        if started:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(1)
        return real()

    monkeypatch.setattr(worker_processes.os, "fork", fork)
    fetch(local, job(local, manifest, tmp_path / "s"))
    assert same(local, tmp_path / "s")
    with pytest.raises(HostError, match="cannot start a restore worker: Resource temporarily"):
        fetch(local, job(local, manifest, tmp_path / "t"))


@pytest.mark.parametrize("how", ["the child is killed", "podwatch is killed", "nobody listens any more"])
def test_no_process_is_left(b2: World, tmp_path: Path, how: str) -> None:
    assert b2.server is not None
    manifest = stored(b2)
    b2.server.pace(rate=3e5)
    line = job(b2, manifest, tmp_path / "s").to_line(b2.credentials())
    # What FetchProcess does, in a process between us and the child that can be killed.
    program = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-P', '-m', 'podwatch.sync.restore.child_main', str(os.getpid())],\n"
        "                         stdin=subprocess.PIPE, cwd='/')\n"
        "child.stdin.write(sys.stdin.buffer.readline()); child.stdin.flush()\n"
        "sys.stdin.buffer.read(1); child.stdin.close(); child.wait(); sys.stdin.buffer.read()\n"
    )
    podwatch = subprocess.Popen(
        [sys.executable, "-P", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=scrubbed_environment(os.environ),
    )
    assert podwatch.stdin is not None
    try:
        podwatch.stdin.write(line)
        podwatch.stdin.flush()
        before = b2.server.sent()
        wait_for(lambda: b2.server is not None and b2.server.sent() > before + 500_000, "nothing is fetched")
        (child,) = children(podwatch.pid)
        workers = children(child)
        assert workers
        assert len(list(Path(f"/proc/{child}/task").iterdir())) == 1, "who forks has no threads"
        for worker in workers:
            ends = {str(Path(f"/proc/{worker}/fd/{n}").readlink()) for n in (0, 1)}
            assert ends == {"/dev/null"}, "the child's pipes end with the child"
        os.kill(workers[0], signal.SIGSTOP)  # it cannot end by itself
        if how == "the child is killed":
            shot(child)
        elif how == "podwatch is killed":
            shot(podwatch.pid)
        else:
            podwatch.stdin.write(b"x")
            podwatch.stdin.flush()
        wait_for(lambda: gone([child, *workers]), f"{child} or one of {workers} is left")
    finally:
        podwatch.kill()
        podwatch.stdin.close()
        podwatch.wait()
    b2.server.pace()
    FetchProcess(b2.credentials).fetch(job(b2, manifest, tmp_path / "s"), lambda _here, _came: None)
    assert same(b2, tmp_path / "s")


def test_when_a_stopped_restore_returns_no_worker_writes_any_more(b2: World, tmp_path: Path) -> None:
    assert b2.server is not None
    manifest = stored(b2)
    b2.server.pace(rate=3e5)
    process = FetchProcess(b2.credentials)
    workers: list[int] = []

    def stop(_here: int, _came: int) -> None:
        assert process.pid is not None
        workers[:] = workers or children(process.pid)
        process.kill()

    with pytest.raises(HostError, match="was stopped"):
        process.fetch(job(b2, manifest, tmp_path / "s"), stop)
    assert workers
    assert not any(open_files(pid) for pid in workers), "at once: the next restore may write there now"


def test_a_part_that_is_damaged_in_the_store_keeps_its_error_and_leaves_nobody(b2: World, tmp_path: Path) -> None:
    manifest = stored(b2)
    damage(b2, 10, "model.bin", at=2 * PIECE_SIZE + 3)
    shooting = Shooting(b2, job(b2, manifest, tmp_path / "s"))
    with pytest.raises(IntegrityError, match="does not match its recorded hash") as caught:
        shooting.run([], lambda workers: workers[0])
    assert caught.value.where == "checkpoint/model.bin part 3"
    assert gone(list(shooting.seen))


def test_errors_come_back_as_they_were(tmp_path: Path) -> None:
    class StrangeError(Exception):
        def __init__(self, *, needed: int) -> None:
            super().__init__(f"needed {needed}")

    def perform(order: Order, _report: Callable[[int], None]) -> None:
        raise (OSError(28, "No space left on device", "model.bin"), StrangeError(needed=3))[order.number]

    for number, kind, text in ((0, OSError, "No space left on device: 'model.bin'"), (1, RuntimeError, "needed 3")):
        workers = Workers(1, 1, lambda: perform)
        try:
            with pytest.raises(kind, match=text):
                workers.run([Order("any", 0, number, 1)], _Deaf())
        finally:
            workers.close()


class _Deaf:
    def moved(self, order: Order, count: int) -> None: ...

    def finished(self, order: Order, result: object) -> tuple[Order, ...]:
        return ()

    def lost(self, order: Order) -> Order:
        return order


def test_a_fresh_piece_is_not_read_as_if_it_had_been_there(
    b2: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces share blocks of the disk with their neighbours: whether one was there is seen before any is written."""
    manifest = stored(b2)

    def never(_self: StagedFile, number: int) -> bool:
        raise AssertionError(f"piece {number} is read")

    monkeypatch.setattr(StagedFile, "good", never)  # the workers are forked from here
    fetch(b2, job(b2, manifest, tmp_path / "s"))
    assert same(b2, tmp_path / "s")


SMALL_PIECE = 700


@pytest.fixture
def tiny(local: World) -> Manifest:
    """Five pieces, one piece, an empty file, a marker; the last piece is shorter."""
    local.write_set(10, size=4 * SMALL_PIECE + 123)
    local.scan()
    store = local.store()
    manifest = put_set(store, local.keys, local.catalogue, 10, layout="custom", part_size=SMALL_PIECE)
    store.close()
    return manifest


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_order_of_ends_deaths_and_wrong_hashes(
    local: World, tiny: Manifest, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """The orders of a restore, carried out one by one in any order, some by a worker that dies half way and some with
    bytes that arrive wrong once: each file is whole and completed once, after its last piece; counts are exact."""
    staging = tmp_path_factory.mktemp("any") / "s"
    staging.mkdir(mode=0o700)
    wanted = job(local, tiny, staging)
    told = [(0, 0)]
    fetching = Fetching(wanted, local.store, lambda *seen: told.append(seen))
    root = os.open(staging, os.O_RDONLY)
    roots = {"checkpoint": root}
    pieces = Pieces(wanted, roots, local.store)
    wrong: set[tuple[str, int, int]] = set()
    right: dict[int, set[int]] = {}
    completed: list[int] = []
    came = 0
    try:
        waiting = list(fetching._orders(tiny.files, roots))
        while waiting:
            order = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
            what = data.draw(st.sampled_from(["done", "done", "dies", "dies late", "wrong"]))
            moved: list[int] = []
            if what == "dies":
                half = order.length // 2
                fetching.moved(order, half)
                came += half
                if order.kind == PIECE:
                    file = staging / tiny.files[order.file].path
                    with file.open("r+b") as stream:
                        stream.seek(order.number * SMALL_PIECE)
                        stream.write(b"?" * half)
                waiting.append(fetching.lost(order))
                continue
            result = pieces(order, moved.append)
            if what == "dies late":
                waiting.append(fetching.lost(order))  # all was done, and nothing of it was heard
                continue
            if what == "wrong" and order[:3] not in wrong and sum(moved) and not order.reading:
                wrong.add(order[:3])
                result = DIFFERS
            came += sum(moved)
            for count in moved:
                fetching.moved(order, count)
            if order.kind == COMPLETE:
                assert right[order.file] == set(range(len(tiny.files[order.file].parts_sha1)))
                completed.append(order.file)
            elif result != DIFFERS:
                right.setdefault(order.file, set()).add(order.number)
            waiting += fetching.finished(order, result)
    finally:
        os.close(root)
    several = [n for n, f in enumerate(tiny.files) if len(f.parts_sha1) > 1]
    assert sorted(completed) == several, "each file of several pieces once"
    assert told[-1] == (tiny.total_bytes, came)
    for file in tiny.files:
        there = staging / file.path
        source = local.output / "checkpoints" / "step_10" / file.path.partition("/")[2]
        assert there.read_bytes() == source.read_bytes()
        assert there.stat().st_mtime_ns == file.mtime_ns


class Noting:
    """A worker's work that only says which process did it; each file's orders take the same time."""

    def __call__(self, order: Order, report: Callable[[int], None]) -> int:
        time.sleep(0.02)
        return os.getpid()


class Counting:
    """Which processes worked on each file, in the order of the answers."""

    def __init__(self) -> None:
        self.by_file: dict[int, list[int]] = {}

    def moved(self, order: Order, count: int) -> None: ...

    def finished(self, order: Order, result: int) -> tuple[Order, ...]:
        self.by_file.setdefault(order.file, []).append(result)
        return ()

    def lost(self, order: Order) -> Order:
        return order


def test_each_worker_has_a_file_of_its_own_while_there_are_enough() -> None:
    """Two writers of one file wait for each other in the kernel, and spin."""
    workers = Workers(2, 2, Noting)
    counted = Counting()
    try:
        workers.run((Order(PIECE, file, number, 1 << 27) for file in range(2) for number in range(12)), counted)
    finally:
        workers.close()
    assert all(len(pids) == 12 for pids in counted.by_file.values())
    first, second = (set(pids[:9]) for pids in counted.by_file.values())
    assert len(first) == len(second) == 1
    assert first != second
