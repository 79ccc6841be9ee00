"""The sensors of one daemon, and what detection makes of their readings at each turn of the loop."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podwatch.app.held_back_findings import believed_progress
from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.checkpoints.trainers import trainer_logs
from podwatch.config.settings import CustomLayoutSettings, Settings
from podwatch.detection.learned import Learned
from podwatch.detection.rules import advance, confirming, initial
from podwatch.disk.leftovers import Measurements
from podwatch.domain.checkpoint import newest_complete
from podwatch.domain.event import Event, EventName
from podwatch.domain.finding import Finding, Severity
from podwatch.domain.process import ProcessRole
from podwatch.domain.snapshot import CheckpointMark, Desired, Reading, SensorState, Snapshot
from podwatch.sensors.base import Sensor
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
from podwatch.system.clock import Clock, until_beat
from podwatch.trainer.process_roles import RolePatterns

if TYPE_CHECKING:
    from podwatch.app.build import Run

LEARNED = "learned"
"""Journal key of the learned baselines and durations."""
READ_SO_FAR = "logs.read"
"""Journal key of the read positions in the logs of the current start."""
LAG = 0.05
"""Fraction of a poll (0.1 s of 2 s) by which the loop runs after the sensors, which answer within milliseconds."""
CONFIRM_POLL = 0.5
"""Seconds between turns while the evidence of a death is incomplete, for some seconds after an engine ended: a small
share of the 5 s to a verdict, and longer than the sensors take to answer."""
CONFIRM_LAG = 0.1
"""Part of ``CONFIRM_POLL`` that the sensors have to answer before the next turn."""
LATE_TURNS = 5
"""The loop counts as stalled after this many polls without a turn, and never sooner than ``LATE_SECONDS``."""
LATE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Sensors:
    """All sensors of one daemon, by the names of their fields in ``Snapshot``."""

    gpus: GpuSensor
    trainer: ProcessSensor
    disk: DiskSensor
    inference: InferenceSensor
    progress: ProgressSensor
    host: HostSensor
    logs: LogRulesSensor
    training: TrainingSensor
    disks: DisksSensor

    def all(self) -> Mapping[str, Sensor[Any]]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def snapshot(self, clock: Clock, *, saving: bool, desired: Desired, checkpoint: CheckpointMark) -> Snapshot:
        """The newest reading of each sensor. Never blocks."""
        readings: dict[str, Any] = {name: sensor.latest() for name, sensor in self.all().items()}
        return Snapshot(
            at=clock.monotonic(),
            wall=clock.wall(),
            checkpoint=checkpoint,
            saving=saving,
            desired=desired,
            boot_at=clock.boottime(),
            **readings,
        )

    def wake(self) -> None:
        """Poll the sensors that show the death of an engine now."""
        for sensor in (self.gpus, self.trainer, self.inference, self.progress):
            sensor.wake()

    async def start(self) -> None:
        for sensor in self.all().values():
            await sensor.start()

    async def stop(self) -> None:
        for sensor in self.all().values():
            await sensor.stop()


class Detection:
    """What detection knows, and what the last turn saw and found."""

    def __init__(self, run: "Run", sensors: Sensors, *, poll: float, learned: Learned | None = None) -> None:
        """``poll``: seconds between two turns."""
        self._run, self._sensors, self._poll = run, sensors, poll
        self.state = initial(run.config.policies, learned)
        self.snapshot = Snapshot(at=run.clock.monotonic(), wall=run.clock.wall())
        self.findings: tuple[Finding, ...] = ()
        self.turns = 0
        self._last_turn = run.clock.monotonic()
        self._sensor_states: dict[str, SensorState] = {}

    def judge(self, snapshot: Snapshot) -> tuple[Finding, ...]:
        """One turn: the findings in what the sensors read."""
        armed = self.state.armed
        self.state, self.findings = advance(self.state, snapshot, self._run.config.policies)
        self._report_sensors(snapshot)
        for name in self.state.armed:
            if name not in armed:
                text = f"detector {name} is ready: its signal was seen healthy"
                self._run.emit(Event(EventName.DETECTOR_ARMED, snapshot.wall, text, fields={"detector": name}))
        self.snapshot, self._last_turn = snapshot, snapshot.at
        self.turns += 1
        return self.findings

    async def until_next_turn(self) -> None:
        """Returns shortly after the next poll of the sensors; at once when an engine has ended; every ``CONFIRM_POLL``
        while the evidence of a death is incomplete."""
        clock, ended = self._run.clock, self._sensors.trainer.engine_ended
        rest = until_beat(clock.monotonic(), self._poll, LAG * self._poll)
        sooner = confirming(self.state, self.snapshot, self._run.config.policies)
        await clock.wait(ended, min(rest, CONFIRM_POLL - CONFIRM_LAG) if sooner else rest)
        if sooner or ended.is_set():
            ended.clear()
            self._sensors.wake()
            await clock.sleep(CONFIRM_LAG)

    def alive(self) -> tuple[bool, str]:
        """Whether the last turn is within the deadline, and a text about it."""
        age = self._run.clock.monotonic() - self._last_turn
        limit = max(LATE_SECONDS, LATE_TURNS * self._poll)
        return age <= limit, f"the sensing loop last ran {age:.1f} s ago (limit {limit:.0f} s)"

    def _report_sensors(self, snapshot: Snapshot) -> None:
        for name in self._sensors.all():
            reading: Reading[Any] = getattr(snapshot, name)
            before = self._sensor_states.get(name)
            if reading.state is before:
                continue
            self._sensor_states[name] = reading.state
            if before is None and reading.state in (SensorState.OK, SensorState.PENDING):
                continue
            worse = reading.state in (SensorState.BLIND, SensorState.DENIED)
            text = f"the {name} sensor is {reading.state}" + (f": {reading.detail}" if reading.detail else "")
            severity = Severity.WARNING if worse else Severity.INFO
            about = {"sensor": name, "state": str(reading.state), "detail": reading.detail}
            self._run.emit(Event(EventName.SENSOR_CHANGED, snapshot.wall, text, severity, about))


# -- building them ---------------------------------------------------------------------------------------------------


def build_sensors(
    settings: Settings,
    run: "Run",
    catalogue: Catalogue,
    measurements: Measurements,
    log_path: Path,
    gpu_reader: GpuReader | None,
) -> Sensors:
    """``log_path``: the log that the supervisor writes. Starts nothing."""
    clock, gpu = run.clock, settings.gpu
    xids = XidInbox(clock)
    reader = gpu_reader or NvmlReader(xids, wait=min(WAIT, 0.6 * gpu.deadline))
    log_rules = LogRulesSensor(clock, run.config.policies.log_rules)
    metrics = TrainingSensor(clock, MetricReader(trainer_logs(settings)))
    progress = _progress(settings, run, catalogue, log_path, (log_rules, metrics))
    processes = ProcessSensor(clock, poll=gpu.poll, logs=progress, roles=_roles(settings))
    inference, before = settings.inference, learned_before(run)
    return Sensors(
        gpus=GpuSensor(reader, clock, poll=gpu.poll, deadline=gpu.deadline),
        trainer=processes,
        disk=DiskSensor(
            settings.trainer.checkpoint_dir or settings.trainer.output_dir,
            clock,
            settings.disk.capacity,
            poll=max(gpu.poll, min(5.0, settings.checkpoints.rescan)),
            known_bytes=lambda: sum(s.size_bytes for s in catalogue.sets) + measurements.found.bytes,
        ),
        inference=InferenceSensor(
            inference.urls,
            clock,
            inference.timeout,
            inference.poll,
            trainer=processes,
            known=(before.start_id, before.servers),
        ),
        progress=progress,
        host=HostSensor(clock, trainer=processes, xids=xids),
        logs=log_rules,
        training=metrics,
        disks=DisksSensor(partial(_places, settings, catalogue), clock),
    )


def learned_before(run: "Run") -> Learned:
    """The baselines and durations that an earlier podwatch learned. Blocks on the journal."""
    return Learned.kept(run.journal.sync.learned(LEARNED, {})) or Learned()


def _progress(
    settings: Settings,
    run: "Run",
    catalogue: Catalogue,
    log_path: Path,
    readers: tuple[LogRulesSensor, TrainingSensor],
) -> ProgressSensor:
    trainer, layout, poll = settings.trainer, run.layout, settings.gpu.poll
    metrics_file = settings.training.metrics_file  # can be relative to output_dir
    target, custom = run.config.policies.max_steps, _custom(settings)
    step_line = re.compile(custom.step_line) if custom is not None and custom.step_line else None
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
        steps=lambda: StepReader(lines, target=target, custom=step_line),
    )
    progress.recall(run.journal.sync.learned(READ_SO_FAR))
    return progress


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


def _roles(settings: Settings) -> RolePatterns:
    """The operator's patterns of process roles."""
    custom = _custom(settings)
    patterns = {} if custom is None else custom.processes
    return RolePatterns({ProcessRole(role): found for role, found in patterns.items()})


def _custom(settings: Settings) -> CustomLayoutSettings | None:
    """[checkpoints.custom], where the layout can be that one."""
    return settings.checkpoints.custom if settings.trainer.layout in ("custom", "auto") else None
