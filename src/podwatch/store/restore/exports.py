"""The exported weights that are stored with a checkpoint: their document, and where each part belongs."""

from dataclasses import dataclass
from pathlib import Path

from podwatch.checkpoints.layout import Layout
from podwatch.domain.errors import IntegrityError
from podwatch.store.documents import SaveExports
from podwatch.store.inventory import Stored
from podwatch.store.keys import EXPORTS, RunKeys
from podwatch.store.objects.base import Objects

EXTRA = "extra"
"""The part with the files that [sync] extra names."""


@dataclass(frozen=True, slots=True)
class RestoredExports:
    """``parts`` are the directories now in place; ``left_out``: which are not, and why."""

    parts: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    downloaded: int = 0


def read_exports(store: Objects, keys: RunKeys, save: Stored) -> SaveExports:
    """Raises IntegrityError, also where they are not complete."""
    where = keys.save(*save.key) + EXPORTS
    found = SaveExports.from_bytes(store.read(where, SaveExports.LARGEST), where=f"{store.url}/{where}")
    if (found.run_id, found.step, found.save_id) != (keys.run_id, *save.key):
        raise IntegrityError("they belong to another save", where=f"{store.url}/{where}")
    if not found.complete:
        raise IntegrityError("they are not stored whole", where=f"{store.url}/{where}")
    return found


def export_target(layout: Layout, save: Stored, part: str, to: Path | None) -> Path:
    """Where a part belongs. Files that came from all over output_dir are not put back over the files there now. Raises
    IntegrityError."""
    own = {file.part for file in save.manifest.files} if save.manifest is not None else set()
    if part in own:
        raise IntegrityError("it is a part of the checkpoint itself", where=part)
    if to is not None:
        return to / part
    if part == EXTRA:
        return layout.output_dir / f"extra-step_{save.step}"
    try:
        return layout.part_dir(part, save.step)
    except (KeyError, ValueError):
        raise IntegrityError(f"layout {layout.name!r} has no part {part!r}") from None
