"""What a bare pod needs to start a run: the pod that trains stores it, scrubbed, below ``config/``; a bare pod fetches
it. Blocks on the disk and on the store.

The record (``start_record``) names each file with its digest: what the store holds is used as a whole or not at all.
"""

import hashlib
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from podwatch import __version__
from podwatch.domain.errors import IntegrityError, RemoteError, SaveGone
from podwatch.domain.secrets import MASK, scrub
from podwatch.store.evidence import Evidence, configuration
from podwatch.store.keys import RunKeys
from podwatch.store.objects.base import Objects
from podwatch.store.objects.errors import ObjectMissing
from podwatch.store.runs.start_record import (
    CONFIG_NAME,
    MOST_BYTES,
    MOST_FILES,
    OBJECT,
    LeftOut,
    StartFile,
    StoredStart,
    absolute,
    read_start,
)
from podwatch.system.files import open_file

_KEY_NAMES = (".env", ".pem", ".key", "credentials", "id_rsa", ".netrc")

# -- on the pod that trains ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunStart:
    """The configuration in force. ``text`` and ``path``: the configuration file; ``directory``: where podwatch was
    started; ``named``: paths of the files in the command; ``secret``: files for secrets, with the names of the
    variables or lines in them, never a value; ``settings``: those from environment and command line."""

    run_id: str
    text: str
    path: str
    directory: str
    named: tuple[str, ...] = ()
    secret: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)


def start_evidence(start: RunStart) -> list[Evidence]:
    """The files and, last, the record that names them. Empty where there is no configuration file to store."""
    if not start.text or len(start.text.encode()) > MOST_BYTES:
        return []
    return _Collecting(start).collect()


class _Collecting:
    def __init__(self, start: RunStart) -> None:
        self._start = start
        self._found: list[Evidence] = []
        self._files: list[StartFile] = []
        self._left_out: list[LeftOut] = []

    def collect(self) -> list[Evidence]:
        start = self._start
        for path in dict.fromkeys(start.named):
            if path not in start.secret and path != start.path and _is_nameable(path):
                self._named(path)
        for path, names in start.secret.items():
            if _is_nameable(path) and names:
                text = "".join(f"{name}={MASK}\n" if name else f"{MASK}\n" for name in names)
                self._files.append(self._add(path, text, "0600", secret=True))
        config = self._add(f"/{CONFIG_NAME}", scrub(start.text), "0600")
        record = StoredStart(
            start.run_id, start.directory, config, tuple(self._files), tuple(self._left_out[:MOST_FILES]),
            {key: _printable(scrub(value)) for key, value in start.settings.items()}, f"podwatch {__version__}",
        )  # fmt: skip
        return [*self._found, Evidence("config", OBJECT, record.to_bytes(), fixed=False)]

    def _named(self, path: str) -> None:
        text, reason = _to_store(path)
        if not reason and len(self._files) >= MOST_FILES - len(self._start.secret):
            reason = f"the command names more than {MOST_FILES} files"
        if reason:
            self._left_out.append(LeftOut(path, reason))
        else:
            self._files.append(self._add(path, scrub(text), "0755" if os.access(path, os.X_OK) else "0644"))

    def _add(self, path: str, text: str, mode: Literal["0600", "0644", "0755"], *, secret: bool = False) -> StartFile:
        self._found.append(one := configuration(Path(path).name, text))
        return StartFile(path, one.name, hashlib.sha256(one.data).hexdigest(), len(one.data), mode, secret)


def looks_like_a_key(name: str) -> bool:
    """Judged only by the file's name."""
    return any(part in name.lower() for part in _KEY_NAMES)


def named_configuration(path: str) -> tuple[bytes, str]:
    """The bytes of a file that a command names, and why it is not stored: it looks like a key, only its owner can read
    it, it is too large, or no text."""
    if looks_like_a_key(Path(path).name):
        return b"", "its name is that of a key file"
    data = _read_shared(path)
    if data is None:
        return b"", "only its owner can read it, or podwatch cannot"
    if len(data) > MOST_BYTES:
        return b"", "it is larger than 1 MiB"
    return (data, "") if b"\0" not in data else (b"", "it is not text")


def _to_store(path: str) -> tuple[str, str]:
    data, reason = named_configuration(path)
    try:
        return data.decode(), reason
    except UnicodeDecodeError:
        return "", "it is not text"


def _read_shared(path: str) -> bytes | None:
    try:
        descriptor = open_file(Path(path), shown=True)
    except (OSError, ValueError):
        return None
    with suppress(OSError), os.fdopen(descriptor, "rb") as file:
        if stat.S_IMODE(os.fstat(descriptor).st_mode) & 0o044:
            return file.read(MOST_BYTES + 1)
    return None


def _is_nameable(path: str) -> bool:
    try:
        return bool(absolute(path))
    except IntegrityError:
        return False


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)[:1000]


# -- from the store --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartTexts:
    """A start as it is stored. ``texts``: object name -> content, whose digest is verified."""

    record: StoredStart
    texts: Mapping[str, str]


def fetch_start(store: Objects, keys: RunKeys) -> StartTexts:
    """RemoteError where the store does not answer; IntegrityError for contents that podwatch would not have written;
    SaveGone (an IntegrityError) where nothing is stored."""
    where = keys.evidence("config") + OBJECT
    try:
        data = store.read(where, MOST_BYTES)
    except ObjectMissing:
        raise SaveGone(
            f"the store holds no start of run {keys.run_id}",
            where=f"{store.url}: {where}",
            fix="check the run's name with `podwatch runs list`. A pod that held it for less than two minutes, or one"
            " with [sync] artefacts = false, stored none: copy podwatch.toml to this pod, then `podwatch run`",
        ) from None
    record = read_start(data, run_id=keys.run_id)
    return StartTexts(record, {f.object: _content(store, keys, f) for f in (record.config, *record.files)})


def _content(store: Objects, keys: RunKeys, file: StartFile) -> str:
    key = keys.evidence("config") + file.object
    fix = "copy the file to this pod yourself, or let the pod that trains store it again"
    try:
        data = store.read(key, MOST_BYTES)
    except ObjectMissing:
        raise IntegrityError(f"{file.path} is not in the store", where=key, fix=fix) from None
    if len(data) != file.size or hashlib.sha256(data).hexdigest() != file.sha256:
        raise IntegrityError(f"{file.path} in the store is not what the record names", where=key, fix=fix)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise IntegrityError("a file of the start is not UTF-8 text", where=key) from error


def why_not_writable(store: Objects, keys: RunKeys) -> str:
    """Why the key cannot guard a run; empty if it can. RemoteError where the store does not answer."""
    try:
        store.check(keys.root)
    except RemoteError as error:
        if error.transient:
            raise
        return str(error)
    return ""
