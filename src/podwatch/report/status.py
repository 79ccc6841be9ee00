"""Builds the status document (docs/json.md and its JSON Schema) from a DaemonView."""

import math
from typing import Any

from podwatch.domain.checkpoint import newest_complete
from podwatch.domain.document import of
from podwatch.domain.facts import StoreFacts
from podwatch.domain.process import ExitStatus, ProcessRole
from podwatch.domain.secrets import scrub, scrub_all
from podwatch.domain.snapshot import DiskSample, HostSample, Reading, SensorState, TrainerSample
from podwatch.domain.status_document import (
    CheckpointsDocument,
    CountersDocument,
    DaemonDocument,
    DiskDocument,
    ExitDocument,
    FiguresDocument,
    FilesDocument,
    FindingDocument,
    GpuDocument,
    HostDocument,
    LearnedDocument,
    LearnedGpu,
    LearnedValue,
    LogRuleDocument,
    OtherDiskDocument,
    SensorDocument,
    ServerDocument,
    Status,
    SyncDocument,
    TrainingDocument,
    TrainingState,
    XidDocument,
)
from podwatch.report.daemon_view import DaemonView
from podwatch.report.json_documents import (
    account_document,
    checkpoint_document,
    finding_document,
    incident_document,
    pause_document,
)
from podwatch.report.overall_status import Reason, judge, step_late
from podwatch.report.rows import worded

_PIDS_SHOWN = 64
_LINE_SHOWN = 300
"""Characters of the last log line. It is scrubbed before it is cut: a part of a secret is no known value."""


def build_status(view: DaemonView) -> dict[str, Any]:
    """The whole document, scrubbed, because details of sensors and recovery were not scrubbed before. Pure."""
    document: dict[str, Any] = scrub_all(worded(status_of(view)).to_json())
    return document


def status_of(view: DaemonView) -> Status:
    """The document before its words: the facts alone."""
    judged, pod = judge(view), view.facts.pod
    return Status(
        running=True,
        time=view.now_wall,
        run_id=view.run_id,
        overall=judged.overall,
        reasons=tuple(_reason(view, reason) for reason in judged.reasons),
        daemon=_daemon(view),
        training=_training(view, judged.state),
        recovery=view.recovery,
        learned=_learned(view),
        gpus=_gpus(view),
        inference=tuple(
            of(ServerDocument, one, outdated=pod.inference.at < view.trainer_changed_at)
            for one in pod.inference.value or ()
        ),
        disk=_disk(view, pod.disk.value),
        other_disks=tuple(of(OtherDiskDocument, d, used_ratio=round(d.used_ratio, 4)) for d in pod.disks.value or ()),
        host=_host(pod.host.value),
        log_rules=tuple(
            of(LogRuleDocument, match, first_at=view.wall_of(match.first_at), last_at=view.wall_of(match.last_at))
            for match in pod.logs.value or ()
        ),
        figures=_figures(view),
        checkpoints=_checkpoints(view),
        sync=_sync(view.sync),
        end=None if view.end is None else view.end.document,
        incident=None if view.incident is None else incident_document(view.incident, view.account),
        nodes=view.nodes,
        node_count=view.node_count,
        account=account_document(view.account),
        sensors=_sensors(view),
        counters=of(CountersDocument, view.counters),
    )


def _daemon(view: DaemonView) -> DaemonDocument:
    return of(
        DaemonDocument,
        view,
        live=view.watchdog_ok,
        desired=view.facts.run.desired,
        pause=pause_document(view.facts.run.pause),
        started_at=view.started_wall,
        last_turn_at=view.facts.pod.wall,
    )


def _sensors(view: DaemonView) -> tuple[SensorDocument, ...]:
    def age(reading: Reading[object]) -> float | None:
        return None if reading.state is SensorState.PENDING else round(max(0.0, view.facts.pod.at - reading.at), 1)

    return tuple(
        of(SensorDocument, reading, name=name, age_seconds=age(reading))
        for name, reading in sorted(view.sensors.items())
    )


def _reason(view: DaemonView, reason: Reason) -> FindingDocument:
    since = reason.since
    if since is None:
        return finding_document(reason.finding, since_wall=None, for_seconds=0.0)
    return finding_document(reason.finding, since_wall=view.wall_of(since), for_seconds=view.now - since)


def _training(view: DaemonView, state: TrainingState) -> TrainingDocument:
    pod = view.facts.pod
    trainer, newest = pod.trainer.value or TrainerSample(), pod.newest_step
    known, launcher = pod.trainer.value is not None, trainer.launcher
    last_sign = max((p.at for p in pod.progress_of_start), default=None)
    pids = [p.identity.pid for p in trainer.descendants if p.role is ProcessRole.TRAINER]

    def wall(at: float | None) -> float | None:
        return None if at is None else view.wall_of(at)

    return of(
        TrainingDocument,
        view,
        state=state,
        alive=trainer.alive if known else None,
        supervision=trainer.supervision,
        pid=launcher.pid if launcher else None,
        trainer_pids=tuple(pids[:_PIDS_SHOWN]),
        start_ticks=launcher.start_ticks if launcher else None,
        boot_id=launcher.boot_id if launcher else "",
        started_at=wall(trainer.started_at),
        exit=_exit(trainer.exit),
        processes=len(trainer.descendants) if known else None,
        step=newest.step if newest else None,
        step_at=wall(newest.at) if newest else None,
        step_source=str(newest.source) if newest else None,
        last_sign_at=wall(last_sign),
        step_late=step_late(pod, view.now, view.learned.median_step_seconds, view.target_step),
        trainer_ended_at=wall(view.trainer_ended_at),
        median_step_seconds=view.learned.median_step_seconds,
        saving=pod.saving,
        last_log_line=scrub(view.last_log_line)[:_LINE_SHOWN],
    )


def _exit(status: ExitStatus | None) -> ExitDocument | None:
    return None if status is None else of(ExitDocument, status, at=status.at_wall, text=status.describe())


def _learned(view: DaemonView) -> LearnedDocument:
    learned = view.learned
    return LearnedDocument(
        step_seconds=LearnedValue(learned.median_step_seconds, len(learned.step_seconds)),
        startup_seconds=LearnedValue(learned.startup_seconds, len(learned.startups)),
        save_seconds=LearnedValue(learned.median_save_seconds, len(learned.save_seconds)),
        save_interval_seconds=LearnedValue(learned.median_save_gap_seconds, len(learned.save_gaps)),
        gpus=tuple(LearnedGpu(index, level) for index, level in learned.gpu_baseline_bytes),
    )


def _gpus(view: DaemonView) -> tuple[GpuDocument, ...]:
    roles = dict.fromkeys(view.trainer_gpus, "trainer")
    for index in view.inference_gpus:
        roles[index] = "shared" if index in roles else "inference"
    return tuple(
        of(
            GpuDocument,
            gpu,
            role=roles.get(gpu.index, "none"),
            baseline_bytes=view.learned.baseline(gpu.index),
            outdated=view.facts.pod.gpus.at < view.trainer_changed_at,
        )
        for gpu in view.facts.pod.gpus.value or ()
    )


def _disk(view: DaemonView, disk: DiskSample | None) -> DiskDocument | None:
    if disk is None:
        return None
    return of(
        DiskDocument,
        disk,
        used_ratio=round(disk.used_ratio, 4),
        prune_above_ratio=view.prune_above,
        next_save_bytes=view.next_save_bytes,
        next_save_fits=None if view.next_save_bytes is None else disk.free_bytes >= view.next_save_bytes,
    )


def _checkpoints(view: DaemonView) -> CheckpointsDocument:
    newest, sync = newest_complete(view.facts.checkpoints), view.sync
    return CheckpointsDocument(
        newest_complete_step=newest.step if newest else None,
        newest_complete_at=newest.changed_wall if newest else None,
        sets=tuple(
            checkpoint_document(s, stored=sync.stored, pins=view.facts.pins, uploading_step=sync.uploading_step)
            for s in sorted(view.facts.checkpoints, key=lambda s: s.step)
        ),
    )


def _sync(store: StoreFacts) -> SyncDocument:
    lease = store.lease
    return of(
        SyncDocument,
        store,
        next_attempt_at=store.next_attempt_wall,
        clock_skew_seconds=_whole(store.clock_skew),
        last_published_at=store.last_published_wall,
        upload_bytes_per_second=_whole(store.upload_rate),
        upload_left_seconds=_whole(store.upload_left_seconds),
        calls={name.lower(): count for name, count in store.calls.items()},
        standing="alone" if lease is None else lease.act,
        generation=0 if lease is None else lease.generation,
        settles_in_seconds=_whole(store.settles_in),
        holder="" if lease is None else lease.holder,
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _host(host: HostSample | None) -> HostDocument | None:
    if host is None:
        return None
    return of(
        HostDocument,
        host,
        container_limit_bytes=host.cgroup_limit_bytes,
        container_used_bytes=host.cgroup_used_bytes,
        files=of(FilesDocument, host.files[0], open=host.files[0].open_files) if host.files else None,
        xids=tuple(of(XidDocument, xid) for xid in host.xids),
    )


def _figures(view: DaemonView) -> FiguresDocument | None:
    """The newest value of each metric of training."""
    steps = view.facts.pod.training.value or ()
    if not steps:
        return None
    newest: dict[str, float] = {}
    for metrics in steps:
        newest.update(metrics.values)
    values = {name: value if math.isfinite(value) else str(value) for name, value in sorted(newest.items())}
    return of(FiguresDocument, steps[-1], values=values)
