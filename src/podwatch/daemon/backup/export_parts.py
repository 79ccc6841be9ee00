"""Parts that no resume needs: a layout's exported weights, and ``[sync] extra``. What they contain now, and whether
that can be stored. Everything here blocks.
"""

import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from podwatch.checkpoints.layout import PartDir, PartFiles
from podwatch.checkpoints.scan import is_temporary, scan_part
from podwatch.daemon.backup.evidence import looks_like_a_key
from podwatch.domain.checkpoint import FileEntry
from podwatch.domain.times import size as in_words
from podwatch.store.documents import EXPORT_BYTES
from podwatch.system.files import read_file
from podwatch.system.pinned_directories import HIDDEN

EXTRA = "extra"
"""The part that holds ``[sync] extra``."""
MOST_FILES = 10_000
"""Limit for ``extra``: an exported model has a hundred files; a tree of rollouts does not belong to a milestone."""
_INDEX = ".safetensors.index.json"
_INDEX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class PartState:
    """``problem``: why the part is left out now; ``absent``: the part does not exist, which is no problem;
    ``changing``: the problem passes."""

    found: PartFiles
    problem: str = ""
    absent: bool = False
    changing: bool = False


def read_part(
    part: PartDir, *, quiet: float, now_wall: float, most_bytes: int = 0, private: Path | None = None
) -> PartState:
    """``quiet``: seconds without a change. ``most_bytes`` limits the part, 0: no limit. ``private`` is never sent."""
    if part.name == EXTRA:
        part = replace(part, names=tuple(n for n in part.names if not _through_a_link(part.path, n)))
        if not part.names:
            return PartState(PartFiles(part, present=False), absent=True)
    scan = scan_part(part)
    found = scan.found
    if part.name == EXTRA:  # this part is the whole output_dir: a link inside it may lead anywhere in there
        files = tuple(f for f in found.files if _may_leave(part.path, f, private))
        found = replace(found, files=files, symlinks=())
    if not found.present or not found.files:
        return PartState(found, scan.error, absent=not scan.error)
    total = sum(f.size for f in found.files)
    changing = any(is_temporary(f.path) for f in found.files) or now_wall - scan.changed_ns / 1e9 < quiet
    if scan.error:
        problem = scan.error
    elif changing:
        problem = "it is still being written"
    elif most_bytes and total > most_bytes:
        problem = f"its {in_words(total)} exceed what sync.extra can be ({in_words(most_bytes)})"
    elif any(f.size > EXPORT_BYTES for f in found.files):
        problem = f"one of its files exceeds {in_words(EXPORT_BYTES)}, the most that every store takes at once"
    elif part.name == EXTRA and len(found.files) > MOST_FILES:
        problem = f"it has more than {MOST_FILES} files"
    else:
        problem = _without_shards(part.path, found.files)
    return PartState(found, problem, changing=changing and not scan.error)


def _through_a_link(root: Path, name: str) -> bool:
    path = root
    for segment in name.split("/"):
        path = path / segment
        try:
            if stat.S_ISLNK(os.lstat(path).st_mode):
                return True
        except OSError:
            return False
    return False


def _may_leave(root: Path, file: FileEntry, private: Path | None) -> bool:
    segments = file.path.split("/")
    if any(s.startswith(HIDDEN) for s in segments) or any(looks_like_a_key(s) for s in segments):
        return False
    if private is None:
        return True
    try:
        return not os.path.samestat(os.lstat(root / file.path), private.stat())
    except OSError:
        return True


def _without_shards(root: Path, files: Sequence[FileEntry]) -> str:
    """An exported model names its shards in an index: each must exist."""
    there = {f.path for f in files}
    for index in sorted(p for p in there if p.endswith(_INDEX)):
        try:
            named = set(map(str, json.loads(read_file(root / index, _INDEX_BYTES))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return f"{index} cannot be read"
        folder = index.rpartition("/")[0]
        missing = sorted(n for n in named if (f"{folder}/{n}" if folder else n) not in there)
        if missing:
            return f"{index} names {missing[0]}, which does not exist"
    return ""
