"""Reads what the store holds of runs, for ``podwatch runs``: the list of all runs, one run as a record, and the
evidence that ``runs check`` judges. Writes nothing.

The list takes one listing of everything below the store's prefix (a class C call per 1,000 objects), then two or three
small reads for each run. Names are only shown and grouped, never used as paths. The evidence needs a key that can read;
listing is used where the key allows it.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from podwatch.domain.earlier_attempts import LastEnd, parse_verdict
from podwatch.domain.errors import HostError, IntegrityError, RemoteError, SaveGone
from podwatch.domain.lease import Beat, Heartbeat, read_control
from podwatch.domain.manifest import Keys, Pointer
from podwatch.domain.safe_names import valid_run_id
from podwatch.domain.secrets import scrub_argv
from podwatch.policy.run_check import Evidence
from podwatch.policy.run_summary import Summary, Texts, summarize
from podwatch.policy.store_retention import sign_of_life
from podwatch.stores.base import AccessDenied, ObjectStore, StoredObject, store_time
from podwatch.sync.last_heartbeat import last_heartbeat
from podwatch.sync.publish_and_pointer import newest_pointer, read_manifest, read_pointer
from podwatch.sync.runs.archive import read_record
from podwatch.sync.runs.bootstrap import fetch

SMALL_JSON = 1 << 20
_MANIFEST = re.compile(r"^step_(\d{1,18})/([^/]+)/manifest\.json\Z")
_MOST_RUNS = 10_000


# -- all runs ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RemoteRun:
    """``ours``: podwatch has written here. Times are epoch seconds of the store, sizes bytes of the newest versions.
    ``last`` is what its podwatch reported last; ``alive``: seconds since the last heartbeat, if it is so
    recent that a podwatch is active on the run; ``problem``: why the pointer cannot be used."""

    run_id: str
    ours: bool = False
    newest_step: int | None = None
    sets: set[tuple[int, str]] = field(default_factory=set)
    size_bytes: int = 0
    heartbeat_wall: float | None = None
    claim_walls: list[float] = field(default_factory=list)
    last: Heartbeat = field(default_factory=Heartbeat)
    summary: Summary | None = None
    """By the last heartbeat; None without one."""
    oldest_wall: float | None = None
    alive: float | None = None
    archived_wall: float | None = None
    problem: str = ""
    unreadable: str = ""
    """What the operating system does not let podwatch read of it, in a directory store."""
    _seen: set[str] = field(default_factory=set)


def list_runs(store: ObjectStore, prefix: str, own_run: str, now_wall: float) -> tuple[tuple[RemoteRun, ...], str]:
    """Every run, by name, and a remark ("" if the whole store could be listed). Raises RemoteError.

    A key that is limited to ``own_run`` lists only that one.
    """
    base = f"{prefix}/" if prefix else ""
    remark = ""
    runs: dict[str, RemoteRun] = {}
    try:
        _group(store.list(base), base, runs)
    except AccessDenied as error:
        for run_id, key in _denied(error, base):
            run = runs.setdefault(run_id, RemoteRun(run_id))
            run.unreadable = run.unreadable or f"Permission denied: cannot read {key}"
    except RemoteError as error:
        if error.transient or isinstance(error, IntegrityError) or not own_run:
            raise
        _group(store.list(f"{base}{own_run}/"), base, runs)
        remark = f"the key can list only run {own_run}"
    found = [run for run in runs.values() if run.ours or run.unreadable]
    for run in found:
        if run.ours:
            try:
                _read(store, Keys(run.run_id, prefix), run, now_wall)
            except AccessDenied as error:
                run.unreadable = str(error)
    return tuple(sorted(found, key=lambda r: r.run_id)), remark


def _group(objects: Iterable[StoredObject], base: str, runs: dict[str, RemoteRun]) -> None:
    for item in objects:
        run_id, mark, inside = item.key.removeprefix(base).partition("/")
        if not mark or not valid_run_id(run_id) or (run_id not in runs and len(runs) >= _MOST_RUNS):
            continue
        run = runs.setdefault(run_id, RemoteRun(run_id))
        if inside.startswith("podwatch/"):
            _ours(run, item, inside.removeprefix("podwatch/"))


def _ours(run: RemoteRun, item: StoredObject, name: str) -> None:
    if item.ours is False:
        return
    run.ours = True
    run.size_bytes += item.size
    run.oldest_wall = item.uploaded_wall if run.oldest_wall is None else min(run.oldest_wall, item.uploaded_wall)
    if (match := _MANIFEST.match(name)) is not None:
        run.sets.add((int(match[1]), match[2]))
    elif name == "heartbeat.json":
        run.heartbeat_wall = item.uploaded_wall
    elif name.startswith("claims/"):
        run.claim_walls.append(item.uploaded_wall)
    elif name in ("archive.json", "latest.json"):
        run._seen.add(name)


def _read(store: ObjectStore, keys: Keys, run: RemoteRun, now_wall: float) -> None:
    pointer: Pointer | None = None
    if "latest.json" in run._seen:
        try:
            pointer = read_pointer(store, keys)
        except IntegrityError as error:
            run.problem = str(error)
    if (
        pointer is not None
        and pointer.step is not None
        and (pointer.step, pointer.save_id) not in run.sets
        and store.stat(pointer.manifest_key, pointer.manifest_file_id) is None  # it can be newer than the listing
    ):
        run.problem = f"it names step {pointer.step}, whose manifest is not in the store"
    run.newest_step = pointer.step if pointer is not None else None
    if run.newest_step is None and pointer is None:
        run.newest_step = max((step for step, _ in run.sets), default=None)
    walls = list(run.claim_walls)
    if run.heartbeat_wall is not None:
        run.summary, written, run.last = read_summary(store, keys, began_wall=run.oldest_wall)
        run.heartbeat_wall = run.heartbeat_wall if written is None else written
        walls.append(run.heartbeat_wall)
    run.alive = sign_of_life(walls, store_time(store, now_wall))
    if "archive.json" in run._seen and pointer is not None:
        record = read_record(store, keys)
        if record is not None and record.done and record.pointer == pointer.order:
            run.archived_wall = record.wall


# -- one run as a record -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredRun:
    """``steps``: of the checkpoints that the store holds. ``last``: the last verdict of a job."""

    summary: Summary
    texts: Texts = field(default_factory=Texts)
    newest_step: int | None = None
    steps: tuple[int, ...] = ()
    size_bytes: int = 0
    layout: str = ""
    lineage: str = ""
    wandb: Mapping[str, str] = field(default_factory=dict)
    heartbeat_wall: float | None = None
    last: LastEnd | None = None


def read_summary(
    store: ObjectStore, keys: Keys, *, began_wall: float | None = None
) -> tuple[Summary, float | None, Heartbeat]:
    """The summary by the heartbeat, when that was written, and the heartbeat. ``began_wall``: the oldest object known.
    Raises RemoteError."""
    said, written = last_heartbeat(store, keys) or (Heartbeat(), None)
    return summarize(keys.run_id, said, began_wall=began_wall, written_wall=written), written, said


def read_run(store: ObjectStore, keys: Keys) -> StoredRun:
    """HostError where podwatch has written nothing of this run; RemoteError if the store does not answer."""
    oldest: float | None = None
    steps: dict[int, None] = {}
    size = count = 0
    problems: list[str] = []
    try:
        for item in store.list(f"{keys.root}/"):
            if item.ours is False:
                continue
            count += 1
            size += item.size
            oldest = item.uploaded_wall if oldest is None else min(oldest, item.uploaded_wall)
            name = item.key.removeprefix(f"{keys.root}/step_")
            if name != item.key and name.endswith("/manifest.json") and name.partition("/")[0].isdigit():
                steps[int(name.partition("/")[0][:18])] = None
    except AccessDenied as error:
        if not count:
            raise
        problems.append(error.what)
    if not count:
        raise HostError(
            f"the store holds nothing of run {keys.run_id}",
            where=f"{store.url}: {keys.root}/",
            fix="`podwatch runs list` shows the runs",
        )
    summary, written, _ = read_summary(store, keys, began_wall=oldest)
    command, newest, layout, lineage, wandb = _newest(store, keys, problems)
    texts = _texts(store, keys, command, problems)
    return StoredRun(
        summary, texts, newest, tuple(sorted(steps)), size, layout, lineage, wandb, written, _last_end(store, keys)
    )


def _newest(
    store: ObjectStore, keys: Keys, problems: list[str]
) -> tuple[tuple[str, ...], int | None, str, str, Mapping[str, str]]:
    """Command, step, layout, lineage and W&B ids of the checkpoint that latest.json names."""
    try:
        pointer = newest_pointer(store, keys)
        if pointer is None or pointer.step is None:
            problems.append("no checkpoint is stored, so the command of a start is not known")
            return (), None, "", "", {}
        manifest = read_manifest(store, keys, pointer)
    except (IntegrityError, SaveGone) as error:
        problems.append(f"latest.json is not usable: {error.what}")
        return (), None, "", "", {}
    return (
        tuple(scrub_argv(manifest.train_command)),
        pointer.step,
        manifest.layout,
        pointer.lineage,
        dict(pointer.wandb),
    )


def _texts(store: ObjectStore, keys: Keys, command: tuple[str, ...], problems: list[str]) -> Texts:
    try:
        fetched = fetch(store, keys)
    except SaveGone:
        problems.append("no configuration is stored ([sync] artefacts = false)")
        return Texts(command, problems=tuple(problems))
    except IntegrityError as error:
        problems.append(f"the stored configuration is not usable: {error.what}")
        return Texts(command, problems=tuple(problems))
    record = fetched.record
    files = {one.path: fetched.texts[one.object] for one in (record.config, *record.files)}
    problems += [f"{one.path} is not stored: {one.reason}" for one in record.left_out]
    return Texts(command, files, record.settings, tuple(problems))


def _last_end(store: ObjectStore, keys: Keys) -> LastEnd | None:
    with contextlib.suppress(IntegrityError):
        try:
            return parse_verdict(store.get_bytes(keys.verdict, limit=SMALL_JSON)).last
        except RemoteError as error:
            if error.transient:
                raise
    return None


# -- evidence for ``runs check`` ---------------------------------------------------------------------------------------


def read_evidence(store: ObjectStore, keys: Keys, wall: Callable[[], float]) -> Evidence:
    """``wall``: this machine's clock in epoch seconds. Raises RemoteError if the store does not answer or refuses the
    key."""
    pointer, problem = _pointer(store, keys)
    beat = last_heartbeat(store, keys)
    claimed = _newest_claim(store, keys)
    now = store_time(store, wall())  # after an answer of the store, which shows its clock
    touched = max((t for t in (beat[1] if beat else None, claimed) if t is not None), default=0.0)
    return Evidence(
        keys.run_id,
        beat=None if beat is None else Beat(beat[0], age=max(0.0, now - beat[1])),
        claim_age=None if claimed is None else max(0.0, now - claimed),
        pointer=pointer is not None and pointer.step is not None,
        pointer_step=pointer.step if pointer is not None else None,
        pointer_problem=problem,
        stopped_by_control=_stopped(store, keys),
        archived=pointer is not None and _archived(store, keys, pointer, touched),
    )


def _pointer(store: ObjectStore, keys: Keys) -> tuple[Pointer | None, str]:
    """The pointer, and why it is not usable: the manifest that it names must be there, whole and of this run. The data
    objects are not read: `podwatch store verify` does that."""
    pointer: Pointer | None = None
    for _ in range(2):  # between the two reads the pod can publish, and delete what the pointer named
        problem = ""
        try:
            pointer = newest_pointer(store, keys)
            if pointer is not None and pointer.step is not None:
                read_manifest(store, keys, pointer)
            return pointer, ""
        except (IntegrityError, SaveGone) as error:
            problem = str(error)
    return pointer, problem


def _newest_claim(store: ObjectStore, keys: Keys) -> float | None:
    """When the newest claim was made, by the store's clock; None without claims, and where the key cannot list."""
    try:
        return max((c.uploaded_wall for c in store.list(keys.claims) if c.ours is not False), default=None)
    except RemoteError as error:
        if error.transient:
            raise
        return None  # the heartbeat is what counts


def _stopped(store: ObjectStore, keys: Keys) -> str | None:
    try:
        control = read_control(store.get_bytes(keys.control, limit=SMALL_JSON))
    except IntegrityError:
        return None  # the pods ignore it, too, and report it
    return (control.reason or "control.json") if control.stopped else None


def _archived(store: ObjectStore, keys: Keys, pointer: Pointer, touched: float) -> bool:
    """``touched``: when a pod last wrote a heartbeat or a claim. A later one continues the archived run."""
    found = store.stat(keys.archive)
    if found is None or found.uploaded_wall < touched:
        return False
    record = read_record(store, keys)
    return record is not None and record.done and record.pointer == pointer.order


def run_ids(store: ObjectStore, prefix: str) -> list[str]:
    """Every run of podwatch below the prefix, by name. Raises RemoteError, also where the key cannot list."""
    base = f"{prefix}/" if prefix else ""
    found: set[str] = set()
    try:
        for item in store.list(base):
            run_id, _, inside = item.key.removeprefix(base).partition("/")
            if item.ours is not False and inside.startswith("podwatch/") and valid_run_id(run_id):
                found.add(run_id)
    except AccessDenied as error:
        found.update(run_id for run_id, _ in _denied(error, base))
    return sorted(found)


def _denied(error: AccessDenied, base: str) -> list[tuple[str, str]]:
    """Run id and key of what could not be read. Raises the error if it is the whole store."""
    if any(len(key) <= len(base) for key in error.keys):
        raise error
    return [(key.removeprefix(base).partition("/")[0], key) for key in error.keys]
