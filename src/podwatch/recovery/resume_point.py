"""Choose the step that the next start resumes from: checkpoints of this run on this pod, those in the store, and
whether the configured command can load them.

No other module opens a new lineage of the run.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from podwatch.checkpoints.known_checkpoints import CHANGED, InspectionUnanswered
from podwatch.checkpoints.layout import Layout
from podwatch.checkpoints.resume import Resumed, resumed
from podwatch.checkpoints.scan import scan_part
from podwatch.domain.checkpoint import CheckpointSet, newest_complete
from podwatch.domain.errors import HostError, PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import FindingKind, Severity
from podwatch.domain.run import Mutation
from podwatch.domain.snapshot import Supervision
from podwatch.domain.starts import changed_start, find_start
from podwatch.domain.stored_checkpoint import StoredCheckpoint
from podwatch.policy.lineage import departure
from podwatch.recovery import start_plan
from podwatch.recovery.choose import (
    BEHIND_A_LINK,
    DECIDE,
    INSPECTIONS,
    SETTLE_PATIENCE,
    Choice,
    awaited,
    choose,
    other_world,
    unanswered,
)
from podwatch.recovery.context import RecoveryContext
from podwatch.recovery.start_entries import CLOCK_SET_BACK, enter_running
from podwatch.recovery.state import Phase
from podwatch.system import procfs
from podwatch.trainer.base import TrainerHandle

LOOK_SECONDS = 4.0
"""How long a restart waits for the store's newest checkpoint while this pod has a complete one: an unreachable store is
retried for minutes, and idle GPUs cost money. B2 answers the four requests within one second."""
ONLY_STORE_SECONDS = 180.0
"""The same while this pod has no complete checkpoint: only the store can provide one."""


class Lineages:
    """Notices an operator's own start that has left the current lineage, as its checkpoints show."""

    def __init__(self, context: RecoveryContext) -> None:
        self.context = context
        self.check: asyncio.Task[None] | None = None
        self._checked: tuple[CheckpointSet, ...] | None = None
        """The checkpoints that the last check saw."""
        self._resumed_of: tuple[str, Resumed | None] = ("", None)
        self._offset = float("-inf")
        """Of the wall clock from the monotonic one, at the last call."""
        self._set_back = False
        """The wall clock was set back, and the recorded begin of the start was not compared with it yet."""

    def check_soon(self) -> None:
        """Check whether an operator's trainer has left the current lineage, as its saves show, and whether the clock
        was set back during a start. Called at each tick of the sensing loop; never blocks."""
        sets, handle, clock = self.context.tools.catalogue.sets, self.context.handle, self.context.tools.clock
        before, self._offset = self._offset, clock.wall() - clock.monotonic()
        self._set_back = self._set_back or self._offset < before - CLOCK_SET_BACK
        attached = handle is not None and handle.supervision is Supervision.ATTACH
        file = self.context.tools.run_file
        unknown = handle is not None and file.known and file.current.start(handle.start_id) is None
        if handle is None or not (self._set_back or unknown or (attached and sets != self._checked)):
            return
        if self.check is None or self.check.done():
            self.check = asyncio.create_task(self._check(handle, sets), name="podwatch-lineage")

    async def _check(self, handle: TrainerHandle, sets: tuple[CheckpointSet, ...]) -> None:
        try:
            if self._set_back or self.context.run.start(handle.start_id) is None:
                await enter_running(self.context.tools, handle)
                self._set_back = False
            await self.descend(handle)
        except (OSError, PodwatchError) as error:
            text = f"podwatch cannot check or record whether training has left its lineage: {error}"
            self.context.notes.add(FindingKind.EARLIER_BRANCH, Severity.WARNING, text, subject="lineage")
        else:
            self.context.notes.drop("lineage")
            self._checked = sets

    async def close(self) -> None:
        if self.check is not None:
            self.check.cancel()
            await asyncio.gather(self.check, return_exceptions=True)

    async def descend(self, handle: TrainerHandle) -> bool:
        """Open a new lineage if an operator's own start has left the current one (see ``policy.lineage``); return
        whether it has. Every checkpoint that the start has completed so far counts. Idempotent."""
        tools = self.context.tools
        if not tools.run_file.known or handle.supervision is not Supervision.ATTACH:
            return False
        sets = [s for s in await self.context.rescan() if s.ours]
        named = await tools.blocking(self._resumed, handle)
        start = find_start(handle.start_id, self.context.run.starts)
        if start is None:
            return False
        lineage = self.context.run.lineage
        left = departure(
            sets,
            start,
            resumed=named.step if named is not None else None,
            named_by=named.named_by if named is not None else "",
            stored=[
                saved.step
                for saved in tools.stored
                if saved.whole and saved.lineage == lineage.id and saved.wall < handle.started_wall
            ],
        )
        if left is None:
            return False
        opened: dict[str, Any] = {
            "from_step": left.step,
            "proved": True,
            "branch": start_plan.new_id(),
            "left_step": left.newest,
            "why": left.why,
        }
        new = await tools.run_file.edit(lambda run: replace(run, starts=changed_start(run.starts, start.id, **opened)))
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
            tools, argv = self.context.tools, procfs.command(pid)
            own = tools.settings.trainer.resume_args
            found = resumed(tools.layout, argv, override=own, cwd=cwd, began_wall=handle.started_wall)
            self._resumed_of = (handle.start_id, found)
        return self._resumed_of[1]


# -- choice of the step ----------------------------------------------------------------------------------------------

SETTLE_LOOK = 0.05
"""Minimum seconds between the two equal scans that a checkpoint needs to count as complete."""
SETTLE_POLL = 1.0
"""Seconds between two scans of a checkpoint that a start waits for; status counts the remaining time down."""
FETCH_TRIES = 3
"""Failed downloads after which an older checkpoint on this pod is better: waiting for the store wastes GPU time."""


class StoreUnknown(PodwatchError):  # noqa: N818
    """No usable checkpoint is here and the store did not answer: a fresh start could discard the run."""


class NothingToResume(PodwatchError):  # noqa: N818
    """Checkpoints exist, but none can be used: the operator has to decide."""

    def __init__(self, choice: Choice, fix: str = "") -> None:
        super().__init__(
            choice.reason,
            fix=fix or DECIDE,
        )
        self.choice = choice


class NotKnownNow(NothingToResume):
    """The operator has to decide only while the state database cannot be read."""


def unfit(choice: Choice, why: str) -> Choice:
    """Return the choice refused: the trainer would fail to load it, and an older checkpoint of the same world size
    too."""
    return replace(choice, source="none", reason=f"step {choice.step} cannot be resumed from: {why}")


def not_inspected(choice: Choice, step: int, why: str) -> Choice:
    """Return the choice refused: whether the newest checkpoint is whole is not known."""
    reason = f"step {step} may be complete, but no inspection gave an answer: {why}"
    return replace(choice, source="none", reason=reason)


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
        self.damaged_in_store: dict[tuple[int, str], str] = {}
        """(step, save_id) of what a fetch found damaged, and how: another download would be the same."""
        self.missing_in_store: set[tuple[int, str]] = set()
        """(step, save_id) of what was deleted while it was fetched."""

    async def ours(self) -> tuple[list[CheckpointSet], list[CheckpointSet]]:
        """Rescan; return (checkpoints of this run, checkpoints of an unknown run)."""
        sets = await self.context.rescan()
        return [s for s in sets if s.ours], [s for s in sets if not s.ours]

    def _require_list(self) -> None:
        """Raises HostError where the last rescan could not list the checkpoints: by an earlier list, what was saved
        since would be passed over and moved to quarantine."""
        if why := self.context.tools.catalogue.unlisted:
            raise HostError(
                f"the checkpoints cannot be listed: {why}",
                fix="give podwatch's user access to the directory, or repair its disk; podwatch retries automatically",
            )

    async def choose(
        self, *, wanted: int | None = None, fresh: bool = False, below: int | None = None, wait: bool = True
    ) -> Choice:
        """Return the step to start from. Raises StoreUnknown or NothingToResume rather than start fresh by accident,
        HostError while the checkpoints cannot be listed.

        With ``wait``, waits for a newer checkpoint that is whole and still settling; status shows that meanwhile.
        """
        tools = self.context.tools
        times = tools.settings.checkpoints
        end = tools.clock.monotonic() + SETTLE_PATIENCE + 2 * max(times.settle, times.settle_weak, times.settle_tracker)
        if fresh:
            return Choice(None, "fresh", "", "a fresh start was requested")
        run = self.context.run
        # A lineage with a parent was opened here on request (`clean`), even if nothing was started in it yet.
        own = run.last_start is not None or run.lineage.parent != ""
        lineage = run.lineage if own else None
        unsound: dict[int, str] = {}
        while True:
            ours, foreign = await self.ours()
            self._require_list()
            use = ours or foreign
            settling = awaited(use, refused=self.context.run.refused, wanted=wanted, below=below) if wait else None
            if settling is not None:
                if tools.clock.monotonic() > end:
                    raise NothingToResume(still_written(settling))
                left = settling.settles_in or 0.0
                waits = f"step {settling.step} looks complete; {left:.0f} s more to see that it no longer changes"
                self.context.show(Phase.LOOKING, waits)
                await tools.clock.sleep(min(SETTLE_POLL, max(SETTLE_LOOK, left)))
                continue
            unsure = None if wanted is not None else unanswered(use, refused=self.context.run.refused, below=below)
            if unsure is not None and wait and unsure.unanswered < INSPECTIONS:
                count = f"{unsure.unanswered} of {INSPECTIONS} inspections gave no answer"
                self.context.show(Phase.LOOKING, f"step {unsure.step} may be complete; {count}: {unsure.reason}")
                await tools.clock.sleep(SETTLE_POLL)
                continue
            remote, trouble = await self._remote(wanted)
            choice = choose(
                [s for s in use if s.step not in unsound],
                remote,
                lineage=lineage,
                refused=self.context.run.refused,
                adopted=bool(ours) or not foreign,
                wanted=wanted,
                below=below,
                ancestry=self.context.run.ancestry,
            )
            choice = replace(choice, rejected=(*unsound.items(), *choice.rejected))
            if unsure is not None and (choice.step is None or choice.step < unsure.step):
                raise NothingToResume(not_inspected(choice, unsure.step, unsure.reason))
            if choice.source == "none":
                raise _unusable(choice, trouble, wanted, use)
            if unknown := self._unknown(choice, foreign):
                raise NotKnownNow(replace(choice, source="none", reason=unknown))
            if choice.source == "fresh":
                if behind := tools.catalogue.out_of_reach:
                    why = f"step {max(behind)} seems to be behind a symbolic link, and podwatch follows no link"
                    raise NothingToResume(replace(choice, source="none", reason=why), BEHIND_A_LINK)
                self.failed_fetches = 0  # no checkpoint is here, so only the store can help: ask it again
                if trouble and not self._store_must_be_empty():
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
            reasons = await self._damage(choice)
            if not reasons:
                if wanted is None and (why := await self.misfit(choice.step)):
                    raise NothingToResume(unfit(choice, why))
                return choice
            if reasons == (CHANGED,) and tools.clock.monotonic() <= end:  # the next rescan judges what it is now
                await tools.clock.sleep(SETTLE_LOOK)
                continue
            unsound[choice.step] = f"damaged: {reasons[0]}"
            tools.say(
                EventName.CHECKPOINT_DAMAGED,
                f"step {choice.step} is damaged, so podwatch does not use it: {reasons[0]}",
                Severity.WARNING,
                step=choice.step,
            )

    def refuse_fetched(self, choice: Choice, why: str) -> None:
        """Do not fetch this save again: it was damaged when it was stored, or became so since. An older one is used."""
        assert choice.step is not None
        self.damaged_in_store[choice.step, choice.save_id] = why
        self.context.tools.say(
            EventName.CHECKPOINT_DAMAGED,
            f"step {choice.step} is damaged in the store, so podwatch continues from an older checkpoint: {why}."
            f" `podwatch start --step {choice.step}` tries it all the same",
            Severity.WARNING,
            step=choice.step,
        )

    def note_missing(self, choice: Choice) -> bool:
        """A save was deleted from the store while it was fetched: a newer one has replaced it. Return whether it is the
        first time: a store that shows it and does not have it is no reason to wait."""
        assert choice.step is not None
        key = (choice.step, choice.save_id)
        if key in self.missing_in_store:
            return False
        self.missing_in_store.add(key)
        return True

    async def _damage(self, choice: Choice) -> tuple[str, ...]:
        """Return the reasons not to start from the chosen checkpoint on this pod. NothingToResume if no inspection
        gives an answer: an older one would lose steps for a child that was killed."""
        tools = self.context.tools
        assert choice.step is not None
        for count in range(1, INSPECTIONS + 1):
            try:
                return await tools.blocking(tools.catalogue.verify, choice.step)
            except InspectionUnanswered as error:
                unanswered = error
            waits = f"{count} of {INSPECTIONS} inspections gave no answer: {unanswered.what}"
            self.context.show(Phase.LOOKING, f"step {choice.step} may be complete; {waits}")
            await tools.clock.sleep(SETTLE_POLL)
        raise NothingToResume(not_inspected(choice, choice.step, unanswered.what))

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

    async def still_holds(self, choice: Choice) -> bool:
        """Return whether the chosen checkpoint still exists and is complete, now that it is protected, and whether
        every newer one was judged when it was chosen: the start moves those to quarantine. A fetched one was just
        verified; the catalogue calls it complete only once it has settled."""
        run = self.context.run
        if choice.source == "store" or run.fresh:
            return True
        sets = await self.context.rescan()
        self._require_list()
        judged = {step for step, _ in choice.rejected}
        above = -1 if choice.step is None else choice.step
        newer = (s for s in sets if s.step > above and s.step not in judged and s.ours)
        if run.wanted is None and any(s.complete or s.settles_in is not None for s in newer):
            return False
        return choice.step is None or any(s.step == choice.step and s.complete for s in sets)

    async def _remote(self, wanted: int | None) -> tuple[tuple[StoredCheckpoint, ...], str]:
        """The checkpoints in the store, the newest first, or those of the step that the operator named; and why the
        store did not show them."""
        restore, here = self.context.tools.store.restore, newest_complete(self.context.tools.catalogue.sets)
        if restore is None:
            return (), ""
        if self.failed_fetches >= FETCH_TRIES:
            return (), f"{self.failed_fetches} fetches failed"
        try:
            found = await restore.saves(wanted, within=ONLY_STORE_SECONDS if here is None else LOOK_SECONDS)
        except (PodwatchError, OSError) as error:  # a call that hangs ends in a TimeoutError
            return (), str(error)
        damaged = {} if wanted is not None else self.damaged_in_store
        return tuple(
            StoredCheckpoint(
                save.step, save.save_id, save.manifest.lineage if save.manifest is not None else "", *save.order,
                problem=save.problem or damaged.get(save.key, ""),
            )
            for save in found
        ), ""  # fmt: skip

    def _store_must_be_empty(self) -> bool:
        """Return whether this pod has trained before, and has never seen a save of this run in the store: then the
        store holds nothing of this run to lose."""
        run = self.context.run
        return run.last_start is not None and not run.stored


def _unusable(choice: Choice, trouble: str, wanted: int | None, here: Sequence[CheckpointSet]) -> PodwatchError:
    """``trouble``: why the store did not provide ``wanted``, the step that an operator named."""
    if wanted is None or not trouble or any(s.step == wanted for s in here):
        return NothingToResume(choice)
    return StoreUnknown(
        f"step {wanted} is not on this pod, and the store did not provide it: {trouble}",
        fix="make the store reachable, or choose a step that `podwatch checkpoints` shows on this pod",
    )


# -- whether two nodes see the same checkpoint ------------------------------------------------------------------------


def files_of(layout: Layout, step: int) -> str:
    """A hash of the names and sizes of all files of the checkpoint that a resume needs; empty: absent or not readable.
    Without times, which clients of one network file system round differently. Blocks."""
    try:
        scans = [scan_part(part) for part in layout.steps().get(step, ()) if part.required]
    except OSError:
        return ""
    if any(scan.error for scan in scans) or not any(scan.found.present for scan in scans):
        return ""
    digest = hashlib.sha256()
    for found in (scan.found for scan in scans):
        digest.update(f"\0{found.part.name}\0{found.present}".encode())
        for file in found.files:
            digest.update(f"\0{file.path}\0{file.size}".encode("utf-8", "surrogateescape"))
        for link in found.symlinks:
            digest.update(f"\0{link.path}\0{link.target}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


# -- number of processes that wrote a checkpoint ---------------------------------------------------------------------


def saved_by(layout: Layout, step: int) -> int | None:
    """The world size that the layout's rule finds in the checkpoint; None: not known, absent or not readable.
    Blocks."""
    try:
        parts = layout.steps().get(step)
    except OSError:
        return None
    return layout.judge(step, [scan_part(p).found for p in parts]).world_size if parts else None
