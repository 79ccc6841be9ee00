"""What lies in the store and serves nobody (DESIGN section 5, "Remote retention").

Three kinds, each invisible to a restore and paid for by the byte: uploads in parts that nobody finished, versions that
a later one has taken the place of, and saves whose manifest never came. Only what carries our mark is ever named, and
only once it is old enough that no pod, frozen or slow, can still be at work on it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

ABANDONED_SECONDS = 24 * 3600.0
"""Another pod may have begun it: no upload of one set takes a day, and a frozen pod that wakes has lost its token by
then (B2's tokens live 24 h)."""
SUPERSEDED_SECONDS = 24 * 3600.0
"""An old version of the pointer still tells a reader what was newest; 24 h is also what protects the sets that any of
its versions names (DESIGN section 4, two pods, (e))."""


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
    """``live`` are ids of uploads that the journal still means to finish."""
    return tuple(
        Leftover("upload", u.key, u.upload, "begun, and never finished")
        for u in unfinished
        if u.ours and u.upload not in live and now_wall - u.started_wall >= grace
    )


def superseded_versions(
    versions: Iterable[Version], named: Collection[str], now_wall: float, grace: float = SUPERSEDED_SECONDS
) -> tuple[Leftover, ...]:
    """Versions that are not the newest of their key and that no manifest or pointer in use names by id.

    ``versions`` are all those below the run, newest first within a key. The age that counts is that of the version
    which took its place. Stores without versions never have any.
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
            found.append(
                Leftover("version", version.key, version.file_id, "a later version took its place", version.size)
            )
        newer[version.key] = version
    return tuple(found)


def orphaned_saves(
    versions: Iterable[Version],
    save_of: Mapping[str, str],
    live: Collection[str],
    now_wall: float,
    grace: float = ABANDONED_SECONDS,
) -> tuple[Leftover, ...]:
    """Saves without a manifest that nobody has added to for a day.

    ``save_of`` maps an object's key to its save's prefix (``.../step_N/<save_id>/``), for keys that lie in one;
    ``live`` are prefixes of saves being uploaded. A save with anything in it that is not ours is left alone.
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
