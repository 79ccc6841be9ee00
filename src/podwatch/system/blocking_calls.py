"""Blocking calls that may hang, each in its own daemon thread: the loop continues and exit is never blocked.

asyncio's default executor is not used for these: its threads are joined at interpreter exit, so one hung NFS or NVML
call would hold the process forever, and on two cores it has only six threads.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeAlias, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def in_time(function: Callable[[], T], *, seconds: float = 20.0) -> T:
    """The result of a call that can hang (NVML, the store, a network file system), for who has no loop. It runs in a
    daemon thread; TimeoutError after ``seconds``."""
    box: dict[str, Any] = {}

    def call() -> None:
        try:
            box["result"] = function()
        except BaseException as error:
            box["error"] = error

    thread = threading.Thread(target=call, name="podwatch-in-time", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    if "error" in box:
        raise box["error"]
    result: T = box["result"]
    return result


class WorkerStuck(TimeoutError):  # noqa: N818
    """An earlier call has not returned; nothing new is queued behind it."""


_Done: TypeAlias = Callable[[Any, BaseException | None], None]
"""Gets the result of a call, or its exception. Runs in the thread."""


class _Job:
    __slots__ = ("args", "cancelled", "done", "dropped", "fn")  # dropped: its caller no longer waits

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], done: _Done) -> None:
        self.fn, self.args, self.done = fn, args, done
        self.dropped = self.cancelled = False


class _Lane:
    """One thread with its queue. A hanging lane is abandoned whole, so that its late results affect nothing."""

    def __init__(self, name: str) -> None:
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.current: _Job | None = None
        self.running_since: float | None = None
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (job := self.jobs.get()) is not None:
            if job.dropped:
                continue
            self.running_since = time.monotonic()
            self.current = job
            result: Any = None
            error: BaseException | None = None
            try:
                result = job.fn(*job.args)
            except BaseException as caught:  # handed to the caller, whatever it is
                error = caught
            self.current = self.running_since = None
            with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits any more
                job.done(result, error)
            del job, result, error


CANCELLED_GRACE = 5.0
"""Seconds that a new call waits for one whose caller was cancelled: such a call is not stuck, and a request that
interrupts an operation must not fail because of the operation's last scan of /proc."""
_LOOK_AGAIN = 0.01


class Worker:
    """One named daemon thread that does one call after the other."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.abandoned = 0
        """Threads given up because a call never returned."""
        self._lane: _Lane | None = None
        self._closed = False

    @property
    def stuck(self) -> bool:
        """A call whose caller gave up (timeout or cancel) has not returned yet. Clears itself when it does."""
        job = self._lane.current if self._lane is not None else None
        return job is not None and job.dropped

    @property
    def busy_seconds(self) -> float:
        """How long the present call has been running; 0 when idle."""
        since = self._lane.running_since if self._lane is not None else None
        return 0.0 if since is None else time.monotonic() - since

    async def call(self, fn: Callable[..., T], *args: Any, timeout: float | None = None) -> T:
        """Run ``fn(*args)`` in the thread and return its result or raise its exception.

        After ``timeout`` seconds (waiting in the queue included) TimeoutError is raised; a call that was still queued
        is dropped, one that runs leaves the worker ``stuck``. Raises WorkerStuck while it is: at once after a timeout,
        and after ``CANCELLED_GRACE`` seconds when the caller of the earlier call was merely cancelled.
        """
        if self._closed:
            raise RuntimeError(f"worker {self.name} is closed")
        await self._let_the_cancelled_finish()
        if self.stuck:
            raise WorkerStuck(f"{self.name}: an earlier call has not returned for {self.busy_seconds:.0f} s")
        job, future = self._queued(fn, args)
        try:
            async with asyncio.timeout(timeout):  # wait_for() of Python 3.11 swallows a cancel that meets the result
                return await future
        except TimeoutError:
            if future.done() and not future.cancelled():
                return future.result()  # it came at the same moment, or the call itself raised TimeoutError
            job.dropped = True
            raise TimeoutError(f"{self.name}: no answer within {timeout:g} s") from None
        except asyncio.CancelledError:
            job.dropped = job.cancelled = True
            raise

    def submit(self, fn: Callable[..., T], *args: Any) -> "asyncio.Future[T]":
        """``call`` without a time limit. It is queued when this returns, and runs even if nobody waits any more."""
        _, future = self._queued(fn, args)
        future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # read, if nobody else does
        return future

    def post(self, fn: Callable[..., Any], *args: Any, done: _Done) -> None:
        """Queue the call. ``done`` runs in the worker's thread."""
        (self._lane or self._new_lane()).jobs.put(_Job(fn, args, done))

    @property
    def waiting(self) -> int:
        """Number of calls that have not begun."""
        return self._lane.jobs.qsize() if self._lane is not None else 0

    def _queued(self, fn: Callable[..., T], args: tuple[Any, ...]) -> "tuple[_Job, asyncio.Future[T]]":
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def done(result: Any, error: BaseException | None) -> None:
            loop.call_soon_threadsafe(settle, result, error)

        job = _Job(fn, args, done)
        (self._lane or self._new_lane()).jobs.put(job)
        return job, future

    async def _let_the_cancelled_finish(self) -> None:
        lane, end = self._lane, time.monotonic() + CANCELLED_GRACE
        while (job := lane.current if lane else None) and job.cancelled and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_AGAIN)

    def renew(self) -> None:
        """Give up the present thread (it stays asleep in the kernel) and use a fresh one for the next call."""
        if self._lane is not None:
            if self.busy_seconds > 0:
                self.abandoned += 1
            self._lane.jobs.put(None)
        self._lane = None

    def close(self) -> None:
        """Accept no more calls. A hung one is abandoned; the interpreter can still exit."""
        self._closed = True
        if self._lane is not None:
            self._lane.jobs.put(None)
            self._lane = None

    def _new_lane(self) -> _Lane:
        self._lane = _Lane(f"podwatch-{self.name}")
        return self._lane
