"""Which complete checkpoints are held back, and whose each one is.

Held back is what was written while two trainers were running (``second_writer``), left behind on an earlier branch
(``domain.starts``), or has a step number that no training of this run can have reached (``implausible_steps``).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from podwatch.checkpoints.implausible_steps import StepEvidence, implausible
from podwatch.checkpoints.records import CheckpointRecords
from podwatch.checkpoints.second_writer import Span, why_held
from podwatch.domain.checkpoint import CheckpointSet, HeldAs
from podwatch.domain.run_state import RunState
from podwatch.domain.starts import NOT_RECORDED, Origins

NO_RECORDS = CheckpointRecords()


class HeldBack:
    """Which checkpoints are in doubt. Read in any thread; set by one.

    ``spans`` are in epoch seconds. ``evidence`` limits how far this run can be; ``origins`` answers whose a checkpoint
    is. What was decided about a checkpoint is in its record.
    """

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self.spans = tuple(spans)
        self.evidence = StepEvidence()
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

    def explain(self, evidence: StepEvidence) -> None:
        if evidence != self.evidence:
            self.evidence = evidence
            self.version += 1

    def follow(self, run: RunState) -> None:
        """Judge by these starts."""
        if (run.starts, run.adopted) != (self.origins.starts, self.origins.adopted):
            self.origins = Origins.of(run.starts, adopted=run.adopted)
            self.version += 1

    def mark(self, sets: Sequence[CheckpointSet], records: CheckpointRecords = NO_RECORDS) -> tuple[CheckpointSet, ...]:
        """The same checkpoints, with whose each one is, and ``held`` where one is held back. Whether a step is
        plausible depends on all of them."""
        released = {key for key, held in records.decided.items() if not held}
        odd = implausible(sets, replace(self.evidence, believed=self.evidence.believed | released))
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
