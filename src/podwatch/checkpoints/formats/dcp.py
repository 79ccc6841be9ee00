"""torch.distributed.checkpoint directories: ``.metadata`` and its ``__R_I.distcp`` shards.

torch writes and fsyncs every shard, then ``.metadata.tmp``, then removes an old ``.metadata`` and renames. So in a
fresh directory ``.metadata`` means "all ranks are done"; in a rewritten one the OLD index stays during the whole write,
which only sizes and mtimes give away.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from podwatch.checkpoints.formats import sandbox, torch_zip
from podwatch.domain.finding import counted
from podwatch.system.files import opened

INDEX = ".metadata"
INDEX_TMP = ".metadata.tmp"
MTIME_TOLERANCE_NS = 2_000_000_000
"""Seconds that the index can be older than a shard: copies and network filesystems round mtimes."""
_SHARD = re.compile(r"^__(\d+)_\d+\.distcp$")


@dataclass(frozen=True, slots=True)
class Shard:
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class DcpVerdict:
    """``whole``, or the reason why not. ``damaged``: nothing is missing, but a file is broken. ``unreadable``: could
    not be observed. ``leftovers``: shards of an earlier save that the index does not list."""

    whole: bool
    reason: str = ""
    damaged: bool = False
    unreadable: bool = False
    save_id: str = ""
    world_size: int | None = None
    leftovers: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


def is_shard(name: str) -> bool:
    return _SHARD.match(name) is not None


def check(directory: Path, files: Mapping[str, Shard]) -> DcpVerdict:
    """Judge one DCP directory. ``files`` maps names relative to it to size and mtime, as the scan found them."""
    shards = {n: f for n, f in files.items() if is_shard(n)}
    if INDEX_TMP in files:
        return DcpVerdict(False, f"{INDEX_TMP} exists: the save has not finished")
    index = files.get(INDEX)
    if index is None:
        if not shards:
            return DcpVerdict(False, f"no {INDEX} and no shard yet")
        return DcpVerdict(False, f"{counted(len(shards), 'shard')} but no {INDEX}: the save has not finished")
    newer = [n for n, f in shards.items() if f.mtime_ns > index.mtime_ns + MTIME_TOLERANCE_NS]
    if newer:
        return DcpVerdict(
            False, f"{min(newer)} is newer than {INDEX}: being overwritten, or an overwrite was interrupted"
        )
    parsed = sandbox.parse("dcp", directory / INDEX)
    if parsed.answer is None:
        if parsed.gone:
            return DcpVerdict(False, f"{INDEX} vanished")
        if parsed.unreadable:
            return DcpVerdict(False, f"cannot read {INDEX}: {parsed.error}", unreadable=True)
        return DcpVerdict(False, f"{INDEX} is damaged ({parsed.error})", damaged=True)
    need: Mapping[str, int] = parsed.answer["need"]
    unsafe = next((n for n in need if not _safe(n)), None)
    if unsafe is not None:
        return DcpVerdict(False, f"{INDEX} names an unsafe path {unsafe!r}", damaged=True)
    missing = sorted(n for n in need if n not in files)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return DcpVerdict(False, f"shard {missing[0]}{more} is missing")
    for name in sorted(need):
        if files[name].size != need[name]:
            return DcpVerdict(
                False, f"{name} has {files[name].size} bytes, {INDEX} requires {need[name]}", damaged=True
            )
    ranks = [int(m.group(1)) for m in map(_SHARD.match, need) if m]
    return DcpVerdict(
        True,
        save_id=str(parsed.answer["save_id"]),
        world_size=max(ranks) + 1 if ranks else None,
        leftovers=tuple(sorted(n for n in shards if n not in need)),
        keys=tuple(parsed.answer["keys"]),
    )


def check_records(directory: Path) -> tuple[str, ...]:
    """The medium check: every record inside every shard must be a complete archive. Finds zero-filled tails, which
    sizes do not show.

    Skipped for writers whose records are not torch archives (transforms, the safetensors writer). The caller handles
    OSError.
    """
    parsed = sandbox.parse("records", directory / INDEX)
    if parsed.answer is None:
        return (f"{INDEX}: {parsed.error}",)
    if not parsed.answer["plain"]:
        return ()
    problems = []
    for name, records in sorted(parsed.answer["records"].items()):
        if not _safe(name) or not is_shard(name):
            continue
        spans = sorted(zip(records[::2], records[1::2], strict=True))
        with opened(directory / name) as file:
            bad = torch_zip.bad_records(file.fileno(), spans)
        if bad:
            problems.append(f"{name}: {len(bad)} of {len(spans)} records are not written, first at byte {bad[0]}")
    return tuple(problems)


def _safe(name: str) -> bool:
    return bool(name) and not name.startswith("/") and "\0" not in name and ".." not in name.split("/")
