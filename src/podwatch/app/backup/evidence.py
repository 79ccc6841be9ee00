"""Configuration files, ends of logs and incident bundles of this pod, as they are stored for when the pod itself is
gone. Scrubbed and bounded; unreadable files are left out. Everything here blocks.
"""

import hashlib
import io
import os
import stat
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from podwatch.domain.secrets import known_version, scrub
from podwatch.sensors.log_tail import Sources, find
from podwatch.store.evidence import Evidence, configuration, plain_name
from podwatch.store.runs.start import named_configuration
from podwatch.system.files import opened

MOST_LOGS = 8
"""Logs per round, most recently written first: launcher, trainer, orchestrator, inference, and some per rank."""
BUNDLE_FILE_BYTES = 2 << 20
MOST_BUNDLES = 30
"""As many bundles as the pod keeps itself."""
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


class LogEnds:
    """The last ``most_bytes`` of each log, in whole lines. What did not change is not scrubbed again: that costs half a
    second per megabyte."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._scrubbed: dict[tuple[bytes, int], str] = {}
        """By the digest of the lines and the values that the scrubber knew."""

    def read(self, sources: Sources, host: str) -> list[Evidence]:
        """``host`` is in the name, so that the next pod's logs do not replace this one's."""
        newest = sorted(find(sources), key=lambda pair: _mtime(pair[0]), reverse=True)[:MOST_LOGS]
        before, self._scrubbed = self._scrubbed, {}
        found = []
        for path, inside in newest:
            if (lines := self._lines(Path(path))) is not None:
                key = (hashlib.sha256(lines).digest(), known_version())
                text = before.get(key) or _last(scrub(lines.decode(errors="replace")), self._most)
                self._scrubbed[key] = text
                name = plain_name(f"{host}__{inside.replace('/', '__')}")
                found.append(Evidence("logs", name, text.encode(), fixed=False))
        return found

    def _lines(self, path: Path) -> bytes | None:
        """Its last lines; before them those of the log that was just rotated away, where there is room. An unfinished
        line waits until it is still: half a line could be half a secret."""
        end = _tail(path, self._most, follow=True)  # find() has checked the link's target
        if end is None:
            return None
        data, info = end
        whole, newline, rest = data.rpartition(b"\n")
        lines = whole + newline + (rest if time.time() - info.st_mtime > _WRITTEN_SECONDS else b"")
        room = self._most - info.st_size
        before = _tail(path.with_name(f"{path.name}.1"), room) if room > 0 else None
        return lines if before is None else before[0] + lines


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
            if (found := _tail(directory / name, BUNDLE_FILE_BYTES)) is None:
                continue
            clear = scrub(found[0].decode(errors="replace")).encode()
            member = tarfile.TarInfo(plain_name(name))
            member.size, member.mtime, member.mode = len(clear), mtime, 0o600
            archive.addfile(member, io.BytesIO(clear))
    return out.getvalue()


def _mtime(path: str) -> float:
    with suppress(OSError):
        return os.stat(path).st_mtime  # noqa: PTH116 - names come as text
    return 0.0


def _tail(path: Path, most: int, *, follow: bool = False) -> tuple[bytes, os.stat_result] | None:
    """The last bytes of a regular file that the one who named it may read, from the start of a line where it has more;
    None for anything else. ``follow``: it can be a link."""
    with suppress(OSError, ValueError):
        if follow or not stat.S_ISLNK(os.lstat(path).st_mode):
            with opened(path, shown=True) as file:
                info = os.fstat(file.fileno())
                file.seek(max(0, info.st_size - most))
                data = file.read(most)
                return (data if info.st_size <= most else data.partition(b"\n")[2]), info
    return None
