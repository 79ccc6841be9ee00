"""Builds the daemon's loops (sensing every few seconds, rescans, pruning under pressure) and the recorder."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from podwatch.app.checkpoint_loop import Announced, CheckpointLoop
from podwatch.app.components import Components
from podwatch.app.observe import as_of_now, observe
from podwatch.app.sensing_loop import SensingLoop
from podwatch.detection.learned import Learned
from podwatch.detection.rules import initial
from podwatch.disk.prune import Pruner, RemovalRules
from podwatch.domain.event import Event, EventName
from podwatch.domain.facts import Facts
from podwatch.domain.finding import Severity
from podwatch.domain.secrets import scrub
from podwatch.recording.format import Header
from podwatch.recording.recorder import Recorder


@dataclass(slots=True)
class DaemonLoops:
    sensing: SensingLoop
    guarding: CheckpointLoop
    pruner: Pruner


def about_run(parts: Components) -> tuple[str, str]:
    """The keys of the learned baselines: the run with its layout, and its GPUs."""
    gpu = parts.settings.gpu
    return f"{parts.settings.run_id} {parts.run.layout.name}", f"{list(gpu.inference)} {list(gpu.trainer)}"


def make_loops(parts: Components, *, learned: Learned, announced: Announced) -> DaemonLoops:
    """Build the loops; starts nothing."""
    policies = parts.run.config.policies
    sensing = SensingLoop(
        parts.sensing,
        partial(observe, parts),
        clock=parts.run.clock,
        poll=parts.settings.gpu.poll,
        policies=policies,
        state=initial(policies, learned.for_run(*about_run(parts))),
        emit=parts.run.emit,
        hurried=parts.sensing.trainer.engine_ended,
    )
    pruner = _pruner(parts, lambda: as_of_now(parts, sensing.snapshot, sensing.state.learned))
    guarding = CheckpointLoop(
        parts.checkpoints.catalogue,
        parts.checkpoints.worker,
        parts.run.clock,
        parts.checkpoints.rescans,
        parts.run.emit,
        announced,
        watcher=parts.checkpoints.watcher,
        checks=(parts.checkpoints.roots, parts.training.two_writers),
        uploads=parts.backup,
        pruner=pruner,
    )
    return DaemonLoops(sensing, guarding, pruner)


def _pruner(parts: Components, facts: Callable[[], Facts]) -> Pruner:
    backup = parts.backup
    return Pruner(
        facts=facts,
        rules=removal_rules(parts),
        layout=parts.run.layout,
        records=parts.checkpoints.catalogue.records,
        rescan=parts.checkpoints.rescans.wake,
        abandon=_nothing_uploads if backup is None else backup.abandon,
        refresh_disk=parts.sensing.disk.wake,
        remover=parts.deletion.remover,
        measurements=parts.checkpoints.measurements,
        worker=parts.deletion.worker,
        clock=parts.run.clock,
    )


async def _nothing_uploads(_step: int) -> None:
    """Without a store."""


def removal_rules(parts: Components) -> RemovalRules:
    """As the settings in force have them."""
    return RemovalRules(
        parts.settings.disk,
        steps_in_use=parts.run.config.policies.steps_in_use,
        acts=parts.settings.mode == "act",
        quota=parts.settings.disk.capacity is not None,
    )


# -- recording -------------------------------------------------------------------------------------------------------


def make_recorder(parts: Components, sensing: SensingLoop) -> Recorder | None:
    """The recorder for `podwatch replay`; None if [record] is off. Its thread reads the components and the state of the
    loop: frozen values only."""
    settings = parts.settings
    if not settings.record.enabled:
        return None
    loop = asyncio.get_running_loop()

    def header() -> Header:
        return Header(
            run_id=settings.run_id,
            layout=parts.run.layout.name,
            poll=parts.settings.gpu.poll,
            policies=parts.run.config.policies,
            learned=sensing.state.learned,
        )

    def tell(problem: str | None) -> None:
        text = problem or "recording for `podwatch replay` works again"
        severity = Severity.INFO if problem is None else Severity.WARNING
        event = Event(EventName.RECORDING_CHANGED, parts.run.clock.wall(), text, severity)
        loop.call_soon_threadsafe(parts.run.emit, event)

    return Recorder(parts.run.paths.recording, header, max_size=settings.record.max_size, mask=scrub, complain=tell)
