"""Whether an end is a failure or an operator stopping the run, and how long podwatch waits for the operator.

After Ctrl-C, SIGINT or SIGTERM the engine can end seconds before the launcher, because FSDP needs time to shut down;
until then it looks like a silent death. podwatch therefore waits (docs/detection.md) if the trainer was started by an
operator (attach); if its launcher ended with a signal that terminals and operators send; if its log reports an
interrupt; or if, beside the engine, the orchestrator or the trainer ended too. Any other failure is acted on without
this wait.
"""

import signal
from dataclasses import dataclass

from podwatch.detection.observe import Turn
from podwatch.detection.start import CONTEXTS, ENGINE_ROLES, Start
from podwatch.domain.process import ExitStatus, ProcessRole
from podwatch.domain.snapshot import Snapshot, Supervision, TrainerSample

ATTACH_EXIT_WAIT_SECONDS = 120.0
"""Wait before acting on an end that an operator may have caused. The slowest known shutdown is prime-rl's (60 s for
each child); each role that ends restarts the time, so that the last one has it in full."""
TERMINAL_WAIT_SECONDS = 900.0
"""The same if the operator typed in the trainer's terminal within this time before its end, or since."""
ONE_END_SECONDS = 65.0
"""Roles that end within this time of each other end together: prime-rl's launcher gives each child 60 s, then kills it,
and a reading notices that some seconds later."""
INTERRUPT_SECONDS = 300.0
"""An interrupt in the log up to this long before an end can be its cause: prime-rl's launcher logs the signal at once,
waits up to 5 s for each of its threads (one for each child, environments included), then up to 60 s for each child."""
INTERRUPTED = "interrupted"
"""The shipped log rule whose match says that a process of the run received SIGINT or SIGTERM."""
SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
"""Sent by Ctrl-C, Ctrl-backslash, ``kill`` and a closed terminal. Others (SIGKILL, SIGSEGV, SIGBUS, ...) are failures.
"""
CODES = frozenset(128 + number for number in SIGNALS)
"""The exit codes by which shells report these signals."""
TRAINER_NAMES = frozenset({str(ProcessRole.TRAINER), CONTEXTS})


def _of_unknown_names(turn: Turn, since: float, declared: bool) -> str:
    """The same where no process is known to be the trainer, as with a layout of the operator's own. A server that only
    refuses may have been stopped with the rest of the run."""
    if not declared:
        return "no process is known to be the trainer, and no server reported the death of its engine"
    ended = turn.start.other_ended
    if ended is not None and ended >= since - ONE_END_SECONDS:
        return "the whole run may be ending (another of its processes ended too)"
    return ""


def looks_interrupted(status: ExitStatus) -> bool:
    """Whether it ended with a signal that terminals and operators send; False if its exit status is unknown."""
    return status.signal in SIGNALS or status.code in CODES


def trainer_role_ended_at(start: Start) -> float | None:
    """When the last process with the trainer's role was first missing (monotonic); None while one lives."""
    return start.ended_roles().get(str(ProcessRole.TRAINER))


@dataclass(frozen=True, slots=True)
class Wait:
    """``seconds``: time left before podwatch acts; ``why``: the reason, as a clause."""

    seconds: float
    why: str

    @property
    def announcement(self) -> str:
        """The suggestion of a finding while podwatch waits for the operator."""
        return (
            f"{self.why}, so an operator possibly ended it: podwatch restarts training in {self.seconds:.0f} s, unless"
            " you start it yourself or run `podwatch stop-training` or `podwatch pause`"
        )


def operator_wait(
    turn: Turn,
    trainer: TrainerSample,
    since: float,
    status: ExitStatus | None = None,
    about: ProcessRole = ProcessRole.ENGINE,
) -> Wait | None:
    """The remaining wait for the operator after an end first seen at ``since``; None if podwatch acts on it now.

    ``status``: the launcher's exit status, if it has ended. ``about``: the role that ended, if the launcher lives.
    """
    near: dict[str, float] = {}
    began = since
    for name, at in sorted(turn.start.ended_roles().items(), key=lambda end: -end[1]):
        if at >= began - ONE_END_SECONDS:  # a chain: each end at most this long before the next
            near[name] = at
            began = min(began, at)
    why = _why(near, turn.snapshot, trainer, began, status, about)
    if not why:
        return None
    used = trainer.terminal_used_wall
    typed = used is not None and used >= turn.snapshot.wall - (turn.at - since) - TERMINAL_WAIT_SECONDS
    left = (TERMINAL_WAIT_SECONDS if typed else ATTACH_EXIT_WAIT_SECONDS) - (turn.at - max((since, *near.values())))
    return Wait(left, why + (", and its terminal was used recently" if typed else "")) if left > 0.0 else None


def _why(
    near: dict[str, float],
    snapshot: Snapshot,
    trainer: TrainerSample,
    began: float,
    status: ExitStatus | None,
    about: ProcessRole,
) -> str:
    if trainer.by_hand:
        return "podwatch did not start this trainer"
    if status is not None and looks_interrupted(status):
        return f"it ended with {status.describe()}, which operators and terminals send"
    if _interrupt_logged(snapshot, began):
        return "its log reports an interrupt"
    alone = TRAINER_NAMES if about is ProcessRole.TRAINER else ENGINE_ROLES
    if status is None and (others := [name for name in near if name not in alone]):
        return f"the whole run may be ending ({', '.join(others)} ended too)"
    return ""


def _interrupt_logged(snapshot: Snapshot, began: float) -> bool:
    """Whether a log reports an interrupt. The inference server's log does not count: vLLM sends SIGTERM to its own
    processes when it dies."""
    reading = snapshot.logs
    return reading.ok and any(
        match.rule == INTERRUPTED and match.role != ProcessRole.INFERENCE and match.last_at >= began - INTERRUPT_SECONDS
        for match in reading.value or ()
    )


def perhaps_intended(turn: Turn, trainer: TrainerSample, since: float, *, declared: bool) -> str:
    """Why the end of the engine at ``since`` (monotonic) may have been intended or be part of the end of the whole run;
    empty if all evidence is against it. Used for a verdict without a window, so anything that cannot be observed counts
    as a reason. ``declared``: the engine's own server reported its death."""
    if trainer.supervision is not Supervision.SUPERVISED:
        return "podwatch did not start this trainer, or does not see how it ends"
    if others := [name for name in turn.start.ended_roles() if name not in ENGINE_ROLES]:
        return f"the whole run may be ending ({', '.join(others)} ended too)"
    if not TRAINER_NAMES & turn.start.present and (why := _of_unknown_names(turn, since, declared)):
        return why
    logs = turn.snapshot.logs
    if not logs.ok or logs.at <= since:
        return "the logs have not been read since"
    if _interrupt_logged(turn.snapshot, since):
        return "its log reports an interrupt"
    for end in trainer.ends:
        # vLLM's engine exits with 0 only on request.
        asked = end.role is ProcessRole.ENGINE and end.status.clean
        if end.seen_at >= since - ONE_END_SECONDS and (asked or looks_interrupted(end.status)):
            return f"a process of the run ended with {end.status.describe()}"
    return ""
