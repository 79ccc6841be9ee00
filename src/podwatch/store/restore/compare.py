"""Compares files on this pod with a manifest, byte for byte: what a restore need not bring, and whether a checkpoint is
still what was stored.

It reads everything, 45 to 60 s of one core for 47 GB, and drops what it read from the page cache, so that the trainer's
files stay cached.
"""

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from podwatch.domain.checkpoint import FileEntry, SymlinkEntry
from podwatch.domain.errors import HostError
from podwatch.store.documents import SaveManifest
from podwatch.store.keys import pieces
from podwatch.system.open_by_descriptor import open_regular
from podwatch.system.pinned_directories import PinnedTree

_BLOCK = 1 << 20
Opener = Callable[[FileEntry], int]
"""A descriptor of the file on this pod, opened without following a link. Raises OSError."""
Moved = Callable[[int], object]
"""Called with the bytes read since its last call."""


@dataclass(frozen=True, slots=True)
class Compared:
    """``problems``: every file that differs, and the first place."""

    problems: tuple[str, ...]
    size_bytes: int


def compare(manifest: SaveManifest, open_file: Opener, moved: Moved) -> Compared:
    """Blocks while reading; never raises OSError."""
    problems, read = [], 0
    for file in manifest.files:
        try:
            descriptor = open_file(file)
        except FileNotFoundError:
            problems.append(f"{file.name} is missing on this pod")
            continue
        except OSError as error:
            problems.append(f"{file.name} cannot be read: {error.strerror}")
            continue
        try:
            if problem := difference(descriptor, file, manifest.piece_size, moved):
                problems.append(f"{file.name} {problem}")
            read += file.size
        finally:
            os.close(descriptor)
    return Compared(tuple(problems), read)


def difference(descriptor: int, file: FileEntry, piece_size: int, moved: Moved) -> str:
    """Where the open file first differs from what was stored; empty where it does not."""
    found = os.fstat(descriptor)
    if found.st_size != file.size:
        return f"has {found.st_size} bytes, the manifest records {file.size}"
    for piece in pieces([file], piece_size):
        try:
            digest = _hash(descriptor, piece.offset, piece.size, piece.hash.partition(":")[0], moved)
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        if digest != piece.hash:
            end = piece.offset + piece.size
            return f"differs from what was stored, within bytes {piece.offset} to {end}"
    return ""


def _hash(descriptor: int, offset: int, size: int, name: str, moved: Moved) -> str:
    digest, left = hashlib.new(name, usedforsecurity=False), size
    while left and (data := os.pread(descriptor, min(_BLOCK, left), offset + size - left)):
        digest.update(data)
        left -= len(data)
        moved(len(data))
    os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)
    return f"{name}:{digest.hexdigest()}"


def has_file(tree: PinnedTree, target: Path, file: FileEntry, piece_size: int) -> bool:
    """Whether the file is below ``target``, with its time and every byte."""
    if not tree.contains(target):
        return False
    try:
        with tree.parent(target / file.path) as (directory, name):
            descriptor = open_regular(directory, name)
    except (OSError, HostError):
        return False
    try:
        same = os.fstat(descriptor).st_mtime_ns == file.mtime_ns
        return same and not difference(descriptor, file, piece_size, lambda _count: None)
    finally:
        os.close(descriptor)


def has_link(tree: PinnedTree, target: Path, link: SymlinkEntry) -> bool:
    try:
        with tree.parent(target / link.path) as (directory, name):
            return os.readlink(name, dir_fd=directory) == link.target
    except (OSError, HostError):
        return False


def in_order(files: Iterable[FileEntry]) -> list[FileEntry]:
    """The newest last."""
    return sorted(files, key=lambda file: (file.mtime_ns, file.name))
