"""Complete sets that are held back: written while two trainers were running (``judgement.two_writers``)."""

from collections.abc import Iterable
from dataclasses import replace

from podwatch.domain.checkpoint import CheckpointSet
from podwatch.judgement.two_writers import Span, why_held


class HeldBack:
    """What is in doubt, and what the operator has decided about. Read in any thread; set by one.

    ``spans`` are in epoch seconds. ``released`` are (step, save_id) that the operator asked for by name.
    """

    def __init__(self, spans: Iterable[Span] = (), released: Iterable[tuple[int, str]] = ()) -> None:
        self.spans = tuple(spans)
        self.released = frozenset(released)
        self.version = 0
        """Grows with each change: whoever keeps marked sets marks them again."""

    def update(self, spans: tuple[Span, ...]) -> bool:
        """True if this changed anything."""
        if spans == self.spans:
            return False
        self.spans = spans
        self.version += 1
        return True

    def release(self, step: int, save_id: str) -> None:
        self.released |= {(step, save_id)}
        self.version += 1

    def mark(self, found: CheckpointSet) -> CheckpointSet:
        """The same set, with ``held`` where it is held back."""
        if not self.spans or not found.complete or (found.step, found.save_id) in self.released:
            return found
        why = why_held(found, self.spans)
        return replace(found, held=why) if why else found


NOTHING_HELD = HeldBack()
"""For catalogues without a daemon; never changed."""
