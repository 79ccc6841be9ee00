"""Configuration files, ends of logs and incident bundles of this pod, as they are stored for when the pod itself is
gone. Scrubbed and bounded; unreadable files are left out. Everything here blocks.
"""

import io
import os
import stat
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from podwatch.domain.secrets import known_version, scrub
from podwatch.sensors.log_tail import Sources, find
from podwatch.store.evidence import Evidence, configuration, plain_name
from podwatch.store.runs.start import named_configuration
from podwatch.system.files import open_file

MOST_LOGS = 8
"""Logs per round, most recently written first: launcher, trainer, orchestrator, inference, and some per rank."""
BUNDLE_FILE_BYTES = 2 << 20
MOST_BUNDLES = 30
"""As many bundles as the pod keeps itself."""
_HEAD = 64
"""Leading bytes that identify a file: a freed inode number is reused at once."""
_WRITTEN_SECONDS = 2.0
"""An unfinished last line that is older counts as finished."""


def configs(paths: Iterable[str]) -> list[Evidence]:
    """Named by content, so that every version of a file that a start used is kept."""
    found = []
    for path in paths:
        data, reason = named_configuration(path)
        if not reason:
            found.append(configuration(Path(path).name, scrub(data.decode(errors="replace"))))
    return found


@dataclass(frozen=True, slots=True)
class _Known:
    """A log as read so far: whole lines up to ``offset``, scrubbed."""

    device: int
    inode: int
    head: bytes
    offset: int
    text: str


class LogEnds:
    """The last ``most_bytes`` of each log. Scrubbing costs up to a second per megabyte, so only new text is scrubbed;
    when the scrubber knows other values, everything is scrubbed again."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._known: dict[str, _Known] = {}
        self._version = 0

    def read(self, sources: Sources, host: str) -> list[Evidence]:
        """``host`` is in the name, so that the next pod's logs do not replace this one's."""
        if (version := known_version()) != self._version:
            self._known, self._version = {}, version
        ordered = sorted(find(sources), key=lambda pair: _mtime(pair[0]), reverse=True)[:MOST_LOGS]
        self._known = {path: self._known[path] for path, _ in ordered if path in self._known}
        found = []
        for path, inside in ordered:
            text = self._end(path)
            if text is not None:
                name = plain_name(f"{host}__{inside.replace('/', '__')}")
                found.append(Evidence("logs", name, text.encode(), fixed=False))
        return found

    def _end(self, path: str) -> str | None:
        descriptor = _open(Path(path), follow=True)  # find() has checked the link's target
        if descriptor is None:
            return None
        with suppress(OSError), os.fdopen(descriptor, "rb") as file:
            info, head = os.fstat(descriptor), file.read(_HEAD)
            known = self._known.get(path)
            if known is None or not _same(known, info, head) or info.st_size - known.offset > self._most:
                known = _Known(info.st_dev, info.st_ino, head, max(0, info.st_size - self._most), "")
                fresh = _before(Path(path), self._most - info.st_size) if not known.offset else b""
            else:
                fresh = b""
            file.seek(known.offset)
            data = file.read(self._most)
            whole, newline, rest = data.rpartition(b"\n")
            lines = fresh + whole + newline
            if known.offset and not known.text:
                lines = lines.partition(b"\n")[2]  # half a line could be half a secret
            text = _last(known.text + scrub(lines.decode(errors="replace")), self._most)
            self._known[path] = _Known(info.st_dev, info.st_ino, head, known.offset + len(whole + newline), text)
            if rest and time.time() - info.st_mtime > _WRITTEN_SECONDS:
                text += scrub(rest.decode(errors="replace"))
            return text
        return None


def _same(known: _Known, info: os.stat_result, head: bytes) -> bool:
    where = (info.st_dev, info.st_ino) == (known.device, known.inode)
    return where and head.startswith(known.head) and info.st_size >= known.offset


def _before(path: Path, most: int) -> bytes:
    """The end of a just-rotated log's predecessor, from the start of a line."""
    data = _tail(path.with_name(f"{path.name}.1"), most) if most > 0 else None
    return b"" if data is None else data if len(data) < most else data.partition(b"\n")[2]


def _last(text: str, most: int) -> str:
    return text if len(text) <= most else text[-most:].partition("\n")[2]


def bundles(directory: Path, known: Collection[str], since_wall: float) -> list[Evidence]:
    """Every incident bundle written since ``since_wall`` whose name is not among the ``known``, newest last."""
    found = []
    try:
        entries = [e for e in os.scandir(directory) if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")]
    except OSError:
        return []
    dated = sorted(((_mtime(e.path), e) for e in entries), key=lambda pair: pair[0])[-MOST_BUNDLES:]
    for mtime, entry in dated:
        when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(mtime))
        name = f"{when}-{plain_name(entry.name)}.tar.gz"
        if mtime >= since_wall and name not in known:
            found.append(Evidence("incidents", name, _packed(Path(entry.path), int(mtime)), fixed=True))
    return found


def _packed(directory: Path, mtime: int) -> bytes:
    import gzip  # only after an incident: both bring 0.3 MiB
    import tarfile

    out = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=out, mode="wb", mtime=mtime) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for name in sorted(os.listdir(directory)) if directory.is_dir() else ():  # noqa: PTH208 - names only
            data = _read(directory / name, BUNDLE_FILE_BYTES)
            if data is None:
                continue
            clear = scrub(data.decode(errors="replace")).encode()
            member = tarfile.TarInfo(plain_name(name))
            member.size, member.mtime, member.mode = len(clear), mtime, 0o600
            archive.addfile(member, io.BytesIO(clear))
    return out.getvalue()


def _mtime(path: str) -> float:
    with suppress(OSError):
        return os.stat(path).st_mtime  # noqa: PTH116 - names come as text
    return 0.0


def _open(path: Path, *, follow: bool = False) -> int | None:
    """A regular file that the one who named it may read (``system.files``), or None."""
    try:
        if not follow and stat.S_ISLNK(os.lstat(path).st_mode):
            return None
        return open_file(path, shown=True)
    except (OSError, ValueError):
        return None


def _read(path: Path, most: int) -> bytes | None:
    descriptor = _open(path)
    if descriptor is None:
        return None
    with suppress(OSError), os.fdopen(descriptor, "rb") as file:
        return file.read(most)
    return None


def _tail(path: Path, most: int) -> bytes | None:
    descriptor = _open(path)
    if descriptor is None:
        return None
    with suppress(OSError), os.fdopen(descriptor, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - most))
        return file.read(most)
    return None
