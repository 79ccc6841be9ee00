"""Runs as others left them in a store: podwatch's own saves, and what an earlier tool copied there without any mark."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from podwatch.domain.manifest import Keys, Manifest, ManifestFile, Pointer, sha1_hex
from podwatch.stores.base import ObjectStore
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server

PART_SIZE = 5 << 20


def save(store: ObjectStore, keys: Keys, step: int, *, lineage: str = "line", files: int = 2) -> Manifest:
    """One whole save of podwatch's, as its manifest; the pointer is left alone."""
    save_id = f"save{step}{lineage}".replace("-", "")
    entries = []
    for number in range(files):
        data = os.urandom(100 + number)
        stored = store.put_bytes(keys.data(step, save_id, f"checkpoint/{number}.bin"), data)
        hashes = (hashlib.sha1(data).hexdigest(),)
        name = f"checkpoint/{number}.bin"
        entries.append(ManifestFile(name, "checkpoint", len(data), 0, 0o644, stored.key, stored.file_id, hashes))
    total = sum(e.size for e in entries)
    manifest = Manifest(
        keys.run_id, lineage, step, save_id, "custom", "2026-01-31T03:00:00Z", "w1", PART_SIZE, total, tuple(entries)
    )
    store.put_bytes(keys.manifest(step, save_id), manifest.to_bytes())
    return manifest


def point(store: ObjectStore, keys: Keys, manifest: Manifest, seq: int = 1) -> Pointer:
    key = keys.manifest(manifest.step, manifest.save_id)
    stored = store.stat(key)
    assert stored is not None
    data = manifest.to_bytes()
    pointer = Pointer(
        1, seq, keys.run_id, manifest.lineage, manifest.step, "w1", "2026-01-31T03:00:00Z", manifest.save_id, key,
        stored.file_id, sha1_hex(data), len(data), manifest.total_bytes, "custom",
    )  # fmt: skip
    store.put_bytes(keys.latest, pointer.to_bytes())
    return pointer


def past_run(store: ObjectStore, keys: Keys, *steps: int) -> list[Manifest]:
    """Saves of these steps, the last one named by the pointer."""
    manifests = [save(store, keys, step) for step in steps]
    point(store, keys, manifests[-1])
    return manifests


def tree(root: Path) -> dict[str, Path]:
    return {p.relative_to(root).as_posix(): p for p in sorted(root.rglob("*")) if p.is_file()}


def into_directory(store: Path, prefix: str, files: Mapping[str, Path]) -> None:
    """As ``cp -a`` does it."""
    for name, path in files.items():
        target = store / prefix / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
        found = path.stat()
        os.utime(target, ns=(found.st_mtime_ns, found.st_mtime_ns))


def into_bucket(server: B2Server, prefix: str, files: Mapping[str, Path]) -> None:
    """As the b2 tool does it, with b2sdk's own upload."""
    from b2sdk.v3 import B2Api, InMemoryAccountInfo

    api = B2Api(InMemoryAccountInfo())
    api.authorize_account(KEY_ID, KEY, realm=server.url)
    bucket = api.get_bucket_by_name(BUCKET)
    for name, path in files.items():
        info = {"src_last_modified_millis": str(path.stat().st_mtime_ns // 1_000_000)}
        bucket.upload_bytes(path.read_bytes(), f"{prefix}/{name}", file_info=info)
