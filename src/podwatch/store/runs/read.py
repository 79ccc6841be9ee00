"""What a store holds of one run, or of every run: who was active on it, its newest save, what it was started with.

Reads only, for the most part with a key that can only read. Names from the store are shown and grouped, never used as
paths. The pointers are the record of what is newest; ``latest.json``, a copy, costs no billed listing, and is what a
key without the permission to list can read.
"""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from podwatch.domain.account_document import AccountTotals
from podwatch.domain.document import At, Document, Label, RunId
from podwatch.domain.earlier_attempts import LastEnd
from podwatch.domain.errors import HostError, IntegrityError, RemoteError, SaveGone
from podwatch.domain.lease import GONE, Beat, Control, Heartbeat, read_beat, read_control
from podwatch.domain.safe_names import valid_run_id
from podwatch.domain.secrets import scrub_argv
from podwatch.store.documents import RunPointer, SaveManifest, manifest_hash
from podwatch.store.interfaces import LISTING_SECONDS, list_bounded, read_or_none
from podwatch.store.inventory import SaveKey
from podwatch.store.keys import MANIFEST, Kind, ObjectName, RunKeys
from podwatch.store.objects.base import ObjectInfo, Objects
from podwatch.store.objects.errors import ObjectMissing, ObjectTooLarge, StoreRefused
from podwatch.store.pointers import PointerSeen, claimed_generations, list_pointers, rank_pointers, read_pointers
from podwatch.store.runs.difference import StartedWith
from podwatch.store.runs.start import fetch_start
from podwatch.store.verdict import read_verdict

ALIVE_SECONDS = 900.0
"""A run whose newest heartbeat or claim is younger can have a podwatch that is only slow."""
FRESH_SECONDS = 180.0
"""A heartbeat that is younger answers by itself who holds the run; older than that, claims are listed, too: a billed
call."""
ENDED = frozenset({"finished", "stopped", "gave-up", "failed", "refused", "blocked", "bad-host"})
"""Outcomes after which the run does not continue on its own. One that was preempted continues elsewhere."""
_MOST_RUNS = 10_000


def store_time(store: Objects, wall: float) -> float:
    """Now by the store's clock; ``wall``: by this machine's. Right only after an answer of the store."""
    return wall - (store.skew or 0.0)


def can_list(error: RemoteError) -> bool:
    """Whether ``error`` is something else than the refusal of a listing to a key that can read."""
    return not (isinstance(error, StoreRefused) and error.kind == "permission")


# -- who was active --------------------------------------------------------------------------------------------------


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


def read_heartbeat(store: Objects, keys: RunKeys, wall: float) -> Beat | None:
    """The last heartbeat with its age by the store's clock; None without one. Where the key cannot list, the age is by
    the clock of the pod that wrote it."""
    try:
        data = read_or_none(store, keys.heartbeat, Heartbeat)
    except ObjectTooLarge:
        data = b""  # one that cannot be read, not an absent one
    beat = read_beat(data)
    if beat is None:
        return None
    try:
        written = next((item.wall for item in store.list(keys.heartbeat) if item.key == keys.heartbeat), None)
    except RemoteError as error:
        if can_list(error):
            raise
        written = beat.said.written_wall
    now = store_time(store, wall)
    return Beat(beat.said, beat.mark, max(0.0, now - (now if written is None else written)))


def read_activity(store: Objects, keys: RunKeys, wall: float, *, fresh: float = 0.0) -> Activity:
    """``wall``: by this machine's clock. The claims, whose listing is billed, are not read where the heartbeat of a pod
    that has not left is younger than ``fresh``. Raises RemoteError."""
    beat = read_heartbeat(store, keys, wall)
    answers = beat is not None and beat.age <= fresh and beat.said.state not in GONE
    claim = None if answers else _newest_claim(store, keys)
    return Activity(store_time(store, wall), beat, claim)


def _newest_claim(store: Objects, keys: RunKeys) -> tuple[int, float] | None:
    try:
        return _listed(keys, store.list(keys.claims)).claim
    except RemoteError as error:
        if can_list(error):
            raise
        return None


# -- the newest save -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewestSave:
    """``pointer`` None: the run has none that can be read. ``problem``: why the newest cannot be used. Its pieces were
    not read: ``store verify`` does that."""

    pointer: RunPointer | None = None
    manifest: SaveManifest | None = None
    problem: str = ""

    @property
    def step(self) -> int | None:
        """None also after a deliberate fresh start."""
        return None if self.pointer is None else self.pointer.step

    @property
    def layout(self) -> str:
        return "" if self.manifest is None else self.manifest.layout


def newest_save(store: Objects, keys: RunKeys, ranked: Sequence[PointerSeen]) -> NewestSave:
    """What the highest of these pointers that can be read names. Raises RemoteError."""
    problem = ""
    for seen in read_pointers(store, keys, ranked):
        if seen.pointer is not None:
            return _with_manifest(store, keys, seen.pointer)
        problem = problem or f"{seen.key}: {seen.problem}"
    return NewestSave(problem=problem)


def read_newest(store: Objects, keys: RunKeys, *, claimed: int = 0) -> NewestSave:
    """By the copy of the pointer, or by the pointers where it is not usable. ``claimed``: a generation that is known to
    be claimed, as that of the heartbeat: up to it, the copy needs no billed listing. Raises RemoteError."""
    copy = _read_copy(store, keys, claimed)
    if copy.problem:  # the pod can publish between the two reads, and delete what the copy named
        copy = _read_copy(store, keys, claimed)
    if copy.pointer is not None and not copy.problem:
        return copy
    try:
        found = newest_save(store, keys, list_pointers(store, keys, claimed=claimed))
    except RemoteError as error:
        if can_list(error):
            raise
        return copy
    return found if found.pointer is not None or found.problem else copy


def _read_copy(store: Objects, keys: RunKeys, claimed: int) -> NewestSave:
    key = keys.latest
    try:
        pointer = RunPointer.from_bytes(store.read(key, RunPointer.LARGEST), where=key)
    except ObjectMissing:
        return NewestSave()
    except IntegrityError as error:
        return NewestSave(problem=str(error))
    if pointer.run_id != keys.run_id:
        return NewestSave(problem=f"{key} belongs to another run")
    if pointer.generation > claimed and not _is_claimed(store, keys, pointer.generation):
        return NewestSave(problem=f"{key}: no pod has claimed its generation, so it counts for nothing")
    return _with_manifest(store, keys, pointer)


def _is_claimed(store: Objects, keys: RunKeys, generation: int) -> bool:
    try:
        claims = claimed_generations(store, keys)
    except RemoteError as error:
        if can_list(error):
            raise
        return True  # what the claims are is not known
    return generation <= max(claims, default=generation)


def _with_manifest(store: Objects, keys: RunKeys, pointer: RunPointer) -> NewestSave:
    if pointer.step is None:
        return NewestSave(pointer)
    key, newest = (
        keys.save(pointer.step, pointer.save_id) + MANIFEST,
        f"the manifest of step {pointer.step}, the newest,",
    )
    with contextlib.suppress(ObjectTooLarge):
        data = read_or_none(store, key, SaveManifest)
        if data is None:
            return NewestSave(pointer, problem=f"{newest} is not in the store")
        if manifest_hash(data) == pointer.manifest_hash:
            try:
                return NewestSave(pointer, SaveManifest.from_bytes(data, where=key))
            except IntegrityError as error:
                return NewestSave(pointer, problem=str(error))
    return NewestSave(pointer, problem=f"{newest} is another one than the pointer names")


# -- listings --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RunListing:
    """What a listing says of one run: names, sizes, times of the store."""

    saves: set[SaveKey] = field(default_factory=set)
    size_bytes: int = 0
    oldest_wall: float | None = None
    claim: tuple[int, float] | None = None
    """(generation, time) of the newest claim."""
    claims: set[int] = field(default_factory=set)
    pointers: list[tuple[ObjectName, ObjectInfo]] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    """Of fixed documents and evidence, below the run's root."""

    def add(self, name: ObjectName, item: ObjectInfo) -> None:
        if name.kind is Kind.FOREIGN:
            return
        self.size_bytes += item.size
        self.oldest_wall = item.wall if self.oldest_wall is None else min(self.oldest_wall, item.wall)
        if name.kind is Kind.SAVE and name.rest == MANIFEST:
            self.saves.add((name.step, name.save_id))
        elif name.kind is Kind.POINTER:
            self.pointers.append((name, item))
        elif name.kind is Kind.CLAIM:
            self.claims.add(name.generation)
            self.claim = max(self.claim or (0, 0.0), (name.generation, item.wall), key=lambda claim: claim[::-1])
        elif name.kind in (Kind.DOCUMENT, Kind.EVIDENCE):
            self.names.add(name.rest)

    @property
    def steps(self) -> tuple[int, ...]:
        """Of the checkpoints that the store holds."""
        return tuple(sorted({step for step, _ in self.saves}))


def _listed(keys: RunKeys, items: Iterable[ObjectInfo]) -> RunListing:
    found = RunListing()
    for item in items:
        found.add(keys.parse(item.key), item)
    return found


def run_ids(store: Objects, prefix: str, seconds: float = LISTING_SECONDS) -> list[str]:
    """Every run below the prefix, by name. Raises RemoteError, also where the key cannot list."""
    return sorted(_group(list_bounded(store, f"{prefix}/" if prefix else "", seconds), prefix))


def _group(items: Iterable[ObjectInfo], prefix: str) -> dict[str, RunListing]:
    base = f"{prefix}/" if prefix else ""
    runs: dict[str, RunListing] = {}
    for item in items:
        run_id = item.key.removeprefix(base).partition("/")[0]
        if not valid_run_id(run_id) or (run_id not in runs and len(runs) >= _MOST_RUNS):
            continue
        name = RunKeys(run_id, prefix).parse(item.key)
        if name.kind is not Kind.FOREIGN:
            runs.setdefault(run_id, RunListing()).add(name, item)
    return runs


# -- runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunInStore:
    """One run, as far as it was read. ``stopped_by_control``: the reason in a control.json that stops it, None without
    one; ``archived_wall``: None if it is not archived, or was continued since. ``texts``: what it was started with;
    ``last``: the last verdict of a job."""

    run_id: str
    active: Activity
    newest: NewestSave = field(default_factory=NewestSave)
    listing: RunListing = field(default_factory=RunListing)
    stopped_by_control: str | None = None
    archived_wall: float | None = None
    texts: StartedWith = field(default_factory=StartedWith)
    last: LastEnd | None = None

    @property
    def said(self) -> Heartbeat:
        """The last heartbeat: what the run says of itself."""
        return self.active.said

    @property
    def account(self) -> AccountTotals:
        """Figures without their times are no totals."""
        found = self.said.account
        return AccountTotals() if found is None or found.since is None else found

    @property
    def ended(self) -> bool:
        return self.said.outcome in ENDED

    @property
    def started_wall(self) -> float | None:
        """By the oldest time that the store shows, or an account that begins earlier."""
        return min((at for at in (self.listing.oldest_wall, self.account.since) if at is not None), default=None)

    @property
    def ended_wall(self) -> float | None:
        """When the last step was made, by the store's clock."""
        written, said, last = self.active.written_wall, self.said.written_wall, self.said.step_wall
        return written if written is None or said is None or last is None else written - max(0.0, said - last)

    @property
    def duration(self) -> float | None:
        if self.started_wall is None or self.ended_wall is None or self.ended_wall < self.started_wall:
            return None
        return self.ended_wall - self.started_wall

    @property
    def step(self) -> int | None:
        """Where the last start made none, the run has at least what is stored."""
        return self.said.last_stored_step if self.said.step is None else self.said.step


def list_runs(store: Objects, prefix: str, own_run: str, wall: float) -> tuple[tuple[RunInStore, ...], str]:
    """Every run, by name, and a remark ("" if the whole store could be listed). Raises RemoteError.

    A key that is limited to ``own_run`` lists only that one.
    """
    base, remark = f"{prefix}/" if prefix else "", ""
    try:
        listed = _group(list_bounded(store, base), prefix)
    except RemoteError as error:
        if can_list(error) or not own_run:
            raise
        listed = _group(list_bounded(store, f"{base}{own_run}/"), prefix)
        remark = f"the key can list only run {own_run}"
    return tuple(_complete(store, RunKeys(run_id, prefix), listed[run_id], wall) for run_id in sorted(listed)), remark


def _complete(store: Objects, keys: RunKeys, run: RunListing, wall: float) -> RunInStore:
    ranked, _ = rank_pointers(run.pointers, run.claims)
    newest = newest_save(store, keys, ranked)
    beat = read_heartbeat(store, keys, wall) if "heartbeat.json" in run.names else None
    active = Activity(store_time(store, wall), beat, run.claim)
    archived = archived_at(store, keys, active) if f"config/{ArchiveRecord.FILE}" in run.names else None
    return RunInStore(keys.run_id, active, newest, run, archived_wall=archived)


def read_run(store: Objects, keys: RunKeys, wall: float) -> RunInStore:
    """All of it, for ``runs show`` and ``diff``. HostError where podwatch has written nothing of this run; RemoteError
    if the store does not answer."""
    run = _listed(keys, list_bounded(store, keys.root))
    if run.oldest_wall is None:
        what, fix = f"the store holds nothing of run {keys.run_id}", "`podwatch runs list` shows the runs"
        raise HostError(what, where=f"{store.url}: {keys.root}", fix=fix)
    beat = read_heartbeat(store, keys, wall)
    active = Activity(store_time(store, wall), beat, run.claim)
    newest = read_newest(store, keys, claimed=active.said.generation)
    texts, last = _started_with(store, keys, newest), read_verdict(store, keys).last
    return RunInStore(keys.run_id, active, newest, run, texts=texts, last=last)


def _started_with(store: Objects, keys: RunKeys, newest: NewestSave) -> StartedWith:
    command: tuple[str, ...] = ()
    problems: list[str] = []
    if newest.problem:
        problems.append(f"the newest checkpoint is not usable: {newest.problem}")
    elif newest.manifest is None:
        problems.append("no checkpoint is stored, so the command of a start is not known")
    else:
        command = tuple(scrub_argv(newest.manifest.train_command))
    try:
        fetched = fetch_start(store, keys)
    except SaveGone:
        return StartedWith(command, problems=(*problems, "no configuration is stored ([sync] artefacts = false)"))
    except IntegrityError as error:
        return StartedWith(command, problems=(*problems, f"the stored configuration is not usable: {error.what}"))
    record = fetched.record
    files = {one.path: fetched.texts[one.object] for one in (record.config, *record.files)}
    problems += [f"{one.path} is not stored: {one.reason}" for one in record.left_out]
    return StartedWith(command, files, record.settings, tuple(problems))


def read_run_to_check(store: Objects, keys: RunKeys, wall: float) -> RunInStore:
    """What ``runs check`` judges: a healthy run costs one billed listing. ``wall``: this machine's clock in epoch
    seconds. Raises RemoteError if the store does not answer or refuses the key."""
    active = read_activity(store, keys, wall, fresh=FRESH_SECONDS)
    newest = read_newest(store, keys, claimed=active.said.generation)
    doubtful = active.beat is None or active.beat.age > FRESH_SECONDS or active.said.state in GONE
    return RunInStore(
        keys.run_id, active, newest, stopped_by_control=_stopped(store, keys),
        archived_wall=archived_at(store, keys, active) if doubtful else None,
    )  # fmt: skip


def _stopped(store: Objects, keys: RunKeys) -> str | None:
    try:
        control = read_control(read_or_none(store, keys.control, Control), where=keys.control)
    except IntegrityError:
        return None  # the pods ignore it, too, and report it
    return (control.reason or "control.json") if control.stopped else None


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
    newer. None also for a key that cannot list. Raises RemoteError."""
    try:
        record = ArchiveRecord.from_bytes(read_or_none(store, record_key(keys), ArchiveRecord) or b"")
        listed = next((item.wall for item in store.list(record_key(keys))), None)
    except IntegrityError:
        return None
    except RemoteError as error:
        if can_list(error):
            raise
        return None
    wall = record.archived_at if listed is None else listed
    newest = max(active.written_wall or 0.0, active.claim[1] if active.claim is not None else 0.0)
    return wall if wall is not None and record.run_id == keys.run_id and wall >= newest else None
