"""Which step the next start is made from: what is here and ours, what the store has, what fits (DESIGN section 4)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from podwatch.checkpoints.layouts.resumed import Resumed, resumed
from podwatch.checkpoints.saved_by import saved_by
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.errors import PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import Severity
from podwatch.domain.mutation import Mutation
from podwatch.domain.run import RunRecord
from podwatch.domain.snapshot import Supervision
from podwatch.journal import Journal
from podwatch.judgement.choose import Choice, RemoteSave, awaited, choose, other_world
from podwatch.judgement.lineage import departure
from podwatch.judgement.ownership import Ownership
from podwatch.recovery import memory as memory_module
from podwatch.recovery.lineages import opened
from podwatch.recovery.memory import Memory
from podwatch.recovery.state import Phase, Tools
from podwatch.system import procfs
from podwatch.trainer.base import TrainerHandle

SETTLE_LOOK = 0.05
"""Seconds between the two equal looks that a set needs at least."""
SETTLE_POLL = 1.0
"""Seconds between two looks at a set that a start waits for; an operator sees the rest of the time count down."""
SETTLE_PATIENCE = 600.0
"""Seconds beyond the longest settle time: a set that still changes then has a writer."""
FETCH_TRIES = 3
"""Then an older step that is here is better than waiting for the store: training goes on losing GPU time."""


class StoreUnknown(PodwatchError):  # noqa: N818
    """Nothing usable is here and the store could not be asked: a fresh start could throw a run away."""


class NothingToResume(PodwatchError):  # noqa: N818
    """Something is here, but none of it may be used: a person has to decide."""

    def __init__(self, choice: Choice, fix: str = "") -> None:
        super().__init__(
            choice.reason, fix=fix or "see `podwatch checkpoints`; `podwatch start --step N` or `--fresh` decides"
        )
        self.choice = choice


def unfit(choice: Choice, why: str) -> Choice:
    """Nobody is helped by an older set of the same world, nor by a trainer that ends at its load."""
    return replace(choice, source="none", reason=f"step {choice.step} cannot be resumed from: {why}")


def still_written(settling: CheckpointSet) -> Choice:
    reason = f"step {settling.step} changes again and again: {settling.reason}. Another process writes to it"
    return Choice(None, "none", "", reason, ((settling.step, settling.reason),))


class Choosing:
    """``show`` tells phase and detail to whoever displays them. Changes nothing but what it remembers."""

    def __init__(self, tools: Tools, memory: Memory, show: Callable[[Phase, str], None]) -> None:
        self.tools = tools
        self.memory = memory
        self.show = show
        self.restoring: int | None = None
        self.failed_fetches = 0
        self.fetched: frozenset[tuple[int, str]] = frozenset()
        """(step, save_id) of what came from the store, as the journal knew it last."""
        self.writers_ended = False
        """The tree that wrote here was watched and has ended; nothing was started since."""
        self._followed = ""
        self._resumed_of: tuple[str, Resumed | None] = ("", None)

    async def remember(self) -> None:
        await memory_module.save(self.tools.journal, self.tools.clock, self.memory)

    async def save_record(self, record: RunRecord) -> None:
        await self.tools.blocking(self.tools.record.save, record)

    async def ours(self) -> tuple[list[CheckpointSet], list[CheckpointSet]]:
        """(sets of this run, sets of an unknown one), after a fresh rescan."""
        sets = await self._rescan()
        published = await self.tools.journal.run(Journal.published)
        self.fetched = frozenset((p.step, p.save_id) for p in published if p.restored)
        return [s for s in sets if self.owns(s)], [s for s in sets if not self.owns(s)]

    async def descend(self, handle: TrainerHandle) -> bool:
        """Open a new lineage if an operator's own start has left the present one (see ``judgement.lineage``); true if
        it has. Any checkpoint that the start has finished by now counts. Asking again does no harm."""
        tools, record = self.tools, self.tools.record.current
        if record is None or handle.supervision is not Supervision.ATTACH:
            return False
        sets = [s for s in await self._rescan() if self.owns(s)]
        published = await tools.journal.run(Journal.published)
        named = await tools.blocking(self._resumed, handle)
        record = tools.record.current  # it may have been written meanwhile
        if record is None:
            return False
        lineage = record.lineage
        left = departure(
            sets,
            lineage=lineage,
            began_wall=handle.started_wall,
            resumed=named.step if named is not None else None,
            named_by=named.named_by if named is not None else "",
            stored=[p.step for p in published if p.lineage == lineage.id and p.wall < handle.started_wall],
        )
        if left is None:
            return False
        new = opened(
            record,
            self.memory,
            left.step,
            earlier=(*record.earlier, *left.left),
            left_step=left.newest,
            opened_wall=handle.started_wall,
        )
        await self.save_record(new)
        await self.remember()
        where = "from the beginning" if left.step is None else f"from step {left.step}"
        tools.say(
            EventName.LINEAGE_OPENED,
            f"the operator's trainer (pid {handle.launcher.pid}) continues {where}, below the newest checkpoint (step"
            f" {left.newest}): {left.why}. podwatch follows it; the checkpoints above belong to an earlier branch now"
            + (f". `podwatch restart --step {left.newest}` returns to it" if left.can_return else ""),
            Severity.WARNING,
            step=left.step,
            newest=left.newest,
            lineage=new.lineage.id,
        )
        return True

    def _resumed(self, handle: TrainerHandle) -> Resumed | None:
        """Blocks. Remembered for each start: its process ends before what it has saved is looked at."""
        if self._resumed_of[0] != handle.start_id or self._resumed_of[1] is None:
            pid = handle.launcher.pid
            at = procfs.working_directory(pid)
            cwd = None if at is None else Path(at)
            found = resumed(self.tools.layout, procfs.command(pid), cwd=cwd, began_wall=handle.started_wall)
            self._resumed_of = (handle.start_id, found)
        return self._resumed_of[1]

    def owns(self, found: CheckpointSet) -> bool:
        """Does this set belong to the run? False before the record was read."""
        record = self.tools.record.current
        if record is None:
            return False
        return Ownership(
            record.first_seen_wall,
            record.last_start.step if record.last_start is not None else None,
            self.fetched,
            self.memory.adopted,
        ).owns(found)

    async def choose(
        self, *, wanted: int | None = None, fresh: bool = False, below: int | None = None, wait: bool = True
    ) -> Choice:
        """Raises StoreUnknown or NothingToResume instead of starting fresh by accident.

        A newer set that is whole and still settling is waited for (``wait``), shown in the status meanwhile.
        """
        tools = self.tools
        times = tools.settings.checkpoints
        end = tools.clock.monotonic() + SETTLE_PATIENCE + 2 * max(times.settle, times.settle_weak, times.settle_tracker)
        if fresh:
            return Choice(None, "fresh", "", "a fresh start was asked for")
        record = tools.record.current
        # A line with a parent was begun here on purpose (`clean`), also where nothing was started yet.
        own = record is not None and (record.last_start is not None or record.lineage.parent != "")
        lineage = record.lineage if record is not None and own else None
        unsound: dict[int, str] = {}
        while True:
            ours, foreign = await self.ours()
            use = ours or foreign
            settling = awaited(use, refused=self.memory.refused, wanted=wanted, below=below) if wait else None
            if settling is not None:
                if tools.clock.monotonic() > end:
                    raise NothingToResume(still_written(settling))
                left = settling.settles_in or 0.0
                self.show(Phase.LOOKING, f"step {settling.step} is whole and settles: {left:.0f} s left")
                await tools.clock.sleep(min(SETTLE_POLL, max(SETTLE_LOOK, left)))
                continue
            remote, trouble = await self._remote()
            choice = choose(
                [s for s in use if s.step not in unsound],
                remote,
                lineage=lineage,
                refused=self.memory.refused,
                adopted=bool(ours) or not foreign,
                wanted=wanted,
                below=below,
                ancestry=self.memory.ancestry,
            )
            if choice.source == "none":
                raise NothingToResume(choice)
            if unknown := self._unknown(choice, foreign):
                raise NothingToResume(replace(choice, source="none", reason=unknown))
            if choice.source == "fresh":
                if behind := tools.catalogue.out_of_reach:
                    why = f"step {max(behind)} seems to lie behind a symbolic link, which is not followed"
                    fix = "set trainer.checkpoint_dir to the directory that it leads to, or `podwatch start --fresh`"
                    raise NothingToResume(replace(choice, source="none", reason=why), fix)
                self.failed_fetches = 0  # without anything here, only the store can help: ask it again
                if trouble and not await self._store_must_be_empty():
                    raise StoreUnknown(
                        f"no checkpoint of this run is here and the store could not be asked: {trouble}",
                        fix="make the store reachable, or run `podwatch start --fresh`",
                    )
                if unsound:
                    step, reason = max(unsound.items())
                    raise NothingToResume(replace(choice, source="none", reason=f"step {step}: {reason}"))
                return choice
            if choice.source == "store" or choice.step is None:
                self._followed = next((r.lineage for r in remote if r.step == choice.step), "")
                return choice
            reasons = await tools.blocking(tools.catalogue.verify, choice.step)
            if not reasons:
                if wanted is None and (why := await self.misfit(choice.step)):
                    raise NothingToResume(unfit(choice, why))
                return choice
            unsound[choice.step] = f"damaged: {reasons[0]}"
            tools.say(
                EventName.CHECKPOINT_DAMAGED,
                f"step {choice.step} is damaged and not used: {reasons[0]}",
                Severity.WARNING,
                step=choice.step,
            )

    def _unknown(self, choice: Choice, foreign: Sequence[CheckpointSet]) -> str:
        """Why this choice is the operator's while the state database cannot be read: without it a run looks new, and
        checkpoints that were adopted look foreign. Empty where it is podwatch's."""
        why = self.tools.guard.blocked_reason(Mutation.FRESH_START)
        if why and choice.step is None:
            return f"no fresh start now: {why}"
        if why and any(s.complete and s.step > (choice.step or 0) for s in foreign):
            return f"whether a checkpoint above step {choice.step} belongs to this run is not known: {why}"
        return ""

    async def misfit(self, step: int | None) -> str:
        """Why the trainer that the command starts will surely not load this set, which is here; empty if it may. A
        person who names the step decides otherwise."""
        tools = self.tools
        layout = tools.layout
        if step is None or layout.reshards:
            return ""
        asked = layout.processes(tools.settings.trainer.command)
        saved = None if asked is None else await tools.blocking(saved_by, layout, step)
        return other_world(saved, asked, counts_all=layout.counts_all)

    async def still_there(self, choice: Choice) -> bool:
        """The chosen set is here and whole, now that it is protected. A fetched one was verified just now, and the
        catalogue waits until it has settled."""
        if choice.step is None or choice.source == "store":
            return True
        return any(s.step == choice.step and s.complete for s in await self._rescan())

    async def _rescan(self) -> tuple[CheckpointSet, ...]:
        return await self.tools.blocking(partial(self.tools.catalogue.rescan, writers_ended=self.writers_ended))

    async def _remote(self) -> tuple[tuple[RemoteSave, ...], str]:
        if self.tools.restore is None:
            return (), ""
        if self.failed_fetches >= FETCH_TRIES:
            return (), f"{self.failed_fetches} fetches failed"
        try:
            newest = await self.tools.restore.newest(frozenset(self.memory.refused))
        except (PodwatchError, OSError) as error:  # a call that hangs ends in a TimeoutError
            return (), str(error)
        return ((newest,) if newest is not None else ()), ""

    async def _store_must_be_empty(self) -> bool:
        """This pod has trained before and never published or fetched anything: the store has nothing of this run that
        we would lose."""
        record = self.tools.record.current
        started = record is not None and record.last_start is not None
        return started and not await self.tools.journal.run(Journal.published)
