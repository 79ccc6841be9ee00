"""Whether a job may start, by how its earlier attempts ended, and what the next attempt must know. Pure.

Engines retry without limit, often on the same machine: Slurm restarted a job that exits with 86 ten times in 90 s, and
dstack also retries one that exits with 65. So an attempt leaves a verdict in the store (domain/earlier_attempts.py);
the next one asks it before it starts training:

- The last attempt ended with 65: the same command ends at once with 65, until the digest of command and configuration
  changes or an operator passes ``--retry``. A finished run ends at once with 0 in the same way.
- Attempts that fail without progress are counted across machines, and each waits longer to start. An exit with 86
  becomes 65 once a count is exhausted and, for a run that ever made a step, a time too: the rule of
  recovery/restart_budget.py. An attempt that left no verdict (SIGKILL, a lost machine) counts too, if it made no
  progress; but neither it nor a machine fault is enough by the count alone, because spot machines vanish and bad
  machines come in rows.
- A machine with a machine fault is refused for a day, but never more than ``MOST_REFUSALS`` times: an engine with only
  this machine would otherwise never run the job.

Progress is a step above every step that an earlier attempt made. A crash at the same step on every machine, with a
resume in between, makes steps but no progress.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from podwatch.domain.earlier_attempts import MOST_HOSTS, BadHost, Host, LastEnd, OpenAttempt, RunVerdict, Suspect
from podwatch.domain.engine_and_attempt import NO_INSTANCE, Instance
from podwatch.domain.errors import ExitCode
from podwatch.domain.run import Lineage
from podwatch.domain.times import span
from podwatch.job.exit_code import PASSING_FAULTS, Blame, JobEnd, Outcome, judge

if TYPE_CHECKING:
    from podwatch.config.settings import RecoverySettings

MOST_REFUSALS = 3
"""Starts refused on one bad host: three attempts move a job in any engine that can move it."""
_FAILURES = frozenset({Outcome.GAVE_UP, Outcome.BLOCKED, Outcome.FAILED})
_UNSEEN = frozenset({Outcome.SUPERSEDED, Outcome.HELD, Outcome.REFUSED, Outcome.BAD_HOST})
"""Outcomes that leave the verdict as it is: another pod's attempt counts, or it was not an attempt at all."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """The attempt that asks. ``id``: its process, the same after a restart of podwatch within it. ``now``: by the
    store's clock. ``worked``: the store has a checkpoint of the run."""

    id: str
    digest: str
    host: Host
    now: float
    instance: Instance = NO_INSTANCE
    host_name: str = ""
    worked: bool = False
    retry: bool = False


@dataclass(frozen=True, slots=True)
class StartVerdict:
    """``end``: how the job ends without training; None if it starts, at ``not_before_wall`` at the earliest. ``kept``
    must be written if it is not what was read."""

    end: JobEnd | None
    kept: RunVerdict
    not_before_wall: float | None = None


def at_start(kept: RunVerdict, attempt: Attempt, recovery: "RecoverySettings") -> StartVerdict:
    """Decide before training starts."""
    retry = attempt.retry and not _used(kept, attempt)
    if retry or kept.digest != attempt.digest:
        # Of another command nothing counts, except that a machine is bad; of an operator's retry not even that.
        hosts = () if retry else kept.bad_hosts
        job = _job(attempt) if retry else kept.retried
        kept = RunVerdict(digest=attempt.digest, bad_hosts=hosts, retried=job)
    if kept.attempt is not None and kept.attempt.id == attempt.id:
        return StartVerdict(None, kept)  # podwatch was restarted within the attempt: its trainer may run
    kept, end = _account(kept, attempt, recovery)
    end = end or _refused(kept, attempt.now)
    if end is None:
        kept, end = ask_hosts(kept, {"": attempt.host}, attempt.now)
    due = kept.not_before_wall
    if due is not None:  # a clock that was set can not make an attempt wait for longer than that
        due = min(due, attempt.now + recovery.backoff_max)
    return StartVerdict(end, kept, due if due is not None and due > attempt.now else None)


def began(kept: RunVerdict, attempt: Attempt, lineage: Lineage) -> RunVerdict:
    """Training has started in this attempt, in this lineage. One that left the lineage of ``best_step`` makes progress
    above the step where it left. An end that was withdrawn does not forbid a rerun any more."""
    back = lineage.parent != "" and lineage.parent == kept.lineage
    forbids = kept.last is not None and kept.last.code in (ExitCode.OK, ExitCode.DO_NOT_RUN)
    return replace(
        kept,
        digest=attempt.digest,
        last=None if forbids else kept.last,
        attempt=OpenAttempt(attempt.id, attempt.now, attempt.host_name),
        best_step=lineage.parent_step if back else kept.best_step,
        lineage=lineage.id,
    )


def advanced(kept: RunVerdict, step: int) -> RunVerdict:
    """This attempt has made ``step``: if that is progress, nothing is left of earlier failures."""
    if kept.best_step is not None and step <= kept.best_step:
        return kept
    made = None if kept.attempt is None else replace(kept.attempt, progress=True)
    calm = replace(kept, failures=0, first_failure_wall=None, not_before_wall=None, suspect=None)
    return replace(calm, best_step=step, attempt=made)


def at_end(
    kept: RunVerdict, end: JobEnd, attempt: Attempt, step: int | None, recovery: "RecoverySettings"
) -> tuple[RunVerdict, JobEnd]:
    """What to keep of this end, and the end that counts: too many without progress are the command's fault. ``step``:
    the newest step that this attempt made; None if it made none."""
    if end.outcome in _UNSEEN or end.lease_unknown:
        return kept, end
    if kept.digest != attempt.digest:
        kept = RunVerdict(digest=attempt.digest, bad_hosts=kept.bad_hosts, retried=kept.retried)
    kept = kept if step is None else advanced(kept, step)
    if end.outcome in _FAILURES and end.blame is not Blame.COMMAND:
        kept = _failed(kept, attempt.now, recovery)
        kept, end = _suspected(kept, end)
        if end.blame is Blame.MACHINE:
            kept = _marked(kept, end, attempt, recovery)
        why = _exhausted(kept, attempt, recovery, explained=end.blame is not Blame.MACHINE)
        if why:
            end = replace(end, reason=f"{why}; the last one: {end.reason}", blame=Blame.COMMAND)
    return replace(kept, attempt=None, last=_last(end, attempt, step)), end


def foretold(
    kept: RunVerdict, end: JobEnd, attempt: Attempt, step: int | None, recovery: "RecoverySettings"
) -> RunVerdict:
    """What to keep of an end whose last data is still being stored, for the case that the attempt vanishes before
    ``at_end``. The attempt stays open: a podwatch that is restarted within it continues, and if it vanishes, the next
    attempt counts it."""
    if kept.attempt is None or kept.digest != attempt.digest:
        return kept
    found, _ = at_end(kept, end, attempt, step, recovery)
    return replace(kept, last=found.last, bad_hosts=found.bad_hosts)


def _last(end: JobEnd, attempt: Attempt, step: int | None) -> LastEnd:
    verdict = judge(end)
    return LastEnd(
        int(verdict.code), str(end.outcome), end.reason, str(end.blame), attempt.now, step, attempt.host_name,
        attempt.instance,
    )  # fmt: skip


def _account(kept: RunVerdict, attempt: Attempt, recovery: "RecoverySettings") -> tuple[RunVerdict, JobEnd | None]:
    """Count an attempt that left no verdict."""
    before = kept.attempt
    if before is None:
        return kept, None
    if before.progress:
        return replace(kept, attempt=None), None
    kept = replace(_failed(kept, attempt.now, recovery), attempt=None)
    why = _exhausted(kept, attempt, recovery, explained=False)
    if not why:
        return kept, None
    where = f" (pod {before.host})" if before.host else ""
    reason = f"{why}; the last one{where} ended without a verdict, as after SIGKILL, no memory or a lost machine"
    end = JobEnd(Outcome.GAVE_UP, reason, Blame.COMMAND)
    return replace(kept, last=_last(end, attempt, None)), end


def _refused(kept: RunVerdict, now: float) -> JobEnd | None:
    last = kept.last
    if last is None:
        return None
    where = f" on pod {last.host}" if last.host else ""
    ago = f"{span(max(0.0, now - last.wall))} ago{where}"
    if last.code == ExitCode.OK:
        return JobEnd(Outcome.FINISHED, f"it finished {ago}; neither command nor configuration changed since")
    if last.code == ExitCode.DO_NOT_RUN:
        return JobEnd(Outcome.REFUSED, f"the attempt that ended {ago} was the last one ({last.outcome}): {last.reason}")
    return None


def ask_hosts(kept: RunVerdict, hosts: Mapping[str, Host], now: float) -> tuple[RunVerdict, JobEnd | None]:
    """Whether the attempt must not start on these machines; to be written if it is not what was read. ``hosts``: by the
    name under which the reason shows them. The refusal counts for each of them that is bad."""
    listed = tuple(bad for bad in kept.bad_hosts if bad.until_wall > now)
    kept = kept if listed == kept.bad_hosts else replace(kept, bad_hosts=listed)
    refused, reasons, broken = list(listed), list[str](), list[Host]()
    for name, host in hosts.items():
        at = next((n for n, bad in enumerate(listed) if bad.host.same_as(host) and bad.refusals < MOST_REFUSALS), None)
        if at is None:
            continue
        bad = refused[at] = replace(listed[at], refusals=listed[at].refusals + 1)
        ago = f"{bad.reason}, {span(max(0.0, now - bad.since_wall))} ago"
        count = f"refusal {bad.refusals} of {MOST_REFUSALS}, after which podwatch starts here anyway"
        reasons.append(f"{name}: {ago}; {count}" if name else f"{ago}; {count}")
        broken.append(host)
    if not reasons:
        return kept, None
    return replace(kept, bad_hosts=tuple(refused)), JobEnd(Outcome.BAD_HOST, "; ".join(reasons), broken=tuple(broken))


def _suspected(kept: RunVerdict, end: JobEnd) -> tuple[RunVerdict, JobEnd]:
    """Count faults of one machine that can pass: with the last of ``PASSING_FAULTS`` in a row it is broken."""
    host, before = end.suspect, kept.suspect
    if host is None:
        return replace(kept, suspect=None), end
    faults = before.faults + 1 if before is not None and before.host.same_as(host) else 1
    if faults < PASSING_FAULTS:
        return replace(kept, suspect=Suspect(host, faults)), end
    return replace(kept, suspect=None), replace(end, broken=(host,), suspect=None)


def _marked(kept: RunVerdict, end: JobEnd, attempt: Attempt, recovery: "RecoverySettings") -> RunVerdict:
    """The broken machine is a bad host from now on. One that fails again after its refusals starts over with them."""
    broken = (attempt.host,) if end.broken is None else end.broken
    others = tuple(bad for bad in kept.bad_hosts if not any(bad.host.same_as(host) for host in broken))
    if recovery.bad_host_for <= 0:
        return replace(kept, bad_hosts=others)
    until = attempt.now + recovery.bad_host_for
    bad = tuple(BadHost(host, end.reason, attempt.now, until) for host in broken)
    return replace(kept, bad_hosts=(*bad, *others)[:MOST_HOSTS])


def _failed(kept: RunVerdict, now: float, recovery: "RecoverySettings") -> RunVerdict:
    count = kept.failures + 1
    pause = min(recovery.backoff_min * 2.0 ** min(count - 2, 30), recovery.backoff_max) if count > 1 else 0
    first = now if kept.first_failure_wall is None else kept.first_failure_wall
    return replace(kept, failures=count, first_failure_wall=first, not_before_wall=now + pause if pause else None)


def _exhausted(kept: RunVerdict, attempt: Attempt, recovery: "RecoverySettings", *, explained: bool) -> str:
    """Why no further attempt makes sense; empty if one does."""
    lasting = attempt.now - (attempt.now if kept.first_failure_wall is None else kept.first_failure_wall)
    worked = kept.best_step is not None or attempt.worked
    if kept.failures < recovery.job_attempts or (lasting < recovery.budget_time and (worked or not explained)):
        return ""
    made = "no progress" if worked else "no step"
    return f"{kept.failures} attempts in a row made {made} in {span(lasting)}"


def _used(kept: RunVerdict, attempt: Attempt) -> bool:
    """An engine passes the flag to every attempt of the job: it counts for the first."""
    return bool(attempt.instance.id) and kept.retried == _job(attempt)


def _job(attempt: Attempt) -> str:
    return "/".join(attempt.instance.job) if attempt.instance.id else ""
