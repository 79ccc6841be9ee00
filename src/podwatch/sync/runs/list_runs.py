"""Lists the runs in a store: podwatch's own, and backups that another tool left under ``<run_id>/step_N/``.

One listing of everything below the store's prefix (a class C call per 1,000 objects), then two or three small reads for
each podwatch run. Names are only shown and grouped, never used as paths.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from podwatch.domain.errors import IntegrityError, RemoteError
from podwatch.domain.manifest import Keys, Pointer, valid_run_id
from podwatch.policy.run_summary import Summary
from podwatch.policy.store_retention import sign_of_life
from podwatch.stores.base import ObjectStore, StoredObject, store_time
from podwatch.sync.inventory import LastWord, parse_last_word
from podwatch.sync.publish import read_pointer
from podwatch.sync.runs.archive import read_record
from podwatch.sync.runs.stored_record import read_summary

OLD_STEP = re.compile(r"^step_(0|[1-9]\d{0,17})/")
_MANIFEST = re.compile(r"^step_(\d{1,18})/([^/]+)/manifest\.json\Z")
_MOST_RUNS = 10_000


@dataclass(slots=True)
class EarlierBackups:
    """Backups of another tool: ``steps`` maps a step to its bytes; ``latest``: a latest.json is there."""

    steps: dict[int, int] = field(default_factory=dict)
    latest: bool = False


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
    last: LastWord = field(default_factory=LastWord)
    summary: Summary | None = None
    """By the last heartbeat; None without one."""
    oldest_wall: float | None = None
    alive: float | None = None
    archived_wall: float | None = None
    earlier: EarlierBackups = field(default_factory=EarlierBackups)
    problem: str = ""
    _seen: set[str] = field(default_factory=set)


def list_runs(store: ObjectStore, prefix: str, own_run: str, now_wall: float) -> tuple[tuple[RemoteRun, ...], str]:
    """Every run, by name, and a remark ("" if the whole store could be listed). Raises RemoteError.

    A key that is limited to ``own_run`` lists only that one.
    """
    base = f"{prefix}/" if prefix else ""
    remark = ""
    try:
        runs = _group(store.list(base), base)
    except RemoteError as error:
        if error.transient or isinstance(error, IntegrityError):
            raise
        runs = _group(store.list(f"{base}{own_run}/"), base)
        remark = f"the key can list only run {own_run}"
    found = [run for run in runs.values() if run.ours or run.earlier.steps]
    for run in found:
        if run.ours:
            _read(store, Keys(run.run_id, prefix), run, now_wall)
    return tuple(sorted(found, key=lambda r: r.run_id)), remark


def _group(objects: Iterable[StoredObject], base: str) -> dict[str, RemoteRun]:
    runs: dict[str, RemoteRun] = {}
    for item in objects:
        run_id, mark, inside = item.key.removeprefix(base).partition("/")
        if not mark or not valid_run_id(run_id) or (run_id not in runs and len(runs) >= _MOST_RUNS):
            continue
        run = runs.setdefault(run_id, RemoteRun(run_id))
        if inside.startswith("podwatch/"):
            _ours(run, item, inside.removeprefix("podwatch/"))
        elif (step := OLD_STEP.match(inside)) is not None and not item.ours:
            number = int(step[1])
            run.earlier.steps[number] = run.earlier.steps.get(number, 0) + item.size
        elif inside == "latest.json":
            run.earlier.latest = True
    return runs


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
    run.newest_step = pointer.step if pointer is not None else None
    if run.newest_step is None and pointer is None:
        run.newest_step = max((step for step, _ in run.sets), default=None)
    walls = list(run.claim_walls)
    if run.heartbeat_wall is not None:
        walls.append(run.heartbeat_wall)
        run.summary, _, beat = read_summary(store, keys, began_wall=run.oldest_wall)
        run.last = parse_last_word(beat)
    run.alive = sign_of_life(walls, store_time(store, now_wall))
    if "archive.json" in run._seen and pointer is not None:
        record = read_record(store, keys)
        if record is not None and record.done and record.pointer == pointer.order:
            run.archived_wall = record.wall
