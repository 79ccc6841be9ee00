"""Every run below a store's prefix, by one listing, and what ``podwatch runs list`` shows of each. Reads only.

Names from the store are shown and grouped, never used as paths.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from podwatch.domain.errors import RemoteError
from podwatch.domain.safe_names import valid_run_id
from podwatch.store.interfaces import LISTING_SECONDS, list_bounded
from podwatch.store.inventory import SaveKey
from podwatch.store.keys import MANIFEST, Kind, ObjectName, RunKeys
from podwatch.store.objects.base import ObjectInfo, Objects
from podwatch.store.pointers import rank_pointers, read_pointers
from podwatch.store.runs.reading import Activity, ArchiveRecord, archived_at, can_list, read_heartbeat, store_time
from podwatch.store.runs.summary import RunSummary, summarize

_MOST_RUNS = 10_000


@dataclass(slots=True)
class RunListing:
    """What a listing says of one run: names, sizes, times of the store."""

    run_id: str
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
        self.size_bytes += item.size
        self.oldest_wall = item.wall if self.oldest_wall is None else min(self.oldest_wall, item.wall)
        if name.kind is Kind.SAVE and name.rest == MANIFEST:
            self.saves.add((name.step, name.save_id))
        elif name.kind is Kind.POINTER:
            self.pointers.append((name, item))
        elif name.kind is Kind.CLAIM:
            self.claims.add(name.generation)
            if self.claim is None or item.wall > self.claim[1]:
                self.claim = (name.generation, item.wall)
        elif name.kind in (Kind.DOCUMENT, Kind.EVIDENCE):
            self.names.add(name.rest)


@dataclass(frozen=True, slots=True)
class RunInStore:
    """``problem``: why the newest pointer cannot be used; ``archived_wall``: None if it is not archived."""

    listing: RunListing
    active: Activity
    newest_step: int | None = None
    problem: str = ""
    archived_wall: float | None = None

    @property
    def run_id(self) -> str:
        return self.listing.run_id

    @property
    def summary(self) -> RunSummary:
        """By its last heartbeat."""
        return summarize(
            self.run_id, self.active.said, began_wall=self.listing.oldest_wall, written_wall=self.active.written_wall
        )


def list_run(store: Objects, keys: RunKeys) -> RunListing:
    """Raises RemoteError."""
    run = RunListing(keys.run_id)
    for item in list_bounded(store, keys.root):
        if (name := keys.parse(item.key)).kind is not Kind.FOREIGN:
            run.add(name, item)
    return run


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
    runs = [_complete(store, RunKeys(run.run_id, prefix), run, wall) for run in listed.values()]
    return tuple(sorted(runs, key=lambda run: run.run_id)), remark


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
            runs.setdefault(run_id, RunListing(run_id)).add(name, item)
    return runs


def _complete(store: Objects, keys: RunKeys, run: RunListing, wall: float) -> RunInStore:
    step, problem = newest_step(store, keys, run)
    beat = read_heartbeat(store, keys, wall) if "heartbeat.json" in run.names else None
    active = Activity(store_time(store, wall), beat, run.claim)
    record = f"config/{ArchiveRecord.FILE}" in run.names
    return RunInStore(run, active, step, problem, archived_at(store, keys, active) if record else None)


def newest_step(store: Objects, keys: RunKeys, run: RunListing) -> tuple[int | None, str]:
    """The step that the newest pointer names, and why it cannot be used. Without a pointer: the highest stored one."""
    ranked, _ = rank_pointers(run.pointers, run.claims)
    problem = ""
    for seen in read_pointers(store, keys, ranked):
        if (pointer := seen.pointer) is None:
            problem = problem or f"{seen.key}: {seen.problem}"
            continue
        if pointer.save is not None and pointer.save not in run.saves:
            problem = problem or f"it names step {pointer.step}, whose manifest is not in the store"
        return pointer.step, problem
    return (None if ranked else max((step for step, _ in run.saves), default=None)), problem
