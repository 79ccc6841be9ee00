"""Open a new lineage of the run. No other module does."""

import asyncio
from dataclasses import replace
from pathlib import Path

from podwatch.checkpoints.layouts.resume_flags import Resumed, resumed
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.errors import PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import FindingKind, Severity
from podwatch.domain.run import EarlierSave, Lineage, RunRecord
from podwatch.domain.snapshot import Supervision
from podwatch.journal import Journal
from podwatch.policy.lineage import departure
from podwatch.recovery import start_plan
from podwatch.recovery.context import RecoveryContext
from podwatch.recovery.remembered import Memory
from podwatch.system import procfs
from podwatch.trainer.base import TrainerHandle


def opened(
    record: RunRecord,
    memory: Memory,
    step: int | None,
    *,
    parent: str = "",
    earlier: tuple[EarlierSave, ...] | None = None,
    left_step: int | None = None,
    opened_wall: float = 0.0,
) -> RunRecord:
    """Return ``record`` with a new lineage that branches off ``parent`` (default: the current one) at ``step`` (None:
    at the beginning of training). Updates ``memory`` with how far older lineages belong to it; writes nothing to disk.
    ``earlier``: the local saves that stay behind (None: as before). ``left_step``, ``opened_wall``: see ``Lineage``."""
    left = parent or record.lineage.id
    if step is None:
        memory.ancestry = {}
    else:
        memory.ancestry = {line: min(last, step) for line, last in memory.ancestry.items()}
        memory.ancestry[left] = step
    lineage = Lineage(start_plan.new_id(), left, step, left_step, opened_wall)
    return replace(record, lineage=lineage, earlier=record.earlier if earlier is None else earlier)


class Lineages:
    """Notices an operator's own start that has left the current lineage, as its checkpoints show."""

    def __init__(self, context: RecoveryContext) -> None:
        self.context = context
        self.check: asyncio.Task[None] | None = None
        self._checked: tuple[CheckpointSet, ...] | None = None
        """The checkpoints that the last check saw."""
        self._resumed_of: tuple[str, Resumed | None] = ("", None)

    def check_soon(self) -> None:
        """Check whether an operator's trainer has left the current lineage, as its saves show. Called at each tick of
        the sensing loop; never blocks."""
        sets, handle = self.context.tools.catalogue.sets, self.context.handle
        if handle is None or handle.supervision is not Supervision.ATTACH or sets == self._checked:
            return
        if self.check is None or self.check.done():
            self.check = asyncio.create_task(self._check(handle, sets), name="podwatch-lineage")

    async def _check(self, handle: TrainerHandle, sets: tuple[CheckpointSet, ...]) -> None:
        try:
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
        tools, record = self.context.tools, self.context.tools.record.current
        if record is None or handle.supervision is not Supervision.ATTACH:
            return False
        sets = [s for s in await self.context.rescan() if self.context.owns(s)]
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
            self.context.memory,
            left.step,
            earlier=(*record.earlier, *left.left),
            left_step=left.newest,
            opened_wall=handle.started_wall,
        )
        await self.context.save_record(new)
        await self.context.remember()
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
            found = resumed(self.context.tools.layout, procfs.command(pid), cwd=cwd, began_wall=handle.started_wall)
            self._resumed_of = (handle.start_id, found)
        return self._resumed_of[1]
