"""The journaled steps of a start: clear stale files, move to quarantine, start."""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from podwatch.checkpoints.layout import Layout
from podwatch.checkpoints.scan import scan_part
from podwatch.checkpoints.shapes import Tracker
from podwatch.checkpoints.trackers import repair_trackers
from podwatch.domain.errors import Busy, HostError, PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import Severity, counted
from podwatch.domain.run import FROM_STORE
from podwatch.domain.run_state import RunState
from podwatch.domain.secrets import scrub_argv
from podwatch.domain.starts import TrainerStart
from podwatch.journal import Journal
from podwatch.recovery import gpus_and_ports_free, quarantine, stale_files, start_plan
from podwatch.recovery.choose import Choice
from podwatch.recovery.context import Attempt, RecoveryContext
from podwatch.recovery.start_entries import entered
from podwatch.recovery.state import GangStart, Phase, newest_step
from podwatch.system.procfs import patiently
from podwatch.trainer.start_and_adopt import CannotExecute
from podwatch.trainer.trainer_handle import TrainerHandle

LITTER_SECONDS = 30.0
"""Limit for finding stale files; a start does not wait longer for it."""
VISIBLE_SECONDS, VISIBLE_POLL = 120.0, 0.5
"""NFS caches a directory for at most 60 s."""
FIRST_BASE_AT_MOST = 4 << 30
"""Bytes that may be in use before our very first start without being taken for a leftover engine (a desktop, another
small service). An engine that outlived its run holds far more."""


class StartFailed(HostError):  # noqa: N818
    """The command could not be executed: a failed start that does not count against the checkpoint. ``needs_person``:
    it fails in the same way until the operator fixes it."""

    needs_person = False


class Superseded(PodwatchError):  # noqa: N818
    """Another request came before the start was recorded: the next decision has it."""


class Starter:
    """Carries out the steps of a start; the table decides when."""

    def __init__(self, context: RecoveryContext, gang: GangStart | None) -> None:
        self.context, self._gang = context, gang
        self.quarantine_number: int | None = None
        """Number of the quarantine with the checkpoints ahead of the last start; None if there were none."""

    async def clear_litter(self) -> None:
        """Remove stale files of the last start from /dev/shm and /tmp: the next start would hang on them."""
        tools = self.context.tools
        last = self.context.run.last_start
        if last is None:
            return
        try:
            found = await patiently(
                tools.files,
                stale_files.find_stale,
                stale_files.owner_id(last.user),
                last.wall,
                timeout=LITTER_SECONDS,
            )
        except TimeoutError:
            return
        # A second call removes them: a look that hung and returns late must have nothing left to do.
        gone = await tools.blocking(stale_files.remove_stale, found.stale, stale_files.owner_id(last.user))
        if gone:
            names = ", ".join(str(path) for path in gone[:5]) + (", ..." if len(gone) > 5 else "")
            text = f"removed {counted(len(gone), 'stale entry', 'stale entries')} of the last start: {names}"
            tools.say(EventName.TRAINER_STARTING, text, cleared=len(gone))

    # -- is the pod free ----------------------------------------------------------------------------------------------

    def free(self, since: float) -> gpus_and_ports_free.Free:
        tools, gpu = self.context.tools, self.context.tools.settings.gpu
        reading = tools.gpus.latest()
        base = self.context.run.gpu_base or {
            i: min(used, FIRST_BASE_AT_MOST) for i, used in gpus_and_ports_free.memory_now(reading).items()
        }
        return gpus_and_ports_free.look(
            reading,
            since=since,
            configured=(*gpu.inference, *gpu.trainer),
            base=base,
            margin=gpu.release_margin,
            ports=tools.sensors.servers.ports(),
        )

    async def until_visible(self, step: int | None, files: str) -> None:
        """Wait until this node sees the checkpoint that rank 0 has prepared, with the same files: a shared file system
        shows changes late. Raises HostError if it does not: this node would load something else."""
        tools = self.context.tools
        end = tools.clock.monotonic() + VISIBLE_SECONDS
        while step is not None:
            here = await tools.blocking(files_of, tools.layout, step)
            if here and here == (files or here):
                return
            if tools.clock.monotonic() > end:
                seen = "of which this node sees other files" if here else "which this node does not see"
                raise HostError(
                    f"node 0 starts from step {step}, {seen}",
                    where=str(tools.settings.trainer.checkpoint_dir or tools.settings.trainer.output_dir),
                    fix="[trainer] output_dir and checkpoint_dir must be the same directories on all nodes",
                )
            await tools.clock.sleep(VISIBLE_POLL)

    async def finish_moves(self, *, beside_training: bool) -> None:
        """Finish the moves that were interrupted, unless a trainer runs: the files there now may be its new ones."""
        tools = self.context.tools
        unfinished = await tools.blocking(quarantine.unfinished, tools.workspace)
        for data in unfinished:
            step = quarantine.leave_as_it_is if beside_training else quarantine.carry_out
            await tools.blocking(step, tools.workspace, data)
        if unfinished:
            await tools.blocking(tools.catalogue.rescan)

    # -- move to quarantine -------------------------------------------------------------------------------------------

    async def set_aside(self, step: int | None, paths: tuple[Path, ...], why: str) -> None:
        if not paths:
            return
        tools = self.context.tools
        number = self.quarantine_number = await tools.blocking(quarantine.free_number, tools.workspace)
        known = {s.step: str(s.completeness) for s in tools.catalogue.sets if step is None or s.step > step}
        index = quarantine.plan(
            paths,
            step=step,
            steps=known,
            lineage=self.context.run.lineage.id,
            wall=tools.clock.wall(),
            number=number,
        )
        await tools.blocking(quarantine.carry_out, tools.workspace, index)
        tools.say(
            EventName.QUARANTINED,
            f"moved {counted(len(paths), 'entry', 'entries')} to quarantine {number}: {why}."
            f" `podwatch quarantine return {number}` moves them back",
            quarantine=number,
            step=step,
            entries=len(paths),
        )
        await tools.blocking(tools.catalogue.rescan)

    # -- start --------------------------------------------------------------------------------------------------------

    async def start(self, choice: Choice, still_asked: Callable[[RunState], bool]) -> tuple[TrainerHandle, Attempt]:
        """Move what is ahead of the step to quarantine, record the start, and start. ``still_asked``: whether the
        operator has requested nothing else since the choice was made. Raises Superseded when that has changed before
        the start is recorded, Busy when another supervisor holds the run, StartFailed when the command cannot be
        executed, HostError when recording or moving failed."""
        tools = self.context.tools
        step = choice.step
        # Start nothing in a directory that another user put in the place of output_dir.
        await tools.blocking(tools.workspace.check)
        prepared = await tools.blocking(self.prepare, step)
        before = newest_step(tools.catalogue.sets)
        ahead: tuple[Path, ...] = ()
        trackers: tuple[Tracker, ...] = ()
        if not tools.follows:
            ahead = tuple(await tools.blocking(tools.layout.ahead_of, step))
            trackers = tuple(await tools.blocking(tools.layout.trackers, step))
        self.quarantine_number = None
        for left in await tools.blocking(quarantine.unfinished, tools.workspace):  # what is ahead is decided anew here
            await tools.blocking(quarantine.leave_as_it_is, tools.workspace, left)
        fresh_or_from = "a fresh start" if step is None else f"a start from step {step}"
        await self.set_aside(step, ahead, f"ahead of {fresh_or_from}")
        self.context.show(Phase.STARTING, fresh_or_from)
        now = gpus_and_ports_free.memory_now(tools.gpus.latest())
        await self._repair(trackers, fresh_or_from)
        if step is None and await tools.journal.run(Journal.learned, FROM_STORE):
            await tools.journal.run(Journal.learn, FROM_STORE, {})

        await tools.blocking(tools.catalogue.record_starts)
        start = TrainerStart(prepared.plan.start_id, step, await tools.blocking(tools.run.files_clock.now), seen=False)

        def starting(run: RunState) -> RunState:
            if not still_asked(run):
                raise Superseded("the request for this start has changed")
            return replace(
                self._entered(run, choice, before, start),
                last_start=prepared.record,
                wandb=dict(prepared.wandb),
                gpu_base=gpus_and_ports_free.merge_base(run.gpu_base, now),
                yielded=False,  # podwatch owns the trainer that it starts now
            )

        self.context.committed = True
        await tools.run_file.edit(starting)
        if prepared.removed:
            tools.say(
                EventName.TRAINER_STARTING,
                "podwatch removed resume flags from the configured command: " + " ".join(scrub_argv(prepared.removed)),
                Severity.WARNING,
            )
        tools.say(
            EventName.TRAINER_STARTING,
            fresh_or_from,
            start_id=prepared.plan.start_id,
            step=step,
            passed_over="; ".join(f"step {n}: {why}" for n, why in choice.rejected if step is None or n > step),
        )
        if self._gang is not None and not tools.follows:
            await self._gang.announce(step, "" if step is None else await tools.blocking(files_of, tools.layout, step))
        began = tools.clock.monotonic()
        self.context.writers_ended = False
        tools.begin_start(began, prepared.plan.start_id)
        handle = await self._launch(prepared)
        tools.track(handle)
        await self.context.start_was_seen(handle.start_id)
        tools.say(
            EventName.TRAINER_STARTED,
            f"training started: {fresh_or_from} (pid {handle.launcher.pid})",
            start_id=handle.start_id,
            step=step,
            pid=handle.launcher.pid,
        )
        for warning in handle.warnings:
            tools.say(EventName.START_WARNING, warning, Severity.WARNING, start_id=handle.start_id)
        return handle, Attempt(handle.start_id, began, step, prepared.first_step)

    async def _launch(self, prepared: start_plan.Prepared) -> TrainerHandle:
        """Start the supervisor and the trainer. Raises as ``start``."""
        tools = self.context.tools
        if tools.reserve is not None:
            await tools.blocking(tools.reserve.drop)
        starting = asyncio.ensure_future(tools.launcher.start(prepared.plan))
        try:
            handle = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # Let the start finish, so that the next operation finds its trainer.
            await asyncio.wait([starting])
            raise
        except PodwatchError as error:
            if isinstance(error, Busy):
                raise
            failed = StartFailed(error.what, where=error.where, fix=error.fix)
            failed.needs_person = isinstance(error, CannotExecute)
            raise failed from error
        if tools.reserve is not None:
            await tools.blocking(tools.reserve.restore)  # for the next start, before the disk is full
        return handle

    async def _repair(self, trackers: Sequence[Tracker], why: str) -> None:
        """Make the trainer's own "latest" files name the step of the start. Idempotent."""
        tools = self.context.tools
        written = await tools.blocking(repair_trackers, trackers, tools.workspace.tree)
        if written:
            names = ", ".join(path.name for path in written)
            tools.say(EventName.TRAINER_STARTING, f"updated {names} for {why}", trackers=len(written))

    def prepare(self, step: int | None) -> start_plan.Prepared:
        """Blocks. Raises ConfigurationError."""
        settings = self.context.tools.settings
        return start_plan.prepare(
            settings,
            self.context.tools.layout,
            step=step,
            environment=self.context.tools.environment.build(settings.trainer),
            wandb=self.context.run.wandb or self.context.tools.journal.sync.learned(FROM_STORE, {}),
            wall=self.context.tools.clock.wall(),
        )

    def _known_branch(self, choice: Choice) -> str:
        """The branch of the chosen checkpoint, as the store names it, which the first start on this pod continues."""
        stored = self.context.tools.stored
        known = next((s.lineage for s in stored if (s.step, s.here) == (choice.step, choice.save_id)), "")
        return known or self.context.followed.get(-1 if choice.step is None else choice.step, "")

    def _entered(self, run: RunState, choice: Choice, newest: int | None, start: TrainerStart) -> RunState:
        """Return ``run`` with this start: going back on request, stepping back, or a fresh start opens a branch."""
        chosen = next((s for s in self.context.tools.catalogue.sets if s.step == choice.step), None)
        if choice.step is None:
            has_past = run.last_start is not None or newest is not None
            return entered(run, start, chosen=None, back=False, opens=has_past, known_branch="")
        # Stepping back opens one too: the store may already hold the step that is left.
        back = run.wanted is not None or run.below is not None
        known = self._known_branch(choice) if run.last_start is None else ""
        return entered(run, start, chosen=chosen, back=back, opens=back, known_branch=known)


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
