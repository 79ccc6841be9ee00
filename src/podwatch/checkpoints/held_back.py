"""Complete sets that are held back: written while two trainers were running (``policy.other_trainers``), left behind on
an earlier branch (``policy.lineage``), or with a step number that no training of this run can have reached
(``policy.resume``)."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from podwatch.domain.checkpoint import CheckpointSet, HeldAs
from podwatch.domain.run import EarlierSave
from podwatch.policy.lineage import is_earlier
from podwatch.policy.other_trainers import Span, why_held
from podwatch.policy.resume import StepEvidence, implausible


class HeldBack:
    """Which checkpoints are in doubt, and the operator's decisions. Read in any thread; set by one.

    ``spans`` are in epoch seconds. ``released`` are (step, save_id) that the operator asked for by name. ``evidence``
    limits how far this run can be; ``earlier`` are the checkpoints of abandoned branches.
    """

    def __init__(self, spans: Iterable[Span] = (), released: Iterable[tuple[int, str]] = ()) -> None:
        self.spans = tuple(spans)
        self.released = frozenset(released)
        self.evidence = StepEvidence()
        self.earlier: tuple[EarlierSave, ...] = ()
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

    def leave(self, earlier: tuple[EarlierSave, ...]) -> None:
        if earlier != self.earlier:
            self.earlier = earlier
            self.version += 1

    def release(self, step: int, save_id: str) -> None:
        self.released |= {(step, save_id)}
        self.version += 1

    def mark(self, sets: Sequence[CheckpointSet]) -> tuple[CheckpointSet, ...]:
        """The same checkpoints, with ``held`` where one is held back. Whether a step is plausible depends on all of
        them."""
        evidence = replace(self.evidence, believed=self.evidence.believed | self.released)
        odd = implausible(sets, evidence)
        return tuple(self._marked(found, odd.get(found.step, "")) for found in sets)

    def _marked(self, found: CheckpointSet, odd: str) -> CheckpointSet:
        if odd:
            return replace(found, held=f"its step number is implausible: {odd}", held_as=HeldAs.IMPLAUSIBLE)
        if self.earlier and is_earlier(found, self.earlier):
            why = "it belongs to an earlier branch of this run, which training has left"
            return replace(found, held=why, held_as=HeldAs.EARLIER_BRANCH)
        if not self.spans or not found.complete or (found.step, found.save_id) in self.released:
            return found
        why = why_held(found, self.spans)
        return replace(found, held=why, held_as=HeldAs.TWO_WRITERS) if why else found


NOTHING_HELD = HeldBack()
"""For catalogues without a daemon; never changed."""
