"""Going backwards: training begins again below a step that it has made, within one start of the trainer."""

from collections.abc import Iterator

from podwatch.detection.observe import Turn, boottime_of
from podwatch.detection.start import ENGINE_ROLES
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity
from podwatch.domain.process import ProcessRole, ProcessSample

SHOWN_SECONDS = 3600.0
"""How long it is shown after training has passed its highest step again; the journal keeps it."""
YOUNGER_SECONDS = 30.0
"""A process that began to train so much later than the start was started again by something in the tree: torchrun
starts its workers within seconds, a slow one within some more."""


def going_backwards(turn: Turn) -> Iterator[Finding]:
    """Two steps in a row below the highest of the same source: torchrun's own restarts, a loop in a shell, an ignored
    resume argument. What it saves from now on takes the place of later steps, which nobody else notices."""
    stream = turn.start.progress.fallen
    if stream is None or stream.fall is None or turn.trainer is None or not turn.trainer.alive or not turn.wanted:
        return
    top, step, fell_at = stream.fall
    if not stream.below and turn.at - fell_at > SHOWN_SECONDS:
        return
    who = _who_restarted_it(turn)
    yield Finding(
        FindingKind.GOING_BACKWARDS,
        Severity.CRITICAL,
        f"training began again below: step {step} after step {top} of the same start"
        f"{f'; {who}' if who else ''}. podwatch does not restart it",
        fell_at,
        suggestion="if this is not intended: end it with `podwatch stop-training`, make the command resume from the"
        " newest checkpoint and end when it fails, and run `podwatch start`",
        evidence=(
            Evidence(
                f"{stream.source} of {stream.role or 'the trainer'}", f"{step}, was {top}",
                Agreement.AGREES, max(0.0, turn.at - fell_at),
            ),
        ),
    )  # fmt: skip


def _who_restarted_it(turn: Turn) -> str:
    """The program that started the trainer's processes again, as a clause; empty if none is younger than the start."""
    trainer, boottime = turn.trainer, boottime_of(turn.snapshot, turn.snapshot.trainer.at)
    if trainer is None or boottime is None or trainer.started_at is None:
        return ""
    age = turn.snapshot.trainer.at - trainer.started_at
    by_pid = {p.identity.pid: p for p in trainer.descendants}
    training = [p for p in trainer.descendants if _trains(p)] or [
        p for p in trainer.descendants if p.role is ProcessRole.OTHER
    ]
    young = [p for p in training if p.identity.age(boottime) < age - YOUNGER_SECONDS and p.parent_pid in by_pid]
    if not young:
        return ""
    parent = by_pid[max(young, key=lambda p: p.identity.start_ticks).parent_pid]
    return f"{parent.name} (process {parent.identity.pid}) started its processes again"


def _trains(process: ProcessSample) -> bool:
    return process.role is ProcessRole.TRAINER or bool(process.cuda and process.role not in ENGINE_ROLES)
