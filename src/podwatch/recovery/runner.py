"""One operation at a time: started, retried when it fails, cancelled for an operator's request.

Each operation is a task that can be cancelled at any point. A cancelled operation leaves the same open intents in the
journal as a killed podwatch, and the same code continues after both.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, Protocol

from podwatch.domain.errors import InternalError, PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import FindingKind, Severity
from podwatch.domain.snapshot import Supervision
from podwatch.recovery.context import RecoveryContext
from podwatch.recovery.reconcile import adopt, reconcile
from podwatch.recovery.resume_point import StoreUnknown
from podwatch.recovery.state import Phase

PROBLEM_RETRY: Final = 30.0
STORE_RETRY: Final = 60.0

Operation = Callable[[], Awaitable[None]]


class CarriesOn(Protocol):
    async def carry_on(self) -> None:
        """Do what the journal and the state of the pod require now."""
        ...


class OperationRunner:
    """Runs at most one operation; the sensing loop and the requests start them."""

    def __init__(self, context: RecoveryContext, operations: CarriesOn) -> None:
        self.context, self._operations = context, operations
        self.task: asyncio.Task[None] | None = None
        self.closed = False
        self._interrupted: asyncio.Task[None] | None = None
        self._requests = asyncio.Lock()

    @property
    def acting(self) -> bool:
        return self.task is not None and not self.task.done()

    @property
    def ready(self) -> bool:
        """Whether podwatch can start an operation on its own: none runs, no operator's request is pending, no exit is
        pending."""
        return not (self.acting or self.context.request_pending or self.closed)

    def spawn(self, operation: Operation) -> None:
        """Start an operation; the caller has made sure that none runs. Does nothing once podwatch is exiting."""
        self.context.by_request, self.context.request_pending = self.context.request_pending, False
        if not self.closed:
            self.task = asyncio.create_task(self._guarded(operation), name="podwatch-recovery")

    @contextlib.asynccontextmanager
    async def by_hand(self) -> AsyncIterator[None]:
        """Handle one operator request at a time. After ``interrupt`` no operation starts on its own until the request
        has become one. If the request fails halfway, the interrupted work is resumed; otherwise training would be
        unguarded."""
        async with self._requests:
            self._interrupted = None
            try:
                yield
            except BaseException:
                if self.context.request_pending and (self._interrupted is not None or self.context.handle is None):
                    self.context.request_pending = False
                    self.spawn(self._take_up_again)
                raise
            finally:
                self.context.request_pending = False

    async def _take_up_again(self) -> None:
        if self._interrupted is not None:
            await asyncio.wait([self._interrupted])
        await self._operations.carry_on()

    async def interrupt(self) -> None:
        """Cancel the current operation, wait until it has ended, settle its open intents, and look at the pod again."""
        self.context.request_pending = True
        task, self.task = self.task, None
        if task is not None and not task.done():
            self._interrupted = task
            task.cancel()
            await asyncio.wait([task])
        look = await self.context.tools.launcher.look()
        await reconcile(self.context, look)
        mine = self.context.handle
        if look.handle is not None and (mine is None or mine.start_id != look.handle.start_id):
            await adopt(self.context, look.handle)  # the cancelled operation had just started it
        elif look.handle is None and mine is not None and mine.supervision is Supervision.KEEPER:
            self.context.forget()  # the cancelled operation had just stopped it

    async def _guarded(self, operation: Operation) -> None:
        """Run an operation. One that fails is retried from the journal and the state of the pod, as after a restart of
        podwatch."""
        try:
            await self._until_done(operation)
        finally:
            self.context.by_request = False

    async def _until_done(self, operation: Operation) -> None:
        while True:
            problem: PodwatchError
            try:
                await operation()
            except PodwatchError as error:
                problem = error
            except OSError as error:
                problem = _refused(error)
            except Exception as error:  # a bug must not leave training unguarded
                problem = InternalError(f"{type(error).__name__}: {error}", fix="please report this")
            else:
                return
            self.context.by_request = False
            self.context.show(Phase.BLOCKED, str(problem))
            self.context.notes.add(FindingKind.BLOCKED, Severity.CRITICAL, problem.what, problem.fix)
            self.context.tools.say(EventName.RECOVERY_BLOCKED, str(problem), Severity.CRITICAL)
            await self.context.tools.clock.sleep(STORE_RETRY if isinstance(problem, StoreUnknown) else PROBLEM_RETRY)
            operation = self._operations.carry_on


def _refused(error: OSError) -> PodwatchError:
    """Return the error as one line that includes the path: a finding shows no other location."""
    where = f"{error.filename}: " if error.filename else ""
    fix = "nothing: podwatch retries automatically"
    if isinstance(error, PermissionError):
        fix = "give podwatch's user access to it, or run podwatch as the user that training runs as"
    return PodwatchError(f"{where}{error.strerror or error}", fix=fix)
