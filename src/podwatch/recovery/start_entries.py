"""Enters the starts of training into run.json: podwatch's own, an operator's, and those of other pods."""

from dataclasses import replace

from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.run_state import RunState
from podwatch.domain.snapshot import Supervision
from podwatch.domain.starts import StartedBy, Starts, TrainerStart, changed_start, find_start, with_start
from podwatch.recovery import start_plan
from podwatch.recovery.state import Tools
from podwatch.trainer.trainer_handle import TrainerHandle

CLOCK_SET_BACK = 2.0
"""Seconds by which a start must have begun earlier than recorded. Some file systems round times to so many."""


async def first_start(tools: Tools) -> TrainerStart:
    """The begin of the guard."""
    start_id = start_plan.new_id()
    wall = await tools.blocking(tools.run.files_clock.now)
    return TrainerStart(start_id, wall=wall, by=StartedBy.GUARD, proved=False, branch=start_id)


async def enter_running(tools: Tools, handle: TrainerHandle) -> None:
    """Make sure that the start of this trainer is recorded, and not as later than the clock of the file system says
    now: one that was set back must not give its saves to the start before. Idempotent. Raises HostError."""
    if not tools.run_file.known:
        return
    began = await tools.blocking(tools.run.files_clock.now) - handle.age
    found = find_start(handle.start_id, tools.run_file.current.starts)
    if found is None:
        await tools.run_file.edit(lambda run: replace(run, starts=_entered(run.starts, handle, began)))
        await tools.blocking(tools.catalogue.rescan)
        await tools.blocking(tools.catalogue.record_starts)
    elif began < found.wall - CLOCK_SET_BACK:
        await tools.run_file.edit(lambda run: replace(run, starts=changed_start(run.starts, found.id, wall=began)))


def _entered(starts: Starts, handle: TrainerHandle, began: float) -> tuple[TrainerStart, ...]:
    by = StartedBy.OPERATOR if handle.supervision is Supervision.ATTACH else StartedBy.PODWATCH
    branch = starts[-1].branch if starts else start_plan.new_id()
    return with_start(starts, TrainerStart(handle.start_id, wall=began, by=by, proved=False, branch=branch))


def entered(
    run: RunState, start: TrainerStart, *, chosen: CheckpointSet | None, back: bool, opens: bool, known_branch: str
) -> RunState:
    """Return ``run`` with podwatch's own ``start``. ``chosen``: the checkpoint that it resumes from. ``back``: it goes
    back on purpose; ``opens``: it opens a branch. ``known_branch``: the branch in the store that this pod's first start
    continues."""
    starts = run.starts
    if known_branch and run.last_start is None and all(s.branch != known_branch for s in starts):
        starts = tuple(replace(s, branch=known_branch) for s in starts)
    branch = starts[-1].branch if starts else start.id
    if chosen is not None and chosen.start_id and find_start(chosen.start_id, starts) is None:
        starts = with_start(starts, TrainerStart(chosen.start_id, by=StartedBy.OTHER_POD, proved=False, branch=branch))
    of = chosen.start_id if back and chosen is not None and chosen.earlier else ""
    return replace(run, starts=with_start(starts, replace(start, branch=start.id if opens else branch, of=of)))
