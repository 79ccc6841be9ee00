"""Which checkpoints a removal of podwatch's local data would destroy for good (promises 2 and 8)."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A regular file in quarantine: ``path`` is where the trainer had written it. Times in ns of the wall clock."""

    path: str
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that a manifest in the store lists: ``path`` is relative to the directory of its part."""

    path: str
    size: int
    mtime_ns: int


def is_stored(kept: Iterable[KeptFile], stored: Sequence[StoredFile]) -> bool:
    """Whether the stored checkpoint is the quarantined one: each of its files is here, at the same place, with the same
    size and time. A manifest without files proves nothing. Two saves of one step (after a rollback) differ in their
    times, so the step number alone is no proof."""
    places: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    for file in kept:
        places[file.size, file.mtime_ns].append(file.path)
    return bool(stored) and all(
        any(path.endswith(f"/{file.path}") for path in places[file.size, file.mtime_ns]) for file in stored
    )
