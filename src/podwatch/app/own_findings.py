"""Findings about podwatch itself and its surroundings: supervisor, clock, configuration, command and directory."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from podwatch.checkpoints.shapes import SAVES, Concern
from podwatch.detection.blind_sensors import STALL_SHOWN_SECONDS
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity
from podwatch.domain.snapshot import Reading, TrainerSample

CLOCK_SECONDS = 120.0
"""Threshold of the clock warning. NTP keeps a clock within a second; an answer takes less than a minute."""


def clock_findings(skew: float | None, *, since: float) -> tuple[Finding, ...]:
    """A finding if the clock is wrong. ``skew``: seconds that this machine's clock is ahead of the store's."""
    if skew is None or abs(skew) <= CLOCK_SECONDS:
        return ()
    minutes = f"{abs(skew) / 60:.0f} min {'ahead of' if skew > 0 else 'behind'} the store's"
    return (
        Finding(
            FindingKind.CLOCK_WRONG,
            Severity.WARNING,
            f"this machine's clock is {minutes}: times in logs and events are wrong; backups are not affected",
            since,
            "set the clock of the host, for example with NTP; a container cannot set it",
        ),
    )


def linked_findings(linked: Sequence[Path], *, since: float) -> tuple[Finding, ...]:
    """A finding for each symbolic link to checkpoints, which podwatch never follows."""
    return tuple(
        Finding(
            FindingKind.FOREIGN_CHECKPOINTS,
            Severity.WARNING,
            f"{link} is a symbolic link: podwatch does not guard, back up or resume from the checkpoints behind it",
            since,
            "set trainer.checkpoint_dir to the directory that it leads to; or, if it is one checkpoint, move that back",
        )
        for link in linked
    )


def freeze_findings(silent: float, *, now: float, wall: float, since: float) -> tuple[Finding, ...]:
    """A finding for ``STALL_SHOWN_SECONDS`` after init restarted a podwatch that did not respond. ``silent``: seconds
    without
    a response before this start, or 0; ``since``: when this daemon started (monotonic, as ``now``); ``wall``: epoch
    seconds now."""
    if silent <= 0 or now - since > STALL_SHOWN_SECONDS:
        return ()
    at = time.strftime("%H:%M:%S", time.gmtime(wall - (now - since)))
    evidence = Evidence("init's watchdog", f"no response for {silent:.1f} s", Agreement.UNAVAILABLE, silent)
    return (
        Finding(
            FindingKind.LOOP_STALLED,
            Severity.WARNING,
            f"podwatch did not respond for {silent:.0f} s, and init restarted it. Training was unguarded meanwhile;"
            f" podwatch guards it again since {at} UTC",
            since,
            "if it happens again, the pod is short of CPU, or a disk or a driver blocks podwatch",
            evidence=(evidence,),
            subject="restarted",
        ),
    )


def supervisor_findings(trainer: Reading[TrainerSample]) -> tuple[Finding, ...]:
    """A finding if the supervisor has ended while its training runs."""
    if not trainer.ok or trainer.value is None or not trainer.value.supervisor_lost:
        return ()
    launcher = trainer.value.launcher
    return (
        Finding(
            FindingKind.SUPERVISOR_LOST,
            Severity.WARNING,
            "the supervisor, the small process that podwatch starts training under, ended before the training"
            f"{f' (pid {launcher.pid})' if launcher is not None else ''}, which continues. podwatch watches it"
            " directly, and stops or restarts it as before. It can no longer read how training ends: an end without the"
            " trainer's finish line counts as a failure. The training log is no longer rotated",
            trainer.at,
            "nothing: the next start of training gets a new supervisor (`podwatch restart` does that now)."
            " If you did not end the supervisor, look for an out-of-memory kill: `dmesg`",
        ),
    )


def config_findings(refused: str, *, since: float) -> tuple[Finding, ...]:
    """A finding if the file is invalid; ``refused`` is the reason, or empty."""
    if not refused:
        return ()
    summary = "the configuration file is invalid; podwatch runs with the last good copy"
    return (Finding(FindingKind.CONFIG_STALE, Severity.CRITICAL, summary, since, refused),)


def saved_after_all(
    concerns: Sequence[Concern], sets: Sequence[CheckpointSet], started_wall: float | None
) -> tuple[Concern, ...]:
    """``concerns`` without "saves nothing" if the running trainer has saved; with a note if only an earlier start has.
    ``started_wall``: start of the running trainer (epoch seconds), None if none runs."""
    whole = [s for s in sets if s.complete]
    if started_wall is not None and any((s.began_wall or s.changed_wall) >= started_wall for s in whole):
        return tuple(c for c in concerns if c.subject != SAVES)
    newest = max((s.step for s in whole), default=None)
    if newest is None:
        return tuple(concerns)
    earlier = f"; the checkpoints here (newest: step {newest}) are of an earlier start"
    return tuple(replace(c, what=f"{c.what}{earlier}") if c.subject == SAVES else c for c in concerns)


def concern_findings(concerns: tuple[Concern, ...], *, since: float) -> tuple[Finding, ...]:
    """A finding for each reason why a restart would fail, known before the first failure."""
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
