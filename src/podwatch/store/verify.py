"""Compares saves in the store with their manifests: objects by the listing, or every byte by its hash. Blocking."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from podwatch.domain.errors import IntegrityError
from podwatch.store.documents import EXPORT_BYTES
from podwatch.store.interfaces import list_save
from podwatch.store.inventory import Stored, missing_objects
from podwatch.store.keys import Piece, RunKeys, pieces
from podwatch.store.objects.base import ObjectInfo, Objects
from podwatch.store.restore.exports import read_exports


class Proof(StrEnum):
    """How the bytes of a sound save are known."""

    NONE = ""
    """Only the sizes of its objects are known: this store's listings have no hashes."""
    STORE_CHECKED = "store-checked"
    """The store compared the hash of every object when it was stored, and shows it."""
    READ_BACK = "read-back"


@dataclass(frozen=True, slots=True)
class Verified:
    """``reasons`` why it cannot be restored; empty if it can. ``exports_reasons``: the same of its exported weights,
    which no resume needs."""

    save: Stored
    reasons: tuple[str, ...] = ()
    exports_reasons: tuple[str, ...] = ()
    proof: Proof = Proof.NONE

    @property
    def sound(self) -> bool:
        return not self.reasons


def verify(store: Objects, keys: RunKeys, saves: Iterable[Stored], *, deep: bool = False) -> Iterator[Verified]:
    """One after the other, as they are found. ``deep``: read every byte back. Raises RemoteError for store trouble."""
    for save in saves:
        listed = list_save(store, keys.save(*save.key))
        reasons, proof = _examine(store, keys, save, listed, deep=deep)
        exports = _examine_exports(store, keys, save, listed, deep=deep) if save.exports else []
        yield Verified(save, tuple(reasons), tuple(exports), Proof.NONE if reasons else proof)


def _examine(
    store: Objects, keys: RunKeys, save: Stored, listed: Mapping[str, ObjectInfo], *, deep: bool
) -> tuple[list[str], Proof]:
    if save.manifest is None:
        return [save.problem], Proof.NONE
    objects = list(save.manifest.objects())
    reasons = _lacking(objects, listed) or ([save.problem] if save.problem else [])
    if deep and not reasons:
        return _differing(store, keys.save(*save.key), objects), Proof.READ_BACK
    shown = all(listed[piece.name].hash == piece.hash for piece in objects if piece.name in listed)
    return reasons, Proof.STORE_CHECKED if shown else Proof.NONE


def _examine_exports(
    store: Objects, keys: RunKeys, save: Stored, listed: Mapping[str, ObjectInfo], *, deep: bool
) -> list[str]:
    try:
        objects = list(pieces(read_exports(store, keys, save).files, EXPORT_BYTES))
    except IntegrityError as error:
        return [str(error)]
    there = [piece for piece in objects if piece.name in listed]
    return [*_lacking(objects, listed), *(_differing(store, keys.save(*save.key), there) if deep else ())]


def _lacking(objects: Iterable[Piece], listed: Mapping[str, ObjectInfo]) -> list[str]:
    return [f"{name} is missing, or is not the object that was sent" for name in missing_objects(objects, listed)]


def _differing(store: Objects, folder: str, objects: Iterable[Piece]) -> list[str]:
    """Those whose bytes do not have the recorded hash."""
    reasons = []
    for piece in objects:
        kind, _, wanted = piece.hash.partition(":")
        try:
            found = store.get(folder + piece.name, lambda _block: None, length=piece.size, hash_name=kind)
        except IntegrityError as error:
            reasons.append(f"{piece.name}: {error.what}")
        else:
            reasons += [] if found == wanted else [f"{piece.name} does not match its recorded hash"]
    return reasons
