"""What only the composed daemon can find: the state of the backup and of its own configuration. Pure functions."""

from podwatch.domain.checkpoint import CheckpointSet, newest_complete
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.sync.doors import SyncState


def backup_findings(
    sync: SyncState | None, sets: tuple[CheckpointSet, ...], *, now: float, wall: float, max_lag: float, since: float
) -> tuple[Finding, ...]:
    """``now`` monotonic, ``wall`` epoch seconds; ``since`` is when this daemon started (monotonic)."""
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
    if sync.superseded:
        found.append(
            Finding(
                FindingKind.STORE_UNAVAILABLE,
                Severity.CRITICAL,
                "another podwatch has taken over this run in the store; nothing is published from here any more",
                now,
                "stop training on the pod that is not wanted: podwatch stop-training",
                subject="superseded",
            )
        )
    elif sync.ok is False:
        suggestion = "podwatch check shows what the key and the bucket allow"
        summary = f"the store cannot be used: {sync.error}"
        found.append(Finding(FindingKind.STORE_UNAVAILABLE, Severity.WARNING, summary, now, suggestion))
    newest = newest_complete(sets)
    if newest is not None and (newest.step, newest.save_id) not in sync.stored:
        waiting = [s.changed_wall for s in sets if s.complete and (s.step, s.save_id) not in sync.stored]
        lag = wall - max(min(waiting), sync.last_published_wall or 0.0)
        if lag > max_lag and now - since > max_lag:
            last = "nothing" if sync.last_step is None else f"step {sync.last_step}"
            found.append(
                Finding(
                    FindingKind.SYNC_LAGGING,
                    Severity.CRITICAL,
                    f"nothing new has reached the store for {lag / 3600:.1f} h; the newest stored is {last}",
                    now - lag,
                    "see the store's error above, or the upload's speed in podwatch status --json",
                )
            )
    return tuple(found)


def config_findings(refused: str, *, since: float) -> tuple[Finding, ...]:
    """``refused`` says why the file could not be used at start, if it could not."""
    if not refused:
        return ()
    summary = "the configuration file cannot be used; running with the last good copy"
    return (Finding(FindingKind.CONFIG_STALE, Severity.CRITICAL, summary, since, refused),)


def store_refused_finding(reason: str, *, since: float) -> tuple[Finding, ...]:
    """A configured store that would be no backup: as good as none, and the owner believes otherwise."""
    return (
        Finding(
            FindingKind.NOT_BACKED_UP,
            Severity.CRITICAL,
            f"NOT BACKED UP: the store is refused, {reason}",
            since,
            "change sync.store and restart podwatch (training goes on meanwhile)",
        ),
    )
