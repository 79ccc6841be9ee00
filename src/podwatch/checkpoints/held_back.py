"""Which checkpoints are held back, and whose each one is. Pure.

Held back is what was written while two trainers were running (``second_writer``), left behind on an earlier branch
(``domain.starts``), or has a step that training cannot have reached (``implausible``).
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from podwatch.checkpoints.records import CheckpointRecords
from podwatch.checkpoints.second_writer import Span, why_held
from podwatch.domain.checkpoint import NO_TRAINING, CheckpointSet, HeldAs
from podwatch.domain.run_state import RunState
from podwatch.domain.starts import NOT_RECORDED, Origins

NO_RECORDS = CheckpointRecords()
_AHEAD = 2
"""Save intervals: saves come one after the other, so one that is further above was made by no training."""


def implausible(
    sets: Sequence[CheckpointSet],
    shown: int | None,
    *,
    doubted: Collection[int] = (),
    trusted: Collection[int] = (),
    deleted: Collection[int] = (),
) -> Mapping[int, str]:
    """Step -> why no training of this run has written it. ``shown``: the newest step that this run's trainer showed;
    None: not known, and then only an impossible number is held against a checkpoint, and what was ``doubted`` before.
    ``trusted``: named by the operator, or from the store. ``deleted``: steps that were complete and never in doubt.

    The save before it shows how far training is, too: a log that is written late (a buffer, a line at every hundredth
    step) must not refuse what training saves meanwhile. A log that counts epochs says nothing about checkpoints that
    count steps: a complete one must be in its reach.
    """
    found: dict[int, str] = {}
    known: list[int] = []
    interval = 0
    at = "" if shown is None else f": it is at step {shown}"
    present = {one.step: one for one in sets}
    for step in sorted({*present, *deleted}):
        one = present.get(step)
        doubt = step in doubted and (shown is None or step > shown)
        if one is not None and step >= NO_TRAINING and step not in trusted:
            found[step] = "the step number is impossibly high"
        elif one is not None and not one.complete:
            continue
        elif one is not None and step not in trusted and (doubt or _is_far(step, shown, known, interval)):
            found[step] = f"training has not shown this step{at}"
        else:
            interval = max(interval, step - known[-1]) if len(known) > 1 else step - (known or [0])[-1]
            known.append(step)
    return found


def _is_far(step: int, shown: int | None, known: Sequence[int], interval: int) -> bool:
    if shown is None or not known or not interval:
        return False
    return known[0] <= shown and step > max(shown, known[-1]) + _AHEAD * interval


def in_reach(sets: Sequence[CheckpointSet]) -> Iterator[CheckpointSet]:
    """Without those that are not complete and far above the save before them: a copy that was cut off has any number.
    How far saves lie apart is known from two complete ones on."""
    ordered = sorted(sets, key=lambda s: s.step)
    complete = [s.step for s in ordered if s.complete]
    interval = max((high - low for low, high in itertools.pairwise(complete)), default=0)
    before: int | None = None
    for one in ordered:
        if one.complete or before is None or not interval or one.step <= before + _AHEAD * interval:
            before = one.step
            yield one


class HeldBack:
    """Which checkpoints are in doubt. Read in any thread; set by one.

    ``spans``, in epoch seconds: when two trainers wrote. ``shown``: see ``implausible``. ``origins`` answers whose a
    checkpoint is, ``started_from`` is the step that the operator or podwatch chose for the last start. What was decided
    about a checkpoint is in its record.
    """

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self.spans = tuple(spans)
        self.shown: int | None = None
        self.started_from: int | None = None
        self.origins = Origins()
        self.version = 0
        """Grows with each change: a caller that keeps marked checkpoints then marks them again."""

    def update(self, spans: tuple[Span, ...]) -> bool:
        """Set the spans. Returns whether this changed anything."""
        if spans == self.spans:
            return False
        self.spans = spans
        self.version += 1
        return True

    def show(self, step: int) -> None:
        """This run's trainer showed this step."""
        if self.shown is None or step > self.shown:
            self.shown = step
            self.version += 1

    def follow(self, run: RunState) -> None:
        """Judge by these starts."""
        if (run.starts, run.adopted) != (self.origins.starts, self.origins.adopted):
            self.origins = Origins.of(run.starts, adopted=run.adopted)
            self.started_from = run.started_from
            self.version += 1

    def mark(self, sets: Sequence[CheckpointSet], records: CheckpointRecords = NO_RECORDS) -> tuple[CheckpointSet, ...]:
        """The same checkpoints, with whose each one is, and ``held`` where one is held back. Whether a step is
        plausible depends on all of them."""
        released = {key for key, held in records.decided.items() if not held} | records.restored
        trusted = {s.step for s in sets if (s.step, s.save_id) in released or s.step == self.started_from}
        doubted = {s.step for s in sets if (s.step, s.save_id) in records.doubted}
        deleted = {r.step for r in records.all if r.deleted and not r.doubted and r.step < NO_TRAINING}
        odd = implausible(sets, self.shown, doubted=doubted, trusted=trusted, deleted=deleted)
        return tuple(self._marked(found, odd.get(found.step, ""), records) for found in sets)

    def _marked(self, found: CheckpointSet, odd: str, records: CheckpointRecords) -> CheckpointSet:
        key = (found.step, found.save_id)
        origin = self.origins.judge(found.step, found.changed_wall, records.origins.get(key, NOT_RECORDED))
        found = replace(found, start_id=origin.start_id, ours=origin.ours)
        if odd:
            return replace(found, held=f"its step number is implausible: {odd}", held_as=HeldAs.IMPLAUSIBLE)
        if origin.left:
            why = "it belongs to an earlier branch of this run, which training has left"
            return replace(found, held=why, held_as=HeldAs.EARLIER_BRANCH)
        if not found.complete:
            return found
        why = records.decided[key] if key in records.decided else why_held(found, self.spans)
        return replace(found, held=why, held_as=HeldAs.TWO_WRITERS) if why else found


NOTHING_HELD = HeldBack()
"""For catalogues without a daemon; never changed."""
