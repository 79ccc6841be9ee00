"""A save in a store as a podwatch would have left it, put there without one: whatever the test wants."""

import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from podwatch.domain.checkpoint import FileEntry, SymlinkEntry
from podwatch.store.documents import RunPointer as Pointer
from podwatch.store.documents import (
    SaveExports,
    SaveIntent,
    SaveManifest,
    manifest_hash,
)
from podwatch.store.keys import EXPORTS, INTENT, MANIFEST, RunKeys, pieces
from podwatch.store.objects.base import Objects

PIECE = 1 << 20
WALL = 1.7e9


@dataclass
class Shelf:
    """Puts saves of one run into a store, each with a pointer that names it."""

    open: Callable[[], Objects]
    keys: RunKeys
    layout: str = "custom"
    lineage: str = "line-1"
    piece_size: int = PIECE
    seq: int = 0
    put: dict[int, SaveManifest] = field(default_factory=dict)

    @contextmanager
    def _store(self) -> Iterator[Objects]:
        store = self.open()
        try:
            yield store
        finally:
            store.close()

    def save(
        self, step: int, parts: Mapping[str, Path], *, named: bool = True, names: Collection[str] = (), **more: Any
    ) -> SaveManifest:
        """Every file below these directories, by part; ``names``: only these entries of them."""
        self.seq += 1
        save_id = f"save{self.seq:04}"
        folder = self.keys.save(step, save_id)
        files, links = list[FileEntry](), list[SymlinkEntry]()
        with self._store() as store:
            for part, root in parts.items():
                for path in sorted(p for p in root.rglob("*") if p.is_symlink() or p.is_file()):
                    name = path.relative_to(root).as_posix()
                    if names and name.partition("/")[0] not in names:
                        continue
                    if path.is_symlink():
                        links.append(SymlinkEntry(name, part, str(path.readlink())))
                    else:
                        files.append(self._file(store, folder, part, name, path))
            head = (self.keys.run_id, step, save_id, "writer-1", 1)
            plain = tuple(replace(file, hashes=()) for file in files)
            intent = SaveIntent(*head, WALL, self.layout, self.piece_size, plain, tuple(links))
            store.put(folder + INTENT, intent.to_bytes())
            manifest = SaveManifest(
                *head, WALL + self.seq, self.layout, self.piece_size, tuple(files), tuple(links), self.seq,
                **{"lineage": self.lineage, "train_command": ("python", "train.py"), **more},
            )  # fmt: skip
            store.put(folder + MANIFEST, manifest.to_bytes())
        self.put[step] = manifest
        if named:
            self.point(manifest)
        return manifest

    def _file(self, store: Objects, folder: str, part: str, name: str, path: Path) -> FileEntry:
        body, status = path.read_bytes(), path.stat()
        file, hashes = FileEntry(name, part, len(body), status.st_mtime_ns, status.st_mode & 0o777), []
        for piece in pieces([file], self.piece_size):
            data = body[piece.offset : piece.offset + piece.size]
            store.put(folder + piece.name, data)
            hashes.append(f"sha1:{hashlib.sha1(data).hexdigest()}")
        return replace(file, hashes=tuple(hashes))

    def point(self, manifest: SaveManifest | None, data: bytes = b"", generation: int = 1) -> None:
        """A pointer that names the save, with these bytes for its manifest; None: no save at all."""
        self.seq += 1
        data = data or (manifest.to_bytes() if manifest is not None else b"")
        pointer = Pointer(
            self.keys.run_id, generation, self.seq, None if manifest is None else manifest.step, "writer-1", WALL,
            "" if manifest is None else manifest.save_id, "" if manifest is None else manifest_hash(data),
            len(data), 0 if manifest is None else manifest.total_bytes, self.lineage, self.layout,
        )  # fmt: skip
        with self._store() as store:
            store.put(self.keys.pointer(generation, self.seq, "nonce"), pointer.to_bytes())
            store.put(self.keys.latest, pointer.to_bytes())

    def forge(self, step: int, **changes: Any) -> SaveManifest:
        """The manifest of the step with other fields, and a pointer that fits it."""
        manifest = replace(self.put[step], **changes)
        self.write(step, manifest.to_bytes())
        self.point(manifest)
        return manifest

    def write(self, step: int, data: bytes) -> None:
        """``data`` as the manifest of the step."""
        with self._store() as store:
            store.put(self.folder(step) + MANIFEST, data)

    def folder(self, step: int) -> str:
        return self.keys.save(step, self.put[step].save_id)

    def names(self, step: int) -> list[str]:
        return [piece.name for piece in self.put[step].objects()]

    def damage(self, step: int, ending: str = "") -> None:
        """One byte of an object differs; its size does not."""
        name = next(n for n in self.names(step) if n.endswith(ending))
        with self._store() as store:
            body = bytearray(store.read(self.folder(step) + name, 1 << 30))
            body[len(body) // 2] ^= 1
            store.put(self.folder(step) + name, bytes(body))

    def remove(self, step: int, ending: str = "") -> None:
        with self._store() as store:
            store.delete([self.folder(step) + name for name in self.names(step) if name.endswith(ending)])

    def remove_save(self, step: int) -> None:
        """As retention does: its manifest first."""
        with self._store() as store:
            folder = self.folder(step)
            store.delete([folder + MANIFEST])
            store.delete([folder + name for name in (*self.names(step), INTENT)])

    def exports(self, step: int, part: str, files: Mapping[str, bytes], *, complete: bool = True) -> None:
        manifest, folder = self.put[step], self.folder(step)
        listed = [
            FileEntry(name, part, len(body), int(WALL * 1e9), hashes=(f"sha1:{hashlib.sha1(body).hexdigest()}",))
            for name, body in files.items()
        ]
        found = SaveExports(self.keys.run_id, step, manifest.save_id, WALL, tuple(listed), complete)
        with self._store() as store:
            for name, body in files.items():
                store.put(f"{folder}{part}/{name}", body)
            store.put(folder + EXPORTS, found.to_bytes())


def tree(root: Path) -> dict[str, Any]:
    """Content, time and mode of each file below, the target of each link."""
    found: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            found[name] = str(path.readlink())
        elif path.is_file():
            status = path.stat()
            found[name] = (path.read_bytes(), status.st_mtime_ns, status.st_mode & 0o777)
    return found


def write_checkpoint(root: Path, size: int = 3 * PIECE + 7) -> Path:
    """Weights of several pieces, small files, a link, an end mark."""
    (root / "sub").mkdir(parents=True, exist_ok=True)
    (root / "model.bin").write_bytes(os.urandom(size))
    (root / "model.bin").chmod(0o640)
    (root / "sub" / "optim.bin").write_bytes(os.urandom(1000))
    (root / "empty").write_bytes(b"")
    if not (root / "link").is_symlink():
        (root / "link").symlink_to("sub/optim.bin")
    (root / "DONE").write_text("1")
    return root
