"""What every look at a run in a store needs: its time, listings that end, the heartbeat and the pointer.

Works with a key that can only read. The pointers are the record of what is newest; ``latest.json``, a copy, costs no
billed listing, and is what a key without the permission to list can read.
"""

import contextlib
from dataclasses import dataclass

from podwatch.domain.document import At, Document, Label, RunId
from podwatch.domain.errors import IntegrityError, RemoteError
from podwatch.domain.lease import GONE, Beat, Heartbeat, read_beat
from podwatch.store.documents import RunPointer, SaveManifest, manifest_hash
from podwatch.store.interfaces import read_or_none
from podwatch.store.keys import MANIFEST, Kind, RunKeys
from podwatch.store.objects.base import Objects
from podwatch.store.objects.errors import ObjectMissing, ObjectTooLarge, StoreRefused
from podwatch.store.pointers import claimed_generations, list_pointers, read_pointers

ALIVE_SECONDS = 900.0
"""A run whose newest heartbeat or claim is younger can have a podwatch that is only slow."""


def store_time(store: Objects, wall: float) -> float:
    """Now by the store's clock; ``wall``: by this machine's. Right only after an answer of the store."""
    return wall - (store.skew or 0.0)


def can_list(error: RemoteError) -> bool:
    """Whether ``error`` is something else than the refusal of a listing to a key that can read."""
    return not (isinstance(error, StoreRefused) and error.kind == "permission")


# -- heartbeat -------------------------------------------------------------------------------------------------------


def read_heartbeat(store: Objects, keys: RunKeys, wall: float) -> Beat | None:
    """The last heartbeat with its age by the store's clock; None without one. Where the key cannot list, the age is by
    the clock of the pod that wrote it."""
    data = _small(store, keys.heartbeat)
    if data is None:
        return None
    beat = read_beat(data)
    assert beat is not None
    try:
        written = next((item.wall for item in store.list(keys.heartbeat) if item.key == keys.heartbeat), None)
    except RemoteError as error:
        if can_list(error):
            raise
        written = beat.said.written_wall
    now = store_time(store, wall)
    return Beat(beat.said, beat.mark, max(0.0, now - (now if written is None else written)))


def _small(store: Objects, key: str) -> bytes | None:
    """One that is too large is one that cannot be read, not an absent one."""
    try:
        return store.read(key, Heartbeat.LARGEST)
    except ObjectMissing:
        return None
    except ObjectTooLarge:
        return b""


@dataclass(frozen=True, slots=True)
class Activity:
    """When a podwatch showed itself on a run: every age is by the store's clock, whose time was ``now``. ``claim``:
    (generation, time) of the newest claim; None without one, and where the key cannot list."""

    now: float
    beat: Beat | None = None
    claim: tuple[int, float] | None = None

    @property
    def said(self) -> Heartbeat:
        """The last heartbeat; an empty one without any."""
        return self.beat.said if self.beat is not None else Heartbeat()

    @property
    def written_wall(self) -> float | None:
        """When the heartbeat was written."""
        return None if self.beat is None else self.now - self.beat.age

    @property
    def claim_age(self) -> float | None:
        return None if self.claim is None else max(0.0, self.now - self.claim[1])

    @property
    def is_outdated(self) -> bool:
        """Whether the heartbeat is of a lower generation than the newest claim."""
        return self.beat is not None and self.claim is not None and self.claim[0] > self.beat.said.generation

    @property
    def seconds(self) -> float | None:
        """Since a podwatch that can still guard the run showed itself; None if none did within ``ALIVE_SECONDS``, or
        the last one has left, and none has claimed the run since."""
        left = self.said.state in GONE
        ages = [self.claim_age if not left or self.is_outdated else None]
        ages.append(self.beat.age if self.beat is not None and not left else None)
        age = min((age for age in ages if age is not None), default=ALIVE_SECONDS)
        return age if age < ALIVE_SECONDS else None


def read_activity(store: Objects, keys: RunKeys, wall: float, *, fresh: float = 0.0) -> Activity:
    """``wall``: by this machine's clock. The claims, whose listing is billed, are not read where the heartbeat of a pod
    that has not left is younger than ``fresh``. Raises RemoteError."""
    beat = read_heartbeat(store, keys, wall)
    answers = beat is not None and beat.age <= fresh and beat.said.state not in GONE
    claim = None if answers else _newest_claim(store, keys)
    return Activity(store_time(store, wall), beat, claim)


def _newest_claim(store: Objects, keys: RunKeys) -> tuple[int, float] | None:
    try:
        claims = [(keys.parse(item.key), item.wall) for item in store.list(keys.claims)]
    except RemoteError as error:
        if can_list(error):
            raise
        return None
    found = [(wall, name.generation) for name, wall in claims if name.kind is Kind.CLAIM]
    return None if not found else (max(found)[1], max(found)[0])


# -- pointer ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewestSave:
    """``pointer`` None: the run has none that can be read. ``problem``: why the newest cannot be used."""

    pointer: RunPointer | None = None
    manifest: SaveManifest | None = None
    problem: str = ""


def read_newest(store: Objects, keys: RunKeys, *, claimed: int = 0) -> NewestSave:
    """The newest pointer with its manifest. The pieces are not read: ``store verify`` does that. ``claimed``: a
    generation that is known to be claimed, as that of the heartbeat: up to it, the copy needs no billed listing."""
    reading = _Reading(store, keys, claimed)
    copy = reading.copy()
    if copy.pointer is not None and not copy.problem:
        return copy
    try:
        found = reading.newest()
    except RemoteError as error:
        if can_list(error):
            raise
        return copy
    return found if found.pointer is not None or found.problem else copy


@dataclass(slots=True)
class _Reading:
    store: Objects
    keys: RunKeys
    claimed: int

    def copy(self) -> NewestSave:
        """What ``latest.json`` names. Twice, because the pod can publish between the two reads, and delete what the
        copy named."""
        found = NewestSave()
        for _ in range(2):
            found = self._copy()
            if not found.problem:
                break
        return found

    def _copy(self) -> NewestSave:
        key = self.keys.latest
        try:
            pointer = RunPointer.from_bytes(self.store.read(key, RunPointer.LARGEST), where=key)
        except ObjectMissing:
            return NewestSave()
        except IntegrityError as error:
            return NewestSave(problem=str(error))
        if pointer.run_id != self.keys.run_id:
            return NewestSave(problem=f"{key} belongs to another run")
        if pointer.generation > self.claimed and not self._is_claimed(pointer.generation):
            return NewestSave(problem=f"{key}: no pod has claimed its generation, so it counts for nothing")
        return self._with_manifest(pointer)

    def _is_claimed(self, generation: int) -> bool:
        try:
            claims = claimed_generations(self.store, self.keys)
        except RemoteError as error:
            if can_list(error):
                raise
            return True  # what the claims are is not known
        return generation <= max(claims, default=generation)

    def newest(self) -> NewestSave:
        problem = ""
        for seen in read_pointers(self.store, self.keys, list_pointers(self.store, self.keys, claimed=self.claimed)):
            if seen.pointer is not None:
                return self._with_manifest(seen.pointer)
            problem = problem or f"{seen.key}: {seen.problem}"
        return NewestSave(problem=problem)

    def _with_manifest(self, pointer: RunPointer) -> NewestSave:
        manifest, problem = (None, "") if pointer.save is None else self._manifest(pointer)
        return NewestSave(pointer, manifest, problem)

    def _manifest(self, pointer: RunPointer) -> tuple[SaveManifest | None, str]:
        assert pointer.step is not None
        key = self.keys.save(pointer.step, pointer.save_id) + MANIFEST
        with contextlib.suppress(ObjectTooLarge):
            data = read_or_none(self.store, key, SaveManifest)
            if data is None:
                return None, f"the manifest of step {pointer.step}, the newest, is not in the store"
            if manifest_hash(data) == pointer.manifest_hash:
                try:
                    return SaveManifest.from_bytes(data, where=key), ""
                except IntegrityError as error:
                    return None, str(error)
        return None, f"the manifest of step {pointer.step}, the newest, is another one than the pointer names"


# -- archives --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArchiveRecord(Document):
    """``config/archived.json``, written after the last deletion. ``keep``: ``latest`` or ``milestones``."""

    KIND = "podwatch-archive"
    FILE = "archived.json"

    run_id: RunId
    keep: Label
    archived_at: At
    host: Label = ""


def record_key(keys: RunKeys) -> str:
    return keys.evidence("config") + ArchiveRecord.FILE


def archived_at(store: Objects, keys: RunKeys, active: Activity) -> float | None:
    """When the run was archived; None if it was not, or a pod has continued it since: then a heartbeat or a claim is
    newer. Raises RemoteError."""
    try:
        record = ArchiveRecord.from_bytes(read_or_none(store, record_key(keys), ArchiveRecord) or b"")
        listed = next((item.wall for item in store.list(record_key(keys))), None)
    except (IntegrityError, ObjectTooLarge):
        return None
    wall = record.archived_at if listed is None else listed
    newest = max(active.written_wall or 0.0, active.claim[1] if active.claim is not None else 0.0)
    return wall if wall is not None and record.run_id == keys.run_id and wall >= newest else None
