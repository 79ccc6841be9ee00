"""Checks of DCP directories anywhere inside a step."""

import re
from collections.abc import Iterator

from podwatch.checkpoints.layouts.inside import Inside
from podwatch.checkpoints.structure import dcp


def dcp_folders(inside: Inside, below: str = "") -> Iterator[Inside]:
    """Every directory that contains an index or shards; ``below`` limits it to names with this prefix."""
    folders = set()
    for name in inside.files:
        folder, _, base = name.rpartition("/")
        if name.startswith(below) and (base in (dcp.INDEX, dcp.INDEX_TMP) or dcp.is_shard(base)):
            folders.add(folder)
    for folder in sorted(folders):
        yield inside.below(folder) if folder else inside


def check(inside: Inside, below: str = "") -> tuple[str, tuple[str, ...]]:
    """Require that all of them are complete (``Fault`` if not): (their save ids, files in them that no index lists)."""
    tokens, leftovers = [], list[str]()
    for folder in dcp_folders(inside, below):
        verdict = folder.dcp()
        tokens.append(verdict.save_id)
        leftovers.extend(f"{folder.part}/{folder.prefix}{n}" for n in verdict.leftovers)
    return "-".join(tokens), tuple(leftovers)


def gap(inside: Inside, pattern: re.Pattern[str], what: str) -> int:
    """Require numbered files 0, 1, 2... without a gap; returns how many, zero if none. ``Fault`` at a gap."""
    found = {int(m.group(1)) for m in inside.matches(pattern)}
    missing = set(range(max(found, default=-1) + 1)) - found
    if missing:
        raise inside.fault(f"{what} {min(missing)} is missing")
    return len(found)
