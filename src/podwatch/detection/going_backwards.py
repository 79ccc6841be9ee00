"""Going backwards: training begins again below a step that it has made, within one start of the trainer."""

from collections.abc import Iterator

from podwatch.detection.observe import Turn, boottime_of
from podwatch.detection.progress import Fall
from podwatch.detection.start import ENGINE_ROLES
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity
from podwatch.domain.process import ProcessRole, ProcessSample

SHOWN_SECONDS = 3600.0
"""How long it is shown after training has passed its highest step again; the journal keeps it."""
YOUNGER_SECONDS = 2.0
"""A step's time is that of the file it was read from, to which the next process may have written already."""


def going_backwards(turn: Turn) -> Iterator[Finding]:
    """Two steps in a row below the highest of the same source: torchrun's own restarts, a loop in a shell, an ignored
    resume argument. What it saves from now on takes the place of later steps, which nobody else notices."""
    stream = turn.start.progress.fallen
    if stream is None or stream.fall is None or turn.trainer is None or not turn.trainer.alive or not turn.wanted:
        return
    fall = stream.fall
    if not stream.below and turn.at - fall.since > SHOWN_SECONDS:
        return
    who = _who_restarted_it(turn, fall)
    yield Finding(
        FindingKind.GOING_BACKWARDS,
        Severity.CRITICAL,
        f"training began again below: step {fall.step} after step {fall.top} of the same start"
        f"{f'; {who}' if who else ''}. podwatch does not restart it",
        fall.since,
        suggestion="if this is not intended: end it with `podwatch stop-training`, make the command resume from the"
        " newest checkpoint and end when it fails, and run `podwatch start`",
        evidence=(
            Evidence(
                f"{stream.source} of {stream.role or 'the trainer'}", f"{fall.step}, was {fall.top}",
                Agreement.AGREES, max(0.0, turn.at - fall.since),
            ),
        ),
    )  # fmt: skip


def _who_restarted_it(turn: Turn, fall: Fall) -> str:
    """The program that started the trainer's processes again after the highest step, as a clause; empty if none did."""
    trainer, at = turn.trainer, turn.snapshot.trainer.at
    boottime = boottime_of(turn.snapshot, at)
    if trainer is None or boottime is None:
        return ""
    by_pid = {p.identity.pid: p for p in trainer.descendants}
    since = at - fall.top_at + YOUNGER_SECONDS
    young = {p.identity.pid for p in trainer.descendants if p.identity.age(boottime) < since}
    begun = [by_pid[pid] for pid in young if by_pid[pid].parent_pid in by_pid.keys() - young]
    training = [p for p in begun if _trains(p)] or [p for p in begun if p.role is ProcessRole.OTHER]
    if not training:
        return ""
    parent = by_pid[max(training, key=lambda p: p.identity.start_ticks).parent_pid]
    return f"{parent.name} (process {parent.identity.pid}) started its processes again"


def _trains(process: ProcessSample) -> bool:
    return process.role is ProcessRole.TRAINER or bool(process.cuda and process.role not in ENGINE_ROLES)
