"""What the store holds of a run: one listing, and each document once. The store is the only record of it.

Whatever a stranger put there is at most a problem that is shown: a name that podwatch does not use is foreign, a
document that cannot be read names nothing, and a save is whole only if its listing has each object of its manifest.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from podwatch.domain.checkpoint import FileEntry
from podwatch.domain.document import Document
from podwatch.domain.errors import IntegrityError
from podwatch.domain.run_state import RunState
from podwatch.domain.stored_checkpoint import StoredCheckpoint
from podwatch.store.documents import RunPointer, SaveIntent, SaveManifest, manifest_hash
from podwatch.store.keys import (
    EXPORTS,
    INTENT,
    MANIFEST,
    PINNED,
    SAVE_DOCUMENTS,
    Kind,
    ObjectName,
    Piece,
    RunKeys,
    contradicts,
)
from podwatch.store.objects.base import ObjectInfo, Objects
from podwatch.store.objects.errors import ObjectMissing
from podwatch.store.pointers import PointerSeen, rank_pointers

MOST_POINTERS = 100
"""Whose documents are read: the newest. Retention keeps no others that are older than a day."""
REUSED_SECONDS = 12 * 3600.0
"""Half of the age at which an unfinished upload is swept."""
SaveKey = tuple[int, str]
"""(step, save_id)."""


@dataclass(frozen=True, slots=True)
class Stored(StoredCheckpoint):
    """With what only this room reads. ``manifest`` is None where it cannot be read."""

    files: int = 0
    manifest: SaveManifest | None = None
    hash: str = ""

    @classmethod
    def of(
        cls, manifest: SaveManifest, digest: str, wall: float, objects: Collection[str], problem: str = ""
    ) -> "Stored":
        """``objects``: the names of what is below the save."""
        return cls(
            *manifest.key, manifest.lineage, manifest.generation, manifest.seq, manifest.total_bytes, wall,
            PINNED in objects, EXPORTS in objects, problem=problem, files=len(manifest.files), manifest=manifest,
            hash=digest,
        )  # fmt: skip

    @property
    def published(self) -> tuple[tuple[int, int], float, SaveKey]:
        """Orders saves as they were published."""
        return (self.order, self.wall, self.key)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An intent without a manifest. ``newest_wall``: of its newest object. ``intent`` is None where it cannot be read:
    what it names is unknown then, and nothing of it is ever deleted."""

    step: int
    save_id: str
    newest_wall: float
    bytes: int
    intent: SaveIntent | None = None
    problem: str = ""

    @property
    def key(self) -> SaveKey:
        return (self.step, self.save_id)


@dataclass(frozen=True, slots=True)
class Inventory:
    """``saves`` in the order in which they were published, ``pointers`` the newest first. ``store_wall``: the newest
    time that the store gave to a document of ours, so at most the store's present time. ``tmp``: (key, time)."""

    saves: tuple[Stored, ...] = ()
    unfinished: tuple[Unfinished, ...] = ()
    pointers: tuple[PointerSeen, ...] = ()
    latest: RunPointer | None = None
    tmp: tuple[tuple[str, float], ...] = ()
    store_wall: float = 0.0
    foreign: int = 0
    problems: tuple[str, ...] = ()
    forged: tuple[str, ...] = ()
    """Pointers of a generation that no pod has claimed: they count for nothing."""

    @property
    def newest(self) -> Stored | None:
        """What the highest pointer names whose save is whole; None after a fresh start."""
        for seen in self.pointers:
            if seen.pointer is not None:
                if seen.pointer.save is None:
                    return None
                if (found := self.named_by(seen.pointer)) is not None and not found.problem:
                    return found
        return None

    @property
    def pointer(self) -> RunPointer | None:
        """The highest one that can be read."""
        return next((seen.pointer for seen in self.pointers if seen.pointer is not None), None)

    def named_by(self, pointer: RunPointer) -> Stored | None:
        """The save with exactly the manifest that the pointer names."""
        return next((s for s in self.saves if s.key == pointer.save and s.hash == pointer.manifest_hash), None)

    @property
    def stored(self) -> frozenset[SaveKey]:
        """Every save that is whole."""
        return frozenset(save.key for save in self.saves if not save.problem)

    def newest_of(self, lineage: str) -> int:
        """The highest step of the lineage that is whole in the store; -1 if there is none."""
        return max((s.step for s in self.saves if not s.problem and s.lineage == lineage), default=-1)

    @property
    def names(self) -> int:
        """About how many names a listing has."""
        return len(self.pointers) + sum(s.files + 3 for s in self.saves) + 100 * len(self.unfinished)

    def find_save(self, step: int, files: Sequence[FileEntry]) -> Stored | None:
        """The whole save that consists of these files: it is not sent again."""
        for save in reversed(self.saves):
            same = save.step == step and save.manifest is not None and save.manifest.same_files(files)
            if same and not save.problem:
                return save
        return None

    def find_unfinished(
        self, step: int, files: Sequence[FileEntry], writer_id: str, *, within: float = REUSED_SECONDS
    ) -> Unfinished | None:
        """The upload of these files that this pod began, and continues. Not one that a sweep can already be removing,
        so only one that is younger than half of a sweep's age."""
        for one in self.unfinished:
            own = one.step == step and one.intent is not None and one.intent.writer_id == writer_id
            young = self.store_wall - one.newest_wall < within
            if own and young and one.intent is not None and one.intent.same_files(files):
                return one
        return None

    # -- what this pod has changed since the listing

    def with_save(self, saved: Stored) -> "Inventory":
        rest = self.without({saved.key})
        return replace(rest, saves=tuple(sorted((*rest.saves, saved), key=lambda s: s.published)))

    def with_intent(self, intent: SaveIntent) -> "Inventory":
        one = Unfinished(intent.step, intent.save_id, self.store_wall, 0, intent)
        return replace(self, unfinished=(*self.unfinished, one))

    def without(self, keys: Collection[SaveKey]) -> "Inventory":
        left = tuple(one for one in self.unfinished if one.key not in keys)
        return replace(self, saves=tuple(save for save in self.saves if save.key not in keys), unfinished=left)


@dataclass(frozen=True, slots=True)
class PointerDue:
    """A pointer that has to be written. ``save`` None: no save is the newest. ``interrupted``: the publication of the
    save was, before its pointer."""

    save: Stored | None
    interrupted: bool = False


def pointer_due(inventory: Inventory, run: RunState, here: Stored | None) -> PointerDue | None:
    """The pointer has to follow the run: after a step back or a fresh start has opened a lineage, a new pod would
    restore the abandoned save that it names. ``here``: the save that is this pod's newest checkpoint."""
    newest, lineage = inventory.pointer, run.lineage
    if lineage.parent and newest is not None and newest.lineage != lineage.id:
        target = _departed_from(inventory, run)
        if target is not None or lineage.parent_step is None:  # else what the store has is better than nothing
            return PointerDue(target)
    if here is None or not here.seq or here.lineage != lineage.id or inventory.newest_of(lineage.id) > here.step:
        return None
    named = any(seen.pointer is not None and seen.pointer.save == here.key for seen in inventory.pointers)
    return None if named else PointerDue(here, interrupted=True)


def _departed_from(inventory: Inventory, run: RunState) -> Stored | None:
    """The save from which the current lineage continues, or the highest below it that the store has; None: it began
    from nothing, or the store has none of them."""
    if (limit := run.lineage.parent_step) is None:
        return None
    last = {**run.ancestry, run.lineage.parent: limit}
    own = [s for s in inventory.saves if not s.problem and s.step <= min(limit, last.get(s.lineage, -1))]
    return max(own, key=lambda s: (s.step, s.order), default=None)


@dataclass(slots=True)
class DocumentCache:
    """Documents by name, size and time: what lies under a name never changes, or gets another time."""

    found: dict[tuple[str, int, float], tuple[Document | None, str, str]] = field(default_factory=dict)

    def read(self, store: Objects, item: ObjectInfo, kind: type[Document]) -> tuple[Document | None, str, str]:
        """(document or None, its hash, what is wrong). Raises RemoteError for trouble of the store."""
        key = (item.key, item.size, item.wall)
        if key not in self.found:
            self.found[key] = _read(store, item.key, kind)
        return self.found[key]

    def keep_only(self, items: Iterable[ObjectInfo]) -> None:
        names = {(item.key, item.size, item.wall) for item in items}
        self.found = {key: found for key, found in self.found.items() if key in names}


def _read(store: Objects, key: str, kind: type[Document]) -> tuple[Document | None, str, str]:
    try:
        data = store.read(key, kind.LARGEST)
        return kind.from_bytes(data, where=f"{store.url}/{key}"), manifest_hash(data), ""
    except ObjectMissing:
        return None, "", "it was deleted while it was read"
    except IntegrityError as error:
        return None, "", str(error)


def take_inventory(store: Objects, keys: RunKeys, cache: DocumentCache | None = None) -> Inventory:
    """Blocks. Raises RemoteError."""
    return _Taking(store, keys, cache if cache is not None else DocumentCache()).take()


class _Taking:
    def __init__(self, store: Objects, keys: RunKeys, cache: DocumentCache) -> None:
        self._store, self._keys, self._cache = store, keys, cache
        self._problems: list[str] = []

    def take(self) -> Inventory:
        items = list(self._store.list(self._keys.root))
        named = [(self._keys.parse(item.key), item) for item in items]
        self._cache.keep_only(items)
        claims = {name.generation for name, _ in named if name.kind is Kind.CLAIM}
        ranked, forged = rank_pointers(named, claims)
        pointers = self._pointers(ranked, {item.key: item for item in items})
        self._problems += [f"{key}: no pod has claimed its generation, so it counts for nothing" for key in forged]
        saves, unfinished, foreign = self._saves(named)
        own = (Kind.POINTER, Kind.CLAIM, Kind.DOCUMENT, Kind.TMP, Kind.LATEST)
        return Inventory(
            tuple(sorted(saves, key=lambda s: s.published)),
            tuple(unfinished),
            pointers,
            self._latest([item for name, item in named if name.kind is Kind.LATEST]),
            tuple((item.key, item.wall) for name, item in named if name.kind is Kind.TMP),
            max((item.wall for name, item in named if name.kind in own), default=0.0),
            len(foreign),
            tuple(self._problems),
            forged,
        )

    def _pointers(self, ranked: Sequence[PointerSeen], items: Mapping[str, ObjectInfo]) -> tuple[PointerSeen, ...]:
        newest = max((p.wall for p in ranked), default=0.0)
        return tuple(
            self._pointer(p, items[p.key]) if number < MOST_POINTERS or newest - p.wall < 2 * 86400 else p
            for number, p in enumerate(ranked)
        )

    def _pointer(self, seen: PointerSeen, item: ObjectInfo) -> PointerSeen:
        pointer, _, problem = self._cache.read(self._store, item, RunPointer)
        found = seen.with_document(pointer, problem, self._keys.run_id)
        if found.problem:
            self._problems.append(f"{item.key}: {found.problem}")
        return found

    def _latest(self, items: list[ObjectInfo]) -> RunPointer | None:
        for item in items:
            found, _, _ = self._cache.read(self._store, item, RunPointer)
            if isinstance(found, RunPointer) and found.run_id == self._keys.run_id:
                return found
        return None

    def _saves(self, named: list[tuple[ObjectName, ObjectInfo]]) -> tuple[list[Stored], list[Unfinished], list[str]]:
        inside: dict[SaveKey, dict[str, ObjectInfo]] = {}
        foreign = [name.rest for name, _ in named if name.kind is Kind.FOREIGN]
        for name, item in named:
            if name.kind is Kind.SAVE:
                inside.setdefault((name.step, name.save_id), {})[name.rest] = item
        saves, unfinished = list[Stored](), list[Unfinished]()
        for key, objects in inside.items():
            known = set[str]()
            if MANIFEST in objects:
                saves.append(save := self._save(key, objects))
                known = {p.name for p in save.manifest.objects()} if save.manifest is not None else set(objects)
            elif INTENT in objects:
                unfinished.append(one := self._unfinished(key, objects))
                known = {p.name for p in one.intent.objects()} if one.intent is not None else set(objects)
            documents = SAVE_DOCUMENTS if known else ()
            foreign += [f"step_{key[0]}/{key[1]}/{n}" for n in objects if n not in known and n not in documents]
        return saves, unfinished, foreign

    def _save(self, key: SaveKey, objects: Mapping[str, ObjectInfo]) -> Stored:
        item = objects[MANIFEST]
        manifest, digest, problem = self._cache.read(self._store, item, SaveManifest)
        if not isinstance(manifest, SaveManifest) or (manifest.run_id, manifest.key) != (self._keys.run_id, key):
            problem = problem or "the manifest belongs to another save"
            self._problems.append(f"{item.key}: {problem}")
            return Stored(*key, wall=item.wall, pinned=PINNED in objects, exports=EXPORTS in objects, problem=problem)
        missing = missing_objects(manifest.objects(), objects)
        if missing:
            problem = f"{len(missing)} of its objects are missing or different, e.g. {missing[0]}"
        return Stored.of(manifest, digest, item.wall, objects, problem)

    def _unfinished(self, key: SaveKey, objects: Mapping[str, ObjectInfo]) -> Unfinished:
        intent, _, problem = self._cache.read(self._store, objects[INTENT], SaveIntent)
        if isinstance(intent, SaveIntent) and (intent.run_id, intent.key) != (self._keys.run_id, key):
            intent, problem = None, "the intent belongs to another save"
        if problem:
            self._problems.append(f"{objects[INTENT].key}: {problem}")
        own = {p.name for p in intent.objects()} | {INTENT} if isinstance(intent, SaveIntent) else set(objects)
        parts = [item for name, item in objects.items() if name in own]
        newest, size = max(item.wall for item in parts), sum(item.size for item in parts)
        return Unfinished(*key, newest, size, intent if isinstance(intent, SaveIntent) else None, problem)


def missing_objects(pieces: Iterable[Piece], objects: Mapping[str, ObjectInfo]) -> list[str]:
    """The names of those that are not in ``objects`` (by name below the save) as they were sent."""
    return [piece.name for piece in pieces if not _is_stored(piece, objects.get(piece.name))]


def _is_stored(piece: Piece, item: ObjectInfo | None) -> bool:
    return item is not None and item.size == piece.size and not contradicts(item.hash, piece.hash)
