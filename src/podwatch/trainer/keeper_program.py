"""The keeper's program in the state directory: written completely, verified before use, replaced only by a complete
one.

An upgrade of podwatch must not pull the keeper's code away, so each start runs a copy. The interpreter reads a
program once, at its start. So if the disk has no room for a copy, the keeper runs from the installed file: an upgrade
in the milliseconds before the interpreter has read it fails that start, which is retried; afterwards nothing depends
on the file.

The copy is compiled, because parsing the source would cost the keeper 2 MiB for as long as training lives. Not by
``py_compile``: on a full disk it wrote half a file and reported success.
"""

import contextlib
import hashlib
import importlib.util
import marshal
from pathlib import Path

from podwatch.system.files import atomic_write, read_small

SOURCE = Path(__file__).with_name("keeper.py")
_UNCHECKED_HASH = 1
"""Flags of PEP 552: named by a hash of the source, which Python does not compare."""
_SEAL = b"podwatch keeper sha256 "
"""Python ignores what follows the code object. Here it is a checksum of everything before it."""


def place(directory: Path, *, compiled: bool) -> tuple[Path, str]:
    """Return the program to run, and why it is not the usual one (empty if it is). Blocks.

    ``compiled``: the keeper runs under the same interpreter as this process. Raises OSError only if the installed
    source cannot be read, as in the middle of an upgrade, and no complete copy of an earlier start exists.
    """
    try:
        source = read_small(SOURCE)
    except OSError as error:
        copy = directory / f"{SOURCE.stem}.pyc"
        if compiled and is_whole(read_small(copy)):
            return copy, f"cannot read {SOURCE}: {error.strerror}"
        raise
    problems: list[str] = []
    for target in [directory / f"{SOURCE.stem}.pyc"] * compiled + [directory / SOURCE.name]:
        if not _holds(target, source):
            try:
                atomic_write(target, sealed(source) if target.suffix == ".pyc" else source)
            except OSError as error:
                problems.append(f"cannot write {target}: {error.strerror}")
                continue
            if not _holds(target, source):
                problems.append(f"{target} does not hold what was written to it")
                continue
        return target, "; ".join(problems)
    return SOURCE, "; ".join(problems)


def remove_unfinished(directory: Path) -> None:
    """Delete the partial files of a podwatch that was killed while writing: on a full disk their space is needed."""
    for pattern in (f".{SOURCE.stem}.py*.tmp", ".wanted.*.tmp", ".spec-*.tmp"):
        for path in directory.glob(pattern):
            with contextlib.suppress(OSError):
                path.unlink()


def sealed(source: bytes) -> bytes:
    """Return the compiled program, with its checksum."""
    code = compile(source, SOURCE.name, "exec", dont_inherit=True, optimize=0)
    data = _header(source) + marshal.dumps(code)
    return data + _SEAL + hashlib.sha256(data).digest()


def is_whole(data: bytes, source: bytes | None = None) -> bool:
    """Return whether ``data`` is the complete compiled form of ``source`` (None: of any version) for this
    interpreter."""
    header = importlib.util.MAGIC_NUMBER if source is None else _header(source)
    end = len(data) - len(_SEAL) - hashlib.sha256().digest_size
    return (
        end > 0
        and data.startswith(header)
        and data[end : end + len(_SEAL)] == _SEAL
        and data[end + len(_SEAL) :] == hashlib.sha256(data[:end]).digest()
    )


def _header(source: bytes) -> bytes:
    return importlib.util.MAGIC_NUMBER + _UNCHECKED_HASH.to_bytes(4, "little") + importlib.util.source_hash(source)


def _holds(path: Path, source: bytes) -> bool:
    try:
        found = read_small(path)
    except OSError:
        return False
    return is_whole(found, source) if path.suffix == ".pyc" else found == source
