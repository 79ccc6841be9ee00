"""One end, or a failure? Roles that end one after another after a Ctrl-C are one end, and its operator has time.

Under Ctrl-C, SIGINT or SIGTERM the engine may be gone seconds before the launcher: FSDP takes its time to tear down. An
engine that is gone looks like a silent death until then. podwatch therefore waits for the operator (DESIGN section 2,
"Supervise", and section 3) where one of these is seen: the trainer was started by an operator (attach); its launcher
ended with a signal that terminals and operators send; its log reports an interrupt; or, beside the engine, the
orchestrator or the trainer ended too. A failure that is none of these is judged as fast as ever.
"""

import signal
from collections.abc import Iterable
from dataclasses import dataclass

from podwatch.domain.process import ExitStatus, ProcessRole, ProcessSample
from podwatch.domain.snapshot import Snapshot, Supervision, TrainerSample

ATTACH_EXIT_WAIT_SECONDS = 120.0
"""An operator may have stopped the trainer: wait before acting (DESIGN section 2). The slowest teardown in facts is
prime-rl's (60 s for each child), and each role that ends starts the time again, so that the last one has it in full."""
TERMINAL_WAIT_SECONDS = 900.0
"""The same where the operator typed in its terminal within as long a time before its end, or since: they are there,
and decide."""
ONE_END_SECONDS = 65.0
"""Roles that end within this time of each other end together: prime-rl's launcher gives each child 60 s, then kills it,
and a look misses it some seconds later."""
INTERRUPT_SECONDS = 300.0
"""An interrupt in the log this long before an end may be why it ended: prime-rl's launcher reports the signal at once,
waits up to 5 s for each of its threads (one for each child, environments included), then up to 60 s for each child."""
INTERRUPTED = "interrupted"
"""The shipped log rule whose match says that a process of the run received SIGINT or SIGTERM."""

_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
"""Sent by Ctrl-C, Ctrl-backslash, ``kill`` and a closed terminal. The kernel's own (SIGKILL, SIGSEGV, SIGBUS, ...) are
failures."""
_CODES = frozenset(128 + number for number in _SIGNALS)
"""How a shell, or a handler that follows its convention, reports the same."""
_ROLES = frozenset({ProcessRole.INFERENCE, ProcessRole.ENGINE, ProcessRole.ORCHESTRATOR, ProcessRole.TRAINER})
_ENGINE_ROLES = frozenset({ProcessRole.INFERENCE, ProcessRole.ENGINE})
_CONTEXTS = "the trainer's CUDA contexts"
_TRAINER_NAMES = frozenset({str(ProcessRole.TRAINER), _CONTEXTS})


@dataclass(frozen=True, slots=True)
class Endings:
    """Which roles the tree has (``present``), and when each that it had was first missed (``gone``, monotonic). A role
    is gone when no process of it is left: forks, replacements and single workers do not count."""

    present: frozenset[str] = frozenset()
    gone: tuple[tuple[str, float], ...] = ()


NO_ENDINGS = Endings()


def looks_interrupted(status: ExitStatus) -> bool:
    """Whether it ended as terminals and operators end processes; False where nothing is known of its end."""
    return status.signal in _SIGNALS or status.code in _CODES


def trainer_gone_at(endings: Endings) -> float | None:
    """When the last process with the trainer's role was first missed (monotonic); None while one lives."""
    return next((at for name, at in endings.gone if name == ProcessRole.TRAINER), None)


def follow(endings: Endings, processes: Iterable[ProcessSample], at: float) -> Endings:
    """One look at the tree, which could be read. Returns the same object where nothing changed."""
    present = frozenset(name for process in processes for name in _names(process))
    if present == endings.present:
        return endings
    gone = {name: since for name, since in endings.gone if name not in present}
    gone |= dict.fromkeys(endings.present - present, at)
    return Endings(present, tuple(sorted(gone.items())))


def _names(process: ProcessSample) -> tuple[str, ...]:
    """The roles that its end would be an end of. A trainer that no title names still holds CUDA contexts."""
    names = (str(process.role),) if process.role in _ROLES else ()
    return (*names, _CONTEXTS) if process.cuda and process.role not in _ENGINE_ROLES else names


@dataclass(frozen=True, slots=True)
class Wait:
    """``seconds`` are left before podwatch acts; ``why`` it waits, as a clause."""

    seconds: float
    why: str


def operator_wait(
    endings: Endings,
    snapshot: Snapshot,
    trainer: TrainerSample,
    since: float,
    status: ExitStatus | None = None,
    about: ProcessRole = ProcessRole.ENGINE,
) -> Wait | None:
    """How long this end, first seen at ``since``, is left to the operator; None where it is a failure to act upon now.

    ``status`` is the launcher's, where it has ended; ``about`` is the role that ended, where the launcher lives. Pure;
    all times are monotonic seconds of ``snapshot``.
    """
    near: dict[str, float] = {}
    began = since
    for name, at in sorted(endings.gone, key=lambda end: -end[1]):
        if at >= began - ONE_END_SECONDS:  # one after another: each may be so far from the next
            near[name] = at
            began = min(began, at)
    why = _why(near, snapshot, trainer, began, status, about)
    if not why:
        return None
    waited = snapshot.at - max((since, *near.values()))
    used = trainer.terminal_used_wall
    there = used is not None and used >= snapshot.wall - (snapshot.at - since) - TERMINAL_WAIT_SECONDS
    left = (TERMINAL_WAIT_SECONDS if there else ATTACH_EXIT_WAIT_SECONDS) - waited
    return Wait(left, why + (", and its terminal was used lately" if there else "")) if left > 0.0 else None


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
    alone = _TRAINER_NAMES if about is ProcessRole.TRAINER else _ENGINE_ROLES
    if status is None and (others := [name for name in near if name not in alone]):
        return f"the whole run may be ending ({', '.join(others)} ended too)"
    return ""


def _interrupt_logged(snapshot: Snapshot, began: float) -> bool:
    """Not in the inference server's log: vLLM passes SIGTERM around while it dies of its own accord."""
    reading = snapshot.logs
    return reading.ok and any(
        match.rule == INTERRUPTED
        and not match.error
        and match.role != ProcessRole.INFERENCE
        and match.last_at >= began - INTERRUPT_SECONDS
        for match in reading.value or ()
    )


def perhaps_intended(endings: Endings, snapshot: Snapshot, trainer: TrainerSample, since: float) -> str:
    """Why the end of the engine at ``since`` (monotonic) may have been wanted, or be part of the end of the whole run;
    empty where all speaks against it. For a verdict that does not wait for a window: what cannot be observed counts
    as a reason. Pure."""
    if trainer.supervision is not Supervision.KEEPER:
        return "podwatch did not start this trainer, or does not see how it ends"
    if others := [name for name, _ in endings.gone if name not in _ENGINE_ROLES]:
        return f"the whole run may be ending ({', '.join(others)} ended too)"
    if not _TRAINER_NAMES & endings.present:
        return "no process is known to be the trainer's"
    logs = snapshot.logs
    if not logs.ok or logs.at <= since:
        return "the logs were not read since"
    if any(match.rule == INTERRUPTED and match.error for match in logs.value or ()):
        return "the log rule for interrupts is switched off"
    if _interrupt_logged(snapshot, since):
        return "its log reports an interrupt"
    for end in trainer.ends:
        if end.seen_at < since - ONE_END_SECONDS:
            continue
        asked = end.role is ProcessRole.ENGINE and end.status.clean  # vLLM's engine ends with 0 only where it was asked
        if asked or looks_interrupted(end.status):
            return f"a process of the run ended with {end.status.describe()}"
    if any(looks_interrupted(gone.status) for gone in trainer.required_exits):
        return "a process of the run ended by a signal that operators and terminals send"
    return ""


def announcement(wait: Wait) -> str:
    """What a finding says while podwatch waits."""
    return (
        f"{wait.why}, so its operator may be stopping it: podwatch restarts training in {wait.seconds:.0f} s unless"
        " it is started again, or you run `podwatch stop-training` or `podwatch pause`"
    )
