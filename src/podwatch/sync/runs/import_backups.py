"""Imports backups that another tool wrote below ``<run_id>/step_N/``: checked, copied under our names, published.

The old objects stay as they are. The order is that of any publication: data, each object verified by id; the manifest;
the pointer, once, after the last step. A killed import leaves objects without a manifest, which readers ignore; the
next import continues from them.
"""

import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from podwatch import __version__
from podwatch.domain.errors import HostError, IntegrityError, RemoteError
from podwatch.domain.manifest import Keys, Manifest, ManifestFile, Pointer, check_relative_path, sha1_hex
from podwatch.policy.store_archive import IMPORT_LINEAGE, Placing, place_import
from podwatch.stores.base import ObjectStore, Progress, StoredObject
from podwatch.stores.parts import part_spans
from podwatch.sync.inventory import hashes_of
from podwatch.sync.publish import checked_manifest, read_pointer
from podwatch.sync.runs.import_skeleton import Fit, FitFile, Item, MakeLayout, Unfit, fit
from podwatch.sync.types import rfc3339
from podwatch.system.clock import Clock

_STEP = re.compile(r"step_(0|[1-9]\d{0,17})/(.*)", re.DOTALL)
_PLACEHOLDER = ".bzEmpty"
"""The placeholder object that B2's web page leaves in a folder that it made."""
MOST_OBJECTS = 200_000
"""Limit per step: more objects are no checkpoint, and each takes memory here."""
_SOURCE_TIME = "src_last_modified_millis"
"""File info key written by the b2 tool, b2sdk and rclone: the source's mtime."""


@dataclass(slots=True)
class Backup:
    """One step of another tool. ``problem``: why it cannot be imported, as far as the names show."""

    step: int
    items: list[Item] = field(default_factory=list)
    problem: str = ""

    @property
    def size_bytes(self) -> int:
        return sum(i.stored.size for i in self.items)


def find_backups(store: ObjectStore, source: str, *, ignore_times: bool = False) -> tuple[Backup, ...]:
    """Steps below the object-name prefix ``source``, lowest first. One listing. Raises RemoteError.

    ``ignore_times``: the file times in the store are the times of copying, and prove nothing.
    """
    backups: dict[int, Backup] = {}
    for stored in store.list(f"{source}/step_"):
        match = _STEP.fullmatch(stored.key.removeprefix(f"{source}/"))
        if match is None or match[2].rpartition("/")[2] == _PLACEHOLDER:
            continue
        backup = backups.setdefault(int(match[1]), Backup(int(match[1])))
        if stored.ours:
            backup.problem = backup.problem or "podwatch wrote it"
        elif len(backup.items) >= MOST_OBJECTS:
            backup.problem = backup.problem or f"it has more than {MOST_OBJECTS} objects, so it is no checkpoint"
        elif not _safe(match[2]):
            backup.problem = backup.problem or f"it has an unsafe object name: {match[2]!r:.100}"
        else:
            backup.items.append(Item(match[2], stored, _mtime_ns(stored)))
    for backup in backups.values():
        _settle_times(backup, ignore_times)
    return tuple(backups[step] for step in sorted(backups))


def _safe(path: str) -> bool:
    try:
        check_relative_path(path)
    except IntegrityError:
        return False
    return True


def _mtime_ns(stored: StoredObject) -> int:
    """0 where the store does not know the file's own time."""
    with suppress(ValueError):
        if "mtime_ns" in stored.info:
            return max(0, min(int(stored.info["mtime_ns"]), 2**62))
        return max(0, min(int(stored.info.get(_SOURCE_TIME, 0)), 2**42)) * 1_000_000
    return 0


def _settle_times(backup: Backup, ignore: bool) -> None:
    """If only some times are known, files would seem overwritten: then every file gets the newest upload's time."""
    if ignore or any(i.mtime_ns == 0 for i in backup.items):
        newest = max((i.stored.uploaded_wall for i in backup.items), default=0.0)
        backup.items = [replace(i, mtime_ns=int(newest) * 1_000_000_000) for i in backup.items]


def judge(store: ObjectStore, backup: Backup, make: MakeLayout) -> Fit:
    """Raises Unfit with the reason, RemoteError, HostError."""
    if backup.problem:
        raise Unfit(backup.problem)
    if not backup.items:
        raise Unfit("it is empty")
    try:
        with tempfile.TemporaryDirectory(prefix="podwatch-import-") as scratch:
            return fit(store, backup.step, backup.items, make, Path(scratch))
    except OSError as error:
        raise HostError(
            f"cannot examine step {backup.step} here: {error.strerror or error}",
            where=str(error.filename or tempfile.gettempdir()),
            fix="set TMPDIR to a directory with free space",
        ) from error


class Importer:
    """Blocking. ``notes`` is a directory of this pod that records what was copied; without it, an import that was
    killed copies everything again."""

    def __init__(
        self,
        store: ObjectStore,
        keys: Keys,
        *,
        source: str,
        part_size: int,
        clock: Clock,
        host: str = "",
        notes: Path | None = None,
        progress: Progress = lambda count: None,
    ) -> None:
        self._store, self._keys, self._part_size, self._clock = store, keys, part_size, clock
        self._host, self._notes, self._progress = host, notes, progress
        self.lineage = f"{IMPORT_LINEAGE}{sha1_hex(source.encode())[:12]}"

    def there(self, found: Fit) -> bool:
        """Was it imported before (or saved by podwatch with the same files)?"""
        return self._existing(found) is not None

    def _existing(self, found: Fit) -> tuple[Manifest, StoredObject, bytes] | None:
        key = self._keys.manifest(found.step, found.save_id)
        stored = self._store.stat(key)
        data = self._store.get_bytes(key, stored.file_id) if stored is not None and stored.ours else None
        if stored is None or data is None:
            return None
        with suppress(IntegrityError):
            return checked_manifest(self._keys, data, found.step, found.save_id, where=key), stored, data
        return None

    def take_in(self, found: Fit) -> None:
        """Copy, verify, write the manifest. Raises RemoteError. A repeated call continues an interrupted one."""
        if self.there(found):
            return
        notes = _Notes(self._notes, self._keys, found, self._part_size)
        begun = {u.key: u.upload for u in self._store.unfinished(self._save(found)) if u.ours}
        files = tuple(self._copy(found, file, notes, begun) for file in found.files)
        for file in files:
            now = self._store.stat(file.key, file.file_id)
            if now is None or not now.ours or now.size != file.size:
                raise RemoteError("a copied object is not in the store", where=f"{self._store.url}/{file.key}")
        manifest = Manifest(
            run_id=self._keys.run_id,
            lineage=self.lineage,
            step=found.step,
            save_id=found.save_id,
            layout=found.layout,
            created_at=rfc3339(self._clock.wall()),
            writer_id="import",
            part_size=self._part_size,
            total_bytes=found.total_bytes,
            files=files,
            world_size=found.world_size,
            producer=f"podwatch {__version__} import",
        )
        key = self._keys.manifest(found.step, found.save_id)
        stored = self._store.put_bytes(key, manifest.to_bytes())
        if self._store.get_bytes(key, stored.file_id) != manifest.to_bytes():
            raise IntegrityError("the stored manifest differs from the written one", where=f"{self._store.url}/{key}")
        notes.done()

    def point(self, newest: Fit, *, alive: bool) -> Placing:
        """Make the newest imported step the one that ``latest.json`` names, unless one of podwatch's own is newer."""
        current = read_pointer(self._store, self._keys)
        existing = self._existing(newest)
        if existing is None:
            return Placing(False, "it is not in the store")
        manifest, stored, data = existing
        placing = place_import(current, newest.step, self.lineage, alive=alive)
        if not placing.moves:
            return placing
        pointer = Pointer(
            generation=placing.generation,
            seq=placing.seq,
            run_id=self._keys.run_id,
            lineage=self.lineage,
            step=manifest.step,
            writer_id="import",
            created_at=rfc3339(self._clock.wall()),
            save_id=manifest.save_id,
            manifest_key=stored.key,
            manifest_file_id=stored.file_id,
            manifest_sha1=sha1_hex(data),
            manifest_size=len(data),
            total_bytes=manifest.total_bytes,
            layout=manifest.layout,
            host=self._host,
        )
        self._store.put_bytes(self._keys.latest, pointer.to_bytes())
        return placing

    # -- below --------------------------------------------------------------------------------------------------------

    def _save(self, found: Fit) -> str:
        return self._keys.save(found.step, found.save_id)

    def _copy(self, found: Fit, file: FitFile, notes: "_Notes", begun: Mapping[str, str]) -> ManifestFile:
        source, remote = file.item.stored, f"{file.part}/{file.path}"
        key = self._keys.data(found.step, found.save_id, remote)
        noted = notes.known.get(key)
        if noted is not None and self._is_there(key, noted[0], source.size):
            file_id, hashes = noted
        else:
            stored = self._small(key, source) if source.size <= self._part_size else self._large(key, source, begun)
            file_id, hashes = stored.file_id, stored.parts_sha1
            if stored.size != source.size or len(hashes) != len(part_spans(source.size, self._part_size)):
                raise IntegrityError("the store copied a different object", where=f"{self._store.url}/{source.key}")
            notes.add(key, file_id, hashes)
        self._progress(source.size)
        return ManifestFile(remote, file.part, source.size, file.item.mtime_ns, 0o644, key, file_id, hashes)

    def _is_there(self, key: str, file_id: str, size: int) -> bool:
        found = self._store.stat(key, file_id)
        return found is not None and found.ours and found.size == size

    def _small(self, key: str, source: StoredObject) -> StoredObject:
        stored = self._store.copy_small(key, source)
        if stored.parts_sha1 or not stored.size:
            return stored
        return replace(stored, parts_sha1=hashes_of(self._store, key, stored.file_id, self._part_size))

    def _large(self, key: str, source: StoredObject, begun: Mapping[str, str]) -> StoredObject:
        """Copy in parts; parts that a killed import copied are kept."""
        spans = part_spans(source.size, self._part_size)
        upload = begun.get(key) or ""
        there = self._store.parts_there(upload) if upload else None
        sent = {number: part.size for number, part in (there or {}).items()}
        if there is None or sent != {n: length for n, (_, length) in enumerate(spans[: len(sent)], 1)}:
            upload, there = self._store.begin_large(key, source.size), {}  # none yet, or in parts of another size
        hashes = [
            there[number].sha1 if number in there else self._store.copy_part(upload, number, source, offset, length)
            for number, (offset, length) in enumerate(spans, 1)
        ]
        return self._store.finish_large(key, upload, hashes, source.size)


class _Notes:
    """What was copied for one checkpoint, one line per part, on this pod's disk. A hint only: everything is checked."""

    def __init__(self, directory: Path | None, keys: Keys, found: Fit, part_size: int) -> None:
        self.known: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._path: Path | None = None
        if directory is None:
            return
        self._path = directory / f"{keys.run_id}.{found.step}.{found.save_id}.{part_size}"
        with suppress(OSError, ValueError, KeyError, TypeError):
            for line in self._path.read_text().splitlines():
                doc = json.loads(line)
                self.known[str(doc["key"])] = (str(doc["file_id"]), tuple(str(h) for h in doc["sha1"]))

    def add(self, key: str, file_id: str, hashes: Iterable[str]) -> None:
        if self._path is None:
            return
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._path.open("a") as file:
                file.write(json.dumps({"key": key, "file_id": file_id, "sha1": list(hashes)}) + "\n")
                file.flush()
                os.fsync(file.fileno())

    def done(self) -> None:
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()
