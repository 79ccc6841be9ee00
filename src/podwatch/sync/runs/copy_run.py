"""Copies a run into another store: each checkpoint whole and verified, then the pointer (docs/runs.md).

Blocking. Every part is read from the source, compared with the hash in the manifest, and only then sent; the target's
answer is compared again. The order is that of any publication: data, each object verified by id; the manifest; the
pointer, once, after the last checkpoint. A killed copy leaves objects without a manifest, which readers ignore; the
next copy continues from them.
"""

import hashlib
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path

from podwatch.domain.errors import Busy, HostError, IntegrityError, RemoteError, SaveGone
from podwatch.domain.manifest import Keys, Manifest, ManifestFile, ManifestRef, Pointer, sha1_hex
from podwatch.domain.stored_checkpoint import StoredSave
from podwatch.policy.store_retention import Placing, place_copy, sign_of_life
from podwatch.stores.base import ObjectStore, Progress, StoredObject, StoredPart, Take, Upload, recognized, store_time
from podwatch.stores.part_reader import FileSource, Source, StreamSource, part_spans
from podwatch.sync.connections import WorkerPool
from podwatch.sync.interfaces import rfc3339
from podwatch.sync.inventory import inventory
from podwatch.sync.publish_and_pointer import (
    checked_manifest,
    in_store,
    newest_pointer,
    pointer_as_stored,
    proof_of,
    read_optional,
)
from podwatch.sync.read_back import read_back
from podwatch.sync.runs.archive import signs
from podwatch.sync.runs.copied_so_far import Notes
from podwatch.system.clock import Clock

WRITER = "copy"
_MD5 = re.compile(r"[0-9a-f]{32}")
ARTEFACTS = ("config", "logs", "incidents")


@dataclass(frozen=True, slots=True)
class RunPlace:
    """A run in a store."""

    store: ObjectStore
    keys: Keys

    @property
    def where(self) -> str:
        return f"{self.store.url}/{self.keys.root}"


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """``saves``: to copy, that of the pointer first, then newest first; ``there``: whole in the target already;
    ``left_out``: step and reason. ``pointer``: that of the source, whose checkpoints are of ``lineages``; ``placing``:
    whether the target's follows it."""

    pointer: Pointer | None
    lineages: frozenset[str]
    saves: tuple[StoredSave, ...]
    there: tuple[StoredSave, ...]
    left_out: tuple[tuple[int, str], ...]
    placing: Placing

    @property
    def total_bytes(self) -> int:
        return sum(save.total_bytes for save in self.saves)


@dataclass(frozen=True, slots=True)
class Copied:
    """``saves`` are whole in the target; ``left_out``: step and reason of the others."""

    saves: tuple[StoredSave, ...]
    left_out: tuple[tuple[int, str], ...]
    placing: Placing


@dataclass(frozen=True, slots=True)
class CopyPace:
    """Connections to each store at first, and at most."""

    connections: int = 4
    connections_max: int = 32


class RunCopier:
    """``notes`` is a directory of this machine that records what was sent; without it, a copy that was killed sends the
    checkpoint again that it was about. ``progress`` is called with the number of bytes newly in the target."""

    def __init__(
        self,
        source: RunPlace,
        target: RunPlace,
        clock: Clock,
        *,
        pace: CopyPace = CopyPace(),
        notes: Path | None = None,
        progress: Progress = lambda count: None,
    ) -> None:
        self._source, self._target, self._clock = source, target, clock
        self._pace, self._notes, self._progress = pace, notes, progress

    def look(self, steps: frozenset[int] = frozenset()) -> CopyPlan:
        """What a copy would do; ``steps``: only these (empty: all). Raises Busy while a podwatch is active on the run
        in the target, IntegrityError where a pointer cannot be used, RemoteError for store trouble."""
        self._refuse_alive()
        source, keys = self._source.store, self._source.keys
        pointer = newest_pointer(source, keys)
        found, _ = inventory(source, keys)
        if pointer is not None:  # a writer that was frozen may have set the name back for a minute
            found = [replace(s, named=s.ref is not None and _is_named(s.ref, pointer)) for s in found]
        chosen = [s for s in found if not steps or s.step in steps]
        readable = (s for s in chosen if s.manifest is not None)  # S3 tells the time in whole seconds
        usable = sorted(readable, key=lambda s: (not s.named, -s.uploaded_wall, -s.step))
        there = tuple(s for s in usable if self._existing(s.content, optional=False) is not None)
        left_out = tuple((s.step, s.problem) for s in chosen if s.manifest is None)
        current, _ = pointer_as_stored(self._target.store, self._target.keys)
        lineages = frozenset(s.lineage for s in found if s.manifest is not None)
        placing = self._placing(pointer, current, lineages, chosen)
        return CopyPlan(pointer, lineages, tuple(s for s in usable if s not in there), there, left_out, placing)

    def carry_out(self, plan: CopyPlan) -> Copied:
        """Copy it, then move the target's pointer. A repeated call continues an interrupted one. A checkpoint that is
        damaged in the source, or is deleted there meanwhile, is left out. Raises Busy where a podwatch became active on
        the run in the target, RemoteError."""
        copied, left_out = list[StoredSave](), list(plan.left_out)
        for save in (*plan.saves, *plan.there):
            self._refuse_alive()
            try:
                self._save(save.content)
                copied.append(save)
                self._beside(save)
            except IntegrityError as error:
                left_out.append((save.step, str(error)))
        self._artefacts()
        return Copied(tuple(copied), tuple(left_out), self._point(plan, copied))

    def _beside(self, save: StoredSave) -> None:
        if save.optional:
            beside = read_optional(self._source.store, self._source.keys, save.step, save.save_id)
            if beside is not None:
                self._save(beside, optional=True)

    # -- pointer ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _placing(
        pointer: Pointer | None, current: Pointer | None, lineages: frozenset[str], copied: list[StoredSave]
    ) -> Placing:
        if pointer is not None and pointer.step is not None and not any(s.named for s in copied):
            return Placing(False, f"step {pointer.step}, which the source's latest.json names, is not copied")
        return place_copy(current, pointer, lineages)

    def _point(self, plan: CopyPlan, copied: list[StoredSave]) -> Placing:
        self._refuse_alive()
        store, keys = self._target.store, self._target.keys
        current, before = pointer_as_stored(store, keys)
        placing = self._placing(plan.pointer, current, plan.lineages, copied)
        if not placing.moves or plan.pointer is None:
            return placing
        pointer = replace(plan.pointer, run_id=keys.run_id, writer_id=WRITER, created_at=rfc3339(self._clock.wall()))
        save = next((s for s in copied if s.named), None)
        if save is not None:
            existing = self._existing(save.content, optional=False)
            if existing is None:
                raise RemoteError("a copied manifest is not in the store", where=self._target.where)
            stored, data = existing
            pointer = replace(
                pointer,
                manifest_key=stored.key,
                manifest_file_id=stored.file_id,
                manifest_sha1=sha1_hex(data),
                manifest_size=len(data),
            )
        body = pointer.to_bytes()
        if not store.conditional:
            store.put_bytes(keys.latest, body)
        elif store.replace(keys.latest, StreamSource(BytesIO(body)), len(body), before) is None:
            return Placing(False, "latest.json was changed meanwhile")
        if pointer_as_stored(store, keys)[0] != pointer:
            raise RemoteError("the store returns a different pointer than podwatch wrote", where=self._target.where)
        return placing

    def _refuse_alive(self) -> None:
        store = self._target.store
        walls = signs(store, self._target.keys)
        age = sign_of_life(walls, store_time(store, self._clock.wall()))
        if age is not None:
            raise Busy(
                f"podwatch is active on run {self._target.keys.run_id} in the target: its last heartbeat is {age:.0f} s"
                " old",
                where=self._target.where,
                fix="copy to another store, or stop podwatch there and wait 15 minutes",
            )

    # -- one checkpoint -----------------------------------------------------------------------------------------------

    def _existing(self, manifest: Manifest, *, optional: bool) -> tuple[StoredObject, bytes] | None:
        """The target's manifest of this checkpoint, if it is ours and lists the same files."""
        keys = self._target.keys
        key = (keys.optional if optional else keys.manifest)(manifest.step, manifest.save_id)
        found = self._target.store.read(key)
        if found is None or not found[0].ours:
            return None
        with suppress(IntegrityError):
            there = checked_manifest(keys, found[1], manifest.step, manifest.save_id, where=key)
            if _content(there) == _content(manifest):
                return found
        return None

    def _save(self, manifest: Manifest, *, optional: bool = False) -> None:
        if self._existing(manifest, optional=optional) is not None:
            return
        keys, store = self._target.keys, self._target.store
        notes = Notes(self._note_path(manifest))
        copies = [_Copy(self, file, manifest, notes) for file in manifest.files]
        pool = WorkerPool(self._pace.connections, self._pace.connections_max)
        pool.run([partial(copy.piece, number, pool.moved) for copy in copies for number in range(1, copy.pieces + 1)])
        files = tuple(copy.done() for copy in copies)
        proofs = [in_store(store, file, manifest.part_size) for file in files]
        for file, proof in zip(files, proofs, strict=True):
            if proof is None:
                raise RemoteError("a copied object is not in the store", where=f"{store.url}/{file.key}")
        body = replace(manifest, run_id=keys.run_id, files=files, proof=proof_of(proofs)).to_bytes()
        key = (keys.optional if optional else keys.manifest)(manifest.step, manifest.save_id)
        stored = store.put_bytes(key, body)
        if store.get_bytes(key, stored.file_id) != body:
            raise IntegrityError("the stored manifest differs from the written one", where=f"{store.url}/{key}")
        notes.done()

    def _note_path(self, manifest: Manifest) -> Path | None:
        if self._notes is None:
            return None
        target = self._target
        content = sha1_hex(repr((target.store.url, target.keys.root, _content(manifest))).encode())
        return self._notes / f"{target.keys.run_id}.{manifest.step}.{content[:16]}"

    # -- what explains the run ----------------------------------------------------------------------------------------

    def _artefacts(self) -> None:
        """Logs, incident bundles and configurations: each that the target does not have with this content. Nothing of
        the target is lost: where it has other content under a name, both are kept."""
        source, target = self._source, self._target
        for kind in ARTEFACTS:
            base = target.keys.artefacts(kind)
            there = {o.key.removeprefix(base): o for o in target.store.list(base)}
            for item in source.store.list(source.keys.artefacts(kind)):
                name = item.key.removeprefix(source.keys.artefacts(kind))
                held = [o for n in (name, self._other_name(name)) if (o := there.get(n)) and o.size == item.size]
                if item.ours is False or any(_same_hash(item, one) for one in held):
                    continue
                with suppress(IntegrityError):  # larger than any of podwatch's, or a name that is none
                    data = source.store.get_bytes(item.key, item.file_id)
                    if data is None or any(target.store.get_bytes(one.key, one.file_id) == data for one in held):
                        continue
                    self._artefact(base, name, data)

    def _artefact(self, base: str, name: str, data: bytes) -> None:
        """A file of the target is only replaced by one that continues it (a log that grew), or by a newer copy of the
        same file of this source, which has a name of its own."""
        store = self._target.store
        held = store.read(f"{base}{name}")
        if held is None or (held[0].ours and data.startswith(held[1])):
            store.put_bytes(f"{base}{name}", data)
            return
        other = f"{base}{self._other_name(name)}"
        before = store.stat(other)
        if before is None or before.ours:
            store.put_bytes(other, data)

    def _other_name(self, name: str) -> str:
        """The name of this source's file where the target has another one under ``name``."""
        stem, dot, end = name.partition(".")
        return f"{stem}.from-{sha1_hex(self._source.where.encode())[:8]}{dot}{end}"


def _is_named(ref: ManifestRef, pointer: Pointer) -> bool:
    return pointer.names(ref.key, ref.file_id) and ref.sha1 == pointer.manifest_sha1


class _Copy:
    """One file in flight. Its lock guards everything but the transfers."""

    def __init__(self, run: RunCopier, file: ManifestFile, manifest: Manifest, notes: Notes) -> None:
        self._run, self._file, self._notes = run, file, notes
        self._source, self._store = run._source.store, run._target.store
        self._part_size = manifest.part_size
        self._key = run._target.keys.data(manifest.step, manifest.save_id, file.path)
        self._spans = part_spans(file.size, manifest.part_size)
        self._large = len(self._spans) > 1
        self.pieces = self._left = max(1, len(self._spans))
        self._lock = threading.Lock()
        self._upload: Upload | None = None
        self._parts: dict[int, StoredPart] = {}
        self._file_id: str | None = None
        self._looked = False

    def done(self) -> ManifestFile:
        assert self._file_id is not None
        return replace(self._file, key=self._key, file_id=self._file_id)

    def piece(self, number: int, moved: Progress) -> None:
        with self._lock:
            if not self._looked:
                self._looked = True
                self._look()
            if self._file_id is None and self._large and self._upload is None:
                self._upload = self._store.begin_large(self._key, self._file.size)
                self._notes.begun(self._upload)
        if self._file_id is None and number not in self._parts:
            self._transfer(number, moved)
        with self._lock:
            self._left -= 1
            if self._left == 0 and self._file_id is None:
                self._finish()

    def _look(self) -> None:
        """What an earlier copy has sent."""
        file_id, hashes = self._notes.stored.get(self._key, ("", None))
        if hashes == self._file.parts_sha1:
            there = replace(self._file, key=self._key, file_id=file_id)
            if in_store(self._store, there, self._part_size) is not None:
                self._file_id = file_id
                self._run._progress(self._file.size)
                return
        upload = self._notes.uploads.get(self._key)
        listed = self._store.parts_there(upload) if upload is not None else None
        if upload is None or listed is None:
            return  # none, or finished or swept: sent again under the same name
        parts = recognized(listed, self._notes.parts(upload, self._spans))
        pairs = zip(self._spans, self._file.parts_sha1, strict=True)
        wanted = {n: (span[1], sha1) for n, (span, sha1) in enumerate(pairs, 1)}
        if any((part.size, part.sha1) != wanted.get(n) for n, part in parts.items()):
            self._store.cancel_large(upload)
            return
        self._upload, self._parts = upload, parts
        self._run._progress(sum(part.size for part in parts.values()))

    def _transfer(self, number: int, moved: Progress) -> None:
        with self._fetched(number) as (source, offset, length):
            if not self._large:
                stored = self._store.put_small(self._key, source, length, moved)
                self._settle(stored)
            else:
                assert self._upload is not None
                part = self._store.put_part(self._upload, number, source, offset, length, moved)
                if part.sha1 != self._file.parts_sha1[number - 1]:
                    raise IntegrityError("a part changed while it was copied", where=f"{self._store.url}/{self._key}")
                self._parts[number] = part
                self._notes.part(self._upload, number, part)
        self._run._progress(length)

    @contextmanager
    def _fetched(self, number: int) -> Iterator[tuple[Source, int, int]]:
        """One part of the source in an unnamed file, compared with its recorded hash; its offset and length."""
        offset, length = self._spans[number - 1] if self._spans else (0, 0)
        file, where = self._file, f"{self._source.url}/{self._file.key}"
        try:
            with tempfile.TemporaryFile() as scratch:
                digest = hashlib.sha1(usedforsecurity=False)

                def take(data: memoryview) -> None:
                    digest.update(data)
                    scratch.write(data)

                if length:
                    size = self._read(offset, length, take)
                    if size != file.size or digest.hexdigest() != file.parts_sha1[number - 1]:
                        raise IntegrityError(
                            "the object in the source is not the one that its manifest names",
                            where=where,
                            fix="`podwatch store verify --deep` shows what is damaged; copy the others with --step",
                        )
                scratch.flush()
                yield _Scratch(scratch.fileno(), offset), offset, length
        except OSError as error:
            raise HostError(
                f"a part cannot be kept here while it is copied: {error.strerror or error}",
                where=tempfile.gettempdir(),
                fix="set TMPDIR to a directory with space for some parts (sync.part_size each)",
            ) from error

    def _read(self, offset: int, length: int, take: Take) -> int:
        """The object's size. SaveGone where the source has it no more."""
        file = self._file
        try:
            return self._source.get_range(file.key, offset, length, take, file_id=file.file_id)
        except RemoteError as error:
            if error.transient or isinstance(error, IntegrityError) or self._source.stat(file.key, file.file_id):
                raise
            raise SaveGone("an object was deleted in the source", where=f"{self._source.url}/{file.key}") from error

    def _finish(self) -> None:
        assert self._upload is not None
        parts = [self._parts[n] for n in sorted(self._parts)]
        self._settle(self._store.finish_large(self._upload, parts, self._file.size))

    def _settle(self, stored: StoredObject) -> None:
        if stored.size != self._file.size:
            raise IntegrityError(
                "the store holds a different size than was sent", where=f"{self._store.url}/{self._key}"
            )
        if not stored.proof:
            read_back(self._store, stored, self._file.parts_sha1, self._part_size, None)
        self._file_id = stored.file_id
        self._notes.sent(self._key, stored.file_id, self._file.parts_sha1)


class _Scratch:
    """A file that holds one part of an object, read by the object's offsets."""

    def __init__(self, descriptor: int, at: int) -> None:
        self._file, self._at = FileSource(descriptor), at

    def read_at(self, offset: int, size: int) -> bytes:
        return self._file.read_at(offset - self._at, size)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        return self._file.read_into(offset - self._at, buffer)


def _same_hash(one: StoredObject, other: StoredObject) -> bool:
    """Whether the two stores' listings show the same hash of a whole object: B2's SHA-1, S3's ETag if it is an MD5."""
    shown = [(str(o.info.get("b2.sha1", "")), str(o.info.get("etag", ""))) for o in (one, other)]
    (sha1, etag), (other_sha1, other_etag) = shown
    return bool(sha1 and sha1 == other_sha1) or bool(_MD5.fullmatch(etag) and etag == other_etag)


def _content(manifest: Manifest) -> object:
    """What two manifests of one checkpoint have in common in two stores."""
    files = tuple((f.path, f.part, f.size, f.mtime_ns, f.mode, f.parts_sha1) for f in manifest.files)
    return (manifest.step, manifest.save_id, manifest.lineage, manifest.part_size, files, manifest.symlinks)
