"""Builds the status document (docs/json.md and its JSON Schema) from a DaemonView."""

import math
from typing import Any

from podwatch.client.times_and_sizes import rfc3339
from podwatch.domain.checkpoint import newest_complete
from podwatch.domain.process import ExitStatus, ProcessRole
from podwatch.domain.secrets import scrub, scrub_all
from podwatch.domain.snapshot import DiskSample, HostSample, SensorState
from podwatch.policy.overall_status import Reason, TrainingState, step_late
from podwatch.reporting.daemon_view import DaemonView
from podwatch.reporting.json_documents import (
    SCHEMA_VERSION,
    account_document,
    checkpoint_document,
    finding_document,
    incident_document,
    pause_document,
)

# -- status document -------------------------------------------------------------------------------------------------

_PIDS_SHOWN = 64
_LINE_SHOWN = 300
"""Characters of the last log line. It is scrubbed before it is cut: a part of a secret is no known value."""


def build_status(view: DaemonView) -> dict[str, Any]:
    """The whole document, scrubbed, because details of sensors and recovery were not scrubbed before. Pure."""
    document: dict[str, Any] = scrub_all(_document(view))
    return document


def _document(view: DaemonView) -> dict[str, Any]:
    judged = view.judgement()
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "podwatch-status",
        "running": True,
        "time": rfc3339(view.now_wall),
        "run_id": view.run_id,
        "overall": str(judged.overall),
        "reasons": [_reason(view, reason) for reason in judged.reasons],
        "daemon": _daemon(view),
        "training": _training(view, judged.state),
        "recovery": _recovery(view),
        "learned": _learned(view),
        "gpus": _gpus(view),
        "inference": _inference(view),
        "disk": _disk(view, view.facts.pod.disk.value),
        "other_disks": [_room(d) | {"role": d.role} for d in view.facts.pod.disks.value or ()],
        "host": host_document(view.facts.pod.host.value),
        "log_rules": log_rules_document(view),
        "figures": figures_document(view),
        "checkpoints": _checkpoints(view),
        "sync": _sync(view),
        "end": None if view.end is None else view.end.to_dict(),
        "incident": None if view.incident is None else incident_document(view.incident, view.account),
        "nodes": [
            {
                "rank": node.rank,
                "host": node.host,
                "phase": node.phase,
                "step": node.step,
                "silent_seconds": round(node.silent, 1),
                "reason": node.reason,
                "here": node.here,
            }
            for node in view.nodes
        ],
        "node_count": view.node_count,
        "account": account_document(view.account),
        "sensors": _sensors(view),
        "counters": _counters(view),
    }


def _daemon(view: DaemonView) -> dict[str, Any]:
    return {
        "version": view.version,
        "pid": view.pid,
        "mode": view.mode,
        "live": view.watchdog_ok,
        "desired": str(view.facts.run.desired),
        "pause": pause_document(view.facts.run.pause),
        "opening": view.opening,
        "started_at": rfc3339(view.started_wall),
        "armed": list(view.armed),
        "second_signals": list(view.second_signals),
        "http_url": view.http_url,
        "config_path": view.config_path,
        "output_dir": view.output_dir,
        "state_dir": view.state_dir,
        "layout": view.layout,
        "layout_because": view.layout_because,
        "capabilities": dict(view.capabilities) or None,
    }


def _inference(view: DaemonView) -> list[dict[str, Any]]:
    return [
        {
            "url": s.url,
            "health": str(s.health),
            "http_status": s.http_status,
            "requests_running": s.requests_running,
            "requests_waiting": s.requests_waiting,
            "generation_tokens_total": s.generation_tokens_total,
            "liveness": None if s.liveness is None else str(s.liveness),
            "asleep": s.asleep,
            "server": str(s.kind),
            "discovered": s.discovered,
            "outdated": view.facts.pod.inference.at < view.trainer_changed_at,
        }
        for s in view.facts.pod.inference.value or ()
    ]


def _sensors(view: DaemonView) -> list[dict[str, Any]]:
    """``age_seconds`` is null before the first reading."""
    return [
        {
            "name": name,
            "state": str(reading.state),
            "detail": reading.detail,
            "age_seconds": None
            if reading.state is SensorState.PENDING
            else round(max(0.0, view.facts.pod.at - reading.at), 1),
        }
        for name, reading in sorted(view.sensors.items())
    ]


def _counters(view: DaemonView) -> dict[str, Any]:
    return {
        "turns": view.counters.turns,
        "restarts": view.counters.restarts,
        "published": view.counters.published,
        "uploaded_bytes": view.counters.uploaded_bytes,
        "skipped": view.counters.skipped,
        "abandoned": view.counters.abandoned,
        "pruned": view.counters.pruned,
        "incidents": dict(view.counters.incidents),
    }


def _reason(view: DaemonView, reason: Reason) -> dict[str, Any]:
    since = reason.since
    if since is None:
        return finding_document(reason.finding, since_wall=None, for_seconds=0.0)
    return finding_document(reason.finding, since_wall=view.wall_of(since), for_seconds=view.now - since)


def _training(view: DaemonView, state: TrainingState) -> dict[str, Any]:
    trainer = view.facts.pod.trainer.value
    newest = view.facts.pod.newest_step
    launcher = trainer.launcher if trainer else None
    last_sign = max((p.at for p in view.facts.pod.progress_of_start), default=None)
    return {
        "state": str(state),
        "alive": None if trainer is None else trainer.alive,
        "supervision": str(trainer.supervision) if trainer else "none",
        "pid": launcher.pid if launcher else None,
        "trainer_pids": [p.identity.pid for p in trainer.descendants if p.role is ProcessRole.TRAINER][:_PIDS_SHOWN]
        if trainer
        else [],
        "start_ticks": launcher.start_ticks if launcher else None,
        "boot_id": launcher.boot_id if launcher else "",
        "started_at": rfc3339(view.wall_of(trainer.started_at)) if trainer and trainer.started_at is not None else None,
        "exit": _exit(trainer.exit) if trainer else None,
        "processes": len(trainer.descendants) if trainer else None,
        "step": newest.step if newest else None,
        "step_at": rfc3339(view.wall_of(newest.at)) if newest else None,
        "step_source": str(newest.source) if newest else None,
        "last_sign_at": rfc3339(view.wall_of(last_sign)) if last_sign is not None else None,
        "step_late": step_late(view.facts.pod, view.now, view.learned.median_step_seconds, view.target_step),
        "trainer_ended_at": rfc3339(None if view.trainer_ended_at is None else view.wall_of(view.trainer_ended_at)),
        "target_step": view.target_step,
        "median_step_seconds": view.learned.median_step_seconds,
        "steps_at_risk": view.steps_at_risk,
        "saving": view.facts.pod.saving,
        "log_path": view.log_path,
        "last_log_line": scrub(view.last_log_line)[:_LINE_SHOWN],
    }


def _exit(status: ExitStatus | None) -> dict[str, Any] | None:
    if status is None:
        return None
    return {
        "code": status.code,
        "signal": status.signal,
        "at": rfc3339(status.at_wall),
        "text": status.describe(),
    }


def _recovery(view: DaemonView) -> dict[str, Any]:
    r = view.recovery
    return {
        "phase": r.phase,
        "active": r.active,
        "waiting": r.waiting,
        "blocked": r.blocked,
        "gave_up": r.gave_up,
        "detail": r.detail,
        "resumed_step": r.resumed_step,
        "confirmed": r.confirmed,
        "attempts": r.attempts,
        "next_try_at": rfc3339(r.next_try_wall),
    }


def _learned(view: DaemonView) -> dict[str, Any]:
    """Each learned value with its number of observations; ``value`` is null before the first."""
    learned, seen = view.learned, view.learned.observations
    baselines = learned.baselines
    return {
        "step_seconds": {"value": learned.median_step_seconds, "observations": seen.get("step", 0)},
        "startup_seconds": {"value": learned.startup_seconds, "observations": seen.get("startup", 0)},
        "save_seconds": {"value": learned.median_save_seconds, "observations": seen.get("save", 0)},
        "save_interval_seconds": {
            "value": learned.median_save_gap_seconds,
            "observations": seen.get("save interval", 0),
        },
        "gpus": [
            {
                "index": index,
                "baseline_bytes": baselines.get(index),
                "baseline_observations": seen.get(f"gpu{index}", 0),
            }
            for index in sorted(baselines)
        ],
    }


def _gpus(view: DaemonView) -> list[dict[str, Any]]:
    roles = dict.fromkeys(view.trainer_gpus, "trainer")
    for index in view.inference_gpus:
        roles[index] = "shared" if index in roles else "inference"
    return [
        {
            "index": gpu.index,
            "uuid": gpu.uuid,
            "name": gpu.name,
            "state": str(gpu.state),
            "role": roles.get(gpu.index, "none"),
            "memory_used_bytes": gpu.memory_used_bytes,
            "memory_total_bytes": gpu.memory_total_bytes,
            "baseline_bytes": view.learned.baseline(gpu.index),
            "utilization_percent": gpu.utilization_percent,
            "temperature_celsius": gpu.temperature_celsius,
            "mig": gpu.mig,
            "ecc_uncorrected": gpu.ecc_uncorrected,
            "throttled": list(gpu.throttled),
            "detail": gpu.detail,
            "outdated": view.facts.pod.gpus.at < view.trainer_changed_at,
        }
        for gpu in view.facts.pod.gpus.value or ()
    ]


def _disk(view: DaemonView, disk: DiskSample | None) -> dict[str, Any] | None:
    if disk is None:
        return None
    fits = None if view.next_save_bytes is None else disk.free_bytes >= view.next_save_bytes
    return _room(disk) | {
        "prune_above_ratio": view.prune_above,
        "next_save_bytes": view.next_save_bytes,
        "next_save_fits": fits,
    }


def _room(disk: DiskSample) -> dict[str, Any]:
    return {
        "path": disk.path,
        "capacity_bytes": disk.capacity_bytes,
        "used_bytes": disk.used_bytes,
        "free_bytes": disk.free_bytes,
        "used_ratio": round(disk.used_ratio, 4),
        "inodes_total": disk.inodes_total,
        "inodes_free": disk.inodes_free,
    }


def _checkpoints(view: DaemonView) -> dict[str, Any]:
    newest = newest_complete(view.facts.checkpoints)
    return {
        "newest_complete_step": newest.step if newest else None,
        "newest_complete_at": rfc3339(newest.changed_wall) if newest else None,
        "sets": [
            checkpoint_document(
                s, stored=view.sync.stored, pins=view.facts.pins, uploading_step=view.sync.uploading_step
            )
            for s in sorted(view.facts.checkpoints, key=lambda s: s.step)
        ],
    }


def _sync(view: DaemonView) -> dict[str, Any]:
    s = view.sync
    return {
        "store_url": s.store_url,
        "ok": s.ok,
        "error": s.error,
        "refused": s.refused,
        "next_attempt_at": rfc3339(s.next_attempt_wall),
        "clock_skew_seconds": None if s.clock_skew is None else round(s.clock_skew),
        "last_step": s.last_step,
        "last_published_at": rfc3339(s.last_published_wall),
        "saves": s.saves,
        "uploading_step": s.uploading_step,
        "uploaded_bytes": s.uploaded_bytes,
        "total_bytes": s.total_bytes,
        "upload_bytes_per_second": None if s.upload_rate is None else round(s.upload_rate),
        "upload_left_seconds": None if s.upload_left_seconds is None else round(s.upload_left_seconds),
        "superseded": s.superseded,
        "calls": {name.lower(): count for name, count in s.calls.items()},
        "standing": "alone" if s.standing is None else str(s.standing.act),
        "generation": 0 if s.standing is None else s.standing.generation,
        "holder": "" if s.standing is None else s.standing.holder,
    }


# -- machine, log rules, training metrics ----------------------------------------------------------------------------


def host_document(host: HostSample | None) -> dict[str, Any] | None:
    if host is None:
        return None
    nearest = host.files[0] if host.files else None
    return {
        "memory_total_bytes": host.memory_total_bytes,
        "memory_available_bytes": host.memory_available_bytes,
        "swap_total_bytes": host.swap_total_bytes,
        "swap_used_bytes": host.swap_used_bytes,
        "shm_total_bytes": host.shm_total_bytes,
        "shm_used_bytes": host.shm_used_bytes,
        "container_limit_bytes": host.cgroup_limit_bytes,
        "container_used_bytes": host.cgroup_used_bytes,
        "oom_kills": host.oom_kills,
        "files": None
        if nearest is None
        else {"pid": nearest.pid, "name": nearest.name, "open": nearest.open_files, "limit": nearest.limit},
        "files_unreadable": host.files_unreadable,
        "xids_watched": host.xids_watched,
        "xids": [{"gpu": x.gpu, "code": x.code} for x in host.xids],
    }


def log_rules_document(view: DaemonView) -> list[dict[str, Any]]:
    """Rules with a match since the start of training, and disabled rules."""
    return [
        {
            "rule": match.rule,
            "role": match.role,
            "count": match.count,
            "first_at": rfc3339(view.wall_of(match.first_at)),
            "last_at": rfc3339(view.wall_of(match.last_at)),
            "line": match.line,
        }
        for match in view.facts.pod.logs.value or ()
    ]


def figures_document(view: DaemonView) -> dict[str, Any] | None:
    """The newest value of each metric of training; values that are not finite are text, because JSON has no NaN."""
    steps = view.facts.pod.training.value or ()
    if not steps:
        return None
    newest: dict[str, float] = {}
    for metrics in steps:
        newest.update(metrics.values)
    return {
        "step": steps[-1].step,
        "source": steps[-1].source,
        "values": {name: value if math.isfinite(value) else str(value) for name, value in sorted(newest.items())},
    }
