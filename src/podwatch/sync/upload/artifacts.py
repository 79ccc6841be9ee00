"""Keeps configuration, ends of logs and incident bundles in the store, for when the pod itself is gone. Scrubbed and
bounded; unreadable files are left out.
"""

import asyncio
import hashlib
import io
import os
import re
import stat
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from podwatch.domain.errors import PodwatchError, RemoteError
from podwatch.domain.manifest import Keys
from podwatch.domain.secrets import known_version, scrub
from podwatch.policy.store_retention import stale_artefacts
from podwatch.sensors.log_tail import Sources, find
from podwatch.stores.base import ObjectStore, OpenStore, StoredObject
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import Clock
from podwatch.system.files import open_file

MOST_LOGS = 8
"""Logs per round, most recently written first: launcher, trainer, orchestrator, inference, and some per rank."""
CONFIG_BYTES = 1 << 20
BUNDLE_FILE_BYTES = 2 << 20
MOST_BUNDLES = 30
"""As many bundles as the pod keeps itself."""
_SECRET_NAMES = (".env", ".pem", ".key", "credentials", "id_rsa", ".netrc")
_HEAD = 64
"""Leading bytes that identify a file: a freed inode number is reused at once."""
_WRITTEN_SECONDS = 2.0
"""An unfinished last line that is older counts as finished."""
_PLAIN = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Artefact:
    """``kind`` is ``config``, ``logs`` or ``incidents``; ``name`` is one safe segment. ``fixed``: the content of
    this name never changes."""

    kind: str
    name: str
    data: bytes
    fixed: bool

    @property
    def digest(self) -> bytes:
        return hashlib.blake2b(self.data, digest_size=16).digest()


def looks_like_a_key(name: str) -> bool:
    """Judged only by the file's name."""
    return any(part in name.lower() for part in _SECRET_NAMES)


def configs(paths: Iterable[str]) -> list[Artefact]:
    """Named by content, so that every version of a file that a start used is kept. Files that look like key files, or
    that only their owner can read, are left out."""
    found = []
    for path in paths:
        name = os.path.basename(path)  # noqa: PTH119 - a recorded name, not a path of ours
        if looks_like_a_key(name):
            continue
        data = read_config(path)
        if data is None or len(data) > CONFIG_BYTES or b"\0" in data:
            continue
        found.append(artefact_of(name, scrub(data.decode(errors="replace"))))
    return found


def read_config(path: str) -> bytes | None:
    """The bytes of a file that a command names, at most one more than ``CONFIG_BYTES``; None where it cannot be read,
    or only its owner can read it."""
    return _read(Path(path), CONFIG_BYTES, follow=True, private=False)


def artefact_of(name: str, text: str) -> Artefact:
    """A configuration file under a name that its content decides."""
    data = text.encode()
    return Artefact("config", f"{hashlib.sha256(data).hexdigest()[:12]}-{plain_name(name)}", data, fixed=True)


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

    def read(self, sources: Sources, host: str) -> list[Artefact]:
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
                found.append(Artefact("logs", name, text.encode(), fixed=False))
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


def bundles(directory: Path, known: Collection[str], since_wall: float) -> list[Artefact]:
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
            found.append(Artefact("incidents", name, _packed(Path(entry.path), int(mtime)), fixed=True))
    return found


def plain_name(text: str) -> str:
    """One segment of letters, digits, dots, dashes; never hidden or empty, at most the last 150 characters, because the
    end of a name says more than its beginning."""
    return _PLAIN.sub("_", text).lstrip(".")[-150:].lstrip(".") or "unnamed"


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
            clear = scrub(data[:BUNDLE_FILE_BYTES].decode(errors="replace")).encode()
            member = tarfile.TarInfo(plain_name(name))
            member.size, member.mtime, member.mode = len(clear), mtime, 0o600
            archive.addfile(member, io.BytesIO(clear))
    return out.getvalue()


def _mtime(path: str) -> float:
    with suppress(OSError):
        return os.stat(path).st_mtime  # noqa: PTH116 - names come as text
    return 0.0


def _open(path: Path, *, follow: bool = False, private: bool = True) -> int | None:
    """A regular file that the one who named it may read (``system.files``), or None. ``private=False``: not a file
    that only its owner can read."""
    try:
        if not follow and stat.S_ISLNK(os.lstat(path).st_mode):
            return None
        descriptor = open_file(path, shown=True)
    except (OSError, ValueError):
        return None
    if not private and not os.fstat(descriptor).st_mode & 0o044:
        os.close(descriptor)
        return None
    return descriptor


def _read(path: Path, most: int, *, follow: bool = False, private: bool = True) -> bytes | None:
    descriptor = _open(path, follow=follow, private=private)
    if descriptor is None:
        return None
    with suppress(OSError), os.fdopen(descriptor, "rb") as file:
        return file.read(most + 1)
    return None


def _tail(path: Path, most: int, *, follow: bool = False) -> bytes | None:
    descriptor = _open(path, follow=follow)
    if descriptor is None:
        return None
    with suppress(OSError), os.fdopen(descriptor, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - most))
        return file.read(most)
    return None


# -- rounds of uploads -----------------------------------------------------------------------------------------------
# A round runs on a cadence, soon after an incident, and at the end, never on the event loop. A failure of the store
# is only logged here (the upload of checkpoints reports it), and the next round tries again.

KEEP = {"config": 50, "logs": 24, "incidents": 60}
"""How many of the newest objects of each kind stay: three pods' logs, two pods' bundles. At most 24 logs and 60 bundles
of a few hundred kB cost cents a month."""
KEEP_SECONDS = 90 * 86400.0
SWEEP_SECONDS = 86400.0
ROUND_SECONDS = 300.0
"""A round that takes longer is abandoned: its thread hangs on a disk or a network."""
HELD_POLL_SECONDS = 5.0
"""Time between two looks at whether this pod holds the run, which costs nothing; a claim takes 90 s."""
LAST_SECONDS = 3.0
"""How long podwatch waits for the last round when it stops."""
SETTLE_SECONDS = 20.0
"""Delay after an incident: by then the bundle is written and the stopped trainer has written its last lines."""


class ArtefactSources(Protocol):
    """What this pod keeps of itself in the store. ``incidents``: the directory of the incident bundles; ``log_bytes``
    of each log are sent."""

    incidents: Path
    host: str
    log_bytes: int

    def logs(self) -> Sources: ...
    def configs(self) -> tuple[str, ...]:
        """Paths of the files that the last start's command named."""
        ...

    def holds(self) -> bool:
        """Whether this pod holds the run; a claim that is not decided yet does not count."""
        ...

    def start(self) -> list[Artefact]:
        """What a bare pod needs to start this run (``sync.runs.bootstrap``); empty where that is not to be stored."""
        ...

    def learn_secrets(self) -> None:
        """Register the values that must not appear. Raises where they cannot be known, and then nothing is sent."""
        ...

    def may_write(self) -> bool:
        """False where another pod owns the run."""
        ...

    def may_delete(self) -> bool:
        """False where deletions are only reported."""
        ...

    def trouble(self, problem: str) -> None:
        """Called once when trouble begins."""
        ...


@dataclass(slots=True)
class _Store:
    """An open store with its contents: object name -> object, and the digests of what was sent."""

    store: ObjectStore
    there: dict[str, StoredObject] = field(default_factory=dict)
    sent: dict[str, bytes] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    """Removed by a sweep: not sent again, although this pod still has it."""
    swept: float | None = None
    keeps: bool = False
    """The key cannot delete: a replaced object stays in the store, and is paid for."""


class Artifacts:
    """Loop-side object."""

    def __init__(self, open_store: OpenStore, keys: Keys, sources: ArtefactSources, clock: Clock) -> None:
        self._open, self._keys, self._sources, self._clock = open_store, keys, sources, clock
        self._worker = Worker("artefacts")
        self._logs = LogEnds(sources.log_bytes)
        self._opened: _Store | None = None
        self._soon: asyncio.Task[None] | None = None
        self.problem = ""
        """Why the last round did not send everything; empty if it did."""
        self.rounds = 0

    async def store(self, *, urgent: bool = False, within: float = ROUND_SECONDS) -> None:
        """One round. Raises only CancelledError. ``urgent``: also send what would otherwise wait."""
        if not self._sources.may_write():
            return
        before, self.problem = self.problem, ""
        try:
            await self._worker.call(self._round, urgent, timeout=within)
        except PodwatchError as error:
            self.problem = str(error)
        except Exception as error:  # sending evidence must never stop the guard
            self.problem = f"{type(error).__name__}: {error}"[:500]
        if self.problem:
            self._forget()
        if self.problem and not before:
            self._sources.trouble(self.problem)
        self.rounds += 1

    async def when_held(self) -> None:
        """One round once this pod holds the run: from then on another pod can start it, whatever happens here."""
        while not self._sources.holds():
            await self._clock.sleep(HELD_POLL_SECONDS)
        await self.store()

    def soon(self, after: float = SETTLE_SECONDS) -> None:
        """Schedule a round shortly after an event. Several calls make one round."""
        if self._soon is None or self._soon.done():
            self._soon = asyncio.create_task(self._shortly(after), name="artefacts soon")

    async def _shortly(self, after: float) -> None:
        await asyncio.sleep(after)
        await self.store(urgent=True)

    async def stop(self, *, last: bool) -> None:
        """``last``: run a last round first, for at most a few seconds."""
        if self._soon is not None:
            self._soon.cancel()
        if last:
            await self.store(urgent=True, within=LAST_SECONDS)
        self._worker.close()
        self._forget()

    def _forget(self) -> None:
        """The next round opens the store again and reads the credentials again."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.store.close()

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _round(self, urgent: bool) -> None:
        sources = self._sources
        sources.learn_secrets()
        opened = self._opened or self._look()
        found = configs(sources.configs())
        start = sources.start()
        found += start
        incidents, since = self._keys.artefacts("incidents"), self._clock.wall() - KEEP_SECONDS
        known = {key.removeprefix(incidents) for key in opened.there if key.startswith(incidents)}
        found += bundles(sources.incidents, known, since)
        if urgent or not opened.keeps:
            found += self._logs.read(sources.logs(), sources.host)
        for artefact in found:
            self._put(opened, artefact)
        if opened.swept is None or self._clock.wall() - opened.swept >= SWEEP_SECONDS:
            self._sweep(opened, {f"{self._keys.artefacts(one.kind)}{one.name}" for one in start})

    def _look(self) -> _Store:
        opened = _Store(self._open())
        try:
            for kind in KEEP:
                opened.there |= {o.key: o for o in opened.store.list(self._keys.artefacts(kind)) if o.ours is not False}
        except BaseException:
            opened.store.close()
            raise
        self._opened = opened
        return opened

    def _put(self, opened: _Store, artefact: Artefact) -> None:
        key = f"{self._keys.artefacts(artefact.kind)}{artefact.name}"
        before = opened.there.get(key)
        if (artefact.fixed and before is not None) or opened.sent.get(key) == artefact.digest or key in opened.gone:
            return
        opened.there[key] = opened.store.put_bytes(key, artefact.data)
        opened.sent[key] = artefact.digest
        if before is not None and opened.store.versioned:
            self._delete(opened, before)

    def _delete(self, opened: _Store, old: StoredObject) -> bool:
        """Whether the object is gone."""
        if opened.keeps or not self._sources.may_delete():
            return False
        try:
            for known in opened.store.identify([old]):
                if not known.ours:
                    return False
                opened.store.delete(known)
        except RemoteError as error:
            if error.transient:
                raise
            opened.keeps = True
        return not opened.keeps

    def _sweep(self, opened: _Store, needed: Collection[str]) -> None:
        """``needed``: keys that stay, however old they are."""
        kinds: dict[str, list[tuple[str, float]]] = {}
        for kind in KEEP:
            found = {o.key: o for o in opened.store.list(self._keys.artefacts(kind)) if o.ours is not False}
            opened.there |= found
            kinds[kind] = [(o.key, o.uploaded_wall) for o in found.values()]
        for key in stale_artefacts(kinds, self._clock.wall(), most=KEEP, seconds=KEEP_SECONDS):
            if key not in needed and self._delete(opened, opened.there[key]):
                del opened.there[key]
                opened.gone.add(key)
        opened.swept = self._clock.wall()
