"""What only the composed daemon can find: the state of the backup and of its own configuration. Pure functions."""

from collections.abc import Callable, Sequence
from pathlib import Path

from podwatch.checkpoints.layouts.base import SAVES, Concern
from podwatch.domain.checkpoint import CheckpointSet, newest_complete
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.judgement.claims import Act
from podwatch.judgement.safekeeping import Kept
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
    standing = sync.standing
    if standing.stop:
        lost = standing.act is Act.SUPERSEDED
        fix = "end this pod, or take the run back: end podwatch here, then podwatch run --take-over"
        found.append(
            Finding(
                FindingKind.SUPERSEDED,
                Severity.CRITICAL if lost else Severity.WARNING,
                f"{standing.why_not}; nothing trains here" + ("" if standing.publish else " and nothing is published"),
                now,
                fix if lost else "change control.json in the store (docs/two-pods.md)",
            )
        )
    if not lost_run(sync) and sync.ok is False:
        suggestion = "podwatch check shows what the key and the bucket allow"
        summary = f"the store cannot be used: {sync.error}"
        found.append(Finding(FindingKind.STORE_UNAVAILABLE, Severity.WARNING, summary, now, suggestion))
    if lost_run(sync):
        return tuple(found)  # what is not stored from here any more is no lag
    newest = newest_complete(sets)
    if newest is not None and (newest.step, newest.save_id) not in sync.stored:
        waiting = [s.changed_wall for s in sets if s.complete and not s.held and (s.step, s.save_id) not in sync.stored]
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


def lost_run(sync: SyncState) -> bool:
    return sync.standing.act in (Act.SUPERSEDED, Act.ASIDE)


def kept_of(
    sync: SyncState | None,
    sets: tuple[CheckpointSet, ...],
    owns: Callable[[CheckpointSet], bool],
    steps_at_risk: int | None,
) -> Kept:
    """What judgement needs to know whether this run is kept. Nothing is ``nothing_stored`` before the store answered
    or failed, nor where another pod publishes for this run."""
    if sync is None or not sync.store_url or sync.standing.stop or lost_run(sync):
        return Kept(sets, owns, steps_at_risk=steps_at_risk)
    known = sync.saves is not None or sync.ok is False
    none = sync.last_step is None and not sync.stored and not sync.saves
    return Kept(sets, owns, known and none, sync.abandoned_in_a_row, steps_at_risk)


def linked_findings(linked: Sequence[Path], *, since: float) -> tuple[Finding, ...]:
    """Checkpoints that are reached through a symbolic link, which podwatch never follows."""
    return tuple(
        Finding(
            FindingKind.FOREIGN_CHECKPOINTS,
            Severity.WARNING,
            f"{link} is a symbolic link: the checkpoints behind it are not guarded, not backed up and not resumed from",
            since,
            "set trainer.checkpoint_dir to the directory that it leads to",
        )
        for link in linked
    )


def config_findings(refused: str, *, since: float) -> tuple[Finding, ...]:
    """``refused`` says why the file could not be used at start, if it could not."""
    if not refused:
        return ()
    summary = "the configuration file cannot be used; running with the last good copy"
    return (Finding(FindingKind.CONFIG_STALE, Severity.CRITICAL, summary, since, refused),)


def store_withheld_finding(*, since: float) -> tuple[Finding, ...]:
    """A store is configured, and podwatch does not know which pod it is in it."""
    return (
        Finding(
            FindingKind.NOT_BACKED_UP,
            Severity.CRITICAL,
            "NOT BACKED UP: the state database cannot be read, so podwatch does not know what the store holds",
            since,
            "see state-unavailable; uploads continue as soon as the database can be read",
        ),
    )


def concern_findings(concerns: tuple[Concern, ...], *, since: float) -> tuple[Finding, ...]:
    """What a restart would fail on, known before the first death."""
    return tuple(
        Finding(
            FindingKind.SAVES_NOTHING if concern.subject == SAVES else FindingKind.RESTART_IMPOSSIBLE,
            Severity.WARNING,
            concern.what,
            since,
            concern.fix,
            subject=concern.subject,
        )
        for concern in concerns
    )


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
