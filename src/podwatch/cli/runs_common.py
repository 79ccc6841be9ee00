"""Shared by the ``podwatch runs`` commands: the store, and this pod's state of a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from podwatch.domain.errors import Busy, UsageError

if TYPE_CHECKING:
    from podwatch.config.settings import Settings
    from podwatch.stores.base import ObjectStore


class Here:
    """This pod's state of a run: its pins, and its record of the checkpoints in the store."""

    def __init__(self, journal: Any) -> None:
        self._journal = journal
        self.pins = frozenset(journal.pins()) if journal is not None else frozenset[int]()

    def forget(self, step: int, save_id: str) -> None:
        if self._journal is not None:
            self._journal.forget_save(step, save_id)


@contextmanager
def state_here(settings: "Settings", run: str) -> Iterator[Here]:
    """The run's state on this pod, if any, under the run's lock. Busy if a podwatch guards the run here."""
    from podwatch.journal.journal import Journal
    from podwatch.system.files import FileLock

    state = settings.state_dir / run
    if not state.is_dir():
        yield Here(None)
        return
    with FileLock(state / "lock") as lock:
        assert lock.held
        journal = Journal.open(state / "journal.sqlite") if (state / "journal.sqlite").exists() else None
        try:
            yield Here(journal)
        finally:
            if journal is not None:
                journal.close()


def guarded_here(settings: "Settings", run: str) -> bool:
    try:
        with state_here(settings, run):
            return False
    except Busy:
        return True


@contextmanager
def open_store(settings: "Settings") -> "Iterator[tuple[ObjectStore, str]]":
    from podwatch.cli.offline import open_configured_store
    from podwatch.stores.open import parse_store_url

    prefix = parse_store_url(store_url(settings)).prefix
    store = open_configured_store(settings)
    try:
        yield store, prefix
    finally:
        store.close()


def store_url(settings: "Settings") -> str:
    from podwatch.cli.offline import require_store

    return require_store(settings)


def checked_run_id(text: str) -> str:
    from podwatch.domain.manifest import valid_run_id

    if not valid_run_id(text):
        raise UsageError("not a valid run id", where=repr(text)[:120], fix="`podwatch runs list` shows the runs")
    return text
