"""Which saves in the store a run can be restored from, the best one first. Pure.

The highest pointer that can be read decides. It names a save, or none after a deliberate fresh start. Saves that were
published after the named one were left behind by a step back. Older ones are used where the named one is damaged; of
those, the ones that a later start began below are not on the run's line any more.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from podwatch.store.documents import RunPointer
from podwatch.store.inventory import Inventory, Stored


def was_started_afresh(inventory: Inventory) -> bool:
    """Whether the run's pointer deliberately names no save."""
    pointer = inventory.pointer
    return pointer is not None and pointer.save is None


def candidates(inventory: Inventory, step: int | None = None) -> tuple[Stored, ...]:
    """Saves to restore from, the best first; ``problem`` says why one cannot be used. With ``step`` all saves of that
    step, whatever became of the run since."""
    saves = [_as_published(save, inventory) for save in inventory.saves]
    pointer = inventory.pointer
    if step is not None:
        own = [save for save in reversed(saves) if save.step == step]
        return tuple(sorted(own, key=lambda save: pointer is None or save.key != pointer.save))
    if was_started_afresh(inventory):
        return ()
    if pointer is None:
        return tuple(_on_the_line(reversed(saves)))
    named = next((save for save in saves if save.key == pointer.save), None) or _lost(pointer)
    before = [save for save in reversed(saves) if save.key != named.key and _is_older(save, named)]
    return tuple(_on_the_line([named, *before]))


def passed_over(inventory: Inventory, step: int | None = None) -> tuple[str, ...]:
    """What of the store cannot be used, in words: documents that cannot be read, and saves that lack something."""
    saves = (f"step {save.step}: {save.problem}" for save in candidates(inventory, step) if save.problem)
    return tuple(dict.fromkeys((*inventory.problems, *saves)))


def _as_published(save: Stored, inventory: Inventory) -> Stored:
    """With a problem where pointers name this save, and all of them with another manifest than it has now."""
    hashes = {p.pointer.manifest_hash for p in inventory.pointers if p.pointer and p.pointer.save == save.key}
    if save.problem or not hashes or save.hash in hashes:
        return save
    return replace(save, problem="its manifest is not the one that was published")


def _lost(pointer: RunPointer) -> Stored:
    assert pointer.step is not None
    problem = "its manifest is not in the store, although a pointer names it"
    return Stored(pointer.step, pointer.save_id, problem=problem)


def _is_older(save: Stored, named: Stored) -> bool:
    """Whether it was there when the named save became the newest. Where that one's place in the order is not known, a
    higher step can have been left behind."""
    return save.order < named.order if named.seq else save.step < named.step


def _on_the_line(saves: Iterable[Stored]) -> Iterator[Stored]:
    """``saves``: the newest first. Without those that a start of training which wrote a newer one began below."""
    begun: list[tuple[str, int]] = []
    for save in saves:
        manifest = save.manifest
        start = manifest.start_id if manifest is not None else ""
        if any(save.step > step and start != other for other, step in begun):
            continue
        if manifest is not None and start and manifest.from_step is not None:
            begun.append((start, manifest.from_step))
        yield save
