"""Fetches the exported weights that are stored with a checkpoint, part by part, once the checkpoint itself is in place.

A part that is damaged in the store, or has no place here, is left out and reported: the checkpoint is valid without it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from podwatch.checkpoints.layout import Layout
from podwatch.domain.checkpoint import FileEntry
from podwatch.domain.errors import ConfigurationError, IntegrityError
from podwatch.store.documents import EXPORT_BYTES, SaveExports
from podwatch.store.inventory import Stored
from podwatch.store.keys import EXPORTS, RunKeys
from podwatch.store.objects.base import Objects
from podwatch.store.restore.compare import has_file
from podwatch.store.restore.place import Placing
from podwatch.store.restore.staging import StagingArea
from podwatch.system.own_directories import Workspace

if TYPE_CHECKING:
    from podwatch.store.restore.restore import Restorer

EXTRA = "extra"
"""The part with the files that [sync] extra names."""


@dataclass(frozen=True, slots=True)
class RestoredExports:
    """``parts`` are the directories now in place; ``left_out``: which are not, and why."""

    parts: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    downloaded: int = 0


def fetch_exports(
    restorer: "Restorer", store: Objects, keys: RunKeys, save: Stored, layout: Layout, workspace: Workspace,
    to: Path | None,
) -> RestoredExports:  # fmt: skip
    """Raises RemoteError for store trouble, HostError and OSError for trouble on this pod."""
    try:
        found = read_exports(store, keys, save)
    except IntegrityError as error:
        return RestoredExports(left_out=(f"exported weights: {error}",))
    parts, left_out, downloaded = list[str](), list[str](), 0
    for part in sorted({file.part for file in found.files}):
        files = [file for file in found.files if file.part == part]
        try:
            target = _target(layout, save, part, to)
            area = StagingArea(workspace, to, f"{save.step}-{save.save_id}-{part}")
            with area.alone():
                downloaded += _bring(restorer, area, files, save, workspace, {part: target}, to)
        except (IntegrityError, ConfigurationError) as error:
            left_out.append(f"{part}: {error}")
        else:
            parts.append(str(target))
    return RestoredExports(tuple(parts), tuple(left_out), downloaded)


def read_exports(store: Objects, keys: RunKeys, save: Stored) -> SaveExports:
    """Raises IntegrityError, also where they are not complete."""
    where = keys.save(*save.key) + EXPORTS
    found = SaveExports.from_bytes(store.read(where, SaveExports.LARGEST), where=f"{store.url}/{where}")
    if (found.run_id, found.step, found.save_id) != (keys.run_id, *save.key):
        raise IntegrityError("they belong to another save", where=f"{store.url}/{where}")
    if not found.complete:
        raise IntegrityError("they are not stored whole", where=f"{store.url}/{where}")
    return found


def _bring(
    restorer: "Restorer", area: StagingArea, files: Sequence[FileEntry], save: Stored, workspace: Workspace,
    targets: dict[str, Path], to: Path | None,
) -> int:  # fmt: skip
    """Bytes that came over the line."""
    (target,) = targets.values()
    if all(has_file(area.tree, target, file, EXPORT_BYTES) for file in files):
        return 0
    (staged,) = area.prepare(targets, frozenset())
    try:
        downloaded = restorer.transfer(area, save.key, files, EXPORT_BYTES)
    except IntegrityError:
        area.forget()
        raise
    lineage = save.manifest.lineage if save.manifest is not None else ""
    Placing(workspace, area.tree, save.step, lineage, in_place=to is None).put(staged)
    area.clean()
    return downloaded


def _target(layout: Layout, save: Stored, part: str, to: Path | None) -> Path:
    """Files that came from all over output_dir are not put back over the files there now."""
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
