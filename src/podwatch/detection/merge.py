"""One finding per failure: its cause, what podwatch does, what it cost, what the operator must do.

A death shows in many places: memory, health, processes, logs, steps. Each detector reports its own finding; the
operator needs the failure once. ``fold`` keeps the leading finding and puts the others into its evidence. Detectors and
recovery use the unfolded findings; only status, events and notices use the folded ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from podwatch.domain.finding import (
    DEATHS,
    NOTHING,
    Agreement,
    Evidence,
    Finding,
    FindingKind,
    Severity,
    Verdict,
    counted,
)
from podwatch.domain.times import span

OPERATOR = (
    FindingKind.SUPERSEDED,
    FindingKind.RESUMED_WRONG,
    FindingKind.GAVE_UP,
    FindingKind.FOREIGN_CHECKPOINTS,
    FindingKind.AMBIGUOUS_TRAINERS,
    FindingKind.UNGUARDED,
    FindingKind.BLOCKED,
)
"""Training stays down until the operator acts: these lead over the cause."""
FOLLOWS = frozenset({*DEATHS, FindingKind.LOG_RULE, FindingKind.SENSOR_BLIND, FindingKind.NO_SECOND_SIGNAL})
FOLLOWS_WHILE_HEALING = FOLLOWS | {
    FindingKind.SYNC_LAGGING,
    FindingKind.CHECKPOINT_OVERDUE,
    FindingKind.TRAINING_HEALTH,
    FindingKind.OUT_OF_MEMORY,
}
BEFORE_SECONDS = 120.0
"""A log line or a blind sensor up to this long before a death belongs to it: a dying engine logs first, and the memory
verdict needs some seconds."""
WAITED_SECONDS = 10.0
"""If a failure is older than this when podwatch acts on it, the downtime is reported too."""
UNPAUSE = "`podwatch unpause` restarts training"


@dataclass(frozen=True, slots=True)
class Healing:
    """A failure that podwatch acts on. ``step``: the step it resumes from; None if not known yet, or for a ``fresh``
    start. ``lost_*`` are None if unknown. ``started``: the new trainer runs and has not made a step yet."""

    cause: Finding
    step: int | None = None
    fresh: bool = False
    lost_steps: int | None = None
    lost_seconds: float | None = None
    started: bool = False
    retry_seconds: float | None = None
    paused: bool = False
    """Maintenance: podwatch acts when the operator ends the pause."""
    launcher: str = ""
    """The launcher's name, such as ``prime-rl``; empty if unknown."""
    log: str = ""
    """The log line that shows the reason, with the log's name; empty if there is none."""
    gave_up: bool = False
    """podwatch does not restart training; the finding ``gave-up`` gives the reason."""
    down_seconds: float | None = None
    """Seconds since the failure began."""


def plain(cause: Finding, launcher: str = "") -> str:
    """The cause as one clause, without the list of signals."""
    if cause.kind is not FindingKind.SILENT_DEATH or not cause.confirmed:
        return cause.summary
    who = f"the inference server at {cause.subject}" if "://" in cause.subject else "the inference engine"
    where = f" on GPU {cause.subject[3:]}" if cause.subject.startswith("gpu") else ""
    return f"{who}{where} died and {launcher or 'the launcher'} did not notice"


def reported(healing: Healing) -> Finding:
    """The single finding for a failure that podwatch heals. It keeps the key of the cause."""
    cause, act = _cause(healing), _act(healing)
    return replace(
        healing.cause,
        severity=Severity.CRITICAL,
        summary=f"{cause}. {act}" if act else cause,
        suggestion=UNPAUSE if healing.paused and not healing.started else NOTHING,
        verdict=Verdict.RESTART,
        confirmed=True,
    )


def _cause(healing: Healing) -> str:
    """What happened, as one sentence without its full stop."""
    cause = plain(healing.cause, healing.launcher)
    return f"{cause[:1].upper()}{cause[1:]}{f' ({healing.log})' if healing.log else ''}"


def _act(healing: Healing) -> str:
    """What podwatch does, and what the failure cost; empty after it gave up."""
    source = " from the beginning" if healing.fresh else "" if healing.step is None else f" from step {healing.step}"
    lost = _lost(healing)
    down = healing.down_seconds
    if healing.gave_up:
        return ""
    if down is not None and down >= WAITED_SECONDS:
        lost += f"; no training for {span(down)}"
    if healing.started:
        return f"Restarted{source}{lost}; waiting for the first step"
    if healing.paused:
        return f"Training restarts{source}{lost} when the pause ends"
    if healing.retry_seconds is not None:
        return f"Restarting{source} in {healing.retry_seconds:.0f} s{lost}"
    return f"Restarting{source or ' training'}{lost}"


def _while_blocked(healing: Healing) -> str:
    """The text of the failure while podwatch does not restart training before the operator acts. A pause is the
    operator's own: its end stays announced."""
    waits = healing.paused and not healing.started
    return reported(healing).summary if waits else _cause(healing)


def _lost(healing: Healing) -> str:
    steps, seconds = healing.lost_steps, healing.lost_seconds
    if steps == 0:
        return " (no step lost)"
    parts = [] if steps is None else [f"{counted(steps, 'step')} lost"]
    parts += [] if seconds is None else [f"{span(seconds)} of training{'' if parts else ' lost'}"]
    return f" ({', '.join(parts)})" if parts else ""


def cost(steps: int | None, seconds: float | None, down: float | None) -> str:
    """The cost of a failure that is over, as the end of a sentence; empty if unknown."""
    parts = [] if steps is None else ["no step lost" if steps == 0 else f"{counted(steps, 'step')} lost"]
    if steps and seconds is not None:
        parts[-1] += f" ({span(seconds)} of training)"
    parts += [] if down is None else [f"no training for {span(down)}"]
    return f"; {', '.join(parts)}" if parts else ""


def fold(findings: Sequence[Finding], healing: Healing | None = None) -> tuple[Finding, ...]:
    """``findings`` with each failure once. ``healing``: the failure that podwatch acts on now. Of two findings with the
    same key the later counts. Pure."""
    merged = {f.key: f for f in findings}
    acting = None if healing is None else reported(healing)
    if acting is not None:
        merged[acting.key] = acting
    found = tuple(merged.values())
    cause = acting if acting is not None else _worst(found)
    if cause is None:
        return found
    folded = FOLLOWS if healing is None else FOLLOWS_WHILE_HEALING
    consequences = [f for f in found if f is not cause and _follows(f, cause, folded)]
    leader = replace(cause, evidence=(*cause.evidence, *(_evidence(f) for f in consequences)))
    asking = _asking(findings, cause)
    gone = {id(f) for f in (cause, *consequences)}
    if asking and healing is not None:
        operator, why = asking[0], [f for f in asking if f.key != cause.key][:1]
        gone |= {id(f) for f in why}
        summary = ". ".join([_while_blocked(healing), *(f.summary for f in why)])
        leader = replace(operator, summary=summary, evidence=(*operator.evidence, *leader.evidence))
    return (leader, *(f for f in found if id(f) not in gone))


def _worst(findings: Sequence[Finding]) -> Finding | None:
    """The critical death that explains most: confirmed ones first, then by kind, then the oldest."""
    deaths = [f for f in findings if f.kind in DEATHS and f.severity is Severity.CRITICAL]
    return min(deaths, key=lambda f: (not f.confirmed, DEATHS.index(f.kind), f.since, f.key), default=None)


def _follows(finding: Finding, cause: Finding, kinds: frozenset[FindingKind]) -> bool:
    if finding.kind not in kinds:
        return False
    # Every death of this trainer is the same failure; other findings only if they came with it.
    return finding.kind in DEATHS or finding.since >= cause.since - BEFORE_SECONDS


def _asking(findings: Sequence[Finding], cause: Finding) -> list[Finding]:
    """The findings that block the restart until the operator acts, the one that leads first."""
    asking = [f for f in findings if f is not cause and f.kind in OPERATOR and f.severity is Severity.CRITICAL]
    return sorted(asking, key=lambda f: (OPERATOR.index(f.kind), f.since, f.key))


def _evidence(finding: Finding) -> Evidence:
    return Evidence(finding.key, finding.summary, Agreement.AGREES)
