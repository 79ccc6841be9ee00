"""The child that inspects checkpoints: ``python -I -m podwatch.checkpoints.inspect_child [RIGHTS]``.

One JSON line on stdin is one request, one line on stdout its answer; it ends when stdin closes. It reads heads, tails
and indexes, never whole files, and imports nothing that a pickle names. A hostile file can cost it its life: its memory
and its time for each request are limited, and its parent takes its end for an answer (inspector.py). ``RIGHTS``, as
JSON, are of the user whose files it reads: each is opened with them, below a directory that podwatch opens itself,
because that user can be unable to enter the directories above.
"""

import contextlib
import errno
import gc
import json
import os
import resource
import stat
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from podwatch.checkpoints.formats import safetensors, torch_zip, unpickler
from podwatch.checkpoints.rules import SaveFacts, Surroundings, TrackerFacts, inspect_save
from podwatch.checkpoints.structures import FILLED, HOLE_FROM, INDEX, FileFacts, is_model_states, matching
from podwatch.checkpoints.table import SaveEnd, TrackerRule, TrainerTable
from podwatch.system.files import DIRECTORY_FLAGS, open_below, open_file, read_descriptor
from podwatch.system.rights import Rights, applied

_MEMORY = 1536 << 20
"""Bytes. Measured: an index takes fourteen times its size (260 MB for 134,400 records)."""
_CPU_SECONDS = 30
_JSON_LIMIT = 64 << 20
_TEXT_LIMIT = 4096
_TORCH = (".pt", ".pth", ".ckpt")
_TORCH_NAMES = ("pytorch_model*", "adapter_model*", "optimizer*", "scheduler*", "model*", "training_args*")
"""Of ``.bin`` files only these are never empty: other programs can write one on purpose."""
_PICKLES = ("random_states_*.pkl", "custom_checkpoint_*.pkl")
_MANIFEST = bytes.fromhex("0cdb3a2a")
"""First bytes of an OCDBT manifest; then its length in eight, little end first."""


_rights: Rights | None = None


def main() -> None:
    if len(sys.argv) > 1:
        global _rights
        _rights = Rights.from_json(json.loads(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.disable()  # an index is millions of small objects, and none of them is garbage
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(used.ru_utime + used.ru_stime) + _CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        sys.stdout.write(json.dumps(_answer(json.loads(line))) + "\n")
        sys.stdout.flush()
        gc.collect()


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        if "values" in request:
            return {"values": _values_at(Path(request["values"]))}
        found = inspect_save(_table(request["table"]), _facts(request))
    except MemoryError:
        return {"outcome": "unknown", "reason": "it needs more memory than an inspection can use"}
    except OSError as error:
        return {"outcome": "unknown", "reason": f"cannot be read: {error.strerror or error}"}
    return asdict(found)


def _table(values: dict[str, Any]) -> TrainerTable:
    """The parent has validated it."""
    rules = tuple(TrackerRule(**rule) for rule in values.pop("trackers", ()))
    return TrainerTable(**{**values, "ends": SaveEnd(values["ends"]), "trackers": rules})


def _facts(request: Mapping[str, Any]) -> SaveFacts:
    table, several = _table(dict(request["table"])), len(request["parts"]) > 1
    listed: dict[str, list[Any]] = {
        (f"{f[0]}:{f[1]}" if several else f[1]): f for f in sorted(request["files"], key=lambda f: (f[0], f[1]))
    }
    wanted = _files_with_values(table, listed)
    files: dict[str, FileFacts] = {}
    roots: dict[str, int] = {}
    try:
        for part, root in request["parts"].items():
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                roots[part] = os.open(root, DIRECTORY_FLAGS)
        for name, (part, path, size, mtime_ns) in listed.items():
            files[name] = _read(roots, part, path, size, mtime_ns, name in wanted)
        _check_records(roots, files, listed)
    finally:
        for descriptor in roots.values():
            os.close(descriptor)
    about = Surroundings(**request["about"])
    trackers = {name: _tracker(Path(path)) for name, path in about.trackers.items()}
    beside = tuple(Path(path).name for path in about.beside if os.path.lexists(path))
    return SaveFacts(request["step"], files, trackers, about, beside)


def _open_below(root: int, path: str) -> int:
    with applied(_rights):
        return open_below(root, path, os.O_RDONLY | os.O_NONBLOCK)


def _files_with_values(table: TrainerTable, names: Iterable[str]) -> set[str]:
    """Torch files of which a rule reads the values; of DeepSpeed's model states one for each directory."""
    globs = (*table.step_in, *table.step_if_in, *(("*.ckpt",) if table.values else ()))
    found = set(matching(names, globs))
    folders: set[str] = set()
    for name in sorted(names):
        folder, _, base = name.replace(":", "/").rpartition("/")
        if is_model_states(base) and folder not in folders:
            folders.add(folder)
            found.add(name)
    return found


def _tracker(path: Path) -> TrackerFacts:
    try:
        above = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fd = _open_below(above, path.name)
        finally:
            os.close(above)
    except (FileNotFoundError, NotADirectoryError):
        return TrackerFacts(None)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return TrackerFacts("")
    try:
        return TrackerFacts(_text(fd), os.fstat(fd).st_mtime_ns)
    finally:
        os.close(fd)


def _text(fd: int) -> str:
    """Without white space of ASCII around it; empty if it is too large or no text: it is being written."""
    try:
        return read_descriptor(fd, _TEXT_LIMIT, "").strip().decode()
    except (UnicodeDecodeError, OSError):
        return ""


# -- one file ----------------------------------------------------------------------------------------------------------


def _read(roots: Mapping[str, int], part: str, path: str, size: int, mtime_ns: int, values: bool) -> FileFacts:
    try:
        fd = _open_below(roots[part], path)
    except FileNotFoundError:
        return FileFacts(size, mtime_ns, problem="vanished while it was inspected")
    except KeyError:
        return FileFacts(size, mtime_ns, problem="vanished with its directory")
    except PermissionError as error:
        whose = "" if _rights is None else f" for user {_rights.uid} (`podwatch check` names the fix)"
        return FileFacts(size, mtime_ns, unreadable=f"{error.strerror}{whose}")
    except OSError as error:
        return FileFacts(size, mtime_ns, unreadable=error.strerror or str(error))
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return FileFacts(size, mtime_ns, problem="is not a regular file")
        if (status.st_size, status.st_mtime_ns) != (size, mtime_ns):
            return FileFacts(size, mtime_ns, problem="changed while it was inspected")
        problem, unsized, content = _structure(fd, path, values)
        return FileFacts(size, mtime_ns, problem, "", _has_hole(fd, path, size), unsized, content)
    except OSError as error:
        return FileFacts(size, mtime_ns, unreadable=error.strerror or str(error))
    finally:
        os.close(fd)


def _structure(fd: int, path: str, values: bool) -> tuple[str, bool, Any]:
    """(what is broken, whether the end cannot be seen, content) by the file's name."""
    base = path.rpartition("/")[2]
    again = Path(f"/proc/self/fd/{fd}")
    if base == INDEX:
        return _index(fd)
    if base.endswith(".index.json"):
        index = safetensors.read_index(again)
        return index.problem, False, {"shards": index.shards, "tensors": index.names}
    if base.endswith(".json") or base == "_METADATA" or base == "_CHECKPOINT_METADATA":
        return _json(fd)
    if base.endswith(".safetensors"):
        header = safetensors.read_header(again)
        return header.problem, False, header.names
    if base.endswith(_TORCH) or matching((base,), _PICKLES) or (base.endswith(".bin") and _is_torch_bin(fd, base)):
        problem = torch_zip.check(again)
        legacy = not problem and torch_zip.is_legacy(again)
        content = _values_of(again) if values and not problem and not legacy else None
        return problem, legacy, content
    if base == "manifest.ocdbt":
        return _manifest(fd), False, None
    if base in ("latest", "COMPLETED"):
        return "", False, _text(fd)
    return "", False, None


def _is_torch_bin(fd: int, base: str) -> bool:
    head = os.pread(fd, 4, 0)
    if not head:
        return bool(matching((base,), _TORCH_NAMES))
    return head == b"PK\x03\x04"[: len(head)]  # one to three bytes of it are a truncated file


def _index(fd: int) -> tuple[str, bool, Any]:
    try:
        data = read_descriptor(fd, unpickler.MAX_PICKLE_BYTES, INDEX)
        return "", False, unpickler.dcp_index(data)
    except MemoryError:
        raise
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        return "is larger than any index", False, None
    except Exception as error:
        return f"is damaged ({type(error).__name__})", False, None


def _json(fd: int) -> tuple[str, bool, Any]:
    try:
        return "", False, json.loads(read_descriptor(fd, _JSON_LIMIT, ""))
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        return "", False, None
    except (ValueError, RecursionError):
        return "is not valid JSON: it is being written, or was truncated", False, None


def _manifest(fd: int) -> str:
    head = os.pread(fd, 12, 0)
    sound = head[:4] == _MANIFEST and int.from_bytes(head[4:12], "little") == os.fstat(fd).st_size
    return "" if sound else "is truncated or damaged"


def _values_at(path: Path) -> dict[str, Any]:
    fd = open_file(path)
    try:
        return _values_of(Path(f"/proc/self/fd/{fd}"))
    finally:
        os.close(fd)


def _values_of(path: Path) -> dict[str, Any]:
    """Small values in a torch file; empty if it has none that can be read."""
    try:
        with path.open("rb") as file:
            return unpickler.zip_values(file)
    except (OSError, MemoryError):
        raise
    except Exception:
        return {}


def _has_hole(fd: int, path: str, size: int) -> bool:
    """Whether a range was never written: a file of full size whose header is right can still be empty. Small files
    have few blocks, and the check of their format sees more."""
    if size == 0 or (size < HOLE_FROM and not path.endswith(FILLED)):
        return False
    try:
        return os.lseek(fd, 0, os.SEEK_HOLE) < size
    except OSError:
        return False


def _check_records(roots: Mapping[str, int], files: dict[str, FileFacts], listed: Mapping[str, list[Any]]) -> None:
    """Every record inside every shard must be a complete archive: a tail of zeros does not change a size. Writers whose
    records are no torch archives are left out."""
    for name, facts in list(files.items()):
        if not name.endswith(INDEX) or not isinstance(facts.content, dict) or not facts.content["plain"]:
            continue
        folder = name[: -len(INDEX)]
        for shard, records in facts.content["records"].items():
            own = files.get(folder + shard)
            if own is None or own.problem or own.unreadable or own.size != facts.content["need"][shard]:
                continue
            part, path = listed[folder + shard][:2]
            fd = _open_below(roots[part], path)
            try:
                bad = torch_zip.bad_records(fd, sorted(zip(records[::2], records[1::2], strict=True)))
            finally:
                os.close(fd)
            if bad:
                problem = f"has {len(bad)} records that are not written, the first at byte {bad[0]}"
                files[folder + shard] = FileFacts(own.size, own.mtime_ns, problem)


if __name__ == "__main__":
    main()
