"""Compares a checkpoint on this pod, byte for byte, with the hashes taken at its upload.

The only check that sees flipped bits and lost pages. It reads everything: 45 to 60 s of one core for 47 GB. It drops
what it read from the page cache, so that the trainer's files stay cached.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from podwatch.checkpoints.known_checkpoints import SetContents
from podwatch.domain.manifest import Manifest, ManifestFile
from podwatch.system.files import open_file

_BLOCK = 1 << 20
Progress = Callable[[int], None]
"""Called with the bytes read since its last call."""


@dataclass(frozen=True, slots=True)
class Compared:
    """``problems``: every file that differs, and the first place."""

    problems: tuple[str, ...]
    size_bytes: int


def compare(contents: SetContents, manifest: Manifest, progress: Progress) -> Compared:
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
    return Compared(tuple(problems), read)


def _differs(root: Path, file: ManifestFile, part_size: int, progress: Progress) -> str:
    try:
        fd = open_file(root / file.path.removeprefix(f"{file.part}/"))
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
