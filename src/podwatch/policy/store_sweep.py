"""Unused objects in the store (docs/sync.md).

Three kinds, all invisible to a restore and billed by the byte: unfinished multipart uploads, superseded versions, and
saves without a manifest. Only objects with podwatch's mark are returned, and only when they are so old that no pod,
frozen or slow, can still be working on them.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

ABANDONED_SECONDS = 24 * 3600.0
"""Another pod may have started it: no upload of one checkpoint takes a day, and a frozen pod that wakes later has lost
its token (B2's tokens are valid for 24 h)."""
SUPERSEDED_SECONDS = 24 * 3600.0
"""An old version of the pointer shows a reader the earlier newest save; the saves that any version of the pointer names
are protected for 24 h too."""


class Begun(Protocol):
    """An unfinished upload; ``stores.base.Unfinished`` is one."""

    @property
    def key(self) -> str: ...
    @property
    def upload(self) -> str: ...
    @property
    def started_wall(self) -> float: ...
    @property
    def ours(self) -> bool: ...


class Version(Protocol):
    """One version of one object; ``stores.base.StoredObject`` is one."""

    @property
    def key(self) -> str: ...
    @property
    def file_id(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def ours(self) -> bool: ...
    @property
    def uploaded_wall(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Leftover:
    """``what`` is ``upload`` (by its id), ``version`` (by key and file id) or ``save`` (everything below ``key``)."""

    what: str
    key: str
    identifier: str
    reason: str
    size_bytes: int = 0


def abandoned_uploads(
    unfinished: Iterable[Begun], live: Collection[str], now_wall: float, grace: float = ABANDONED_SECONDS
) -> tuple[Leftover, ...]:
    """Uploads started at least ``grace`` seconds ago and not in ``live``, the ids that the journal plans to finish."""
    return tuple(
        Leftover("upload", u.key, u.upload, "started and never finished")
        for u in unfinished
        if u.ours and u.upload not in live and now_wall - u.started_wall >= grace
    )


def superseded_versions(
    versions: Iterable[Version], named: Collection[str], now_wall: float, grace: float = SUPERSEDED_SECONDS
) -> tuple[Leftover, ...]:
    """Versions that are not the newest of their key and that no manifest or pointer in use names by id.

    ``versions``: all below the run, newest first within a key. The age that counts is that of the next newer version.
    A store without versions has none.
    """
    found, newer = [], dict[str, Version]()
    for version in versions:
        successor = newer.get(version.key)
        if (
            successor is not None
            and version.ours
            and version.file_id not in named
            and now_wall - successor.uploaded_wall >= grace
        ):
            found.append(Leftover("version", version.key, version.file_id, "replaced by a later version", version.size))
        newer[version.key] = version
    return tuple(found)


def orphaned_saves(
    versions: Iterable[Version],
    save_of: Mapping[str, str],
    live: Collection[str],
    now_wall: float,
    grace: float = ABANDONED_SECONDS,
) -> tuple[Leftover, ...]:
    """Saves without a manifest to which no object was added for ``grace`` seconds.

    ``save_of`` maps the key of an object in a save to the save's prefix (``.../step_N/<save_id>/``). ``live``: prefixes
    of saves being uploaded. A save that contains an object without podwatch's mark is never returned.
    """
    saves: dict[str, list[Version]] = {}
    for version in versions:
        prefix = save_of.get(version.key)
        if prefix is not None:
            saves.setdefault(prefix, []).append(version)
    found = []
    for prefix, inside in sorted(saves.items()):
        if prefix in live or any(v.key == f"{prefix}manifest.json" for v in inside):
            continue
        newest = max(v.uploaded_wall for v in inside)
        if all(v.ours for v in inside) and now_wall - newest >= grace:
            size = sum(v.size for v in inside)
            found.append(Leftover("save", prefix, "", f"{len(inside)} objects without a manifest", size))
    return tuple(found)
