"""One run over several nodes: who belongs to an attempt, which node failed, and how all of them end (docs/nodes.md).
Pure.

A node that dies takes the others with it: their collectives break, and each reports a failure of its own some seconds
later. So rank 0 waits for the others' reports, and blames a node whose failure is not the echo of a lost peer.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from podwatch.domain.finding import FindingKind
from podwatch.domain.nodes import GangEnd, GangRecord, Report
from podwatch.job.exit_code import Blame, JobEnd, Outcome

ECHO_SECONDS = 4.0
"""How long rank 0 waits for the reports of the other nodes after the first failure: a broken collective ends the other
ranks within a second, and podwatch sees an exit within two."""
CLEARLY_SECONDS = 10.0
"""Two nodes that made the same last step stopped one after the other only if their times differ by more than this:
podwatch reads the logs every 4 s, and a report is up to a second old. Ranks that wait for each other in every step
print it at the same time."""
MOST_BETWEEN = 20.0
"""The time between two looks at the reports counts as silence only if it is shorter than this: with a longer one, this
node was frozen, or the directory did not answer."""

_ECHO = re.compile(
    r"connection (closed|reset|refused|aborted)|closed by (peer|remote)|reset by peer|broken pipe|remote process exited"
    r"|ncclRemoteError|TCPStore.{0,80}(timeout|timed out|failed)|RendezvousConnectionError"
    r"|(NCCL|gloo).{0,80}(timeout|timed out)|watchdog caught collective",
    re.IGNORECASE,
)
"""Lines with which a rank reports that another one is gone (torch.distributed over gloo, NCCL, TCPStore)."""
_OWN = re.compile(
    r"Signal \d+ \(SIG[A-Z]+\) received by PID|exitcode\s*: -\d+|killed by signal|out of memory", re.IGNORECASE
)
"""Lines with which a launcher reports the end of a rank of its own (torchrun)."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A report, and for how many seconds it has not changed while this node could read it. ``alive``: it has changed
    since this node looks."""

    report: Report
    unchanged: float = 0.0
    alive: bool = False


@dataclass(frozen=True, slots=True)
class Sight:
    """All reports by process. ``at``: when they were read (monotonic); None before the first look."""

    seen: Mapping[str, Seen] = field(default_factory=dict)
    at: float | None = None

    def look(self, reports: Iterable[Report], now: float, *, every: bool = True) -> "Sight":
        """After one look that was answered. ``every``: at every report that there is; else what is not in ``reports``
        stays as it was heard last."""
        since = 0.0 if self.at is None else now - self.at
        counted = since if 0 <= since <= MOST_BETWEEN else 0.0
        found = {} if every else {p: replace(s, unchanged=s.unchanged + counted) for p, s in self.seen.items()}
        for report in reports:
            before = self.seen.get(report.process)
            if before is None:
                found[report.process] = Seen(report)
            elif before.report.beat != report.beat:
                found[report.process] = Seen(report, 0.0, alive=True)
            else:
                found[report.process] = replace(before, report=report, unchanged=before.unchanged + counted)
        return Sight(found, now)


def arrived(sight: Sight, attempt: str, count: int, own: Report) -> tuple[str, ...] | None:
    """The process of each rank, once every node of this attempt has reported and lives; None before. ``own``: of rank
    0. A node that trains in an earlier generation is not of this attempt, whatever it says."""
    found: dict[int, Seen] = {}
    for one in sight.seen.values():
        report = one.report
        if report.process == own.process or not one.alive or report.left or report.follows:
            continue
        if report.attempt != attempt or not 0 < report.rank < count:
            continue
        before = found.get(report.rank)
        if before is None or one.unchanged < before.unchanged:
            found[report.rank] = one
    if len(found) < count - 1:
        return None
    return (own.process, *(found[rank].report.process for rank in range(1, count)))


def missing(sight: Sight, attempt: str, count: int) -> tuple[int, ...]:
    """The ranks that have not reported in this attempt."""
    there = {
        s.report.rank
        for s in sight.seen.values()
        if s.alive and s.report.attempt == attempt and not s.report.follows and not s.report.left
    }
    return tuple(rank for rank in range(1, count) if rank not in there)


def still_there(sight: Sight, own: str, generation: int, silence: float) -> tuple[Report, ...]:
    """Nodes of earlier attempts that can still train: they follow another generation, have not left, and have reported
    within ``silence`` seconds of this node's looks."""
    return tuple(
        s.report
        for s in sight.seen.values()
        if s.report.process != own
        and 0 < s.report.follows != generation
        and not s.report.left
        and s.unchanged < silence
    )


def mine(record: GangRecord | None, attempt: str, rank: int, process: str) -> bool:
    """Whether this node starts by the record: no record of an earlier attempt names its process."""
    return (
        record is not None
        and record.ready
        and record.attempt == attempt
        and rank < len(record.members)
        and record.members[rank] == process
    )


def silent(sight: Sight, members: Sequence[str], own: str, silence: float) -> tuple[Report, ...]:
    """Members that have not reported for ``silence`` seconds, although they had not left."""
    return tuple(
        s.report
        for process in members
        if process != own and (s := sight.seen.get(process)) is not None and not s.report.left and s.unchanged > silence
    )


def own_line(lines: Iterable[str]) -> str:
    """The last line that reports how a rank of this node was ended; empty if there is none."""
    return next((line.strip() for line in reversed(list(lines)) if _OWN.search(line)), "")


def is_echo(lines: Iterable[str]) -> bool:
    """Whether the last lines of a node's logs only say that another node is gone."""
    known = list(lines)
    return not own_line(known) and any(_ECHO.search(line) for line in known)


def culprit(failed: Sequence[Report]) -> Report:
    """The node that is the reason: one whose machine is broken; else one that failed on its own, before one whose
    connection to a peer broke; a hang is judged by who stopped first. ``failed``: in the order in which rank 0 heard of
    them, not empty."""
    if broken := [r for r in failed if r.failure is not None and r.failure.broken]:
        return broken[0]
    if all(r.failure is not None and r.failure.kind == FindingKind.HANG for r in failed):
        return first_to_stop(failed) or failed[0]
    return min(failed, key=_doubt)


def _doubt(report: Report) -> tuple[bool, bool]:
    failure = report.failure
    return failure is not None and failure.echo, failure is not None and failure.kind == FindingKind.HANG


def first_to_stop(reports: Iterable[Report]) -> Report | None:
    """The node that made its last step first: the lowest step, and of equal ones the one that made it clearly earlier.
    None if the reports do not show it: fewer than two nodes show steps, or several stopped together."""
    known = sorted((r for r in reports if r.step is not None), key=lambda r: (r.step or 0, -(r.step_age or 0.0)))
    if len(known) < 2:
        return None
    first, second = known[:2]
    return first if first.step != second.step or _clearly_earlier(first, second) else None


def _clearly_earlier(one: Report, other: Report) -> bool:
    """Whether ``one`` made its last step that much earlier. False if a time is not known."""
    if one.step_age is None or other.step_age is None:
        return False
    return one.step_age - other.step_age > CLEARLY_SECONDS


def ended_by(report: Report, all_reports: Sequence[Report]) -> GangEnd:
    """The end of an attempt in which ``report``'s node failed."""
    failure = report.failure
    said = "ended" if failure is None else f"failed: {failure.summary}"
    if failure is not None and failure.log:
        said += f" ({failure.log})"
    if failure is not None and failure.kind == FindingKind.HANG:
        said += _who_stopped_first(all_reports)
    blame = Blame.UNKNOWN if failure is None else _blame(failure.blame)
    at_fault = failure is not None and blame is Blame.MACHINE and not failure.echo
    machine, broken = report.machine if at_fault else None, failure is not None and failure.broken
    return GangEnd(str(Outcome.GAVE_UP), f"{report.name} {said}", str(blame), report.rank, machine, broken)


def _who_stopped_first(reports: Sequence[Report]) -> str:
    first = first_to_stop(reports)
    if first is not None:
        ago = "" if first.step_age is None else f", {first.step_age:.0f} s ago"
        return f"; {first.name} stopped first, at step {first.step}{ago}"
    known = [r for r in reports if r.step is not None]
    if len(known) < 2:
        return ""
    lowest = min(r.step or 0 for r in known)
    together = [r.name for r in known if r.step == lowest]
    return f"; {' and '.join(together)} stopped together, at step {lowest}"


def gone_silent(report: Report, seconds: float) -> GangEnd:
    """The end of an attempt in which a node does not report any more."""
    reason = f"{report.name} has not reported for {seconds:.0f} s: its machine, its podwatch or its network is gone"
    return GangEnd(str(Outcome.GAVE_UP), reason, str(Blame.UNKNOWN), report.rank)


def as_job_end(end: GangEnd) -> JobEnd:
    """The end that every node of the attempt has."""
    try:
        outcome = Outcome(end.outcome)
    except ValueError:
        outcome = Outcome.GAVE_UP
    broken = (end.machine,) if end.machine is not None and end.broken else ()
    return JobEnd(outcome, end.reason, _blame(end.blame), broken=broken, suspect=None if broken else end.machine)


def as_gang_end(end: JobEnd, rank: int) -> GangEnd:
    return GangEnd(str(end.outcome), end.reason, str(end.blame), None if end.outcome is Outcome.FINISHED else rank)


def _blame(text: str) -> Blame:
    try:
        return Blame(text)
    except ValueError:
        return Blame.UNKNOWN
