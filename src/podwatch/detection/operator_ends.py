"""Whether an end is a failure or an operator stopping the run, and how long podwatch waits for the operator.

After Ctrl-C, SIGINT or SIGTERM the engine can end seconds before the launcher, because FSDP needs time to shut down;
until then it looks like a silent death. podwatch therefore waits (docs/detection.md) if the trainer was started by an
operator (attach); if its launcher ended with a signal that terminals and operators send; if its log reports an
interrupt; or if, beside the engine, the orchestrator or the trainer ended too. Any other failure is acted on without
this wait.
"""

import signal
from collections.abc import Iterable
from dataclasses import dataclass

from podwatch.detection.observe import Turn
from podwatch.detection.start import CONTEXTS, ENGINE_ROLES, Start
from podwatch.domain.process import ExitStatus, ProcessRole
from podwatch.domain.snapshot import Supervision

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
"""Sent by Ctrl-C, Ctrl-backslash, ``kill`` and a closed terminal; shells report them as exit codes of 128 and more.
Others (SIGKILL, SIGSEGV, SIGBUS, ...) are failures."""
TRAINER_NAMES = frozenset({str(ProcessRole.TRAINER), CONTEXTS})


def looks_interrupted(status: ExitStatus) -> bool:
    """Whether it ended with a signal that terminals and operators send; False if its exit status is unknown."""
    return status.signal in SIGNALS or (status.code or 0) - 128 in SIGNALS


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
    turn: Turn, since: float, status: ExitStatus | None = None, about: ProcessRole = ProcessRole.ENGINE
) -> Wait | None:
    """The remaining wait for the operator after an end first seen at ``since``; None if podwatch acts on it now.

    ``status``: the launcher's exit status, if it has ended. ``about``: the role that ended, if the launcher lives.
    """
    near: dict[str, float] = {}
    began, used = since, turn.trainer.terminal_used_wall
    for name, at in sorted(turn.start.ended_roles().items(), key=lambda end: -end[1]):
        if at >= began - ONE_END_SECONDS:  # a chain: each end at most this long before the next
            near[name] = at
            began = min(began, at)
    why = _why(turn, near, began, status, about)
    typed = used is not None and used >= turn.snapshot.wall - (turn.at - since) - TERMINAL_WAIT_SECONDS
    left = (TERMINAL_WAIT_SECONDS if typed else ATTACH_EXIT_WAIT_SECONDS) - (turn.at - max((since, *near.values())))
    why += ", and its terminal was used recently" if why and typed else ""
    return Wait(left, why) if why and left > 0.0 else None


def _why(
    turn: Turn, ended: Iterable[str], began: float, status: ExitStatus | None = None,
    about: ProcessRole = ProcessRole.ENGINE,
) -> str:  # fmt: skip
    """Why an operator may have ended it, as a clause; empty if nothing says so."""
    if turn.trainer.by_hand:
        return "podwatch did not start this trainer"
    if status is not None and looks_interrupted(status):
        return f"it ended with {status.describe()}, which operators and terminals send"
    # The inference server's log does not count: vLLM sends SIGTERM to its own processes when it dies.
    logged = [m for m in turn.snapshot.logs.value or () if m.rule == INTERRUPTED and m.role != ProcessRole.INFERENCE]
    if any(match.last_at >= began - INTERRUPT_SECONDS for match in logged):
        return "its log reports an interrupt"
    alone = TRAINER_NAMES if about is ProcessRole.TRAINER else ENGINE_ROLES
    if status is None and (others := [name for name in ended if name not in alone]):
        return f"the whole run may be ending ({', '.join(others)} ended too)"
    return ""


def perhaps_intended(turn: Turn, since: float, *, declared: bool) -> bool:
    """Whether the end of the engine at ``since`` (monotonic) may have been intended or be part of the end of the whole
    run. Used for a verdict without a window, so anything that cannot be observed counts. ``declared``: the engine's own
    server reported its death."""
    start, trainer, logs = turn.start, turn.trainer, turn.snapshot.logs
    if trainer.supervision is not Supervision.SUPERVISED or not logs.ok or logs.at <= since:
        return True
    if _why(turn, start.ended_roles(), since):
        return True
    if not TRAINER_NAMES & start.present:
        # No process is known to be the trainer: a server that only refuses may have been stopped with the whole run.
        ended = start.other_ended
        if not declared or (ended is not None and ended >= since - ONE_END_SECONDS):
            return True
    return any(
        end.seen_at >= since - ONE_END_SECONDS
        and (looks_interrupted(end.status) or (end.role is ProcessRole.ENGINE and end.status.clean))
        for end in trainer.ends  # vLLM's engine exits with 0 only on request
    )
