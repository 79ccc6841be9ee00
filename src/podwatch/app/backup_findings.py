"""Findings about backups and uploads. Pure functions."""

from podwatch.app.lost_saves import SavesOfRun, not_stored
from podwatch.app.own_findings import clock_findings
from podwatch.checkpoints.lineage import branch_line, kept_branch
from podwatch.config.store_kinds import bucket_of
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.facts import StoreFacts
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.domain.lease import LeaseAction
from podwatch.domain.run_state import RunState
from podwatch.domain.times import span
from podwatch.store.uploads import uploads_behind

CANNOT = "the store cannot be used"


def backup_findings(
    sync: StoreFacts | None, sets: tuple[CheckpointSet, ...], *, now: float, wall: float, max_lag: float, since: float
) -> tuple[Finding, ...]:
    """Findings about the store and the age of the backup. ``now`` monotonic, ``wall`` epoch seconds; ``since``: when
    this daemon started (monotonic)."""
    if sync is None or not sync.store_url:
        return (
            Finding(
                FindingKind.NOT_BACKED_UP,
                Severity.WARNING,
                "NOT BACKED UP: no store is configured, so the only copy of every checkpoint is on this pod",
                since,
                'set sync.store, for example "b2://my-bucket"',
            ),
        )
    found: list[Finding] = []
    lease = sync.lease
    if lease is not None and lease.stop:
        lost = lease.act is LeaseAction.SUPERSEDED
        fix = "shut this pod down, or take the run back: stop podwatch here, then `podwatch run --take-over`"
        found.append(
            Finding(
                FindingKind.SUPERSEDED,
                Severity.CRITICAL if lost else Severity.WARNING,
                f"{lease.why_not}; nothing trains here" + ("" if lease.publish else " and nothing is published"),
                now,
                fix if lost else "nothing if this is intended; else change control.json in the store (docs/pods.md)",
            )
        )
    if not lost_run(sync) and sync.ok is False:
        suggestion = f"`podwatch check` shows what {_limits(sync)}"
        if sync.refused:
            suggestion = f"{_correct(sync)} {suggestion}, `podwatch sync` retries at once"
            summary, severity = f"NOT BACKED UP: {sync.error}", Severity.CRITICAL
        else:
            summary, severity = cannot_be_used(sync.error), Severity.WARNING
        found.append(Finding(FindingKind.STORE_UNAVAILABLE, severity, summary, now, suggestion))
    found += clock_findings(sync.clock_skew, since=now)
    if lost_run(sync):
        return tuple(found)  # another pod uploads now, so that this pod cannot lag
    waiting = not_stored(sets, sync.stored, sync.last_published_wall)
    if waiting is not None:
        lag = wall - waiting.since_wall
        if lag > max_lag and now - since > max_lag:
            last = "it holds none of this run" if sync.last_step is None else f"its newest is step {sync.last_step}"
            found.append(
                Finding(
                    FindingKind.SYNC_LAGGING,
                    Severity.CRITICAL,
                    f"the store has received no new checkpoint for {lag / 3600:.1f} h; {last}",
                    now - lag,
                    "check the uplink: `podwatch status` shows the upload, `podwatch check` tests the store",
                )
            )
    return tuple(found)


def cannot_be_used(error: str) -> str:
    """The store's error as a sentence; the errors of a directory are one already."""
    return error if error.startswith(CANNOT) else f"{CANNOT}: {error}"


def _limits(sync: StoreFacts) -> str:
    return "the directory allows" if _is_directory(sync) else "the key and the bucket allow"


def _correct(sync: StoreFacts) -> str:
    if _is_directory(sync):
        return "mount the directory again, or make it writable for podwatch."
    return (
        "correct the key, the cap or the bucket. podwatch reads [trainer] env_file again at each attempt; a key in its"
        " environment (/etc/podwatch/podwatch.env) needs `systemctl restart podwatch`, and training continues."
    )


def _is_directory(sync: StoreFacts) -> bool:
    return not bucket_of(sync.store_url)


def upload_findings(sync: StoreFacts | None, *, now: float) -> tuple[Finding, ...]:
    """A finding if uploads are slower than saves. ``now`` monotonic."""
    if sync is None or lost_run(sync) or sync.ok is False:
        return ()  # another finding says why nothing is stored
    if not uploads_behind(sync.skipped, sync.upload_seconds, sync.save_seconds):
        return ()
    return (
        Finding(
            FindingKind.UPLOADS_SLOW,
            Severity.WARNING,
            f"uploads are slower than the saves: an upload takes {span(sync.upload_seconds or 0.0)}, a save comes every"
            f" {span(sync.save_seconds or 0.0)}; {sync.skipped} checkpoints were skipped lately. podwatch always sends"
            " the newest checkpoint next",
            now,
            "save less often, use a faster uplink, or leave more of the CPU free; check that sync.max_rate does not"
            " hold uploads back",
        ),
    )


def lost_run(sync: StoreFacts) -> bool:
    return sync.lease is not None and sync.lease.act is LeaseAction.SUPERSEDED


def saves_of_run(sync: StoreFacts | None, sets: tuple[CheckpointSet, ...], steps_at_risk: int | None) -> SavesOfRun:
    """The input of the safekeeping rules; checkpoints that are not this run's are left out. ``nothing_stored`` is False
    until the store has answered or failed, and where another pod publishes for this run."""
    own = tuple(s for s in sets if s.ours)
    if sync is None or not sync.store_url or (sync.lease is not None and sync.lease.stop) or lost_run(sync):
        return SavesOfRun(own, steps_at_risk=steps_at_risk)
    known = sync.saves is not None or sync.ok is False
    none = sync.last_step is None and not sync.stored and not sync.saves
    return SavesOfRun(own, known and none, sync.abandoned_in_a_row, steps_at_risk, sync.saves is not None)


def store_refused_finding(reason: str, *, since: float) -> tuple[Finding, ...]:
    """The finding if the configured store is refused because it is no backup."""
    return (
        Finding(
            FindingKind.NOT_BACKED_UP,
            Severity.CRITICAL,
            f"NOT BACKED UP: podwatch does not use the configured store. {reason}",
            since,
            "change sync.store and restart podwatch (training continues)",
        ),
    )


# -- earlier branches ------------------------------------------------------------------------------------------------


def branch_findings(
    sets: tuple[CheckpointSet, ...], run: RunState, sync: StoreFacts | None, now: float, wall: float
) -> tuple[Finding, ...]:
    """A finding while the newest checkpoint of an earlier branch is kept, and for a day after an operator went back to
    an earlier step. ``now`` monotonic, ``wall`` epoch seconds."""
    if not run.lineage.parent:
        return ()
    kept = kept_branch(sets, run, sync)
    line = branch_line(sets, run.lineage, kept, has_store=sync is not None, wall=wall)
    if line is None:
        return ()
    summary, suggestion = line
    opened = run.lineage.opened_wall
    since = now - max(0.0, wall - opened) if opened else now
    return (Finding(FindingKind.EARLIER_BRANCH, Severity.INFO, summary, since, suggestion),)
