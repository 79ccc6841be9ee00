"""Who may move the pointer, and to which (generation, seq).

The thin rule for two pods on one run: a writer that meets a foreign pointer for the first time takes the next
generation; a writer that later meets a foreign pointer of its own generation or above has been superseded and
publishes nothing more. Readers take the highest (generation, seq), so neither number ever goes back (DESIGN section
4, "Two pods, one run", and section 5).
"""

from dataclasses import dataclass

from podwatch.domain.remote import Pointer


@dataclass(frozen=True, slots=True)
class PointerDecision:
    """``ok`` is false when this writer must not publish; the numbers are then those of the pointer that won."""

    ok: bool
    generation: int
    seq: int
    reason: str

    @property
    def superseded(self) -> bool:
        return not self.ok


def next_pointer(
    current: Pointer | None, *, writer_id: str, own_generation: int | None, own_seq: int = 0
) -> PointerDecision:
    """Decide the numbers of the next pointer write.

    ``current`` is the pointer as just read; None means the store answered that there is none (an unreachable store is
    not None: do not call this then). ``own_generation`` is the generation this writer has claimed before, None before
    its first write. ``own_seq`` is the highest seq this writer has published, as the journal remembers it; it keeps
    seq from going back when the pointer object was deleted or set back.

    ``seq`` goes on counting across generations, because retention orders saves by it.
    """
    if current is None:
        generation = 1 if own_generation is None else own_generation
        return PointerDecision(True, generation, own_seq + 1, "no pointer yet")
    seq = max(current.seq, own_seq) + 1
    if current.writer_id == writer_id:
        # Our own pointer may be ahead of what we remember when the journal was lost: it is ours all the same.
        generation = max(current.generation, own_generation or 0)
        return PointerDecision(True, generation, seq, "own pointer")
    if own_generation is None:
        return PointerDecision(True, current.generation + 1, seq, f"first claim, after writer {current.writer_id}")
    if current.generation > own_generation:
        reason = (
            f"superseded: writer {current.writer_id} holds generation {current.generation}, this one {own_generation}"
        )
        return PointerDecision(False, current.generation, current.seq, reason)
    if current.generation == own_generation:
        reason = f"superseded: writer {current.writer_id} holds the same generation {own_generation}"
        return PointerDecision(False, current.generation, current.seq, reason)
    # A writer frozen in the middle of a request may set the pointer back once; the owner repairs it.
    reason = f"repairs a late write of {current.writer_id} (generation {current.generation})"
    return PointerDecision(True, own_generation, seq, reason)
