"""Trainers that a person started: seen, taken over, never joined by a second one (DESIGN section 2, "Supervise")."""

from collections.abc import Sequence
from typing import Final

from podwatch.domain.errors import Busy, InternalError, PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import FindingKind, Severity
from podwatch.domain.snapshot import Desired, Snapshot, Supervision
from podwatch.evidence import scrub
from podwatch.judgement.beside import Sifted, sift
from podwatch.recovery.attempt import Attempt
from podwatch.recovery.core import BLOCKED_POLL
from podwatch.recovery.state import Phase
from podwatch.recovery.stopping import Stopping
from podwatch.trainer.base import Candidate, Look, TrainerHandle

PERSON_POLL: Final = 15.0
"""Seconds between two looks for a person's own start while nothing of ours runs; one look reads all of /proc."""


class Persons(Stopping):
    """Taking over, and the lookout: while nothing of ours runs and no act does, somebody still looks."""

    async def take_over(self, look: Look) -> bool:
        """Attach to the one trainer that an operator started; wait while it is not clear which, or whether one is about
        to be. False when nothing is there, so that a start cannot join a second trainer to a first (promise 4)."""
        tools = self.tools
        while True:
            if look.handle is not None:
                await self.adopt(look.handle)
                return True
            there = self.sift(look)
            if len(there.successors) == 1 and tools.settings.trainer.supervise != "keeper":
                if await self.guard(there.successors[0]):
                    return True
                look = await tools.launcher.look()
                continue
            if not self._must_wait(there):
                self.clear(FindingKind.AMBIGUOUS_TRAINERS)
                return False
            await tools.clock.sleep(BLOCKED_POLL)
            look = await tools.launcher.look()

    def sift(self, look: Look) -> Sifted[Candidate]:
        """Which of those that were seen may be our next trainer; the tree of the one that is watched is none."""
        memory, wall = self.memory, self.tools.clock.wall()
        return sift(look.candidates, look.pending, ended=memory.ended_wall, wall=wall, ignored=memory.ignored)

    def _must_wait(self, there: Sifted[Candidate]) -> bool:
        """Whether nothing may be started beside these; it is then shown, with what the operator can do."""
        if there.successors or there.rivals:
            several = len(there.successors) > 1
            text = "several trainers could be this run's" if several else "a trainer not started by us runs"
            if not there.successors:
                text = "a process that ran beside the trainer that ended works in its output_dir"
            names = listed((*there.successors, *there.rivals))
            fix = (
                "`podwatch start --attach PID` guards one; stop what does not belong here, or say so with"
                " `podwatch start --beside PID`; podwatch then continues"
            )
            self._show(Phase.BLOCKED, f"{text}: {names}")
            self.clear(FindingKind.AMBIGUOUS_TRAINERS)
            self.note(FindingKind.AMBIGUOUS_TRAINERS, Severity.CRITICAL, f"{text}: {names}", fix)
            return True
        if not there.pending or self.tools.settings.mode == "observe":
            return False
        self._await(there.pending)
        return True

    def _await(self, pending: Sequence[Candidate]) -> None:
        """Show what is awaited: until the patience of a start is over a warning, then a question."""
        patience = self.tools.settings.trainer.startup_patience
        names = listed(pending)
        late = all(c.age >= patience for c in pending)
        awaited = " or ".join(dict.fromkeys(c.awaits for c in pending))
        if late:
            text = (
                f"Training is not running: {names}. After {min(c.age for c in pending) / 60:.0f} min podwatch still has"
                f" not seen {awaited}, and starts no trainer beside it"
            )
        else:
            left = max(0.0, patience - min(c.age for c in pending)) / 60
            text = (
                f"podwatch waits before it starts training: {names}. It waits for {awaited} (attaches then), or for its"
                f" end (starts then); in {left:.0f} min it asks you"
            )
        pids = [str(c.launcher.pid) for c in pending if c.attachable] or [str(pending[0].launcher.pid)]
        fix = (
            f"if this is the run's training: `podwatch start --attach {pids[0]}`; if not: end it, or"
            f" `podwatch start --beside {pids[0]}` starts training beside it; `podwatch stop-training` starts nothing"
        )
        self._show(Phase.BLOCKED, text)
        self.clear(FindingKind.AMBIGUOUS_TRAINERS)
        self.note(FindingKind.AMBIGUOUS_TRAINERS, Severity.CRITICAL if late else Severity.WARNING, text, fix)

    async def guard(self, candidate: Candidate) -> bool:
        """Attach to this one; False when it has ended in the meantime."""
        tools = self.tools
        self.clear(FindingKind.AMBIGUOUS_TRAINERS, FindingKind.BLOCKED)
        try:
            handle = await tools.launcher.attach(candidate)
        except Busy:
            return False
        now = tools.clock.monotonic()
        self.watch(handle, Attempt(handle.start_id, now, known=False))
        tools.begin_start(now, handle.start_id)
        await self.procedure.descend(handle)
        self._show(Phase.ATTACHED, f"watching pid {handle.launcher.pid}, which was started by someone else")
        tools.say(
            EventName.TRAINER_ATTACHED,
            f"attached to pid {handle.launcher.pid}: {candidate.reason}",
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

    async def notice(self, look: Look) -> None:
        """Training is not wanted (stopped, finished), and this is what runs here. Only a trainer of this very run, seen
        at work in output_dir and started since, says that its person wants it again: podwatch guards it from now on.
        Whatever else holds the GPUs (a notebook, an evaluation, what is left of the old run) is told and left alone: it
        would be "restarted" as training one day."""
        record, clock = self.tools.record.current, self.tools.clock
        there = self.sift(look)
        candidates = (*there.successors, *there.rivals)
        since = record.desired_wall if record is not None else 0.0
        mine = [c for c in there.successors if c.of_run and clock.wall() - c.age > since]
        self.clear(FindingKind.AMBIGUOUS_TRAINERS)
        self.drop("beside")
        pending = [c for c in look.candidates if record is not None and c.start_id == record.stop_of]
        if pending:  # podwatch ended while it waited for the save, or before it had begun to stop it
            if await self.guard(pending[0]):
                await self.as_recorded()
        elif len(mine) == 1 and self.tools.settings.trainer.supervise != "keeper":
            before = self.desired
            if await self.guard(mine[0]):
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
                return await self._again_by_hand(old, look)
            if self.desired is not Desired.RUNNING:
                return await self.notice(look)
            self.clear(FindingKind.AMBIGUOUS_TRAINERS)
            there = self.sift(look)
            if len(there.successors) == 1 and self.tools.settings.trainer.supervise != "keeper":
                if await self.take_over(look):
                    self.memory.next_try_wall = None
                    self.clear(FindingKind.GAVE_UP, FindingKind.FOREIGN_CHECKPOINTS)
            elif there.successors:
                self._ask(there.successors)
        finally:
            self.looking_out = False
        return None

    async def _again_by_hand(self, old: TrainerHandle, look: Look) -> None:
        """What is left of the old tree is no new trainer, nor what ran beside it all the time."""
        status, wall = await old.exit_status(), self.tools.clock.wall()
        ended = status.at_wall if status is not None else wall
        left = {process.identity for process in (await old.tree()).value or ()} | {old.launcher}
        there = sift(look.candidates, look.pending, ended=ended, wall=wall, ignored=self.memory.ignored)
        fresh = [c for c in there.successors or there.pending if c.launcher not in left]
        if len(fresh) != 1 or self.tools.settings.trainer.supervise == "keeper":
            return
        self.tools.say(
            EventName.TRAINER_STOPPED,
            f"the trainer that ended (pid {old.launcher.pid}) was started again by hand: no failure",
            start_id=old.start_id,
        )
        self.memory.ended_wall = ended
        await self.procedure.descend(old)
        self.forget()
        if fresh[0].awaits or not await self.guard(fresh[0]):
            await self.carry_on()  # one that only loads yet is waited for there


def listed(candidates: Sequence[Candidate]) -> str:
    """For an operator to choose from, without secrets."""
    return "; ".join(f"pid {c.launcher.pid}: {scrub(c.command)[:80]} ({scrub(c.reason)})" for c in candidates)
