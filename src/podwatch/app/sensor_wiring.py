"""Builds the sensors of one daemon. Starts nothing."""

import os
import re
from functools import partial
from pathlib import Path

from podwatch.app.components import LEARNED, READ_SO_FAR, Checkpoints, Run
from podwatch.app.held_back_findings import believed_progress
from podwatch.app.sensing_loop import Sensors
from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.checkpoints.trainers import trainer_logs
from podwatch.config.settings import Settings
from podwatch.detection.learned import Learned
from podwatch.domain.checkpoint import newest_complete
from podwatch.domain.process import ProcessRole
from podwatch.journal import Journal
from podwatch.sensors.disk import DiskSensor, DisksSensor
from podwatch.sensors.gpu import WAIT, GpuReader, GpuSensor, NvmlReader
from podwatch.sensors.host import HostSensor
from podwatch.sensors.inference import InferenceSensor
from podwatch.sensors.log_tail import Sources, StepLines
from podwatch.sensors.match_log_rules import LogRulesSensor
from podwatch.sensors.processes import ProcessSensor
from podwatch.sensors.progress import POLL as PROGRESS_POLL
from podwatch.sensors.progress import PingInbox, ProgressSensor
from podwatch.sensors.read_step_lines import StepReader
from podwatch.sensors.training_metrics import FIGURES_GLOBS, MetricReader, TrainingSensor
from podwatch.sensors.xid import XidInbox
from podwatch.trainer.process_roles import RolePatterns


def build_sensing(
    settings: Settings, run: Run, checkpoints: Checkpoints, log_path: Path, gpu_reader: GpuReader | None
) -> Sensors:
    clock, poll, gpu = run.clock, settings.gpu.poll, settings.gpu
    catalogue, measurements = checkpoints.catalogue, checkpoints.measurements
    xids = XidInbox(clock)
    gpus = GpuSensor(
        gpu_reader or NvmlReader(xids, wait=min(WAIT, 0.6 * gpu.deadline)), clock, poll=poll, deadline=gpu.deadline
    )
    disk = DiskSensor(
        settings.trainer.checkpoint_dir or settings.trainer.output_dir,
        clock,
        settings.disk.capacity,
        poll=max(poll, min(5.0, settings.checkpoints.rescan)),
        known_bytes=lambda: sum(s.size_bytes for s in catalogue.sets) + measurements.found.bytes,
    )
    disks = DisksSensor(partial(_places, settings, catalogue), clock)
    log_rules = LogRulesSensor(clock, run.config.policies.log_rules)
    metrics = TrainingSensor(clock, MetricReader(trainer_logs(settings)))
    progress = _progress(settings, run, catalogue, log_path, (log_rules, metrics))
    processes = ProcessSensor(clock, poll=poll, logs=progress, roles=_roles(settings))
    return Sensors(
        gpus=gpus,
        trainer=processes,
        disk=disk,
        inference=_inference(settings, run, processes),
        progress=progress,
        host=HostSensor(clock, trainer=processes, xids=xids),
        logs=log_rules,
        training=metrics,
        disks=disks,
    )


def _progress(
    settings: Settings,
    run: Run,
    catalogue: Catalogue,
    log_path: Path,
    readers: tuple[LogRulesSensor, TrainingSensor],
) -> ProgressSensor:
    trainer, layout, poll = settings.trainer, run.layout, settings.gpu.poll
    metrics_file = settings.training.metrics_file  # can be relative to output_dir
    target, custom = run.config.policies.max_steps, _step_line(settings)
    lines = StepLines(trainer_logs(settings))
    progress = ProgressSensor(
        run.clock,
        lambda: believed_progress(layout.progress(), catalogue.sets),
        logs=Sources(trainer.output_dir, trainer.logs or layout.log_globs(), (log_path,)),
        inbox=PingInbox(run.clock),
        finish_lines=layout.finish_lines,
        poll=max(poll, min(2 * poll, PROGRESS_POLL)),
        readers=readers,
        figures=Sources(trainer.output_dir, (metrics_file,) if metrics_file else FIGURES_GLOBS),
        steps=lambda: StepReader(lines, target=target, custom=custom),
    )
    progress.recall(run.journal.sync.learned(READ_SO_FAR))
    return progress


def _inference(settings: Settings, run: Run, processes: ProcessSensor) -> InferenceSensor:
    inference, before = settings.inference, _learned(run.journal.sync)
    known = (before.start_id, before.servers)
    return InferenceSensor(inference.urls, run.clock, inference.timeout, inference.poll, trainer=processes, known=known)


def _places(settings: Settings, catalogue: Catalogue) -> dict[str, Path]:
    """Role -> path of what a run and podwatch write besides the checkpoints. Parts come from the newest checkpoint."""
    environment = {**os.environ, **settings.trainer.env}
    newest = newest_complete(catalogue.sets)
    return {
        "output": settings.trainer.output_dir,
        "temp": Path(environment.get("TMPDIR") or "/tmp"),
        "state": settings.state_dir,
        **({p.name: Path(p.path) for p in newest.parts} if newest is not None else {}),
    }


def _learned(journal: Journal) -> Learned:
    """The baselines and durations that an earlier podwatch learned."""
    kept = journal.learned(LEARNED, {})
    return Learned.kept(kept) or Learned()


def _step_line(settings: Settings) -> re.Pattern[str] | None:
    """The operator's pattern of a step line."""
    custom = settings.checkpoints.custom
    if custom is None or not custom.step_line or settings.trainer.layout not in ("custom", "auto"):
        return None
    return re.compile(custom.step_line)


def _roles(settings: Settings) -> RolePatterns:
    """The operator's patterns of process roles."""
    custom = settings.checkpoints.custom
    if custom is None or settings.trainer.layout not in ("custom", "auto"):
        return RolePatterns({})
    return RolePatterns({ProcessRole(role): patterns for role, patterns in custom.processes.items()})
