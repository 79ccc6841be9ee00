"""Choose the step that the next start resumes from: checkpoints of this run on this pod, those in the store, and
whether the configured command can load them.
"""

from collections.abc import Sequence
from dataclasses import replace

from podwatch.checkpoints.layouts.base import Layout
from podwatch.checkpoints.scan import scan_part
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.errors import PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import Severity
from podwatch.domain.mutation_guard import Mutation
from podwatch.journal import Journal
from podwatch.policy.resume import Choice, RemoteSave, awaited, choose, other_world
from podwatch.recovery.context import RecoveryContext
from podwatch.recovery.state import Phase

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


class ResumeChooser:
    """Chooses the step of a start. Writes nothing."""

    def __init__(self, context: RecoveryContext) -> None:
        self.context = context
        self.failed_fetches = 0
        self.followed = ""
        """The lineage in the store that the chosen checkpoint belongs to; empty if it is on this pod."""

    async def ours(self) -> tuple[list[CheckpointSet], list[CheckpointSet]]:
        """Rescan; return (checkpoints of this run, checkpoints of an unknown run)."""
        sets = await self.context.rescan()
        published = await self.context.tools.journal.run(Journal.published)
        self.context.fetched = frozenset((p.step, p.save_id) for p in published if p.restored)
        return [s for s in sets if self.context.owns(s)], [s for s in sets if not self.context.owns(s)]

    async def choose(
        self, *, wanted: int | None = None, fresh: bool = False, below: int | None = None, wait: bool = True
    ) -> Choice:
        """Return the step to start from. Raises StoreUnknown or NothingToResume rather than start fresh by accident.

        With ``wait``, waits for a newer checkpoint that is whole and still settling; status shows that meanwhile.
        """
        tools = self.context.tools
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
            settling = awaited(use, refused=self.context.memory.refused, wanted=wanted, below=below) if wait else None
            if settling is not None:
                if tools.clock.monotonic() > end:
                    raise NothingToResume(still_written(settling))
                left = settling.settles_in or 0.0
                self.context.show(
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
                refused=self.context.memory.refused,
                adopted=bool(ours) or not foreign,
                wanted=wanted,
                below=below,
                ancestry=self.context.memory.ancestry,
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
                self.followed = next((r.lineage for r in remote if r.step == choice.step), "")
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
        why = self.context.tools.guard.blocked_reason(Mutation.FRESH_START)
        if why and choice.step is None:
            return f"podwatch does not start fresh: {why}"
        if why and any(s.complete and s.step > (choice.step or 0) for s in foreign):
            return f"podwatch cannot tell whether a checkpoint above step {choice.step} belongs to this run: {why}"
        return ""

    async def misfit(self, step: int | None) -> str:
        """Return why the configured command cannot load this local checkpoint; empty if it can, or if that is unknown.
        A step that the operator named is not checked."""
        tools = self.context.tools
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
        return any(s.step == choice.step and s.complete for s in await self.context.rescan())

    async def _remote(self) -> tuple[tuple[RemoteSave, ...], str]:
        if self.context.tools.store.restore is None:
            return (), ""
        if self.failed_fetches >= FETCH_TRIES:
            return (), f"{self.failed_fetches} fetches failed"
        try:
            newest = await self.context.tools.store.restore.newest(frozenset(self.context.memory.refused))
        except (PodwatchError, OSError) as error:  # a call that hangs ends in a TimeoutError
            return (), str(error)
        return ((newest,) if newest is not None else ()), ""

    async def _store_must_be_empty(self) -> bool:
        """Return whether this pod has trained before and never published or fetched anything: then the store holds
        nothing of this run to lose."""
        record = self.context.tools.record.current
        started = record is not None and record.last_start is not None
        return started and not await self.context.tools.journal.run(Journal.published)


# -- number of processes that wrote a checkpoint ---------------------------------------------------------------------


def saved_by(layout: Layout, step: int) -> int | None:
    """The world size that the layout's rule finds in the checkpoint; None: not known, absent or not readable.
    Blocks."""
    try:
        parts = layout.steps().get(step)
    except OSError:
        return None
    return layout.judge(step, [scan_part(p).found for p in parts]).world_size if parts else None
