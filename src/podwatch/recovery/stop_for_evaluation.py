"""Stop training, let an evaluation use its GPUs, and start training again (docs/evaluation.md).

One operation, while the desired state stays ``running``: whatever happens to the evaluation, and to podwatch, training
starts again. The evaluation itself is ``Work`` (hooks/evaluations_in_one_stop.py); the daemon joins the two.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from podwatch.domain.errors import PodwatchError
from podwatch.domain.snapshot import Desired, SensorState, Supervision
from podwatch.recovery.context import RecoveryContext
from podwatch.recovery.operation_runner import OperationRunner
from podwatch.recovery.restart import FREE_POLL, Operations
from podwatch.recovery.state import Phase, newest_step
from podwatch.sensors.base import Wakeable
from podwatch.trainer.base import TrainerHandle

WATCH_SECONDS: Final = 0.5
"""Time between two looks whether the evaluation must end early."""
END_SECONDS: Final = 20.0
"""For the end of an evaluation that is cancelled. Training then starts anyway: its start waits for free GPUs."""
_RUNS_NONE: Final = {Phase.FINISHED: Desired.FINISHED, Phase.STOPPED: Desired.STOPPED}


class Work(Protocol):
    """Evaluations that need training's GPUs."""

    @property
    def title(self) -> str:
        """What is evaluated: ``step 40``."""
        ...

    @property
    def most_seconds(self) -> float:
        """After this time it has failed to end itself, and is cancelled."""
        ...

    async def run(self) -> None:
        """Run them. Cancelling ends them and all that they started."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """``why_not``: why the work did not run, or did not run to its end; empty if it did. ``stopped``: training was
    stopped for it."""

    why_not: str = ""
    stopped: bool = False


class Evaluating:
    """Runs ``Work`` with training stopped; one per run."""

    def __init__(self, context: RecoveryContext, runner: OperationRunner, operations: Operations) -> None:
        self.context, self._runner, self._operations = context, runner, operations

    @property
    def idle(self) -> bool:
        """Whether no training runs and none is wanted, so that an evaluation needs no stop."""
        context = self.context
        return context.handle is None and _RUNS_NONE.get(context.phase) is context.desired

    def why_not(self) -> str:
        """Why podwatch cannot stop training for an evaluation now; empty if it can. Never blocks."""
        context, tools = self.context, self.context.tools
        reading, handle = tools.gpus.latest(), context.handle
        if tools.place is not None:
            return "training runs on several nodes"
        if not self._runner.ready:
            return "podwatch is stopping or starting training"
        if held := context.held():
            return held if held != "paused" else "podwatch is paused"
        if not reading.ok and reading.state is not SensorState.ABSENT:
            return "GPU memory cannot be read, so podwatch cannot see whether the GPUs are free"
        if self.idle:
            return ""
        if context.desired is not Desired.RUNNING:
            return f"training is {context.desired}"
        if tools.standing.why_not:
            return tools.standing.why_not
        if handle is None:
            return "no training is running"
        if handle.supervision is Supervision.ATTACH:
            return f"podwatch did not start the trainer (pid {handle.launcher.pid}), so it does not stop it"
        if not tools.settings.trainer.command:
            return "[trainer] command is not configured, so podwatch could not start training again"
        if context.phase is not Phase.RUNNING:
            return "the last start of training is not confirmed by a step yet"
        last, saved = tools.policies.max_steps, newest_step(tools.catalogue.sets)
        if last is not None and saved is not None and saved >= last:
            return "training has saved its last step and is about to end"
        return ""

    async def run(self, work: Work) -> Outcome:
        """Stop training, run the work, and start training again; with ``idle`` only run it. Returns once the work is
        over: the start continues as recovery's operation."""
        if why := self.why_not():
            return Outcome(why)
        over: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def tell(outcome: Outcome) -> None:
            if not over.done():
                over.set_result(outcome)

        idle = self.idle
        self._runner.spawn(lambda: self._operation(work, tell, idle=idle))
        task = self._runner.task
        if task is not None:  # also if it is cancelled before its first step
            task.add_done_callback(lambda _: tell(Outcome("podwatch interrupted it")))
        return await over

    async def _operation(self, work: Work, tell: Callable[[Outcome], None], *, idle: bool) -> None:
        self.context.evaluation = work.title
        try:
            if idle:
                tell(await self._beside_nothing(work))
            elif (handle := self.context.handle) is not None:
                await self._stopped(work, handle, tell)
        finally:
            self.context.evaluation = ""
            tell(Outcome("podwatch interrupted it", stopped=not idle))

    async def _beside_nothing(self, work: Work) -> Outcome:
        """Training has ended, or its operator stopped it."""
        context, launcher = self.context, self.context.tools.launcher
        try:
            look = await launcher.look()
        except (OSError, PodwatchError) as error:
            return Outcome(f"podwatch cannot see whether a trainer runs: {error}")
        if look.trees:
            return Outcome(f"a trainer that podwatch did not start runs (pid {look.trees[0].launcher.pid})")
        if held := await self._until_free(0.0):
            return Outcome(held)
        phase, detail = context.phase, context.detail
        context.show(phase, f"{detail}; evaluating {work.title}")
        try:
            return Outcome(await self._work(work))
        finally:
            context.show(phase, detail)

    async def _stopped(self, work: Work, handle: TrainerHandle, tell: Callable[[Outcome], None]) -> None:
        context, tools, operations = self.context, self.context.tools, self._operations
        try:
            if await handle.exit_status() is not None:
                return tell(Outcome("training has ended"))
            await tools.blocking(operations.starter.prepare, None)  # a start that must fail is no reason to stop
        except (PodwatchError, OSError) as error:
            return tell(Outcome(f"training could not be started again: {error}"))
        await operations.stops.stop_tree(handle, f"to evaluate {work.title}", evaluation=True)
        context.forget()
        context.show(Phase.EVALUATING, f"training is stopped to evaluate {work.title}")
        if await operations.checks.someone_there(await tools.launcher.look()):
            return tell(Outcome("an operator started a trainer", stopped=True))
        why = await self._until_free(tools.settings.gpu.release_wait)
        if not why:
            why = await self._work(work)
            context.free_since = tools.clock.monotonic()  # older readings show what the evaluation held
        tell(Outcome(why, stopped=True))
        await operations.start()
        return None

    async def _until_free(self, patience: float) -> str:
        """Wait until the GPUs and ports of training are free; return what holds them after ``patience`` seconds, empty
        if nothing does. A start of training waits longer: an evaluation is not worth it."""
        tools = self.context.tools
        end = tools.clock.monotonic() + patience
        while True:
            if isinstance(tools.gpus, Wakeable):
                tools.gpus.wake()
            free = self._operations.starter.free(self.context.free_since)
            if free.free and free.observed:
                return ""
            if tools.clock.monotonic() >= end:
                held = "; ".join(free.holders) or "GPU memory has not been observed"
                return f"the GPUs are not free: {held}"
            await tools.clock.sleep(FREE_POLL)

    async def _work(self, work: Work) -> str:
        """Run it; return why it did not come to its end, empty if it did. No error of it leaves this."""
        tools = self.context.tools
        task = asyncio.ensure_future(work.run())
        end = tools.clock.monotonic() + work.most_seconds
        why = ""
        try:
            while not task.done() and not (why := self._ends_early()):
                if tools.clock.monotonic() > end:
                    why = f"it did not end within {work.most_seconds:.0f} s"
                    break
                await asyncio.wait([task], timeout=WATCH_SECONDS)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task], timeout=END_SECONDS)
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            why = f"internal error: {error!r}"[:200]
        return why

    def _ends_early(self) -> str:
        if self.context.paused:
            return "podwatch is paused"
        return self.context.tools.standing.why_not if not self.idle else ""
