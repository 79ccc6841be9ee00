"""Domain objects as JSON-safe dicts, one shape everywhere: HTTP, control socket, command line (docs/json.md)."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from podwatch.client.times_and_sizes import rfc3339
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.event import Event, Incident
from podwatch.domain.finding import Finding
from podwatch.domain.run import Pause
from podwatch.domain.stored_checkpoint import PublishedSave
from podwatch.policy.run_cost import Account, Loss, Price

# -- pause -----------------------------------------------------------------------------------------------------------
# `daemon.pause` in the status, and the answer to `pause`.


def pause_document(pause: Pause | None) -> dict[str, Any] | None:
    if pause is None:
        return None
    return {
        "since": rfc3339(pause.since),
        "until": rfc3339(pause.until),
        "by": pause.by,
        "reason": pause.reason,
        "held_by": pause.held_by,
    }


# -- events, incidents, checkpoints, findings ------------------------------------------------------------------------

SCHEMA_VERSION = 1


def event_document(event: Event) -> dict[str, Any]:
    """One event, as in ``podwatch events --json``."""
    return {
        "id": event.id,
        "at": rfc3339(event.wall),
        "name": str(event.name),
        "severity": str(event.severity),
        "message": event.message,
        "fields": dict(event.fields),
    }


def account_document(account: Account | None, *, brief: bool = False) -> dict[str, Any] | None:
    """What the run costs. ``brief``: the totals only, for the heartbeat. Amounts are null without ``[cost]
    per_hour``."""
    if account is None:
        return None
    run, finish = account.run, account.finish
    document: dict[str, Any] = {
        "since": rfc3339(run.since),
        "total_seconds": round(run.seconds, 1),
        "goodput_ratio": _rounded(account.goodput, 4),
        "failures": run.failures,
        "lost_seconds": _rounded(run.lost_seconds, 1),
        "steps_lost": run.steps_lost,
        "finish_seconds": None if finish is None else {"low": round(finish.low), "high": round(finish.high)},
        "money": {
            "per_hour": account.price.per_hour,
            "currency": account.price.currency,
            "so_far": _rounded(run.so_far, 2),
            "lost": _rounded(run.lost, 2),
            "at_end": _rounded(account.at_end, 2),
        },
    }
    if not brief:
        document["causes"] = [
            {"cause": cause, "times": loss.times} | loss_document(loss, account.price)
            for cause, loss in sorted(account.causes.items())
        ]
    return document


def loss_document(loss: Loss, price: Price) -> dict[str, Any]:
    return {
        "without_training_seconds": round(loss.idle, 1),
        "lost_training_seconds": _rounded(loss.training, 1),
        "steps_lost": loss.steps,
        "money": _rounded(price.of(loss.seconds), 2),
        "currency": price.currency,
    }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def incident_document(incident: Incident, account: Account | None = None) -> dict[str, Any]:
    """One incident. ``evidence`` is the parsed list; text that is not JSON stays text. ``account``: for its cost."""
    try:
        evidence: object = json.loads(incident.evidence) if incident.evidence else []
    except ValueError:
        evidence = incident.evidence
    loss = None if account is None else account.incidents.get(incident.id)
    return {
        "id": incident.id,
        "kind": incident.kind,
        "opened_at": rfc3339(incident.opened_wall),
        "closed_at": rfc3339(incident.closed_wall),
        "open": incident.closed_wall is None,
        "summary": incident.summary,
        "resolution": incident.resolution,
        "resumed_step": incident.resumed_step,
        "lost_steps": incident.lost_steps,
        "bundle": incident.bundle,
        "cost": None if loss is None or account is None else loss_document(loss, account.price),
        "evidence": evidence,
    }


def checkpoint_document(
    found: CheckpointSet,
    *,
    stored: frozenset[tuple[int, str]] | None = None,
    pins: Mapping[int, str] | None = None,
    uploading_step: int | None = None,
    held: Sequence[str] = (),
) -> dict[str, Any]:
    """One checkpoint. ``stored`` is None where it is unknown (no daemon was asked). ``held``: reasons besides a pin
    that protect it from removal."""
    pin = (pins or {}).get(found.step)
    return {
        "step": found.step,
        "completeness": str(found.completeness),
        "reason": found.reason,
        "held_back": found.held,
        "size_bytes": found.size_bytes,
        "file_count": found.file_count,
        "changed_at": rfc3339(found.changed_wall),
        "save_id": found.save_id,
        "stored": None if stored is None else (found.step, found.save_id) in stored,
        "uploading": uploading_step == found.step,
        "pinned": pin,
        "held_by": [*([f"pinned: {pin}"] if pin is not None else []), *held],
        "parts": [
            {
                "name": part.name,
                "path": part.path,
                "required": part.required,
                "complete": part.complete,
                "size_bytes": part.size_bytes,
                "reason": part.reason,
            }
            for part in found.parts
        ],
    }


def inspection_document(step: int, problems: Sequence[str], notes: Sequence[str], files: int) -> dict[str, Any]:
    """Result of the structural check of one checkpoint. ``notes`` are no proof of damage."""
    return {
        "step": step,
        "sound": not problems,
        "reasons": list(problems),
        "notes": list(notes),
        "files_checked": files,
    }


def remote_document(saved: PublishedSave, here: Collection[tuple[int, str]]) -> dict[str, Any]:
    """One checkpoint in the store, from the journal. ``here``: (step, save_id) of the checkpoints on this pod."""
    return {
        "step": saved.step,
        "save_id": saved.save_id,
        "size_bytes": saved.total_bytes,
        "stored_at": rfc3339(saved.wall),
        "lineage": saved.lineage,
        "restored": saved.restored,
        "here": (saved.step, saved.save_id) in here,
    }


def remote_documents(
    saves: Iterable[PublishedSave], listed: Collection[tuple[int, str]] | None, here: Collection[tuple[int, str]]
) -> list[dict[str, Any]]:
    """The checkpoints in the store, oldest first; before them those that only a listing of the store shows: ``listed``
    are (step, save_id), None if it was not listed yet."""
    known = [remote_document(save, here) for save in saves]
    names = set(listed or ()) - {(item["step"], item["save_id"]) for item in known}
    unknown = {"size_bytes": None, "stored_at": None, "lineage": None, "restored": None}
    bare = [{"step": step, "save_id": name, **unknown, "here": (step, name) in here} for step, name in sorted(names)]
    return [*bare, *known]


def finding_document(finding: Finding, *, since_wall: float | None, for_seconds: float) -> dict[str, Any]:
    """One finding. ``confirmed`` matters for kinds that can lead to a restart."""
    return {
        "kind": str(finding.kind),
        "severity": str(finding.severity),
        "subject": finding.subject,
        "summary": finding.summary,
        "suggestion": finding.suggestion,
        "verdict": str(finding.verdict),
        "confirmed": finding.confirmed,
        "since": rfc3339(since_wall),
        "for_seconds": round(max(0.0, for_seconds), 1),
        "evidence": [
            {
                "signal": e.signal,
                "value": e.value,
                "agreement": str(e.agreement),
                "window_seconds": e.window_seconds,
            }
            for e in finding.evidence
        ],
    }
