"""The worker processes of a restore: each fetches, hashes and writes pieces with its share of the connections.

Connections of one interpreter wait for each other at its lock; connections of several interpreters do not. The process
that forks them has no threads and no connections, so that it can fork at any time; it alone decides which worker does
what. Each worker has its own socket pair that carries whole messages: it is known which worker has which order, and a
killed worker has either reported a piece or not. Another worker repeats what was not reported.
"""

import contextlib
import itertools
import os
import pickle
import queue
import selectors
import signal
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from podwatch.domain.errors import HostError
from podwatch.stores.base import TOTAL, ChildCalls
from podwatch.system.child import end_with_parent

MOST_WORKERS = 4
"""Above this the line or the disk is the limit, and each worker costs about 10 MiB of memory."""
MOST_DEATHS = 4
"""Workers that may die over one piece. A fifth would not do better."""
LOOK_AHEAD = 64
"""Pending orders among which a worker's next one is chosen."""
SMALL = 1 << 20
"""Bytes: up to this piece size, a worker gets ``AHEAD`` times as many orders as connections, and never waits for us."""
AHEAD = 3
REPORT_EVERY = 0.1
"""Seconds between two reports of one connection."""
REAPING = 5.0
"""Seconds that a killed worker may take to end; one that hangs in the kernel ends when the kernel returns."""


class Order(NamedTuple):
    """One thing to do. ``touched``: the piece's place may have been written to already; ``reading``: how often its
    bytes came and were wrong."""

    kind: str
    file: int
    number: int
    length: int
    touched: bool = False
    reading: int = 0


Report = Callable[[int], None]
Perform = Callable[[Order, Report], Any]
"""Performs an order in one of the worker's threads; reports the bytes that came over the line."""


class Boss(Protocol):
    """Receives the reports on every order, in the process that gave it."""

    def moved(self, order: Order, count: int) -> None:
        """``count`` more bytes arrived."""
        ...

    def finished(self, order: Order, result: Any) -> Iterable[Order]:
        """The order is done. Returns the orders that follow from it."""
        ...

    def lost(self, order: Order) -> Order:
        """Its worker died. Returns the order that replaces it; bytes reported for this one no longer count."""
        ...


def how_many(cores: int, connections: int, pieces: int) -> int:
    """Workers for a restore of ``pieces`` pieces over ``connections`` connections on ``cores`` cores."""
    return max(1, min(MOST_WORKERS, cores, connections, pieces))


@dataclass(slots=True)
class _Worker:
    pid: int
    socket: socket.socket
    hand: dict[int, Order] = field(default_factory=dict)
    calls: ChildCalls = field(default_factory=ChildCalls)


class Workers:
    """``run`` returns when all orders are done; the first failure ends it and is raised. ``close`` leaves no process.

    ``begin`` is called once in each worker. ``parent``: a descriptor whose end ends this process (-1: none). Use it
    from one thread, in a process without other threads.
    """

    def __init__(self, count: int, connections: int, begin: Callable[[], Perform], parent: int = -1) -> None:
        self._count = count
        self._connections = max(connections, count)
        self._begin = begin
        self._workers: list[_Worker] = []
        self._again: deque[Order] = deque()
        self._deaths: dict[tuple[str, int, int], int] = {}
        self._ids = 0
        self._selector = selectors.PollSelector()  # uses no descriptor, so that a fork shares none
        if parent >= 0:
            self._selector.register(parent, selectors.EVENT_READ, None)

    def run(self, orders: Iterable[Order], boss: Boss) -> None:
        """``orders`` is asked for the next one when a worker has capacity."""
        rest = iter(orders)
        while self._deal(rest) or any(w.hand for w in self._workers):
            for key, _ in self._selector.select():
                if key.data is None:
                    _end_if_closed(key.fd)
                else:
                    self._hear(key.data, boss)

    def close(self) -> None:
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
            worker.socket.close()
        end = time.monotonic() + REAPING
        for worker in self._workers:
            while not os.waitpid(worker.pid, os.WNOHANG)[0] and time.monotonic() < end:
                time.sleep(0.002)
        self._workers.clear()
        self._selector.close()

    # -- giving -------------------------------------------------------------------------------------------------------

    def _deal(self, rest: Iterator[Order]) -> bool:
        """Hand out orders; returns whether one is left that no worker could take."""
        while True:
            self._again.extend(itertools.islice(rest, max(0, LOOK_AHEAD - len(self._again))))
            if not self._again:
                return False
            found = self._room(self._again[0])
            if found is None:
                return True
            worker, lanes = found
            order = self._next_for(worker)
            self._ids += 1
            worker.hand[self._ids] = order
            with contextlib.suppress(OSError):  # it just died, and its end is handled later
                worker.socket.send(pickle.dumps((self._ids, order, lanes)))

    def _next_for(self, worker: _Worker) -> Order:
        """The first pending order, but rather one for a file to which no other worker writes (``pieces.Pieces``)."""
        theirs = {order.file for other in self._workers if other is not worker for order in other.hand.values()}
        best = next((n for n, order in enumerate(self._again) if order.file not in theirs), 0)
        order = self._again[best]
        del self._again[best]
        return order

    def _room(self, order: Order) -> tuple[_Worker, int] | None:
        """The worker with the most capacity for it, and its number of connections."""
        self._fill()
        share, more = divmod(self._connections, len(self._workers))
        best: tuple[float, _Worker, int] | None = None
        for number, worker in enumerate(self._workers):
            lanes = max(1, share + (number < more))
            load = len(worker.hand) / lanes
            if load < (AHEAD if order.length <= SMALL else 1) and (best is None or load < best[0]):
                best = (load, worker, lanes)
        return None if best is None else best[1:]

    def _fill(self) -> None:
        while len(self._workers) < self._count:
            try:
                self._workers.append(self._fork())
            except OSError as error:
                if not self._workers:
                    raise HostError(
                        f"cannot start a restore worker: {error.strerror}",
                        fix="free memory or raise the limit of processes, then restore again",
                    ) from error
                self._count = len(self._workers)

    def _fork(self) -> _Worker:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if pid == 0:
            try:
                end_with_parent(parent)
                ours.close()
                for other in self._workers:
                    other.socket.close()  # or it would not see our parent's end while we live
                _without_standard_streams()
                _Hands(theirs, self._begin).serve()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        theirs.close()
        worker = _Worker(pid, ours)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        return worker

    # -- hearing ------------------------------------------------------------------------------------------------------

    def _hear(self, worker: _Worker, boss: Boss) -> None:
        try:
            message = worker.socket.recv(1 << 18)
        except ConnectionResetError:
            return  # it died with orders unread; its last reports follow, then the end
        if not message:
            self._bury(worker, boss)
            return
        number, count, calls, end = pickle.loads(message)
        worker.calls.hear({"calls": calls})
        order = worker.hand[number]
        if count:
            boss.moved(order, count)
        if end is None:
            return
        del worker.hand[number]
        failure, result = end
        if failure is not None:
            raise failure
        self._again.extendleft(boss.finished(order, result))

    def _bury(self, worker: _Worker, boss: Boss) -> None:
        self._selector.unregister(worker.socket)
        worker.socket.close()
        self._workers.remove(worker)
        code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        for order in worker.hand.values():
            instead = boss.lost(order)
            place = order[:3]
            self._deaths[place] = self._deaths.get(place, 0) + 1
            if self._deaths[place] >= MOST_DEATHS:
                how = f"signal {-code}" if code < 0 else f"exit {code}"
                raise HostError(
                    f"{MOST_DEATHS} restore workers ended early at the same piece ({how}: killed, perhaps for lack of "
                    "memory)",
                    fix="free memory, then restore again: it continues from there",
                )
            self._again.appendleft(instead)


def _end_if_closed(descriptor: int) -> None:
    if not os.read(descriptor, 4096):
        os._exit(1)


def _without_standard_streams() -> None:
    """Only the parent keeps the job's pipe and the protocol's. Standard error stays open: the process that started the
    parent reads it to its end, and so waits until no worker can write into staging any more (start_child.py)."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nothing, descriptor)
    os.close(nothing)


class _Hands:
    """One worker: a thread for each connection, started when there is an order for it."""

    def __init__(self, line: socket.socket, begin: Callable[[], Perform]) -> None:
        self._line, self._perform = line, begin()
        self._orders: queue.SimpleQueue[tuple[int, Order]] = queue.SimpleQueue()
        self._before = TOTAL.snapshot()
        self._lock = threading.Lock()
        self._threads = self._wanted = 0

    def serve(self) -> None:
        """Returns when the process that gives the orders ends."""
        while message := self._line.recv(1 << 18):
            number, order, self._wanted = pickle.loads(message)
            self._orders.put((number, order))
            with self._lock:
                missing = self._threads < self._wanted
                self._threads += missing
            if missing:
                threading.Thread(target=self._lane, daemon=True).start()

    def _lane(self) -> None:
        while True:
            number, order = self._orders.get()
            self._do(number, order)
            with self._lock:
                if self._threads > self._wanted:
                    self._threads -= 1
                    return

    def _do(self, number: int, order: Order) -> None:
        count, said = 0, time.monotonic()

        def report(more: int) -> None:
            nonlocal count, said
            count += more
            if (now := time.monotonic()) - said >= REPORT_EVERY:
                self._say(number, count, None)
                count, said = 0, now

        try:
            end: tuple[BaseException | None, Any] = (None, self._perform(order, report))
        except BaseException as error:
            end = (_portable(error), None)
        self._say(number, count, end)

    def _say(self, number: int, count: int, end: tuple[BaseException | None, Any] | None) -> None:
        calls = {name: now - self._before[name] for name, now in TOTAL.snapshot().items()}
        try:
            self._line.send(pickle.dumps((number, count, calls, end)))
        except OSError:
            os._exit(1)  # the parent is gone


def _portable(error: BaseException) -> BaseException:
    """An error that the other process can unpickle."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {str(error)[:200]}")
    return error
