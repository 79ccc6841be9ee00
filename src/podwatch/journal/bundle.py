"""Writes incident bundles: small directories with the data that explains a failure."""

import dataclasses
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence, Set
from enum import Enum
from pathlib import Path, PurePath
from typing import Final

from podwatch.domain.finding import Finding
from podwatch.domain.process import ProcessSample
from podwatch.domain.secrets import scrub
from podwatch.domain.snapshot import Snapshot

# -- bundles ---------------------------------------------------------------------------------------------------------

KEEP: Final = 30
"""Bundles to keep; the oldest is deleted first. With MAX_BYTES at most 30 MiB of state."""
TABLES: Final = ("snapshot.json", "finding.json", "processes.txt", "gpus.json", "environment.txt")
"""Files of every bundle; all others are log tails."""
MAX_BYTES: Final = 1 << 20
MAX_LINE: Final = 2_000


def capture(
    bundle_dir: Path,
    *,
    snapshots: Sequence[Snapshot] = (),
    finding: Finding | None = None,
    tree: Sequence[ProcessSample] = (),
    log_tails: Mapping[str, Sequence[str]] | None = None,
    gpu_state: object = None,
    environment_names: Iterable[str] = (),
    max_bytes: int = MAX_BYTES,
    keep: int = KEEP,
) -> Path:
    """Write the bundle ``bundle_dir`` (``<state_dir>/<run_id>/incidents/<id>``) and return its path.

    The bundle is created by rename; an existing one is kept. Everything is scrubbed and cut to ``max_bytes``: log tails
    share the rest of it, and keep their newest lines. ``log_tails`` maps a file name to its last lines, oldest first.
    Deletes the oldest bundles beyond ``keep``. Blocks. Raises OSError (a full disk); the caller continues without a
    bundle.
    """
    if bundle_dir.is_dir():
        return bundle_dir
    tables = (
        _json([plain(s) for s in snapshots]),
        _json(plain(finding)),
        _processes(tree),
        _json(plain(gpu_state)),
        "".join(f"{name}\n" for name in sorted(set(environment_names))),
    )
    files: dict[str, str] = dict(zip(TABLES, tables, strict=True))
    files = {name: scrub(text)[: max_bytes // 8] for name, text in files.items()}
    left = max(0, max_bytes - sum(len(text.encode(errors="replace")) for text in files.values()))
    tails = log_tails or {}
    for number, (name, lines) in enumerate(sorted(tails.items(), key=lambda item: _length(item[1]))):
        text = _tail(lines, left // (len(tails) - number))  # a short tail leaves its share to the longer ones
        left -= len(text.encode(errors="replace"))
        files[_free_name(_safe_name(name), files)] = text
    bundle_dir.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = bundle_dir.with_name(f".{bundle_dir.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(mode=0o700)
        for name, text in files.items():
            path = partial / name
            path.write_text(text, errors="replace")
            path.chmod(0o600)
        partial.rename(bundle_dir)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _trim(bundle_dir.parent, keep)
    return bundle_dir


def _json(value: object) -> str:
    return json.dumps(value, indent=1, default=str) + "\n"


def _processes(tree: Sequence[ProcessSample]) -> str:
    lines = [f"{'PID':>8} {'PPID':>8} S CUDA ROLE         COMMAND"]
    for p in tree:
        cuda = {True: "yes", False: "no", None: "?"}[p.cuda]
        lines.append(f"{p.identity.pid:>8} {p.parent_pid:>8} {p.state} {cuda:<4} {p.role:<12} {p.command[:MAX_LINE]}")
    return "\n".join(lines) + "\n"


def _tail(lines: Sequence[str], budget: int) -> str:
    """The newest lines that fit, oldest first. Scrubbed before they are cut: a cut key would not be recognised."""
    kept: list[str] = []
    # Scrubbed as one text: secrets such as private keys span lines.
    text = scrub("\n".join(line.rstrip("\n") for line in list(lines)[-400:]))
    for line in reversed(text.split("\n") if text else []):
        clean = line[:MAX_LINE]
        budget -= len(clean.encode(errors="replace")) + 1
        if budget < 0:
            break
        kept.append(clean)
    return "".join(f"{line}\n" for line in reversed(kept))


def _length(lines: Sequence[str]) -> int:
    return sum(len(line) + 1 for line in lines)


def _safe_name(name: str) -> str:
    """``logs/inference.stdout`` becomes ``logs_inference.stdout``: two directories can have logs of the same name."""
    clean = "".join(c if c.isalnum() or c in "._-" else "_" for c in name).strip("._")
    return clean[-120:] or "log.txt"


def _free_name(name: str, taken: Mapping[str, str]) -> str:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{number}_{name}"
    return free


def _trim(directory: Path, keep: int) -> None:
    """Delete the oldest bundles; errors are ignored."""
    bundles = [p for p in directory.iterdir() if p.is_dir() and not p.is_symlink() and not p.name.startswith(".")]
    bundles.sort(key=lambda p: (int(p.name) if p.name.isdecimal() else -1, p.name))
    for old in bundles[: max(0, len(bundles) - keep)]:
        shutil.rmtree(old, ignore_errors=True)


# -- JSON-safe values ------------------------------------------------------------------------------------------------


def plain(value: object) -> object:
    """The JSON-safe value: dataclasses become objects, enums their values, sets sorted lists, unknown types text."""
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, Set):
        return sorted((plain(v) for v in value), key=str)
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, PurePath):
        return str(value)
    return repr(value)
