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

from podwatch.domain.process import ExitStatus, ProcessRole, ProcessSample
from podwatch.domain.snapshot import Snapshot, Supervision, TrainerSample

ATTACH_EXIT_WAIT_SECONDS = 120.0
"""Wait before acting on an end that an operator may have caused. The slowest known shutdown is prime-rl's (60 s for
each child); each role that ends restarts the time, so that the last one has it in full."""
TERMINAL_WAIT_SECONDS = 900.0
"""The same if the operator typed in the trainer's terminal within this time before its end, or since."""
ONE_END_SECONDS = 65.0
"""Roles that end within this time of each other end together: prime-rl's launcher gives each child 60 s, then kills it,
and a look notices that some seconds later."""
INTERRUPT_SECONDS = 300.0
"""An interrupt in the log up to this long before an end can be its cause: prime-rl's launcher logs the signal at once,
waits up to 5 s for each of its threads (one for each child, environments included), then up to 60 s for each child."""
INTERRUPTED = "interrupted"
"""The shipped log rule whose match says that a process of the run received SIGINT or SIGTERM."""

_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
"""Sent by Ctrl-C, Ctrl-backslash, ``kill`` and a closed terminal. Others (SIGKILL, SIGSEGV, SIGBUS, ...) are failures.
"""
_CODES = frozenset(128 + number for number in _SIGNALS)
"""The exit codes by which shells report these signals."""
_ROLES = frozenset({ProcessRole.INFERENCE, ProcessRole.ENGINE, ProcessRole.ORCHESTRATOR, ProcessRole.TRAINER})
_ENGINE_ROLES = frozenset({ProcessRole.INFERENCE, ProcessRole.ENGINE})
_CONTEXTS = "the trainer's CUDA contexts"
_TRAINER_NAMES = frozenset({str(ProcessRole.TRAINER), _CONTEXTS})


@dataclass(frozen=True, slots=True)
class Endings:
    """The roles in the tree (``present``), and when each earlier role was first missing (``gone``, monotonic). A role
    is gone when no process of it is left: forks, replacements and single workers do not count."""

    present: frozenset[str] = frozenset()
    gone: tuple[tuple[str, float], ...] = ()


NO_ENDINGS = Endings()


def looks_interrupted(status: ExitStatus) -> bool:
    """Whether it ended with a signal that terminals and operators send; False if its exit status is unknown."""
    return status.signal in _SIGNALS or status.code in _CODES


def trainer_gone_at(endings: Endings) -> float | None:
    """When the last process with the trainer's role was first missing (monotonic); None while one lives."""
    return next((at for name, at in endings.gone if name == ProcessRole.TRAINER), None)


def follow(endings: Endings, processes: Iterable[ProcessSample], at: float) -> Endings:
    """Take one look at the tree, at the monotonic second ``at``. Returns the same object if nothing changed."""
    present = frozenset(name for process in processes for name in _names(process))
    if present == endings.present:
        return endings
    gone = {name: since for name, since in endings.gone if name not in present}
    gone |= dict.fromkeys(endings.present - present, at)
    return Endings(present, tuple(sorted(gone.items())))


def _names(process: ProcessSample) -> tuple[str, ...]:
    """The roles of a process. A trainer without a recognized name is known by its CUDA contexts."""
    names = (str(process.role),) if process.role in _ROLES else ()
    return (*names, _CONTEXTS) if process.cuda and process.role not in _ENGINE_ROLES else names


@dataclass(frozen=True, slots=True)
class Wait:
    """``seconds``: time left before podwatch acts; ``why``: the reason, as a clause."""

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
    """The remaining wait for the operator after an end first seen at ``since``; None if podwatch acts on it now.

    ``status``: the launcher's exit status, if it has ended. ``about``: the role that ended, if the launcher lives.
    All times are monotonic seconds of ``snapshot``. Pure.
    """
    near: dict[str, float] = {}
    began = since
    for name, at in sorted(endings.gone, key=lambda end: -end[1]):
        if at >= began - ONE_END_SECONDS:  # a chain: each end at most this long before the next
            near[name] = at
            began = min(began, at)
    why = _why(near, snapshot, trainer, began, status, about)
    if not why:
        return None
    waited = snapshot.at - max((since, *near.values()))
    used = trainer.terminal_used_wall
    there = used is not None and used >= snapshot.wall - (snapshot.at - since) - TERMINAL_WAIT_SECONDS
    left = (TERMINAL_WAIT_SECONDS if there else ATTACH_EXIT_WAIT_SECONDS) - waited
    return Wait(left, why + (", and its terminal was used recently" if there else "")) if left > 0.0 else None


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
    """Whether a log reports an interrupt. The inference server's log does not count: vLLM sends SIGTERM to its own
    processes when it dies."""
    reading = snapshot.logs
    return reading.ok and any(
        match.rule == INTERRUPTED and match.role != ProcessRole.INFERENCE and match.last_at >= began - INTERRUPT_SECONDS
        for match in reading.value or ()
    )


def perhaps_intended(endings: Endings, snapshot: Snapshot, trainer: TrainerSample, since: float) -> str:
    """Why the end of the engine at ``since`` (monotonic) may have been intended or be part of the end of the whole run;
    empty if all evidence is against it. Used for a verdict without a window, so anything that cannot be observed counts
    as a reason. Pure."""
    if trainer.supervision is not Supervision.SUPERVISED:
        return "podwatch did not start this trainer, or does not see how it ends"
    if others := [name for name, _ in endings.gone if name not in _ENGINE_ROLES]:
        return f"the whole run may be ending ({', '.join(others)} ended too)"
    if not _TRAINER_NAMES & endings.present:
        return "no process is known to be the trainer"
    logs = snapshot.logs
    if not logs.ok or logs.at <= since:
        return "the logs have not been read since"
    if _interrupt_logged(snapshot, since):
        return "its log reports an interrupt"
    for end in trainer.ends:
        if end.seen_at < since - ONE_END_SECONDS:
            continue
        asked = end.role is ProcessRole.ENGINE and end.status.clean  # vLLM's engine exits with 0 only on request
        if asked or looks_interrupted(end.status):
            return f"a process of the run ended with {end.status.describe()}"
    if any(looks_interrupted(gone.status) for gone in trainer.required_exits):
        return "a process of the run ended with a signal that operators and terminals send"
    return ""


def announcement(wait: Wait) -> str:
    """The suggestion of a finding while podwatch waits for the operator."""
    return (
        f"{wait.why}, so an operator possibly ended it: podwatch restarts training in {wait.seconds:.0f} s, unless you"
        " start it yourself or run `podwatch stop-training` or `podwatch pause`"
    )
