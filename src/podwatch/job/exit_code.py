"""How a run ended, and the exit code that tells an engine what to do with it (docs/jobs.md). Pure.

A code is an instruction to a program that cannot read: 0 and 65 end the job, 86 runs it again and preferably on another
machine. So 0 is given only for a finished run, 86 never for an error that another machine repeats, and an end that the
engine caused is never 0: Slurm and Kubernetes count it as completed.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from podwatch.domain.earlier_attempts import Host
from podwatch.domain.errors import ExitCode
from podwatch.domain.lease import HeartbeatEnd
from podwatch.domain.outcome import Outcome as Outcome
from podwatch.store.uploads import PINNED

PASSING_FAULTS = 3
"""Failures in a streak after which a fault that can pass is taken for a broken machine."""


class Blame(StrEnum):
    """Whose fault a failure is, as far as its evidence shows."""

    COMMAND = "command"
    """The command or its configuration: it fails in the same way on every machine."""
    MACHINE = "machine"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The evidence of one end. ``reason``: one clause without a full stop. ``blame`` counts for GAVE_UP and BLOCKED.
    ``unstored``: names of what could not be stored. ``error``: the exit code of the error, for FAILED.
    ``broken``: the machines that are; None: this one, if a machine is to blame. ``suspect``: a machine with a fault
    that can pass. ``lease_unknown``: the store did not say whether this pod may train, so it was no attempt."""

    outcome: Outcome
    reason: str = ""
    blame: Blame = Blame.UNKNOWN
    unstored: tuple[str, ...] = ()
    error: ExitCode | None = None
    broken: tuple[Host, ...] | None = None
    suspect: Host | None = None
    lease_unknown: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """``sentence`` says what happened and what the engine or the operator must do; it ends with a full stop."""

    code: ExitCode
    outcome: Outcome
    sentence: str
    blame: Blame = Blame.UNKNOWN

    @property
    def document(self) -> HeartbeatEnd:
        """For the status, the heartbeat and the incident."""
        return HeartbeatEnd(str(self.outcome), int(self.code), str(self.blame), self.sentence)


PERMANENT = frozenset({ExitCode.USAGE, ExitCode.DO_NOT_RUN, ExitCode.PERMISSION, ExitCode.CONFIGURATION})
"""Codes that another machine repeats: an engine must not run the job again."""

_AGAIN = "Run the job again"
_ELSEWHERE = "Run the job again, preferably on another machine"
_NOT_AGAIN = "Do not run the job again before that is fixed"

_ANSWERS: dict[Outcome, tuple[ExitCode, str, str]] = {
    Outcome.FINISHED: (ExitCode.OK, "The run is finished", "Nothing to do"),
    Outcome.GAVE_UP: (ExitCode.GAVE_UP, "podwatch gave up", _ELSEWHERE),
    Outcome.STOPPED: (
        ExitCode.DO_NOT_RUN,
        "An operator stopped the run",
        "To continue: `podwatch run --job --retry`",
    ),
    Outcome.PREEMPTED: (ExitCode.GAVE_UP, "The job was ended before the run was finished", _AGAIN),
    Outcome.SUPERSEDED: (ExitCode.GAVE_UP, "Another pod has taken the run over", f"{_AGAIN} if that pod ends"),
    Outcome.HELD: (ExitCode.GAVE_UP, "Another pod trains this run", f"{_AGAIN} later"),
    Outcome.BLOCKED: (ExitCode.GAVE_UP, "Training could not start on this machine", _ELSEWHERE),
    Outcome.BAD_HOST: (ExitCode.GAVE_UP, "The machine is on the run's list of bad hosts", _ELSEWHERE),
    Outcome.REFUSED: (
        ExitCode.DO_NOT_RUN,
        "podwatch does not start this command again",
        "Change the command or the configuration, or run `podwatch run --job --retry`",
    ),
    Outcome.FAILED: (ExitCode.GAVE_UP, "podwatch cannot run here", _ELSEWHERE),
}


_ON_A_POD: dict[Outcome, str] = {
    Outcome.STOPPED: "`podwatch start` starts training again",
    Outcome.GAVE_UP: "`podwatch status` shows the cause, and what podwatch does next",
    Outcome.SUPERSEDED: "`podwatch status` shows that pod",
    Outcome.HELD: "`podwatch status` shows that pod",
    Outcome.BLOCKED: "`podwatch status` shows what blocks it",
}
"""What the operator does where no engine runs the job, and podwatch stays."""


def judge(end: JobEnd, *, job: bool = True) -> Verdict:
    """The exit code of this end (docs/jobs.md has the table), with its reason as a sentence. ``job``: an engine reads
    the code; else an operator reads the sentence."""
    code, what, todo = _ANSWERS[end.outcome]
    if end.outcome is Outcome.FINISHED and end.unstored:
        code = ExitCode.UNAVAILABLE
        what = f"The run is finished, but not everything is in the store: {', '.join(end.unstored)}"
        pinned = any(name.startswith(PINNED) for name in end.unstored)
        command = "`podwatch sync --step N --wait` for each of these steps" if pinned else "`podwatch sync --wait`"
        todo = f"Keep this disk, and run {command} once the store answers"
    elif end.outcome in (Outcome.GAVE_UP, Outcome.BLOCKED) and end.blame is Blame.COMMAND:
        code, todo = ExitCode.DO_NOT_RUN, _NOT_AGAIN
    elif end.outcome is Outcome.FAILED and end.error in PERMANENT:
        code, todo = end.error or code, _NOT_AGAIN
    if not job:
        todo = _ON_A_POD.get(end.outcome, todo)
    said = f"{what}: {end.reason}" if end.reason else what
    if end.outcome is not Outcome.FINISHED and end.unstored:
        said += f". Not in the store: {', '.join(end.unstored)}"
    return Verdict(code, end.outcome, f"{said}. {todo}.", end.blame)


@dataclass(frozen=True, slots=True)
class Situation:
    """What recovery, the lease and the operator show at one moment. ``held``: by another pod. ``unanswered``: the store
    does not say which pod holds the run. ``settled``: no operation of recovery is in progress. ``why``: recovery's own
    words. ``waited``: seconds for which this pod has neither trained nor been able to. ``blame`` is that of the last
    counted failure."""

    finished: bool = False
    stopped: bool = False
    gave_up: bool = False
    superseded: bool = False
    held: bool = False
    unanswered: bool = False
    blocked: bool = False
    settled: bool = True
    paused: bool = False
    why: str = ""
    waited: float = 0.0
    blame: Blame = Blame.UNKNOWN


UNDECIDED_SECONDS = 10.0
"""A start that recovery has left to an operator stays so for this long before it ends a job: a look at the pod between
two operations is none."""


def ended(now: Situation, standby: float) -> JobEnd | None:
    """How the job has ended; None while it continues. ``standby``: seconds to wait for another pod, or for what blocks
    a start, before an attempt is used up."""
    if not now.settled and not (now.held or now.unanswered or now.superseded or now.blocked):
        return None
    if now.finished:
        return JobEnd(Outcome.FINISHED, now.why)
    if now.superseded:
        return JobEnd(Outcome.SUPERSEDED, now.why) if now.waited >= standby else None
    if now.stopped:
        return JobEnd(Outcome.STOPPED, now.why)
    if now.held:
        return JobEnd(Outcome.HELD, now.why) if now.waited >= standby else None
    if now.gave_up and now.settled:
        return JobEnd(Outcome.GAVE_UP, now.why, now.blame)
    if now.paused:
        return None
    if now.unanswered:
        return JobEnd(Outcome.BLOCKED, now.why, lease_unknown=True) if now.waited >= standby else None
    if not now.blocked:
        return None
    if now.settled:  # recovery has returned: only an operator can decide, and a job has none
        return JobEnd(Outcome.BLOCKED, now.why, Blame.COMMAND) if now.waited >= UNDECIDED_SECONDS else None
    return JobEnd(Outcome.BLOCKED, now.why, Blame.UNKNOWN) if now.waited >= standby else None


def withdrawn(concluded: Outcome, now: Situation, standby: float) -> bool:
    """Whether the run continues after this end, because an operator or recovery started it again. An operation of
    recovery alone withdraws nothing: podwatch also looks for trainers, once a run has ended."""
    still = ended(replace(now, settled=True), standby)
    return still is None or still.outcome is not concluded


def of_error(code: int, reason: str) -> JobEnd:
    """The end of a job whose podwatch ended with an error. ``code``: of the PodwatchError; negative: the signal."""
    known = ExitCode(code) if code in {int(one) for one in ExitCode} else None
    return JobEnd(Outcome.FAILED, reason, error=known)


def blame(*, deterministic: str, machine: str, ever_worked: bool) -> Blame:
    """Whose fault a given-up run is. ``deterministic``: the error in the command's output that fails again everywhere,
    or why the command cannot be executed; ``machine``: the machine fault that was seen; both empty if there is none.

    A command that never made a step is to blame unless a machine fault was seen: engines retry without limit, and each
    retry of a broken command is a machine rented for nothing. A run that has worked is never blamed by a count alone.
    """
    if machine:
        return Blame.MACHINE
    if deterministic:
        return Blame.COMMAND
    return Blame.UNKNOWN if ever_worked else Blame.COMMAND
