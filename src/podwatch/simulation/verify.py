"""Proves the demo's claims: reads everything back and compares, without relying on any status or event."""

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path

from podwatch.checkpoints.catalogue import Catalogue
from podwatch.checkpoints.layouts import make_layout
from podwatch.config.settings import Settings
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.errors import PodwatchError
from podwatch.domain.remote import Keys, Manifest, Pointer
from podwatch.stores.base import ObjectStore
from podwatch.stores.local import LocalStore
from podwatch.system.clock import SystemClock


@dataclass(frozen=True, slots=True)
class StoreProof:
    """The content of the store. ``step`` is the pointer's step; ``verified`` are the steps of manifests with every byte
    read and compared; ``problems`` is empty if there are none."""

    step: int | None = None
    verified: tuple[int, ...] = ()
    total_bytes: int = 0
    problems: tuple[str, ...] = ()


def prove_store(root: Path, keys: Keys) -> StoreProof:
    """Check pointer -> manifest -> every file, with sizes and part hashes, and every other manifest."""
    store = LocalStore(root, writer_id="demo-verifier")
    problems: list[str] = []
    verified: list[int] = []
    total = 0
    try:
        raw = store.get_bytes(keys.latest)
        pointer = Pointer.from_bytes(raw) if raw is not None else None
        for found in [stored.key for stored in store.list(keys.root) if stored.key.endswith("/manifest.json")]:
            content = store.get_bytes(found) or b""
            manifest = Manifest.from_bytes(content, where=found)
            wrong = [text for file in manifest.files if (text := _check(store, manifest, file.key))]
            problems += wrong
            if not wrong:
                verified.append(manifest.step)
                total += sum(file.size for file in manifest.files)
            if pointer is not None and pointer.manifest_key == found:
                if hashlib.sha1(content, usedforsecurity=False).hexdigest() != pointer.manifest_sha1:
                    problems.append(f"latest.json records another hash of {found}")
                if wrong:
                    problems.append("latest.json names an incomplete checkpoint")
    except PodwatchError as error:
        return StoreProof(problems=(str(error),))
    finally:
        store.close()
    if pointer is None:
        return StoreProof(verified=tuple(sorted(verified)), problems=("no latest.json in the store",))
    if pointer.step not in verified and not problems:
        problems.append(f"latest.json names step {pointer.step}, which has no complete manifest")
    return StoreProof(pointer.step, tuple(sorted(verified)), total, tuple(problems))


def prove_local(settings: Settings) -> tuple[tuple[CheckpointSet, ...], tuple[str, ...]]:
    """The complete checkpoints on the pod's disk, and the problems that the structural check found."""
    catalogue = Catalogue(make_layout(settings), SystemClock(), settle=0.0, settle_weak=0.0)
    catalogue.rescan()  # a checkpoint is complete from its second scan on
    complete = tuple(found for found in catalogue.rescan() if found.complete)
    problems = [f"step {found.step}: {reason}" for found in complete for reason in catalogue.verify(found.step)]
    return complete, tuple(problems)


def _check(store: ObjectStore, manifest: Manifest, key: str) -> str:
    file = next(entry for entry in manifest.files if entry.key == key)
    buffer = io.BytesIO()
    try:
        store.get_file(key, buffer)
    except PodwatchError as error:
        return f"{key}: {error.what}"
    content = buffer.getvalue()
    if len(content) != file.size:
        return f"{key}: {len(content)} bytes instead of {file.size}"
    size = manifest.part_size
    parts = tuple(
        hashlib.sha1(content[start : start + size], usedforsecurity=False).hexdigest()
        for start in range(0, len(content), size)
    )
    return "" if parts == file.parts_sha1 else f"{key}: its bytes do not match the recorded hashes"
