"""A save in a store, as a podwatch would have left it, put there without one: quick, and whatever the test wants."""

from pathlib import Path

from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.domain.manifest import Keys, Manifest, ManifestFile, ManifestSymlink, Pointer, sha1_hex
from podwatch.stores.base import ObjectStore
from tests.support.put_file import put_file

NOW = "2026-01-31T03:00:00Z"


def put_set(
    store: ObjectStore,
    keys: Keys,
    catalogue: Catalogue,
    step: int,
    *,
    layout: str,
    part_size: int = 5 << 20,  # the smallest part that S3 takes
    seq: int = 1,
    wandb: dict[str, str] | None = None,
) -> Manifest:
    """Store the complete set of ``step`` that the catalogue sees, with manifest and pointer."""
    contents = catalogue.contents(step)
    roots = {p.part.name: Path(p.part.path) for p in contents.parts}
    save_id = contents.set.save_id
    files = []
    for entry in sorted(contents.files, key=lambda f: (f.part, f.path)):
        name = f"{entry.part}/{entry.path}"
        with (roots[entry.part] / entry.path).open("rb") as stream:
            put = put_file(store, keys.data(step, save_id, name), stream, entry.size, part_size=part_size)
        mode = entry.mode & 0o777
        files.append(
            ManifestFile(name, entry.part, entry.size, entry.mtime_ns, mode, put.key, put.file_id, put.parts_sha1)
        )
    manifest = Manifest(
        run_id=keys.run_id,
        lineage="line-1",
        step=step,
        save_id=save_id,
        layout=layout,
        created_at=NOW,
        writer_id="writer-1",
        part_size=part_size,
        total_bytes=sum(f.size for f in files),
        files=tuple(files),
        symlinks=tuple(ManifestSymlink(f"{s.part}/{s.path}", s.part, s.target) for s in contents.symlinks),
        train_command=("python", "train.py"),
        wandb=dict(wandb or {}),
    )
    point(store, keys, manifest, seq)
    return manifest


def point(store: ObjectStore, keys: Keys, manifest: Manifest, seq: int) -> None:
    """Write this manifest, and a pointer that names it."""
    data = manifest.to_bytes()
    stored = store.put_bytes(keys.manifest(manifest.step, manifest.save_id), data)
    pointer = Pointer(
        generation=1, seq=seq, run_id=manifest.run_id, lineage=manifest.lineage, step=manifest.step,
        writer_id=manifest.writer_id, created_at=NOW, save_id=manifest.save_id, manifest_key=stored.key,
        manifest_file_id=stored.file_id, manifest_sha1=sha1_hex(data), manifest_size=len(data),
        total_bytes=manifest.total_bytes, layout=manifest.layout, wandb=dict(manifest.wandb),
    )  # fmt: skip
    store.put_bytes(keys.latest, pointer.to_bytes())
