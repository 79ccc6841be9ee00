"""Trainers that a person started: seen, taken over, never joined by a second one (DESIGN section 2, "Supervise")."""

from collections.abc import Sequence
from typing import Final

from podwatch.domain.errors import Busy, InternalError, PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import FindingKind, Severity
from podwatch.domain.snapshot import Desired, Snapshot, Supervision
from podwatch.recovery.attempt import Attempt
from podwatch.recovery.core import BLOCKED_POLL
from podwatch.recovery.state import Phase
from podwatch.recovery.stopping import Stopping
from podwatch.trainer.base import Candidate, TrainerHandle

PERSON_POLL: Final = 15.0
"""Seconds between two looks for a person's own start while nothing of ours runs; one look reads all of /proc."""

SEEN_LATE: Final = 30.0
"""Seconds that the end of a trainer may be noticed after it happened: its person may have been quicker."""


class Persons(Stopping):
    """Taking over, and the lookout: while nothing of ours runs and no act does, somebody still looks."""

    async def take_over(self, candidates: Sequence[Candidate]) -> bool:
        """Attach to the one trainer that a person started; wait while it is not clear which. False when nothing is
        there, so that a start cannot join a second trainer to a first (promise 4)."""
        tools = self.tools
        while tools.settings.trainer.supervise == "keeper" or len(candidates) != 1:
            if not candidates:
                self.clear(FindingKind.AMBIGUOUS_TRAINERS)
                return False
            names = listed(candidates)
            if len(candidates) > 1 and self._none_on_a_gpu(candidates):
                # Whatever they are, they are not training (DESIGN section 2).
                self.note(FindingKind.AMBIGUOUS_TRAINERS, Severity.WARNING, f"started beside: {names}")
                return False
            text = "several trainers could be this run's" if len(candidates) > 1 else "a trainer not started by us runs"
            self._show(Phase.BLOCKED, f"{text}: {names}")
            self.note(
                FindingKind.AMBIGUOUS_TRAINERS,
                Severity.CRITICAL,
                f"{text}: {names}",
                "stop what does not belong here; podwatch then goes on by itself",
            )
            await tools.clock.sleep(BLOCKED_POLL)
            look = await tools.launcher.look()
            if look.handle is not None:
                await self.adopt(look.handle)
                return True
            candidates = look.candidates
        self.clear(FindingKind.AMBIGUOUS_TRAINERS, FindingKind.BLOCKED)
        try:
            handle = await tools.launcher.attach(candidates[0])
        except Busy:  # it has ended in the meantime
            look = await tools.launcher.look()
            if look.handle is not None:
                await self.adopt(look.handle)
                return True
            return await self.take_over(look.candidates)
        now = tools.clock.monotonic()
        self.watch(handle, Attempt(handle.start_id, now, known=False))
        tools.begin_start(now, handle.start_id)
        self._show(Phase.ATTACHED, f"watching pid {handle.launcher.pid}, which was started by someone else")
        tools.say(
            EventName.TRAINER_ATTACHED,
            f"attached to pid {handle.launcher.pid}: {candidates[0].reason}",
            start_id=handle.start_id,
            pid=handle.launcher.pid,
        )
        if not tools.settings.trainer.command:
            self.note(
                FindingKind.UNGUARDED,
                Severity.WARNING,
                "no command is configured: this trainer cannot be restarted",
                "`podwatch config init` copies it from the running trainer",
            )
        return True

    def _none_on_a_gpu(self, candidates: Sequence[Candidate]) -> bool:
        """Seen, not supposed: with a blind GPU sensor nobody knows (promises 3 and 4)."""
        reading = self.tools.gpus.latest()
        seen = reading.ok and bool(reading.value) and bool(self.memory.gpu_base)
        free = self.procedure.free(self._free_since)
        return seen and free.observed and free.free and not any(c.holds_gpu for c in candidates)

    async def notice(self, candidates: Sequence[Candidate]) -> None:
        """Training is not wanted (stopped, finished), and this is what runs here. Only a trainer of this very run, seen
        at work in output_dir and started since, says that its person wants it again: podwatch guards it from now on.
        Whatever else holds the GPUs (a notebook, an evaluation, what is left of the old run) is told and left alone: it
        would be "restarted" as training one day."""
        record, clock = self.tools.record.current, self.tools.clock
        since = record.desired_wall if record is not None else 0.0
        mine = [c for c in candidates if c.of_run and clock.wall() - c.age > since]
        self.clear(FindingKind.AMBIGUOUS_TRAINERS)
        self.drop("beside")
        pending = [c for c in candidates if record is not None and c.start_id == record.stop_of]
        if pending:  # podwatch ended while it waited for the save, or before it had begun to stop it
            if await self.take_over(pending):
                await self.as_recorded()
        elif len(mine) == 1 and self.tools.settings.trainer.supervise != "keeper":
            before = self.desired
            if await self.take_over(mine):
                self.tools.say(
                    EventName.DESIRED_CHANGED,
                    f"training was {before}, and a person started it again (pid {mine[0].launcher.pid})",
                    desired=str(Desired.RUNNING),
                )
                await self.set_desired(Desired.RUNNING)
        elif len(mine) > 1:
            self._ask(mine)
        elif candidates:
            self.note(
                FindingKind.UNGUARDED,
                Severity.WARNING if mine else Severity.INFO,
                f"not guarded, training is {self.desired}: {listed(candidates)}",
                "if it is this run's training: `podwatch start --attach PID`",
                subject="beside",
            )

    def _ask(self, candidates: Sequence[Candidate]) -> None:
        self.note(
            FindingKind.AMBIGUOUS_TRAINERS,
            Severity.CRITICAL,
            f"several trainers could be this run's: {listed(candidates)}",
            "`podwatch start --attach PID` guards one; stop what does not belong here",
        )

    async def as_recorded(self) -> None:
        """Carry out the stop or the completion that was recorded; ``Acts`` knows."""
        raise InternalError("no acts here", fix="use Recovery")

    # -- the lookout --------------------------------------------------------------------------------------------------

    def look_out(self, snapshot: Snapshot) -> None:
        """At each turn of the sensing loop. Never blocks: at its time the look is the act."""
        if not self.ready or snapshot.at - self.looked_out_at < PERSON_POLL:
            return
        handle, sample = self.handle, snapshot.trainer.value
        if handle is not None:
            # One that podwatch did not start and that ended: its person has time to start it again, which is no
            # failure. All others are acted upon at once.
            ended = sample is not None and sample.start_id == handle.start_id and not sample.alive
            if not (ended and handle.supervision is Supervision.ATTACH):
                return
        self.looked_out_at = snapshot.at
        self.spawn(self._look_out)

    async def _look_out(self) -> None:
        self.looking_out = True
        try:
            try:
                look = await self.tools.launcher.look()
            except (OSError, PodwatchError) as error:  # a timeout is an OSError; the next look is in seconds
                text = f"a trainer that a person starts would not be seen: {error}"
                return self.note(FindingKind.SENSOR_BLIND, Severity.WARNING, text, subject="lookout")
            self.drop("lookout")
            old = self.handle
            if look.handle is not None and (old is None or look.handle.start_id != old.start_id):
                return await self.carry_on()
            if old is not None:
                return await self._again_by_hand(old, look.candidates)
            if self.desired is not Desired.RUNNING:
                return await self.notice(look.candidates)
            self.clear(FindingKind.AMBIGUOUS_TRAINERS)
            if len(look.candidates) == 1 and self.tools.settings.trainer.supervise != "keeper":
                if await self.take_over(look.candidates):
                    self.memory.next_try_wall = None
                    self.clear(FindingKind.GAVE_UP, FindingKind.FOREIGN_CHECKPOINTS)
            elif look.candidates:
                self._ask(look.candidates)
        finally:
            self.looking_out = False
        return None

    async def _again_by_hand(self, old: TrainerHandle, candidates: Sequence[Candidate]) -> None:
        """What is left of the old tree is no new trainer, nor what ran beside it all the time."""
        status, wall = await old.exit_status(), self.tools.clock.wall()
        ended = status.at_wall if status is not None else wall
        left = {process.identity for process in (await old.tree()).value or ()} | {old.launcher}
        fresh = [c for c in candidates if c.launcher not in left and wall - c.age > ended - SEEN_LATE]
        if len(fresh) != 1 or self.tools.settings.trainer.supervise == "keeper":
            return
        self.tools.say(
            EventName.TRAINER_STOPPED,
            f"the trainer that ended (pid {old.launcher.pid}) was started again by hand: no failure",
            start_id=old.start_id,
        )
        self.forget()
        if not await self.take_over(fresh):
            await self.carry_on()


def listed(candidates: Sequence[Candidate]) -> str:
    """For a person to choose from."""
    return "; ".join(f"pid {c.launcher.pid}: {c.command[:80]} ({c.reason})" for c in candidates)
