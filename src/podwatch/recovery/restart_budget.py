"""Whether podwatch restarts training after a failure: start, wait, step back to an older checkpoint, or give up.

**Giving up needs a count and a time.** The worst bugs of mature restarters are false recoveries: a single fault became
24 recoveries in 19 hours, or a healthy job was killed every 30 minutes, because a clock or a counter was not reset
after a recovery. So podwatch gives up a run that has worked only when, *in the current streak of failures*, at least
``budget_restarts`` failures were counted **and** ``budget_seconds`` have passed since the first of them. A count alone
would give up after a five-minute outage of the store; a time alone would give up at the second death of a night. The
count covers the streak instead of a sliding window: a start that needs 40 minutes to fail never fits five times into
two hours and would be repeated forever, on a rented GPU. A streak ends with a *calm period*: steps were made over
``calm_seconds`` without a failure. It is measured from the first step to the newest step, not to the next failure,
because a run that makes one step and hangs counts as failed only after the hang detector's floor (25 min), which is
nearly a calm period.

**A command that never worked** is given up after ``never_worked_tries``. Only a proven failed load gives it one step
back with its own tries (a new pod whose newest checkpoint is damaged).

**A deterministic error** (unknown argument, validation error...) in the output of a start that made no step needs the
operator at once. So does a command that cannot be executed, unless it worked before: then its program may be on a
volume that returns, and podwatch gives up by count and time only.

**A wrong resume** (training began below the step that it was given, as a script does that ignores its argument) needs
the operator: no checkpoint is at fault, and each further start would train the same steps again.

**A step back** needs ``resume_attempts`` *proven* failed loads of the same step: the trainer had loaded (or its error
names the checkpoint) and made no step. A start that never loaded is no evidence against the checkpoint; nor is a dead
inference engine or a machine fault (CUDA error, XID, ECC, GPU lost, NCCL, no memory). After two different steps in one
streak failed like this, the checkpoints are not the cause, and podwatch does not step back further.

**A broken machine** is left at once where an engine can run the job elsewhere (``leaves_broken_machine``): an ECC error
or a lost GPU at the first failure, a fault that can pass at the third.

After giving up, podwatch tries once every ``retry_after_give_up``. Times are seconds of one clock that the
caller chooses.
"""

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from podwatch.domain.finding import FindingKind
from podwatch.domain.run_state import RestartHistory
from podwatch.job.exit_code import PASSING_FAULTS, Blame, blame
from podwatch.trainer.errors_in_output import LOG_LINES_KEPT, deterministic, shows_failed_load

if TYPE_CHECKING:
    from podwatch.config.settings import RecoverySettings, Settings

NEVER_WORKED_TRIES = 2
"""Attempts of a command that never made a step."""
MAX_STEP_BACKS_PER_STREAK = 2
"""Two damaged checkpoints can have one cause (a burst of bad writes); a third failed load has another cause."""
JITTER_SHARE = 0.2
"""A delay varies by this share up and down, so that pods that failed together do not restart together."""

_MACHINE_FAULT: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), meaning)
    for pattern, meaning in (
        # First what lasts: a line can say both.
        (r"uncorrectable ECC|ECC error", "an ECC error"),
        (r"GPU (?:is lost|has fallen off the bus)|fallen off the bus|NVML: Unknown Error", "a lost GPU"),
        # Not "device-side assert": an index out of range in the program fails in the same way on every machine.
        (r"CUDA (?:driver )?error: (?!device-side assert)|cudaError(?!Assert)", "a CUDA error"),
        (r"CUBLAS_STATUS_|CUDNN_STATUS_", "a CUDA error"),
        (r"an illegal memory access was encountered|unspecified launch failure", "a CUDA error"),
        (r"\bXid\b", "an XID"),
        (r"nccl(?:System|Internal|Remote|UnhandledCuda)Error|DistBackendError|NCCL (?:error|timeout|watchdog)"
         r"|Watchdog caught collective operation timeout", "an NCCL error"),
        (r"CUDA out of memory|torch(?:\.cuda)?\.OutOfMemoryError", "no GPU memory"),
    )
)  # fmt: skip
_LASTING = frozenset({"an ECC error", "a lost GPU"})
MACHINE_FAULTS = frozenset({FindingKind.GPU_FAULT, FindingKind.GPU_LOST, FindingKind.OUT_OF_MEMORY})
"""Findings that show a machine fault while a start runs."""
MACHINE_RULES = frozenset({"nccl", "cuda-out-of-memory"})
"""Log rules that show one. The rule for CUDA errors also matches a program's own assertion, so it is not among them."""
_LOAD_FAILURE_KINDS = frozenset({FindingKind.TRAINER_EXITED, FindingKind.HANG})
"""Kinds of failure that a checkpoint can cause. A dead engine or a lost GPU cannot."""


class Action(StrEnum):
    START = "start"
    """Now."""
    WAIT = "wait"
    """After ``delay_seconds``."""
    GIVE_UP = "give-up"
    """The operator must act; one more try after ``delay_seconds`` unless that is 0 (never)."""


@dataclass(frozen=True, slots=True)
class Failure:
    """How one attempt ended. ``at``: the time of the failure.

    ``loaded``: the load was proven (GPU memory rose, or the checkpoint was read). ``made_step``: a new step was seen
    in this attempt. ``resumed_from``: the step it was started with, None for a fresh start. ``last_lines``: its last
    output, oldest first. ``needs_person``: why the command cannot be executed at all; empty if it ran.
    """

    kind: FindingKind
    at: float
    loaded: bool
    made_step: bool
    resumed_from: int | None
    last_lines: tuple[str, ...] = ()
    needs_person: str = ""
    machine_fault: str = ""
    """The machine fault that a sensor saw at that time (XID, ECC, GPU lost); empty if none."""
    machine_broken: bool = False
    """That fault lasts: a critical finding about a GPU."""
    explained_by: str = ""
    """The line of any log of the run that best explains the end: launchers write the trainer's output to a file of its
    own, so that ``last_lines`` only says that it ended."""


@dataclass(frozen=True, slots=True)
class Decision:
    """``step_back``: the next start must use a step below the one that failed."""

    action: Action
    delay_seconds: float
    step_back: bool
    reason: str
    history: RestartHistory


def succeeded(history: RestartHistory, at: float, recovery: "RecoverySettings") -> RestartHistory:
    """Record a new step at ``at``. Call it for every new step; it ends a streak after a calm period."""
    since = history.working_since if history.working_since is not None else at
    if at - since >= recovery.calm:
        return RestartHistory(ever_worked=True, working_since=since, last_step_at=at)
    return replace(
        history, ever_worked=True, tries_without_step=0, failed_loads=(), working_since=since, last_step_at=at
    )


def after_failure(history: RestartHistory, failure: Failure, settings: "Settings", jitter: float) -> Decision:
    """Decide what to do after a failure. ``jitter`` is a random number from 0 to 1.

    Not for a stop by an operator, nor for ``blocked`` (GPU memory still held), which does not count against the budget.
    """
    if failure.made_step and history.last_step_at is None:
        history = succeeded(history, failure.at, settings.recovery)
    worked = history.ever_worked or failure.made_step
    loads = {} if failure.made_step else dict(history.failed_loads)
    proven = _proven_failed_load(failure)
    if proven is not None:
        loads[proven] = loads.get(proven, 0) + 1
    history = replace(
        history,
        ever_worked=worked,
        streak_count=history.streak_count + 1,
        streak_started_at=failure.at if history.streak_started_at is None else history.streak_started_at,
        tries_without_step=0 if worked else history.tries_without_step + 1,
        failed_loads=tuple(sorted(loads.items())),
        working_since=None,
        last_step_at=None,
    )
    allowed = MAX_STEP_BACKS_PER_STREAK if worked else 1
    tries = 0 if proven is None else loads[proven]
    step_back = tries >= settings.trainer.resume_attempts and history.step_backs < allowed
    if step_back:
        # The older step gets its own tries.
        history = replace(history, step_backs=history.step_backs + 1, tries_without_step=0)
    return _decide(history, failure, settings, jitter, step_back)


def _decide(
    history: RestartHistory, failure: Failure, settings: "Settings", jitter: float, step_back: bool
) -> Decision:
    recovery = settings.recovery
    if failure.kind is FindingKind.RESUMED_WRONG:
        why = f"training did not continue from step {failure.resumed_from}, and another start would not either"
        return replace(_give_up(history, failure, recovery, why, False), delay_seconds=0.0)
    if not failure.made_step and failure.kind is FindingKind.TRAINER_EXITED:
        meaning = deterministic(failure.last_lines)
        if meaning:
            return _give_up(history, failure, recovery, f"{meaning}; the same command would fail again", False)
        if failure.needs_person and not history.ever_worked:
            return _give_up(history, failure, recovery, failure.needs_person, False)
    # An engine runs the job elsewhere: a machine that is broken is not retried on.
    if recovery.on_give_up == "exit" and (broken := broken_machine(failure, history.streak_count)):
        return _give_up(history, failure, recovery, f"{broken}: this machine cannot train", False)
    if settings.nodes.several:
        reason = "this is one of several nodes, and the engine starts them together"
        return _give_up(history, failure, recovery, reason, step_back)
    if history.gave_up:
        return _give_up(history, failure, recovery, "the retry after giving up failed too", step_back)
    if not history.ever_worked and history.tries_without_step >= NEVER_WORKED_TRIES:
        tries = history.tries_without_step
        return _give_up(history, failure, recovery, f"the training command made no step in {tries} attempts", step_back)
    started = failure.at if history.streak_started_at is None else history.streak_started_at
    lasting = failure.at - started
    if history.streak_count >= recovery.budget_restarts and lasting >= recovery.budget_time:
        calm = recovery.calm / 60
        calm_for = f"training never ran {calm:.0f} minutes without one"
        reason = f"{history.streak_count} failures in {lasting / 3600:.1f} h, and {calm_for}"
        return _give_up(history, failure, recovery, reason, step_back)
    delay = _backoff(history.streak_count, recovery, jitter)
    reason = f"failure {history.streak_count} in a row"
    if step_back:
        reason += f"; {_why_back(failure)}"
    return Decision(Action.WAIT if delay > 0 else Action.START, delay, step_back, reason, history)


def _give_up(
    history: RestartHistory, failure: Failure, recovery: "RecoverySettings", reason: str, step_back: bool
) -> Decision:
    delay = recovery.retry_after_give_up
    return Decision(Action.GIVE_UP, delay, step_back, reason, replace(history, gave_up_at=failure.at))


def _backoff(count: int, recovery: "RecoverySettings", jitter: float) -> float:
    """Seconds to wait before failure number ``count`` of a streak is retried; 0 for the first, because waiting costs
    GPU time."""
    if count <= 1:
        return 0.0
    doubled = recovery.backoff_min * 2.0 ** min(count - 2, 30)
    varied = min(doubled, recovery.backoff_max) * (1 - JITTER_SHARE + 2 * JITTER_SHARE * jitter)
    return min(max(varied, recovery.backoff_min), recovery.backoff_max)


def _proven_failed_load(failure: Failure) -> int | None:
    """The step whose load provably failed, or None."""
    step = failure.resumed_from
    if step is None or failure.made_step or failure.kind not in _LOAD_FAILURE_KINDS or fault_of_machine(failure):
        return None
    if failure.loaded:
        return step
    return step if shows_failed_load((*failure.last_lines, failure.explained_by), step) else None


def _why_back(failure: Failure) -> str:
    step = failure.resumed_from
    if failure.loaded:
        return f"training loaded step {step} and failed again before a new step"
    return f"loading step {step} failed again"


def fault_of_machine(failure: Failure) -> str:
    """The machine fault that this failure shows, in words; empty if none. Such a failure never counts against a
    checkpoint."""
    if failure.machine_fault:
        return failure.machine_fault
    for line in (*reversed(failure.last_lines[-LOG_LINES_KEPT:]), failure.explained_by):
        for pattern, meaning in _MACHINE_FAULT:
            if pattern.search(line):
                return meaning
    return ""


def broken_machine(failure: Failure, streak: int) -> str:
    """The machine fault for which another machine is needed, in words; empty if there is none. An ECC error or a lost
    GPU stays; a CUDA or NCCL error can pass, so only a streak of ``PASSING_FAULTS`` counts."""
    fault = fault_of_machine(failure)
    if failure.machine_broken or fault in _LASTING or (fault and streak >= PASSING_FAULTS):
        return fault
    return ""


def blame_of(failure: Failure, ever_worked: bool) -> Blame:
    """Whose fault a failure is. ``ever_worked``: the command has made a step, in this attempt or before."""
    said = failure.needs_person
    if failure.kind is FindingKind.RESUMED_WRONG:
        said = "it did not continue from the step that it was given"
    if not failure.made_step and failure.kind is FindingKind.TRAINER_EXITED:
        said = deterministic(failure.last_lines) or said
    return blame(deterministic=said, machine=fault_of_machine(failure), ever_worked=ever_worked)
