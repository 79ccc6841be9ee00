"""Notices an operator's own start that has left the current lineage."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from podwatch.checkpoints.lineage import departure
from podwatch.checkpoints.resume import Resumed, resumed
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.errors import PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import FindingKind, Severity
from podwatch.domain.snapshot import Supervision
from podwatch.domain.starts import changed_start, find_start
from podwatch.recovery import start_plan
from podwatch.recovery.context import RecoveryContext
from podwatch.recovery.start_entries import CLOCK_SET_BACK, enter_running
from podwatch.system import procfs
from podwatch.trainer.trainer_handle import TrainerHandle


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
        """Open a new lineage if an operator's own start has left the current one (see ``checkpoints.lineage``); return
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
