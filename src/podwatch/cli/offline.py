"""A run without its daemon: settings, journal, checkpoints on disk, and the runs in the store."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from podwatch.cli.common import Where, find_daemon
from podwatch.domain.errors import ConfigurationError, HostError, PodwatchError, RemoteError, UsageError

if TYPE_CHECKING:
    from podwatch.checkpoints.held_back import HeldBack
    from podwatch.checkpoints.known_checkpoints import Catalogue
    from podwatch.checkpoints.layout import Layout
    from podwatch.checkpoints.records import RecordFiles
    from podwatch.config.settings import Settings
    from podwatch.domain.process import FoundTree
    from podwatch.domain.run_state import RunState
    from podwatch.journal.journal import Journal
    from podwatch.recovery.run_file import RunFile
    from podwatch.store.inventory import Inventory
    from podwatch.store.objects.access import Access
    from podwatch.store.objects.base import Objects
    from podwatch.store.restore.restore import StoreOfRun
    from podwatch.system.own_directories import Workspace


def load(where: Where) -> "Settings":
    """The settings that ``podwatch run`` would use; where no file is named or in its usual place, those of the podwatch
    that runs. ConfigurationError (exit 78)."""
    from podwatch.config.loading import find_file, load_settings

    path = find_file(where.path, environ=os.environ, run=where.run)
    if path is None and (found := find_daemon(where)) is not None and found.endpoint.config_path:
        path = Path(found.endpoint.config_path)
    return load_settings(path, environ=os.environ, run=where.run).settings


def journal_path(settings: "Settings") -> Path:
    return settings.state_dir / settings.run_id / "journal.sqlite"


@contextmanager
def read_journal(where: Where) -> Iterator["Journal"]:
    """The run's journal, read-only. HostError if there is none yet."""
    from podwatch.journal.journal import Journal

    path = journal_path(load(where))
    if not path.exists():
        raise HostError("this run has no journal yet", where=str(path), fix="`podwatch run` creates it")
    journal = Journal.open(path, read_only=True)
    try:
        yield journal
    finally:
        journal.close()


def _journal_if_any(settings: "Settings") -> "Journal | None":
    """The run's journal, read-only; None if it is absent or unreadable."""
    from podwatch.journal.journal import Journal

    path = journal_path(settings)
    if not path.exists():
        return None
    try:
        return Journal.open(path, read_only=True)
    except HostError:
        return None


def run_file(settings: "Settings", run_id: str = "") -> "RunFile":
    """run.json of this run, or of another one of the same state directory; not read yet."""
    from podwatch.app.paths_and_run_lock import workspace_of
    from podwatch.recovery.run_file import RunFile
    from podwatch.system.clock import SystemClock

    name = run_id or settings.run_id
    return RunFile(settings.state_dir / name, workspace_of(settings), name, SystemClock())


def recorded(settings: "Settings", run_id: str = "") -> "RunState | None":
    """What is recorded of the run; None where there is nothing, or nothing readable. Changes nothing. HostError."""
    return run_file(settings, run_id).load(looking=True)


def record_files(settings: "Settings", workspace: "Workspace") -> "RecordFiles":
    from podwatch.checkpoints.records import RecordFiles

    return RecordFiles(settings.state_dir / settings.run_id / "records", workspace.records_copy, workspace.tree)


def look(settings: "Settings", problems: list[str] | None = None) -> "Catalogue":
    """A catalogue after two scans, which completeness needs, with the checkpoints marked that the daemon holds back.
    ``problems`` receives what could not be read for the marks. Blocks on the file system."""
    from podwatch.app.paths_and_run_lock import workspace_of
    from podwatch.checkpoints.known_checkpoints import Catalogue
    from podwatch.checkpoints.records import CheckpointRecords
    from podwatch.checkpoints.trainers import make_layout
    from podwatch.system.clock import SystemClock
    from podwatch.system.procfs import boot_id, boot_wall

    rules = settings.checkpoints
    journal = _journal_if_any(settings)
    try:
        layout, workspace = make_layout(settings), workspace_of(settings)
        catalogue = Catalogue(
            layout,
            SystemClock(),
            settle=rules.settle,
            settle_weak=rules.settle_weak,
            settle_tracker=rules.settle_tracker,
            records=CheckpointRecords(
                record_files(settings, workspace),
                boot_id=boot_id(),
                boot_wall=boot_wall(),
                writes=False,
            ),
            held_back=_held_back(settings, layout, journal, problems if problems is not None else []),
            tree=workspace.tree,
        )
        catalogue.rescan()
        catalogue.rescan()
    finally:
        if journal is not None:
            journal.close()
    return catalogue


def _held_back(settings: "Settings", layout: "Layout", journal: "Journal | None", problems: list[str]) -> "HeldBack":
    """The checkpoints that a daemon would hold back if it started now, by journal and run.json."""
    from podwatch.app import held_back_findings
    from podwatch.checkpoints.held_back import HeldBack
    from podwatch.domain.errors import PodwatchError

    held = (
        HeldBack()
        if journal is None
        else held_back_findings.recalled_spans(journal.learned(held_back_findings.TWO_WRITERS_KEY))
    )
    try:
        run = recorded(settings)
    except PodwatchError as error:
        problems.append(f"podwatch cannot mark checkpoints of an earlier lineage: {error}")
        return held
    if run is not None:
        held.follow(run)
    return held


@dataclass(frozen=True, slots=True)
class TrainingHere:
    """The training of a run on this pod. ``pid``: of the launcher that podwatch started; 0 for none, then ``trees``
    may train the run, and podwatch did not start them."""

    pid: int = 0
    trees: "tuple[FoundTree, ...]" = ()

    @property
    def attachable(self) -> "list[FoundTree]":
        from podwatch.domain.process import TreeAnswer

        return [tree for tree in self.trees if tree.answer is TreeAnswer.ATTACH]

    @property
    def text(self) -> str:
        """The training that certainly runs; empty if there is none."""
        if self.pid:
            return f"training is running (pid {self.pid})"
        if len(self.attachable) != 1:
            return ""
        return f"a trainer that podwatch did not start is running (pid {self.attachable[0].launcher.pid})"

    @property
    def possible(self) -> str:
        """The same, or what could be this run's training."""
        trees = (f"pid {one.launcher.pid} could be this run's training: {one.reason}" for one in self.trees)
        return self.text if self.pid else "; ".join(trees)


def training_here(settings: "Settings") -> TrainingHere:
    """Searches /proc unless training runs under its supervisor. Blocks."""
    from podwatch.checkpoints.trainers import process_names
    from podwatch.system.procfs import is_alive
    from podwatch.trainer.find import find_trees, sought_run
    from podwatch.trainer.process_roles import Roles
    from podwatch.trainer.supervisor_files import read_record

    record = read_record(settings.state_dir / settings.run_id / "supervisor")
    if record is not None and is_alive(record.launcher):
        return TrainingHere(record.launcher.pid)
    return TrainingHere(trees=find_trees(sought_run(settings), Roles(process_names())))


def require_store(settings: "Settings") -> str:
    """The store's URL. ConfigurationError if none is configured."""
    if not settings.sync.store:
        raise ConfigurationError("no store is configured", where="[sync] store", fix='set it to "b2://bucket"')
    return settings.sync.store


def store_access(settings: "Settings") -> "Access":
    """The store's key, from the same sources as the daemon's, the key file of the run's service included.
    ConfigurationError, PermissionDenied."""
    from podwatch.store.objects.access import access_for

    return access_for(settings, {**service_environment(settings.run_id), **os.environ})


def service_environment(run_id: str) -> dict[str, str]:
    """What systemd gives the service of this run from its key file; nothing where none is installed."""
    from podwatch.cli.systemd_service import Service, variables_of

    for service in (Service(), Service(run_id)):
        if service.installed_for()[0] == run_id:
            return variables_of(service.key_file)
    return {}


def store_of_run(settings: "Settings", run_id: str = "") -> "StoreOfRun":
    """Where this run, or another one of the same prefix, is stored; its key is that of the daemon. ConfigurationError
    if no store is configured."""
    from podwatch.store.keys import RunKeys
    from podwatch.store.objects.open import parse_url
    from podwatch.store.restore.restore import StoreOfRun

    url = require_store(settings)
    keys = RunKeys(run_id or settings.run_id, parse_url(url).prefix)
    return StoreOfRun(url, keys, lambda: store_access(settings), settings.sync.connections)


@contextmanager
def inventory_of(settings: "Settings") -> "Iterator[tuple[Objects, StoreOfRun, Inventory]]":
    """This run's store, open, with its address and its inventory. ConfigurationError if none is configured."""
    from podwatch.store.inventory import take_inventory

    place = store_of_run(settings)
    store = place.open()
    try:
        yield store, place, take_inventory(store, place.keys)
    finally:
        store.close()


# -- runs in the store -----------------------------------------------------------------------------------------------


@contextmanager
def opened(where: Where, url: str) -> "Iterator[tuple[Objects, str, str]]":
    """The store, the prefix of all runs in it, and the configured run ("" with ``url``, which needs no
    configuration)."""
    from podwatch.store.objects.access import access_from
    from podwatch.store.objects.open import open_objects, parse_url

    settings = None if url else load(where)
    place = url if settings is None else require_store(settings)
    own = where.run if settings is None else settings.run_id
    _refuse_absent(place)
    access = access_from(url, os.environ) if settings is None else store_access(settings)
    store, prefix = open_objects(place, access, connections=2), parse_url(place).prefix
    try:
        yield store, prefix, own
    finally:
        store.close()


def _refuse_absent(url: str) -> None:
    """A directory that is not there is not an empty store: its disk is not mounted, or the name is wrong."""
    from podwatch.store.objects.open import parse_url

    path = parse_url(url).path
    if path is not None and not path.is_dir() and os.access(path.parent, os.X_OK):
        what = f"directory {path} not found"
        raise RemoteError(what, where=url, fix="mount it, or correct the store's URL", transient=False)


@contextmanager
def fixes_for(url: str, run_id: str) -> Iterator[None]:
    """With --store there is no configuration: an error names commands that work without one."""
    try:
        yield
    except PodwatchError as error:
        at = f"--store {url}`"
        for named, instead in (
            ("`podwatch store ls`", f"`podwatch runs show {run_id} {at}"),
            ("`podwatch runs list`", f"`podwatch runs list {at}"),
            ("`podwatch restore --step N`", f"`podwatch runs restore {run_id} --step N --to DIR {at}"),
        ):
            error.fix = error.fix.replace(named, instead) if url else error.fix
        raise


@contextmanager
def pins_here(settings: "Settings", run: str) -> Iterator[frozenset[int]]:
    """The steps that are pinned on this pod, under the run's lock. Busy if a podwatch guards the run here."""
    from podwatch.app.paths_and_run_lock import GUARD_LOCK
    from podwatch.system.files import FileLock

    state = settings.state_dir / run
    if not state.is_dir():
        yield frozenset()
        return
    with FileLock(state / GUARD_LOCK) as lock:
        assert lock.held
        state_of_run = recorded(settings, run)
        yield frozenset(() if state_of_run is None else state_of_run.pins)


def checked_run_id(text: str) -> str:
    from podwatch.domain.safe_names import valid_run_id

    if not valid_run_id(text):
        raise UsageError("not a valid run id", where=repr(text)[:120], fix="`podwatch runs list` shows the runs")
    return text
