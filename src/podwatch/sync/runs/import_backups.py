"""Imports backups that another tool wrote below ``<run_id>/step_N/``: checked, copied under our names, published.

The old objects stay as they are. The order is that of any publication: data, each object verified by id; the manifest;
the pointer, once, after the last step. A killed import leaves objects without a manifest, which readers ignore; the
next import continues from them.
"""

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path

from podwatch import __version__
from podwatch.checkpoints import checkpoint_identity
from podwatch.checkpoints.formats.files import sparse_on_purpose
from podwatch.checkpoints.layouts import write_trackers
from podwatch.checkpoints.layouts.base import Judgement, Layout, PartFiles
from podwatch.checkpoints.scan import scan_part
from podwatch.domain.errors import HostError, IntegrityError, PodwatchError, RemoteError
from podwatch.domain.manifest import Keys, Manifest, ManifestFile, Pointer, sha1_hex
from podwatch.domain.safe_names import check_relative_path
from podwatch.policy.store_retention import IMPORT_LINEAGE, Placing, place_import
from podwatch.stores.base import ObjectStore, Progress, StoredObject, Upload, recognized
from podwatch.stores.part_reader import StreamSource, part_spans
from podwatch.sync.interfaces import rfc3339
from podwatch.sync.publish_and_pointer import checked_manifest, in_store, pointer_as_stored, proof_of
from podwatch.sync.read_back import hashes_of
from podwatch.sync.runs.copied_so_far import Notes
from podwatch.system.clock import Clock
from podwatch.system.pinned_directories import PinnedTree

# -- is it a complete checkpoint? -------------------------------------------------------------------------------------
# Decided by running the layout's own rule on a skeleton of the backup: every file at its full size and with its time.
# Small files are whole; of large ones it has the first and last two megabytes, which is all that a layout's rule reads,
# and a hole between. A 47 GB checkpoint costs some megabytes of download.

END_BYTES = 2 << 20
"""Bytes of each end of a large file: enough for a zip directory of 10,000 tensors and any shard's safetensors
header."""
WHOLE_BYTES = 4 << 20
INDEX_BYTES = 64 << 20
"""Indexes are read whole: DCP's ``.metadata``, JSON."""
_INDEX_NAMES = (".metadata", ".json")
_STEP_NAMES = ("step_{0}", "global_step_{0}", "global_step{0}", "checkpoint-{0}", "iter_{0:07d}", "step-{0}", "{0}")


class Unfit(Exception):  # noqa: N818 - internal: the reason why a backup is refused
    """The text is shown to the operator."""


class _Enough(Exception):  # noqa: N818 - ends a download that has all that is needed
    pass


MakeLayout = Callable[[Path], Layout]
"""The run's layout for another output_dir."""


@dataclass(frozen=True, slots=True)
class Item:
    """One object of a backup. ``path`` is relative to the backup's step directory, and safe."""

    path: str
    stored: StoredObject
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class FitFile:
    """``part`` and ``path`` (inside the part) are the file's place in the layout."""

    item: Item
    part: str
    path: str


@dataclass(frozen=True, slots=True)
class Fit:
    """A complete checkpoint. ``others``: the number of objects of the backup that do not belong to it."""

    step: int
    layout: str
    save_id: str
    files: tuple[FitFile, ...]
    world_size: int | None
    others: int

    @property
    def total_bytes(self) -> int:
        return sum(f.item.stored.size for f in self.files)


def fit(store: ObjectStore, step: int, items: Sequence[Item], make: MakeLayout, scratch: Path) -> Fit:
    """``make`` builds the layout for an output directory; ``scratch`` is an empty directory of ours. Raises Unfit with
    the reason, RemoteError for store trouble, OSError where the skeleton cannot be written."""
    raw = scratch / "raw"
    raw.mkdir()
    for number, item in enumerate(items):
        _skeleton(store, item, raw / str(number))
    reasons: list[str] = []
    for number, place in enumerate(_places(step, items, make)):
        out = scratch / str(number) / "out"
        try:
            found = _try(place, step, items, raw, make(out), out)
        except Unfit as error:
            reasons.append(str(error))
            continue
        if found is not None:
            return found
    tops = sorted({i.path.partition("/")[0] for i in items})
    shown = ", ".join(tops[:6]) + (", ..." if len(tops) > 6 else "")
    raise Unfit(reasons[0] if reasons else f"the layout finds no checkpoint in it (it contains {shown})")


# -- places where the files could belong -----------------------------------------------------------------------------

_Place = Callable[[str, Path, Layout], Path | None]
"""(path in the backup, output directory, its layout) -> the file's place, None if it has none."""


def _places(step: int, items: Sequence[Item], make: MakeLayout) -> Iterator[_Place]:
    tops = {i.path.partition("/")[0] for i in items if "/" in i.path}
    yield lambda path, _, layout: _by_part(path, step, layout, tops)
    yield lambda path, _, layout: _in_main_part(path, step, layout)
    layout = make(Path("/nonexistent/out"))
    roots = [os.path.relpath(root, "/nonexistent/out") for root in layout.watch_roots()]
    for root in roots:
        for name in _STEP_NAMES:
            yield _below(f"{root}/{name.format(step)}")
    yield lambda path, out, _: out / path


def _below(directory: str) -> _Place:
    """For a backup that is a step directory of this name."""
    return lambda path, out, _: out / directory / path


def _by_part(path: str, step: int, layout: Layout, tops: set[str]) -> Path | None:
    """For a backup whose directories have the names of the layout's parts."""
    part, _, inside = path.partition("/")
    if not layout.variant:
        layout.expect_parts(tops)
    with suppress(PodwatchError, KeyError, ValueError):
        return layout.part_dir(part, step) / inside if inside else None
    return None


def _in_main_part(path: str, step: int, layout: Layout) -> Path | None:
    """For a backup of the step directory of a layout with one part."""
    with suppress(PodwatchError, KeyError, ValueError):
        return layout.part_dir("checkpoint", step) / path
    return None


def _try(place: _Place, step: int, items: Sequence[Item], raw: Path, layout: Layout, out: Path) -> Fit | None:
    """None where the layout sees no such step in this arrangement. Raises Unfit where the step is there but
    incomplete."""
    out.mkdir(parents=True)
    back: dict[str, Item] = {}
    for number, item in enumerate(items):
        target = place(item.path, out, layout)
        if target is None or out not in target.parents:
            continue
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(raw / str(number), target)
        except (FileExistsError, NotADirectoryError):
            raise Unfit("one of its names is a file and a directory") from None
        back[str(target)] = item
    if not back:
        return None
    try:
        with sparse_on_purpose():
            parts = layout.steps().get(step)
            if parts is None:
                return None
            with closing(PinnedTree((out, *layout.watch_roots()))) as tree:
                write_trackers.repair(layout.trackers(step), tree, only_missing=True)
            found = tuple(scan_part(part).found for part in parts)
            if not any(p.part.required and p.present for p in found):
                return None
            judgement = layout.judge(step, found)
    except (PodwatchError, ValueError) as error:
        raise Unfit(f"the layout cannot judge it: {error}") from error
    if not judgement.whole:
        raise Unfit(judgement.reason or "it is not complete")
    return _fitted(step, layout, found, judgement, back, len(items))


def _fitted(
    step: int,
    layout: Layout,
    found: tuple[PartFiles, ...],
    judgement: Judgement,
    back: dict[str, Item],
    count: int,
) -> Fit:
    leftovers = frozenset(judgement.leftovers)
    files = tuple(
        FitFile(back[str(part.part.path / file.path)], part.part.name, file.path)
        for part in found
        if part.part.uploaded
        for file in part.files
        if checkpoint_identity.belongs(file, leftovers) and str(part.part.path / file.path) in back
    )
    name = checkpoint_identity.save_id(found, judgement)
    return Fit(step, layout.name, name, files, judgement.world_size, count - len(files))


# -- skeleton --------------------------------------------------------------------------------------------------------


class _First:
    """Takes the first bytes of a download, then ends it."""

    def __init__(self, most: int) -> None:
        self.data = bytearray()
        self._most = most

    def write(self, data: bytes) -> int:
        self.data += memoryview(data)[: self._most - len(self.data)]
        if len(self.data) >= self._most:
            raise _Enough
        return len(data)


def _skeleton(store: ObjectStore, item: Item, target: Path) -> None:
    size = item.stored.size
    whole = INDEX_BYTES if item.path.endswith(_INDEX_NAMES) else WHOLE_BYTES
    with target.open("xb") as file:
        if 0 < size <= whole:
            file.write(_read(store, item.stored, 0, size))
        elif size:
            os.ftruncate(file.fileno(), size)
            file.write(_read(store, item.stored, 0, END_BYTES))
            file.seek(size - END_BYTES)
            file.write(_read(store, item.stored, size - END_BYTES, END_BYTES))
    if target.stat().st_size != size:
        raise RemoteError("the object is shorter than listed", where=f"{store.url}/{item.stored.key}")
    os.utime(target, ns=(item.mtime_ns, item.mtime_ns))


def _read(store: ObjectStore, stored: StoredObject, offset: int, length: int) -> bytes:
    first = _First(length)
    with suppress(_Enough):
        store.get_file(stored.key, first, file_id=stored.file_id, offset=offset)  # type: ignore[arg-type]
    return bytes(first.data)


# -- import -----------------------------------------------------------------------------------------------------------

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
    for stored in store.identify(store.list(f"{source}/step_")):
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
        there = self._store.read(key)
        if there is None or not there[0].ours:
            return None
        stored, data = there
        with suppress(IntegrityError):
            return checked_manifest(self._keys, data, found.step, found.save_id, where=key), stored, data
        return None

    def take_in(self, found: Fit) -> None:
        """Copy, verify, write the manifest. Raises RemoteError. A repeated call continues an interrupted one."""
        if self.there(found):
            return
        notes = Notes(self._note_path(found))
        begun = {u.key: u.upload for u in self._store.unfinished(self._save(found)) if u.ours}
        files = tuple(self._copy(found, file, notes, begun) for file in found.files)
        proofs = [in_store(self._store, file, self._part_size) for file in files]
        for file, proof in zip(files, proofs, strict=True):
            if proof is None:
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
            proof=proof_of(proofs),
        )
        key = self._keys.manifest(found.step, found.save_id)
        stored = self._store.put_bytes(key, manifest.to_bytes())
        if self._store.get_bytes(key, stored.file_id) != manifest.to_bytes():
            raise IntegrityError("the stored manifest differs from the written one", where=f"{self._store.url}/{key}")
        notes.done()

    def point(self, newest: Fit, *, alive: bool) -> Placing:
        """Make the newest imported step the one that ``latest.json`` names, unless one of podwatch's own is newer."""
        current, before = pointer_as_stored(self._store, self._keys)
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
        data = pointer.to_bytes()
        if not self._store.conditional:
            self._store.put_bytes(self._keys.latest, data)
        elif self._store.replace(self._keys.latest, StreamSource(BytesIO(data)), len(data), before) is None:
            return Placing(False, "latest.json was changed meanwhile")
        return placing

    # -- below --------------------------------------------------------------------------------------------------------

    def _note_path(self, found: Fit) -> Path | None:
        name = f"{self._keys.run_id}.{found.step}.{found.save_id}.{self._part_size}"
        return None if self._notes is None else self._notes / name

    def _save(self, found: Fit) -> str:
        return self._keys.save(found.step, found.save_id)

    def _copy(self, found: Fit, file: FitFile, notes: Notes, begun: Mapping[str, Upload]) -> ManifestFile:
        source, remote = file.item.stored, f"{file.part}/{file.path}"
        key = self._keys.data(found.step, found.save_id, remote)
        noted = notes.stored.get(key)
        if noted is not None and self._is_there(key, noted[0], source.size):
            file_id, hashes = noted
        else:
            stored = (
                self._small(key, source) if source.size <= self._part_size else self._large(key, source, begun, notes)
            )
            file_id, hashes = stored.file_id, stored.parts_sha1
            if stored.size != source.size or len(hashes) != len(part_spans(source.size, self._part_size)):
                raise IntegrityError("the store copied a different object", where=f"{self._store.url}/{source.key}")
            notes.sent(key, file_id, hashes)
        self._progress(source.size)
        return ManifestFile(remote, file.part, source.size, file.item.mtime_ns, 0o644, key, file_id, hashes)

    def _is_there(self, key: str, file_id: str, size: int) -> bool:
        found = self._store.stat(key, file_id)
        return found is not None and bool(found.ours) and found.size == size

    def _small(self, key: str, source: StoredObject) -> StoredObject:
        stored = self._store.copy_small(key, source)
        if stored.parts_sha1 or not stored.size:
            return stored
        return replace(stored, parts_sha1=hashes_of(self._store, key, stored.file_id, self._part_size))

    def _large(self, key: str, source: StoredObject, begun: Mapping[str, Upload], notes: Notes) -> StoredObject:
        """Copy in parts; parts that a killed import copied are kept."""
        spans = part_spans(source.size, self._part_size)
        upload = notes.uploads.get(key) or begun.get(key)
        listed = self._store.parts_there(upload) if upload is not None else None
        there = recognized(listed, notes.parts(upload, spans)) if upload is not None and listed is not None else {}
        fitting = all(n <= len(spans) and part.size == spans[n - 1][1] for n, part in there.items())
        if upload is None or listed is None or not fitting:  # none yet, or in parts of another size
            upload, there = self._store.begin_large(key, source.size), {}
            notes.begun(upload)
        parts = []
        for number, (offset, length) in enumerate(spans, 1):
            part = there.get(number)
            if part is None:
                part = self._store.copy_part(upload, number, source, offset, length)
                notes.part(upload, number, part)
            parts.append(part)
        return self._store.finish_large(upload, parts, source.size)
