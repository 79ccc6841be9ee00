"""The pointers of a run: which of them count, and which is the highest. Every reader of a pointer uses this file.

The name of a pointer orders it: the highest generation and seq wins, the first that the store received if equal. One of
a generation above every claim is forged, because each pod claims its generation minutes before its first pointer, and
the highest claim is never deleted. Without any claim nothing is known, and every pointer counts.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from podwatch.domain.document import Document
from podwatch.domain.errors import IntegrityError
from podwatch.store.documents import RunPointer
from podwatch.store.interfaces import list_bounded
from podwatch.store.keys import Kind, ObjectName, RunKeys
from podwatch.store.objects.base import ObjectInfo, Objects
from podwatch.store.objects.errors import ObjectMissing

MOST_TRIED = 5
"""Pointers that one search reads: below so many that cannot be read, an older one is no answer any more."""


@dataclass(frozen=True, slots=True)
class PointerSeen:
    """``pointer`` is None where it cannot be read or contradicts its name (``problem``), or was not read."""

    key: str
    generation: int
    seq: int
    nonce: str
    wall: float
    pointer: RunPointer | None = None
    problem: str = ""

    @property
    def order(self) -> tuple[int, int]:
        return (self.generation, self.seq)

    def with_document(self, found: Document | None, problem: str, run_id: str) -> "PointerSeen":
        """With its document, if that says what the name says."""
        if isinstance(found, RunPointer) and (found.order, found.run_id) != (self.order, run_id):
            found, problem = None, "it belongs to another run, or contradicts its name"
        return replace(self, pointer=found if isinstance(found, RunPointer) else None, problem=problem)


def rank_pointers(
    listed: Iterable[tuple[ObjectName, ObjectInfo]], claims: Collection[int]
) -> tuple[tuple[PointerSeen, ...], tuple[str, ...]]:
    """(the pointers that count, the highest first; the names of forged ones). ``claims``: the generations of all
    claims."""
    found = [
        PointerSeen(item.key, name.generation, name.seq, name.nonce, item.wall)
        for name, item in listed
        if name.kind is Kind.POINTER
    ]
    found.sort(key=lambda p: (-p.generation, -p.seq, p.wall, p.nonce))
    highest = max(claims, default=None)
    forged = {p.key for p in found if highest is not None and p.generation > highest}
    return tuple(p for p in found if p.key not in forged), tuple(p.key for p in found if p.key in forged)


def list_pointers(store: Objects, keys: RunKeys, *, claimed: int = 0) -> tuple[PointerSeen, ...]:
    """The pointers that count, the highest first. ``claimed``: a generation that is known to be claimed; the claims,
    whose listing is billed, are listed only where a pointer is above it. Raises RemoteError."""
    listed = [(keys.parse(item.key), item) for item in list_bounded(store, keys.pointers)]
    above = any(name.kind is Kind.POINTER and name.generation > claimed for name, _ in listed)
    return rank_pointers(listed, claimed_generations(store, keys) if above else ())[0]


def claimed_generations(store: Objects, keys: RunKeys) -> set[int]:
    """Raises RemoteError."""
    names = (keys.parse(item.key) for item in list_bounded(store, keys.claims))
    return {name.generation for name in names if name.kind is Kind.CLAIM}


def read_pointers(store: Objects, keys: RunKeys, ranked: Sequence[PointerSeen]) -> Iterator[PointerSeen]:
    """The highest ones, read one at a time. One that was deleted since its listing is left out. Raises RemoteError."""
    for seen in ranked[:MOST_TRIED]:
        try:
            found, problem = RunPointer.from_bytes(store.read(seen.key, RunPointer.LARGEST), where=seen.key), ""
        except ObjectMissing:
            continue
        except IntegrityError as error:
            found, problem = None, str(error)
        yield seen.with_document(found, problem, keys.run_id)


def highest_pointer(store: Objects, keys: RunKeys, *, claimed: int = 0) -> RunPointer | None:
    """The highest one that can be read. ``claimed``: as in ``list_pointers``. Raises RemoteError."""
    ranked = list_pointers(store, keys, claimed=claimed)
    return next((seen.pointer for seen in read_pointers(store, keys, ranked) if seen.pointer is not None), None)
