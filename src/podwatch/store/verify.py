"""Compares saves in the store with their manifests: objects by the listing, or every byte by its hash. Blocking."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from podwatch.domain.errors import IntegrityError
from podwatch.store.inventory import Stored, missing_objects
from podwatch.store.keys import RunKeys
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
        folder = keys.save(*save.key)
        listed = {item.key.removeprefix(folder): item for item in store.list(folder)}
        reasons, proof = _examine(store, folder, save, listed, deep=deep)
        exports = _examine_exports(store, keys, save, listed, deep=deep) if save.exports else ()
        yield Verified(save, tuple(reasons), tuple(exports), Proof.NONE if reasons else proof)


def _examine(
    store: Objects, folder: str, save: Stored, listed: dict[str, ObjectInfo], *, deep: bool
) -> tuple[list[str], Proof]:
    if save.manifest is None:
        return [save.problem], Proof.NONE
    lacks = missing_objects(save.manifest, listed)
    reasons = [f"{name} is missing, or is not the object that was sent" for name in lacks]
    reasons = reasons or ([save.problem] if save.problem else [])
    objects = [(piece.name, piece.size, digest) for piece, digest in save.manifest.objects()]
    if deep and not reasons:
        return [
            bad for name, size, digest in objects if (bad := _differs(store, folder, name, size, digest))
        ], Proof.READ_BACK
    shown = all(listed[name].hash == digest for name, _, digest in objects if name in listed)
    return reasons, Proof.STORE_CHECKED if shown else Proof.NONE


def _examine_exports(
    store: Objects, keys: RunKeys, save: Stored, listed: dict[str, ObjectInfo], *, deep: bool
) -> Iterator[str]:
    folder = keys.save(*save.key)
    try:
        found = read_exports(store, keys, save)
    except IntegrityError as error:
        yield str(error)
        return
    for file in found.files:
        item = listed.get(file.name)
        if item is None or item.size != file.size:
            yield f"{file.name} is missing, or is not the object that was sent"
        elif deep and (bad := _differs(store, folder, file.name, file.size, file.hash)):
            yield bad


def _differs(store: Objects, folder: str, name: str, size: int, recorded: str) -> str:
    kind, _, wanted = recorded.partition(":")
    try:
        found = store.get(folder + name, lambda _block: None, length=size, hash_name=kind)
    except IntegrityError as error:
        return f"{name}: {error.what}"
    return "" if found == wanted else f"{name} does not match its recorded hash"
