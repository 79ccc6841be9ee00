"""Fetches optional parts on request, part by part, after the checkpoint itself is in place.

A part that is damaged in the store, or has no place here, is left out and reported: the checkpoint is valid without it.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from podwatch.checkpoints.layout import Layout
from podwatch.domain.errors import ConfigurationError, IntegrityError
from podwatch.domain.manifest import Keys, Manifest, ManifestFile, ManifestSymlink, sha1_hex
from podwatch.domain.safe_links import check_links
from podwatch.policy.store_retention import EXTRA
from podwatch.stores.base import ObjectStore
from podwatch.sync.publish_and_pointer import read_optional
from podwatch.sync.restore.child_job import Fetched
from podwatch.sync.restore.fetch import by_part
from podwatch.sync.restore.stage_and_put_in_place import StagingArea

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")


@dataclass(frozen=True, slots=True)
class Brought:
    """``parts`` are the directories now in place; ``left_out``: which are not, and why."""

    parts: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    downloaded: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """One optional part to fetch. ``lock`` is the descriptor of the staging area's lock."""

    name: str
    part_size: int
    files: tuple[ManifestFile, ...]
    symlinks: tuple[ManifestSymlink, ...]
    staging: Path
    target: Path
    lock: int


class PartFetcher(Protocol):
    def fetch(self, part: Part) -> Fetched:
        """Fetch it into its staging directory. Raises IntegrityError, SaveGone, RemoteError, HostError or OSError."""
        ...


def bring_optional(
    store: ObjectStore,
    keys: Keys,
    layout: Layout,
    required: Manifest,
    placer: StagingArea,
    to: Path | None,
    fetcher: PartFetcher,
) -> Brought:
    """``placer`` is a new one. Raises RemoteError for store trouble, HostError
    and OSError for trouble on this pod."""
    try:
        manifest = read_optional(store, keys, required.step, required.save_id)
    except IntegrityError as error:
        return Brought(left_out=(f"optional parts: {error}",))
    if manifest is None:
        return Brought(left_out=(f"the store has no optional parts of step {required.step}",))
    name = f"restore-{manifest.step}-{manifest.save_id}-{sha1_hex(manifest.to_bytes())[:8]}"
    brought: list[str] = []
    left_out: list[str] = []
    downloaded = 0
    with placer.alone() as lock:
        placer.forget_others(name)
        for part, files in sorted(by_part(manifest.files).items()):
            links = tuple(x for x in manifest.symlinks if x.part == part)
            try:
                if not _PART.match(part) or part in {f.part for f in required.files}:
                    raise IntegrityError("it cannot be an optional part", where=repr(part)[:80])
                check_links(files, links)
                target = _target(layout, part, manifest.step, to)
                places = placer.homes({part: target}, frozenset())
                try:
                    staging = places[part].home / name
                    wanted = Part(part, manifest.part_size, tuple(files), links, staging, target, lock)
                    done = fetcher.fetch(wanted)
                except IntegrityError:
                    placer.forget(places, name)
                    raise
            except (IntegrityError, ConfigurationError) as error:
                left_out.append(f"{part}: {error}")
                continue
            for staged in done.staged:
                placer.put(places[staged], name, manifest.step, manifest.lineage)
            placer.clean(places, name)
            brought.append(str(target))
            downloaded += done.downloaded
    return Brought(tuple(brought), tuple(left_out), downloaded)


def _target(layout: Layout, part: str, step: int, to: Path | None) -> Path:
    """Files that came from all over output_dir are not put back over the files there now."""
    if to is not None:
        return to / part
    if part == EXTRA:
        return layout.output_dir / f"extra-step_{step}"
    try:
        return layout.part_dir(part, step)
    except (KeyError, ValueError):
        raise IntegrityError(f"layout {layout.name!r} has no part {part!r}") from None
