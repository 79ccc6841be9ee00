"""One run by what the store holds of it: as a record, for ``podwatch runs show`` and ``diff``, and as the evidence that
``runs check`` judges. Reads only; the evidence needs a key that can read."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from podwatch.domain.earlier_attempts import LastEnd
from podwatch.domain.errors import HostError, IntegrityError, RemoteError, SaveGone
from podwatch.domain.lease import GONE, Control, read_control
from podwatch.domain.secrets import scrub_argv
from podwatch.store.interfaces import read_or_none
from podwatch.store.keys import RunKeys
from podwatch.store.objects.base import Objects
from podwatch.store.runs.find import RunInStore, list_run
from podwatch.store.runs.judge import RunEvidence
from podwatch.store.runs.reading import (
    Activity,
    NewestSave,
    archived_at,
    read_activity,
    read_heartbeat,
    read_newest,
    store_time,
)
from podwatch.store.runs.start import fetch_start
from podwatch.store.runs.summary import StartedWith
from podwatch.store.verdict import read_verdict

FRESH_SECONDS = 180.0
"""A heartbeat that is younger answers by itself who holds the run; older than that, claims are listed, too: a billed
call."""


@dataclass(frozen=True, slots=True)
class StoredRun(RunInStore):
    """With what the run was started with, and what its newest checkpoint says. ``last``: the last verdict of a job."""

    texts: StartedWith = field(default_factory=StartedWith)
    layout: str = ""
    lineage: str = ""
    wandb: Mapping[str, str] = field(default_factory=dict)
    last: LastEnd | None = None

    @property
    def steps(self) -> tuple[int, ...]:
        """Of the checkpoints that the store holds."""
        return tuple(sorted({step for step, _ in self.listing.saves}))


def read_run(store: Objects, keys: RunKeys, wall: float) -> StoredRun:
    """HostError where podwatch has written nothing of this run; RemoteError if the store does not answer."""
    run = list_run(store, keys)
    if run.oldest_wall is None:
        what, fix = f"the store holds nothing of run {keys.run_id}", "`podwatch runs list` shows the runs"
        raise HostError(what, where=f"{store.url}: {keys.root}", fix=fix)
    beat = read_heartbeat(store, keys, wall)
    active = Activity(store_time(store, wall), beat, run.claim)
    newest = read_newest(store, keys, claimed=active.said.generation)
    manifest, pointer = newest.manifest, newest.pointer
    return StoredRun(
        run,
        active,
        None if pointer is None else pointer.step,
        newest.problem,
        texts=_started_with(store, keys, newest),
        layout="" if manifest is None else manifest.layout,
        lineage="" if pointer is None else pointer.lineage,
        wandb={} if pointer is None else pointer.wandb,
        last=read_verdict(store, keys).last,
    )


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


def read_run_evidence(store: Objects, keys: RunKeys, wall: float) -> RunEvidence:
    """``wall``: this machine's clock in epoch seconds. Raises RemoteError if the store does not answer or refuses the
    key."""
    active = read_activity(store, keys, wall, fresh=FRESH_SECONDS)
    newest = read_newest(store, keys, claimed=active.said.generation)
    doubtful = active.beat is None or active.beat.age > FRESH_SECONDS or active.said.state in GONE
    return RunEvidence(
        keys.run_id,
        beat=active.beat,
        claim_age=active.claim_age,
        pointer=newest.pointer is not None and newest.pointer.step is not None,
        pointer_step=None if newest.pointer is None else newest.pointer.step,
        pointer_problem=newest.problem,
        stopped_by_control=_stopped(store, keys),
        archived=doubtful and _is_archived(store, keys, active),
    )


def _is_archived(store: Objects, keys: RunKeys, active: Activity) -> bool:
    try:
        return archived_at(store, keys, active) is not None
    except RemoteError as error:
        if error.transient:
            raise
        return False  # a key that cannot list


def _stopped(store: Objects, keys: RunKeys) -> str | None:
    try:
        control = read_control(read_or_none(store, keys.control, Control), where=keys.control)
    except IntegrityError:
        return None  # the pods ignore it, too, and report it
    return (control.reason or "control.json") if control.stopped else None
