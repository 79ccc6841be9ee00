"""Runs the rules over a recording: which findings podwatch would have raised, and when it would have acted.
Read-only."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from podwatch.config.settings import Policies
from podwatch.detection.learned import Learned
from podwatch.detection.rules import DetectionState, advance, initial
from podwatch.domain.finding import Finding, Verdict
from podwatch.domain.snapshot import Snapshot
from podwatch.recording.format import Header, Segment


@dataclass(slots=True)
class ReplayedFinding:
    """One finding, from the turn it was raised (or changed) to the turn it ended. Times are epoch seconds."""

    at: float
    finding: Finding
    since: float
    start_id: str = ""
    acts: bool = False
    """podwatch would have acted here: the first confirmed verdict since the trainer's start."""
    cleared_at: float | None = None


@dataclass(frozen=True, slots=True)
class Gap:
    """Nothing was recorded between these epoch seconds."""

    begin: float
    end: float


@dataclass(slots=True)
class Replay:
    """The result. ``seconds`` is the time covered, without gaps."""

    headers: list[Header] = field(default_factory=list)
    told: list[ReplayedFinding] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    sessions: int = 0
    turns: int = 0
    seconds: float = 0.0
    begin: float | None = None
    end: float | None = None

    def acted(self, verdict: Verdict) -> list[ReplayedFinding]:
        return [t for t in self.told if t.acts and t.finding.verdict is verdict]


def replay(
    segments: Iterable[Segment],
    result: Replay,
    *,
    policies: Policies | None = None,
    since: float = float("-inf"),
    until: float = float("inf"),
) -> Iterator[ReplayedFinding]:
    """Judge turn by turn; yields each finding when it is raised and again when it ends, and fills ``result``.

    ``policies`` None: those of the recording. Turns before ``since`` are judged too, because a detector must have seen
    health first, but their findings are not reported; ``since`` and ``until`` are epoch seconds.
    """
    state: DetectionState | None = None
    session = ""
    last: Snapshot | None = None
    open_now: dict[str, ReplayedFinding] = {}
    acted: set[str] = set()
    for segment in segments:
        header = segment.header
        rules = header.policies if policies is None else _with_target(policies, header.policies)
        result.headers.append(header)
        if state is None or header.session != session or not session:
            # Another podwatch, or missing turns: learned values continue (also from turns that never reached the disk),
            # observed values do not.
            learned = header.learned if state is None or header.learned != Learned() else state.learned
            if last is not None and since <= last.wall:
                result.gaps.append(Gap(last.wall, max(last.wall, header.wall)))
            state, session, last = initial(rules, learned), header.session, None
            result.sessions += 1
        for snapshot in segment:
            if snapshot.wall > until:
                return
            state, findings = advance(state, snapshot, rules)
            if snapshot.wall >= since:
                result.turns += 1
                result.begin = snapshot.wall if result.begin is None else result.begin
                result.end = snapshot.wall
                result.seconds += max(0.0, snapshot.at - last.at) if last is not None else 0.0
                yield from _news(snapshot, findings, open_now, acted, result)
            last = snapshot
        if segment.problem or segment.torn:
            text = segment.problem or "it ends in the middle of a line, which was left out"
            result.problems.append(f"{segment.path.name}: {text}")


def _with_target(policies: Policies, recorded: Policies) -> Policies:
    """The final step and the interval between saves came from the trainer's command, which a recording does not
    contain.
    """
    if policies.save_interval_steps is None:
        policies = policies.model_copy(update={"save_interval_steps": recorded.save_interval_steps})
    if policies.max_steps is None:
        policies = policies.model_copy(update={"max_steps": recorded.max_steps})
    return policies


def _news(
    snapshot: Snapshot,
    findings: tuple[Finding, ...],
    open_now: dict[str, ReplayedFinding],
    acted: set[str],
    result: Replay,
) -> Iterator[ReplayedFinding]:
    if not findings and not open_now:
        return
    now = {f.key: f for f in findings}
    for key in [k for k in open_now if k not in now]:
        over = open_now.pop(key)
        over.cleared_at = snapshot.wall
        yield over
    trainer = snapshot.trainer.value
    start_id = trainer.start_id if trainer is not None else ""
    for key, finding in now.items():
        before = open_now.get(key)
        if before is not None and _word(before.finding) == _word(finding):
            continue
        acts = finding.verdict is not Verdict.NONE and finding.confirmed and start_id not in acted
        if acts:
            acted.add(start_id)
        told = ReplayedFinding(
            snapshot.wall, finding, snapshot.wall - max(0.0, snapshot.at - finding.since), start_id, acts
        )
        if before is not None:
            before.cleared_at = snapshot.wall
        open_now[key] = told
        result.told.append(told)
        yield told


def _word(finding: Finding) -> tuple[object, ...]:
    return finding.severity, finding.confirmed, finding.verdict
