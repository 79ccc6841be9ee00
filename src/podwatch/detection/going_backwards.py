"""Going backwards: training begins again below a step that it has made, within one start of the trainer."""

from collections.abc import Iterator

from podwatch.detection.observe import Turn
from podwatch.detection.progress import Fall
from podwatch.detection.start import ENGINE_ROLES
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity
from podwatch.domain.process import ProcessRole

SHOWN_SECONDS = 3600.0
"""How long it is shown after training has passed its highest step again; the journal keeps it."""
YOUNGER_SECONDS = 2.0
"""A step's time is that of the file it was read from, to which the next process may have written already."""


def going_backwards(turn: Turn) -> Iterator[Finding]:
    """Two steps in a row below the highest of the same source: torchrun's own restarts, a loop in a shell, an ignored
    resume argument. What it saves from now on takes the place of later steps, which nobody else notices."""
    stream = turn.start.progress.fallen
    fall = stream.fall if stream is not None else None
    if stream is None or fall is None or (not stream.below and turn.at - fall.since > SHOWN_SECONDS):
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
    by_pid = {p.identity.pid: p for p in turn.trainer.descendants}
    since = turn.snapshot.trainer.at - fall.top_at + YOUNGER_SECONDS
    young = {pid for pid, p in by_pid.items() if (age := turn.age(p)) is not None and age < since}
    begun = [by_pid[pid] for pid in young if by_pid[pid].parent_pid in by_pid.keys() - young]
    trains = [p for p in begun if p.role is ProcessRole.TRAINER or (p.cuda and p.role not in ENGINE_ROLES)]
    training = trains or [p for p in begun if p.role is ProcessRole.OTHER]
    if not training:
        return ""
    parent = by_pid[max(training, key=lambda p: p.identity.start_ticks).parent_pid]
    return f"{parent.name} (process {parent.identity.pid}) started its processes again"
