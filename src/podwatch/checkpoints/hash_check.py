"""Compares a checkpoint on this pod, byte for byte, with the hashes taken at its upload, or with the trainer's own
hashes: Megatron's ``integrity.json`` (``--verify-integrity``).

The only check that sees flipped bits and lost pages. It reads everything: 45 to 60 s of one core for 47 GB. It drops
what it read from the page cache, so that the trainer's files stay cached.
"""

import hashlib
import json
import os
import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from podwatch.checkpoints.known_checkpoints import SetContents
from podwatch.domain.manifest import Manifest, ManifestFile
from podwatch.system.files import open_file, read_file

INTEGRITY = "integrity.json"
"""``{"algorithm": "sha256", "files": {name: hex}}`` over the files beside it, written after all of them (Megatron-LM,
megatron/core/dist_checkpointing/integrity.py, 98ca8956b9)."""
_INTEGRITY_LIMIT = 64 << 20
_BLOCK = 1 << 20
Progress = Callable[[int], None]
"""Called with the bytes read since its last call."""


def ignored(_read: int) -> None:
    """The ``Progress`` of a caller that shows none."""


@dataclass(frozen=True, slots=True)
class Compared:
    """``problems``: every file that differs, and the first place."""

    problems: tuple[str, ...]
    files: int
    size_bytes: int


def compare(contents: SetContents, manifest: Manifest, progress: Progress = ignored) -> Compared:
    """Blocks while reading; never raises OSError."""
    roots = {p.part.name: Path(p.part.path) for p in contents.parts}
    here = {f"{f.part}/{f.path}": f for f in contents.files}
    problems: list[str] = []
    read = 0
    for file in manifest.files:
        found = here.pop(file.path, None)
        if found is None or file.part not in roots:
            problems.append(f"{file.path} is missing on this pod")
        elif found.size != file.size:
            problems.append(f"{file.path} has {found.size} bytes, the manifest records {file.size}")
        else:
            problem = _differs(roots[file.part], file, manifest.part_size, progress)
            read += file.size
            if problem:
                problems.append(f"{file.path} {problem}")
    problems += [f"{path} is not in the manifest" for path in sorted(here)]
    return Compared(tuple(problems), len(manifest.files), read)


def _differs(root: Path, file: ManifestFile, part_size: int, progress: Progress) -> str:
    try:
        fd = _open(root, file.path.removeprefix(f"{file.part}/"))
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    try:
        for number, expected in enumerate(file.parts_sha1):
            begin = number * part_size
            left = min(part_size, file.size - begin)
            digest = hashlib.sha1(usedforsecurity=False)
            while left and (data := os.read(fd, min(_BLOCK, left))):
                digest.update(data)
                left -= len(data)
                progress(len(data))
            os.posix_fadvise(fd, begin, part_size, os.POSIX_FADV_DONTNEED)
            if left:
                return "became shorter while podwatch read it"
            if digest.hexdigest() != expected:
                return f"differs from what was uploaded, within bytes {begin} to {min(begin + part_size, file.size)}"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    finally:
        os.close(fd)
    return ""


def compare_own(contents: SetContents, progress: Progress = ignored) -> Compared | None:
    """Compare with the hashes that the trainer took when it saved; None if it took none. Otherwise as ``compare``."""
    problems: list[str] = []
    files = read = 0
    found = False
    for part in contents.parts:
        here = {f.path: f for f in part.files}
        for listing in (p for p in here if posixpath.basename(p) == INTEGRITY):
            sums = _sums(Path(part.part.path) / listing)
            if sums is None:
                continue
            found = True
            for name, expected in sorted(sums.items()):
                path = posixpath.join(posixpath.dirname(listing), name)
                files += 1
                if path not in here:
                    problems.append(f"{part.part.name}/{path} is missing on this pod, but {INTEGRITY} lists it")
                    continue
                read += here[path].size
                if problem := _summed(Path(part.part.path), path, expected, progress):
                    problems.append(f"{part.part.name}/{path} {problem}")
    return Compared(tuple(problems), files, read) if found else None


def _sums(path: Path) -> Mapping[str, str] | None:
    """Name -> SHA-256; None if the file has another form. The structural check reports invalid JSON."""
    try:
        document = json.loads(read_file(path, _INTEGRITY_LIMIT))
    except (OSError, ValueError, RecursionError):
        return None
    files = document.get("files") if isinstance(document, dict) else None
    if not isinstance(files, dict) or document.get("algorithm", "sha256") != "sha256":
        return None
    whole = all(isinstance(n, str) and isinstance(s, str) and len(s) == 64 for n, s in files.items())
    return files if whole else None


def _summed(root: Path, path: str, expected: str, progress: Progress) -> str:
    try:
        fd = _open(root, path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    digest, position = hashlib.sha256(usedforsecurity=False), 0
    try:
        while data := os.read(fd, _BLOCK):
            digest.update(data)
            os.posix_fadvise(fd, position, len(data), os.POSIX_FADV_DONTNEED)
            position += len(data)
            progress(len(data))
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    finally:
        os.close(fd)
    return "" if digest.hexdigest() == expected.lower() else f"differs from the hash in {INTEGRITY}"


def _open(root: Path, path: str) -> int:
    return open_file(root / path)
