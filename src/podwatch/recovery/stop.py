"""End training: a stop that the operator requested (now, or after the next save), a finished run, and the stop before a
restart."""

import shlex
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final

from podwatch.domain.errors import HostError, PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import Finding, FindingKind, Severity, Verdict
from podwatch.domain.lease import LeaseAction
from podwatch.domain.outcome import ENDS_ON_ITS_OWN
from podwatch.domain.run_state import Stopping
from podwatch.domain.secrets import scrub, scrub_argv
from podwatch.domain.snapshot import Desired, Supervision
from podwatch.recovery import start_plan
from podwatch.recovery.context import RecoveryContext
from podwatch.recovery.operation_runner import recall
from podwatch.recovery.resume_point import Lineages
from podwatch.recovery.state import Phase, Tools, newest_step
from podwatch.system.child import run_child
from podwatch.system.procfs import send_signal
from podwatch.trainer.base import TrainerHandle
from podwatch.trainer.environment import for_training
from podwatch.trainer.trainer_handle import SupervisedTrainer

SAVE_POLL: Final = 1.0
JUDGE_POLL: Final = 0.5
JUDGE_SECONDS: Final = 120.0
"""For the sensing loop to judge an end of training. It takes one turn, and after a restart of podwatch the time to read
the logs again. A blind sensor never judges it."""
NO_SET: Final = -1
"""Below every step, so that any complete checkpoint is newer."""
STUCK_RETRY: Final = 15.0
STOP_ALSO_DEADLINE: Final = 60.0
"""Seconds for one command of ``trainer.stop_also``; `ray stop` takes up to sixteen."""


class Stops:
    """Every stop is durable before it starts: run.json holds ``desired`` and whether to wait for the next save, so that
    the next podwatch continues it unchanged."""

    def __init__(self, context: RecoveryContext, lineages: Lineages) -> None:
        self.context, self.lineages = context, lineages
        self.stuck: tuple[str, ...] = ()
        """Processes that SIGKILL did not end, as text. podwatch starts nothing beside them."""
        self._judged: Finding | None = None
        """The end of training that the sensing loop has found since the stop in progress began."""
        self._finish_line = False
        """Training has printed its finish line."""

    def newest(self) -> int:
        """Return the newest complete step here, as last seen; NO_SET if there is none."""
        newest = newest_step(self.context.tools.catalogue.sets)
        return NO_SET if newest is None else newest

    async def stop(self, why: str, *, above: int | None = None) -> None:
        """Stop on request; not a failure. ``above``: only once a complete checkpoint above this step exists. Training
        that finishes before podwatch stops it is recorded as finished."""
        if self.context.held():
            return
        self.context.failure = None
        handle = self.context.handle
        if handle is not None:
            self._judged, self._finish_line = None, False
            if above is not None:
                why = await self._until_saved(handle, above, why)
            finished = await self._finished(handle, why)
            if finished is not None:
                await self._finish(finished)
                return
            await self.stop_tree(handle, why)
        self.context.forget()
        await self.handed_over()
        await self.set_desired(Desired.STOPPED)
        self.context.notes.clear(
            FindingKind.GAVE_UP, FindingKind.BLOCKED, FindingKind.RESUMED_WRONG, FindingKind.UNGUARDED
        )
        await self.context.close_open_incident(f"podwatch stopped training: {why}")
        self.context.show(Phase.STOPPED, why)

    async def stop_sick(self, finding: Finding) -> None:
        """Stop unhealthy training, as the configuration requests: durable like any stop, after the next save. The
        desired state changes first, so that the stop is requested only once. If the next save does not fit on the disk,
        stop at once and wait only for a save in progress."""
        above = None if finding.kind is FindingKind.DISK_NO_ROOM else self.newest()
        await self.set_desired(Desired.STOPPED, above=above, of=self.context.watched)
        await self.stop(finding.summary, above=above)

    # -- handing over to another pod (the operation is in restart.py) -------------------------------------------------

    def must_hand_over(self) -> bool:
        """Return whether the watched trainer has to end because another pod owns the run. A trainer that an operator
        starts here after that is left alone."""
        if self.context.held() or not self.context.tools.standing.stop:
            return False
        return not (
            self.context.run.yielded
            and self.context.handle is not None
            and self.context.handle.supervision is Supervision.ATTACH
        )

    async def handed_over(self) -> None:
        """Record that this pod's own training has ended. Durable, so that the next podwatch does not stop a trainer
        that an operator starts."""
        if self.context.tools.standing.act is LeaseAction.SUPERSEDED and not self.context.run.yielded:
            await self.context.edit(yielded=True)

    def holds_again(self) -> None:
        """Clear that record once this pod owns the run again. Called by the sensing loop."""
        standing = self.context.tools.standing
        if self.context.run.yielded and standing.act is LeaseAction.HOLD and not standing.stop:
            self.context.edit_soon(yielded=False)

    # -- the next save ------------------------------------------------------------------------------------------------

    async def _until_saved(self, handle: TrainerHandle, above: int, why: str) -> str:
        """Wait for a complete checkpoint above ``above``; return why to stop now. The wait also ends when the trainer
        ends, or when a verdict says that it is dead, hangs or is finished: then no save comes any more. Training that
        is about to end, after the save of its last step or its finish line, is not stopped by that save."""
        tools = self.context.tools
        have = "there is no checkpoint yet" if above == NO_SET else f"the newest checkpoint is step {above}"
        self.context.show(Phase.ENDING, f"{why}; training stops after its next save ({have})")
        while await handle.exit_status() is None:
            if self.must_hand_over():  # another pod owns the run now: a save here would not continue it
                return f"{why}; {tools.standing.why_not}"
            newest = newest_step(await tools.blocking(tools.catalogue.rescan))
            if newest is not None and newest > above:
                last = tools.policies.max_steps
                if not self._finish_line and (last is None or not above < last <= newest):
                    return f"{why}; step {newest} is saved"
                above, have = newest, f"the newest checkpoint is step {newest}"
                self.context.show(Phase.ENDING, f"{why}; step {newest} is the last one, so {ENDS_ON_ITS_OWN}")
            if self._judged is not None:
                if self._judged.verdict is not Verdict.FINISH:
                    text = f"no further save will come, so training stops now: {self._judged.summary}; {have}"
                    tools.say(EventName.TRAINER_STOPPING, text, Severity.WARNING, start_id=handle.start_id)
                return f"{why}; {self._judged.summary}"
            await tools.clock.sleep(SAVE_POLL)
        return why

    async def _finished(self, handle: TrainerHandle, why: str) -> Finding | None:
        """Return the finding that training is finished, if podwatch has not stopped it. If it has just ended, wait
        until the sensing loop has judged that."""
        tools, ended = self.context.tools, await handle.exit_status() is not None
        if ended:
            stop = self.context.run.stopping
            if stop is not None and stop.start_id == handle.start_id:
                return None  # podwatch requested this end
        if ended and self._judged is None:
            self.context.show(Phase.ENDING, f"{why}; training has ended: podwatch checks whether it is finished")
            until = tools.clock.monotonic() + JUDGE_SECONDS
            while self._judged is None and not self.must_hand_over() and tools.clock.monotonic() < until:
                await tools.clock.sleep(JUDGE_POLL)
        judged = self._judged
        if judged is not None and judged.verdict is Verdict.FINISH and not self.must_hand_over():
            return judged
        if ended:
            how = "podwatch cannot see how" if judged is None else judged.summary
            text = f"training ended on its own before podwatch stopped it: {how}"
            tools.say(EventName.TRAINER_STOPPING, text, Severity.WARNING, start_id=handle.start_id)
        return None

    def hear_of_death(self, findings: tuple[Finding, ...], *, finish_line: bool) -> None:
        """Note the end of training while a stop waits for it or for the next save. Called by the sensing loop."""
        if self.context.phase is not Phase.ENDING:
            return
        self._finish_line = finish_line
        for finding in findings:
            if finding.verdict is Verdict.FINISH and finding.confirmed:
                self._judged = finding
                return
            # Unconfirmed, an operator may have stopped training: that is what this stop was to do.
            sure = finding.confirmed or finding.kind is FindingKind.TRAINER_EXITED
            if finding.verdict is Verdict.RESTART and sure:
                self._judged = finding

    async def finish(self, finding: Finding) -> None:
        """Record that the run is finished, then stop the processes that remain (they still hold GPUs)."""
        if not self.context.held():
            await self._finish(finding)

    async def _finish(self, finding: Finding) -> None:
        self.context.failure = None
        handle = self.context.handle
        await self.set_desired(Desired.FINISHED, of=self.context.watched)
        if handle is not None:
            await self.stop_tree(handle, finding.summary)
        self.context.forget()
        await self.set_desired(Desired.FINISHED)
        self.context.notes.clear(
            FindingKind.GAVE_UP, FindingKind.BLOCKED, FindingKind.RESUMED_WRONG, FindingKind.UNGUARDED
        )
        await self.context.close_open_incident("training finished")
        self.context.show(Phase.FINISHED, finding.summary)
        self.context.tools.say(EventName.TRAINER_FINISHED, finding.summary)

    async def set_desired(self, desired: Desired, *, above: int | None = None, of: str = "", **more: Any) -> None:
        """Record the desired state; durable on return. ``above`` and ``of`` (a start id) describe a stop that is still
        to be carried out: see RunState. ``more``: fields of it that change with the desired state, or not at all."""
        await recall(self.context)
        run = self.context.run
        if not more and (run.desired, run.stop_above, run.stop_of) == (desired, above, of):
            return
        changed = run.desired is not desired
        wall = self.context.tools.clock.wall() if changed else run.desired_wall
        await self.context.edit(desired=desired, stop_above=above, stop_of=of, desired_wall=wall, **more)
        if changed:
            self.context.tools.say(EventName.DESIRED_CHANGED, f"desired state: {desired}", desired=str(desired))

    # -- the process tree ---------------------------------------------------------------------------------------------

    async def stop_tree(
        self,
        handle: TrainerHandle,
        why: str,
        *,
        before: Callable[[], Awaitable[None]] | None = None,
        evaluation: bool = False,
    ) -> None:
        """Record the stop, run ``before`` (evidence), stop the whole tree, then release the supervisor. ``evaluation``:
        the time until the next start belongs to an evaluation."""
        await self.context.edit(stopping=stopping(handle, why))
        if before is not None:
            await before()
        await self.finish_stop(handle, why, evaluation=evaluation)

    async def finish_stop(self, handle: TrainerHandle, why: str, *, evaluation: bool = False) -> None:
        """Stop the tree; also used for a stop that an earlier podwatch left half done."""
        tools, trainer = self.context.tools, self.context.tools.settings.trainer
        self.context.show(Phase.STOPPING, why)
        tools.say(
            EventName.TRAINER_STOPPING,
            f"stopping training: {why}",
            start_id=handle.start_id,
            step=self.context.last_step(),
            evaluation=evaluation,
        )
        while True:
            report = await handle.stop(
                grace=trainer.stop_grace, save_grace=trainer.save_grace, saving=lambda: tools.catalogue.saving
            )
            self.stuck = report.survivors
            if not report.survivors:
                break
            # Never start a second trainer beside a process that still exists, even if it is stuck in the kernel.
            self.context.show(Phase.BLOCKED, "podwatch cannot end these processes: " + "; ".join(report.survivors))
            tools.say(
                EventName.RECOVERY_BLOCKED,
                "podwatch cannot end the old trainer and starts no new one; these processes are stuck in the kernel: "
                + "; ".join(report.survivors),
                Severity.CRITICAL,
            )
            await tools.clock.sleep(STUCK_RETRY)
        ended = report.exit.at_wall if report.exit is not None else 0.0
        self.context.note_end(handle.start_id, ended or tools.clock.wall())
        await self.stop_also()
        await handle.release()
        self.context.writers_ended = True
        await self.lineages.descend(handle)
        await self.context.edit(stopping=None)
        tools.track(None)
        tools.say(
            EventName.TRAINER_STOPPED,
            f"training stopped in {report.seconds:.1f} s",
            start_id=handle.start_id,
            killed=report.killed,
            seconds=round(report.seconds, 3),
        )

    async def stop_also(self) -> None:
        """Run the commands of ``trainer.stop_also``, which end training's processes outside its tree. A command that
        fails is reported and does not delay the restart: the check for free GPUs and ports follows anyway."""
        tools, trainer = self.context.tools, self.context.tools.settings.trainer
        for command in trainer.stop_also:
            try:
                done = await run_child(
                    command,
                    timeout=STOP_ALSO_DEADLINE,
                    env=for_training(tools.environment.build(trainer)),
                    cwd=start_plan.working_directory(tools.settings),
                    user=trainer.user,
                )
            except HostError as error:
                said = f"failed: {error}"
            else:
                if done.ok:
                    continue
                last = (done.output.strip().splitlines() or [""])[-1][:200]
                how = f"did not end in {STOP_ALSO_DEADLINE:.0f} s" if done.timed_out else f"ended with code {done.code}"
                said = f"{how}: {scrub(last)}"
            text = f"trainer.stop_also: {shlex.join(scrub_argv(command))[:200]} {said}"
            tools.say(EventName.TRAINER_STOPPING, text, Severity.WARNING)


def stopping(handle: TrainerHandle, why: str) -> Stopping:
    launcher = handle.launcher
    return Stopping(
        start_id=handle.start_id, why=why, pid=launcher.pid, ticks=launcher.start_ticks, boot=launcher.boot_id
    )


async def tell_to_end(tools: Tools, handle: TrainerHandle | None, why: str) -> bool:
    """The machine is being taken away: ask training to end, once, and do not wait for it (docs/maintenance.md).

    Records the stop, then sends SIGTERM to the trainer. Returns False if none runs.

    The stop stays recorded: the next podwatch here finishes it, and this end does not count as a failure. The
    desired state does not change. If a supervisor runs the trainer, only the supervisor gets the signal: it passes the
    signal on, outlives podwatch, and sends SIGKILL to processes that do not end.
    """
    if handle is None:  # podwatch may have been starting it
        handle = (await tools.launcher.look()).handle
    if handle is None or await handle.exit_status() is not None:
        return False
    stop = stopping(handle, why)
    try:
        await tools.run_file.edit(lambda run: replace(run, stopping=stop))
    except HostError as error:  # the machine is gone in seconds: the last save matters more than this record
        tools.say(EventName.TRAINER_STOPPING, f"cannot record this stop: {error}", Severity.WARNING)
    tools.say(EventName.TRAINER_STOPPING, f"podwatch requests training to end: {why}", start_id=handle.start_id)
    await _sigterm(handle)
    return True


async def _sigterm(handle: TrainerHandle) -> None:
    if (
        isinstance(handle, SupervisedTrainer)
        and handle.supervisor_lives()
        and send_signal(handle.record.supervisor, signal.SIGTERM)
    ):
        return
    refused: PodwatchError | None = None
    for process in (await handle.tree()).value or ():
        try:
            send_signal(process.identity, signal.SIGTERM)
        except PodwatchError as error:
            refused = error
    if refused is not None:
        raise refused
