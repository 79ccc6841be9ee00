"""The status of a run whose daemon does not answer: not found, stopped, died or silent, and what to do."""

import time
from pathlib import Path
from typing import Any

from podwatch.cli.find_daemon import Found, training_lives
from podwatch.domain.times import ago, from_rfc3339, local, rfc3339, span


def stale(found: Found) -> dict[str, Any]:
    """The last snapshot, marked as not current."""
    endpoint, now = found.endpoint, time.time()
    snapshot = found.snapshot()
    document = dict(snapshot[0]) if snapshot else {}
    seen = from_rfc3339(document.get("time")) or (snapshot[1] if snapshot else None)
    lives, state = training_lives(document), _state(document)
    if found.alive:
        kind, summary = "podwatch-silent", f"podwatch (pid {endpoint.pid}) runs but does not answer"
        fix = f"read its log; to replace it, end pid {endpoint.pid} and run `podwatch run`: it takes over the trainer"
    elif endpoint.stopped_wall is not None:
        kind = "podwatch-stopped"
        summary = f"podwatch was stopped {ago(now - endpoint.stopped_wall)}"
        fix = "nothing, the run is finished" if state == "finished" else _start_hint(endpoint.config_path)
    else:
        kind = "podwatch-died"
        summary = f"podwatch (pid {endpoint.pid}) died{f', last seen {ago(now - seen)}' if seen else ''}"
        fix = _start_hint(endpoint.config_path)
        if _init_lives(found.directory):
            fix = f"wait some seconds: podwatch's init starts it again; if it does not, end init, then {fix}"
    reason = _reason(kind, summary, fix)
    reason["since"] = rfc3339(endpoint.stopped_wall or seen)
    document.update(
        _not_running(endpoint.run_id, reason, _headline(kind, lives, state)),
        rows=_rows(document, seen, now),
        snapshot_at=rfc3339(seen),
        training_alive=lives,
        time=rfc3339(now),
    )
    return document


def _not_running(run_id: str, reason: dict[str, Any], headline: str) -> dict[str, Any]:
    """What the document of every run says whose podwatch does not answer."""
    return {
        "schema_version": 1,
        "kind": "podwatch-status",
        "running": False,
        "time": rfc3339(time.time()),
        "run_id": run_id,
        "overall": "unknown",
        "reasons": [reason],
        "headline": headline,
    }


def _state(document: dict[str, Any]) -> str:
    """The state of training in a document; empty if it has none."""
    training = document.get("training")
    return str(training.get("state")) if isinstance(training, dict) else ""


_GUARDS = {
    "podwatch-silent": "PODWATCH DOES NOT ANSWER",
    "podwatch-stopped": "PODWATCH IS STOPPED",
}
_STATES = {
    "stopped": "training was STOPPED",
    "finished": "training was FINISHED",
    **dict.fromkeys(("down", "recovering", "gave-up", "blocked"), "TRAINING WAS DOWN, nothing restarts it"),
}


def _headline(kind: str, lives: bool | None = None, state: str = "") -> str:
    """``lives``: the launcher of the last document, None if unknown. ``state``: of training, in that document."""
    guard = _GUARDS.get(kind, "PODWATCH IS NOT RUNNING")
    if lives is True:
        return f"{guard}: training continues UNGUARDED"
    if lives is False:
        return f"{guard} and TRAINING IS NOT RUNNING"
    return f"{guard}: {_STATES.get(state, 'training is UNGUARDED')}"


def _rows(document: dict[str, Any], seen: float | None, now: float) -> list[dict[str, Any]]:
    """The facts of the last document, below their age; without what was podwatch's own."""
    found = document.get("rows")
    rows = [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []
    run = [row for row in rows if row.get("label") == "run"]
    others = [row for row in rows if row.get("label") not in ("run", "log", "podwatch")]
    if seen is None or not others:
        return run
    text = f"the values below are {span(now - seen)} old (from {local(seen, now)})"
    return [*run, {"label": "", "text": text, "tone": "warning", "share": None}, *others]


def _init_lives(directory: Path) -> bool:
    """Whether podwatch's init runs: with `--detach`, or in a container. False if unknown. The lock of its pid file is
    not tried: init could be just taking it."""
    try:
        pid = int((directory / "init.pid").read_text())
        return b"podwatch" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return False


def nothing(run: str, roots: list[Path], config: str) -> dict[str, Any]:
    named = f" for run {run}" if run else ""
    places = ", ".join(str(r) for r in roots)
    said = f"podwatch is not running{named} (no endpoint in {places})"
    reason = _reason("podwatch-not-found", said, _start_hint(config))
    return {
        **_not_running(run, reason, _headline("podwatch-not-found")),
        "not_backed_up": "",
        "rows": [{"label": "run", "text": run, "tone": "", "share": None}] if run else [],
        "snapshot_at": None,
        "training_alive": None,
    }


def _start_hint(config_path: str) -> str:
    return f"podwatch run -c {config_path}" if config_path else "podwatch run (or: systemctl start podwatch)"


def _reason(kind: str, summary: str, suggestion: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "severity": "critical",
        "subject": "",
        "summary": summary,
        "suggestion": suggestion,
        "verdict": "none",
        "confirmed": False,
        "since": None,
        "for_seconds": 0.0,
        "evidence": [],
    }
