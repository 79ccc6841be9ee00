"""``podwatch clean``: move everything that an old run left behind to quarantine, so that the next start is fresh.

Nothing is deleted, and ``podwatch quarantine return`` undoes it. A new lineage starts, so that podwatch does not fetch
the old run's checkpoints from the store again.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from podwatch.domain.errors import Busy
from podwatch.domain.finding import FindingKind
from podwatch.domain.run_state import RestartHistory, RunState
from podwatch.domain.snapshot import Desired
from podwatch.domain.starts import StartedBy, with_start
from podwatch.recovery import quarantine
from podwatch.recovery.operation_runner import read_run, recall, reconcile, replace_other_run
from podwatch.recovery.recovery import Recovery
from podwatch.recovery.start_entries import first_start
from podwatch.trainer.base import Look

WHY = "everything, for a fresh start"


@dataclass(frozen=True, slots=True)
class Cleaned:
    """``number`` is the quarantine's, for ``podwatch quarantine return``; None if there was nothing to move."""

    number: int | None
    paths: tuple[Path, ...]
    starts: bool
    """Training is wanted, so a fresh start follows automatically."""


async def request_clean(recovery: Recovery) -> Cleaned:
    """Clean in a running daemon, on an operator's request. Raises Busy, and changes nothing, while training runs."""
    await _refuse_while_running(recovery, None)
    async with recovery.runner.by_hand():
        await recovery.runner.interrupt()
        await _refuse_while_running(recovery, await recovery.context.tools.launcher.look())
        cleaned = await _clean(recovery)
        recovery.context.request_pending = False  # the next operation is podwatch's own: it respects a pause
        recovery.runner.spawn(recovery.operations.carry_on)
        return cleaned


async def clean_alone(recovery: Recovery) -> Cleaned:
    """Clean without a daemon; the caller holds the daemon's lock. Replaces the record of another run, of which nothing
    is left here."""
    tools = recovery.context.tools
    look = await tools.launcher.look()
    await _refuse_while_running(recovery, look)
    await read_run(recovery.context)
    await replace_other_run(recovery.context)
    await recall(recovery.context)
    await reconcile(recovery.context, look)
    recovery.context.handle = look.handle
    return await _clean(recovery)


async def _refuse_while_running(recovery: Recovery, look: Look | None) -> None:
    handle = recovery.context.handle or (look.handle if look is not None else None)
    if handle is not None and await handle.exit_status() is None:
        raise Busy(
            f"training is running (pid {handle.launcher.pid})", where="clean", fix="`podwatch stop-training` first"
        )
    if look is not None and look.trees:
        pids = ", ".join(f"{tree.launcher.pid} ({tree.reason})" for tree in look.trees)
        raise Busy(
            f"a process that may be this run's training is running, and podwatch did not start it: {pids}",
            where="clean",
            fix="stop it first",
        )
    if look is not None and look.kept:
        raise Busy(look.kept, where="clean", fix="stop that training first")


async def _clean(recovery: Recovery) -> Cleaned:
    tools = recovery.context.tools
    if recovery.context.handle is not None:  # it has ended and is not released yet
        await recovery.stops.stop_tree(recovery.context.handle, "cleaning up after a trainer that has ended")
        recovery.context.forget()
    for _ in range(2):  # two scans make a checkpoint complete, which protects it in quarantine
        await tools.blocking(tools.catalogue.rescan)
    paths = await tools.blocking(tools.layout.ahead_of, None)
    number = await tools.blocking(quarantine.free_number, tools.workspace) if paths else None
    # Files first: if podwatch is killed in between, the next one finishes the move, and at worst fetches the checkpoint
    # that the store still names.
    await recovery.starter.set_aside(None, paths, WHY)

    start = replace(await first_start(tools), by=StartedBy.CLEAN, proved=True)

    def cleaned(run: RunState) -> RunState:
        run = replace(run, starts=with_start(run.starts, start)) if paths or run.last_start is not None else run
        history = RestartHistory(ever_worked=run.history.ever_worked)
        return replace(run, refused={}, wanted=None, below=None, next_try_wall=None, history=history, adopted="")

    await tools.run_file.edit(cleaned)
    recovery.context.notes.clear(
        FindingKind.GAVE_UP, FindingKind.RESUMED_WRONG, FindingKind.BLOCKED, FindingKind.FOREIGN_CHECKPOINTS
    )
    return Cleaned(number, paths, recovery.desired is Desired.RUNNING)
