"""Choose the step that the next start resumes from: checkpoints of this run on this pod, those in the store, and
whether the configured command can load them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from podwatch.checkpoints.layouts.base import Layout
from podwatch.checkpoints.layouts.resume_flags import Resumed, resumed
from podwatch.checkpoints.scan import scan_part
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.errors import PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import Severity
from podwatch.domain.mutation_guard import Mutation
from podwatch.domain.run import RunRecord
from podwatch.domain.snapshot import Supervision
from podwatch.journal import Journal
from podwatch.policy.lineage import departure
from podwatch.policy.resume import Choice, Ownership, RemoteSave, awaited, choose, other_world
from podwatch.recovery import remembered as memory_module
from podwatch.recovery.lineages import opened
from podwatch.recovery.remembered import Memory
from podwatch.recovery.state import Phase, Tools
from podwatch.system import procfs
from podwatch.trainer.base import TrainerHandle

# -- choice of the step ----------------------------------------------------------------------------------------------

SETTLE_LOOK = 0.05
"""Minimum seconds between the two equal scans that a checkpoint needs to count as complete."""
SETTLE_POLL = 1.0
"""Seconds between two scans of a checkpoint that a start waits for; status counts the remaining time down."""
SETTLE_PATIENCE = 600.0
"""Seconds beyond the longest settle time: a checkpoint that still changes then has a writer."""
FETCH_TRIES = 3
"""Failed downloads after which an older checkpoint on this pod is better: waiting for the store wastes GPU time."""


class StoreUnknown(PodwatchError):  # noqa: N818
    """No usable checkpoint is here and the store did not answer: a fresh start could discard the run."""


class NothingToResume(PodwatchError):  # noqa: N818
    """Checkpoints exist, but none can be used: the operator has to decide."""

    def __init__(self, choice: Choice, fix: str = "") -> None:
        super().__init__(
            choice.reason,
            fix=fix or "see `podwatch checkpoints`, then run `podwatch start --step N` or `podwatch start --fresh`",
        )
        self.choice = choice


def unfit(choice: Choice, why: str) -> Choice:
    """Return the choice refused: the trainer would fail to load it, and an older checkpoint of the same world size
    too."""
    return replace(choice, source="none", reason=f"step {choice.step} cannot be resumed from: {why}")


def still_written(settling: CheckpointSet) -> Choice:
    reason = f"step {settling.step} keeps changing: {settling.reason}. Another process writes to it"
    return Choice(None, "none", "", reason, ((settling.step, settling.reason),))


class Choosing:
    """Chooses the step of a start. ``show`` displays phase and detail. Writes only the run record and the journal."""

    def __init__(self, tools: Tools, memory: Memory, show: Callable[[Phase, str], None]) -> None:
        self.tools = tools
        self.memory = memory
        self.show = show
        self.restoring: int | None = None
        self.failed_fetches = 0
        self.fetched: frozenset[tuple[int, str]] = frozenset()
        """(step, save_id) of every checkpoint that came from the store, as last read from the journal."""
        self.writers_ended = False
        """podwatch saw the process tree that wrote here end, and has started nothing since."""
        self._followed = ""
        self._resumed_of: tuple[str, Resumed | None] = ("", None)

    async def remember(self) -> None:
        await memory_module.save(self.tools.journal, self.tools.clock, self.memory)

    async def save_record(self, record: RunRecord) -> None:
        await self.tools.blocking(self.tools.record.save, record)

    async def ours(self) -> tuple[list[CheckpointSet], list[CheckpointSet]]:
        """Rescan; return (checkpoints of this run, checkpoints of an unknown run)."""
        sets = await self._rescan()
        published = await self.tools.journal.run(Journal.published)
        self.fetched = frozenset((p.step, p.save_id) for p in published if p.restored)
        return [s for s in sets if self.owns(s)], [s for s in sets if not self.owns(s)]

    async def descend(self, handle: TrainerHandle) -> bool:
        """Open a new lineage if an operator's own start has left the current one (see ``policy.lineage``); return
        whether it has. Every checkpoint that the start has completed so far counts. Idempotent."""
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
            f" {left.newest}): {left.why}. podwatch follows it; the checkpoints above now belong to an earlier lineage"
            + (f". `podwatch restart --step {left.newest}` returns to it" if left.can_return else ""),
            Severity.WARNING,
            step=left.step,
            newest=left.newest,
            lineage=new.lineage.id,
        )
        return True

    def _resumed(self, handle: TrainerHandle) -> Resumed | None:
        """Return what the attached trainer resumed from. Blocks. Kept per start, because the process may end before its
        checkpoints are judged."""
        if self._resumed_of[0] != handle.start_id or self._resumed_of[1] is None:
            pid = handle.launcher.pid
            at = procfs.working_directory(pid)
            cwd = None if at is None else Path(at)
            found = resumed(self.tools.layout, procfs.command(pid), cwd=cwd, began_wall=handle.started_wall)
            self._resumed_of = (handle.start_id, found)
        return self._resumed_of[1]

    def owns(self, found: CheckpointSet) -> bool:
        """Return whether this checkpoint belongs to the run; False before the run record is read."""
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
        """Return the step to start from. Raises StoreUnknown or NothingToResume rather than start fresh by accident.

        With ``wait``, waits for a newer checkpoint that is whole and still settling; status shows that meanwhile.
        """
        tools = self.tools
        times = tools.settings.checkpoints
        end = tools.clock.monotonic() + SETTLE_PATIENCE + 2 * max(times.settle, times.settle_weak, times.settle_tracker)
        if fresh:
            return Choice(None, "fresh", "", "a fresh start was requested")
        record = tools.record.current
        # A lineage with a parent was opened here on request (`clean`), even if nothing was started in it yet.
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
                self.show(
                    Phase.LOOKING,
                    f"step {settling.step} looks complete; {left:.0f} s more to see that it no longer changes",
                )
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
                    why = f"step {max(behind)} seems to be behind a symbolic link, and podwatch follows no link"
                    fix = (
                        "set trainer.checkpoint_dir to the directory that it points to, or run `podwatch start --fresh`"
                    )
                    raise NothingToResume(replace(choice, source="none", reason=why), fix)
                self.failed_fetches = 0  # no checkpoint is here, so only the store can help: ask it again
                if trouble and not await self._store_must_be_empty():
                    raise StoreUnknown(
                        f"no checkpoint of this run is on this pod, and the store did not provide one: {trouble}",
                        fix="make the store reachable, or run `podwatch start --fresh` to start at step 0",
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
                f"step {choice.step} is damaged, so podwatch does not use it: {reasons[0]}",
                Severity.WARNING,
                step=choice.step,
            )

    def _unknown(self, choice: Choice, foreign: Sequence[CheckpointSet]) -> str:
        """Return why the operator has to make this choice while the state database cannot be read (without it a run
        looks new, and adopted checkpoints look foreign); empty if podwatch can make it."""
        why = self.tools.guard.blocked_reason(Mutation.FRESH_START)
        if why and choice.step is None:
            return f"podwatch does not start fresh: {why}"
        if why and any(s.complete and s.step > (choice.step or 0) for s in foreign):
            return f"podwatch cannot tell whether a checkpoint above step {choice.step} belongs to this run: {why}"
        return ""

    async def misfit(self, step: int | None) -> str:
        """Return why the configured command cannot load this local checkpoint; empty if it can, or if that is unknown.
        A step that the operator named is not checked."""
        tools = self.tools
        layout = tools.layout
        if step is None or layout.reshards:
            return ""
        asked = layout.processes(tools.settings.trainer.command)
        saved = None if asked is None else await tools.blocking(saved_by, layout, step)
        return other_world(saved, asked, counts_all=layout.counts_all)

    async def still_there(self, choice: Choice) -> bool:
        """Return whether the chosen checkpoint still exists and is complete, now that it is protected. A fetched one
        was just verified; the catalogue calls it complete only once it has settled."""
        if choice.step is None or choice.source == "store":
            return True
        return any(s.step == choice.step and s.complete for s in await self._rescan())

    async def _rescan(self) -> tuple[CheckpointSet, ...]:
        return await self.tools.blocking(partial(self.tools.catalogue.rescan, writers_ended=self.writers_ended))

    async def _remote(self) -> tuple[tuple[RemoteSave, ...], str]:
        if self.tools.store.restore is None:
            return (), ""
        if self.failed_fetches >= FETCH_TRIES:
            return (), f"{self.failed_fetches} fetches failed"
        try:
            newest = await self.tools.store.restore.newest(frozenset(self.memory.refused))
        except (PodwatchError, OSError) as error:  # a call that hangs ends in a TimeoutError
            return (), str(error)
        return ((newest,) if newest is not None else ()), ""

    async def _store_must_be_empty(self) -> bool:
        """Return whether this pod has trained before and never published or fetched anything: then the store holds
        nothing of this run to lose."""
        record = self.tools.record.current
        started = record is not None and record.last_start is not None
        return started and not await self.tools.journal.run(Journal.published)


# -- number of processes that wrote a checkpoint ---------------------------------------------------------------------


def saved_by(layout: Layout, step: int) -> int | None:
    """The world size that the layout's rule finds in the checkpoint; None: not known, absent or not readable.
    Blocks."""
    try:
        parts = layout.steps().get(step)
    except OSError:
        return None
    return layout.judge(step, [scan_part(p).found for p in parts]).world_size if parts else None
