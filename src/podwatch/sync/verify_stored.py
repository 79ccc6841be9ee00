"""Compares a save in the store with its manifest: every object by its listing, or every byte by its hash."""

from dataclasses import dataclass

from podwatch.domain.errors import IntegrityError
from podwatch.domain.manifest import Keys, Manifest, ManifestFile, Proof
from podwatch.domain.safe_links import check_links
from podwatch.domain.stored_checkpoint import StoredSave
from podwatch.stores.base import ObjectStore
from podwatch.sync.publish_and_pointer import read_optional
from podwatch.sync.read_back import hashes_of


@dataclass(frozen=True, slots=True)
class Verified:
    """``reasons`` why it cannot be restored; empty if it can. ``proof``: how the bytes of its objects are known, NONE
    where the store shows no more than their sizes."""

    reasons: tuple[str, ...] = ()
    proof: Proof = Proof.NONE


def verify_save(store: ObjectStore, save: StoredSave, *, deep: bool = False) -> tuple[str, ...]:
    """Reasons why this checkpoint cannot be restored; empty if it can. Raises RemoteError for store trouble."""
    return examine_save(store, save, deep=deep).reasons


def examine_save(store: ObjectStore, save: StoredSave, *, deep: bool = False) -> Verified:
    """``deep``: read every byte back; without it, only of objects without podwatch's mark. Raises RemoteError for store
    trouble."""
    if save.manifest is None:
        return Verified((save.problem,))
    return _verify(store, save.manifest, deep=deep)


def verify_optional(store: ObjectStore, keys: Keys, save: StoredSave, *, deep: bool = False) -> tuple[str, ...]:
    """The same for its optional parts, which no resume needs. Raises RemoteError for store trouble."""
    try:
        manifest = read_optional(store, keys, save.step, save.save_id)
    except IntegrityError as error:
        return (str(error),)
    return () if manifest is None else _verify(store, manifest, deep=deep).reasons


def _verify(store: ObjectStore, manifest: Manifest, *, deep: bool) -> Verified:
    reasons, proofs = [], set[Proof]()
    try:
        check_links(manifest.files, manifest.symlinks)
    except IntegrityError as error:
        reasons.append(str(error))
    for file in manifest.files:
        found = store.stat(file.key, file.file_id)
        if found is None:
            reasons.append(f"{file.path} is not in the store")
        elif found.size != file.size:
            reasons.append(f"{file.path} is not the object that was sent")
        elif deep or not found.ours:  # without the mark it is a copy that another tool made: only its bytes prove it
            reason = _differs(store, file, manifest.part_size)
            reasons += [reason] if reason else []
            proofs.add(Proof.READ_BACK)
        else:
            try:
                proofs.add(store.prove(found, file.parts_sha1, manifest.part_size))
            except IntegrityError as error:
                reasons.append(f"{file.path}: {error.what}")
    return Verified(tuple(reasons), proofs.pop() if len(proofs) == 1 and not reasons else Proof.NONE)


def _differs(store: ObjectStore, file: ManifestFile, part_size: int) -> str:
    hashes = hashes_of(store, file.key, file.file_id, part_size)
    for number, (is_, should) in enumerate(zip(hashes, file.parts_sha1, strict=False), 1):
        if is_ != should:
            return f"{file.path} part {number} does not match its recorded hash"
    return "" if len(hashes) == len(file.parts_sha1) else f"{file.path} does not have its recorded length"
