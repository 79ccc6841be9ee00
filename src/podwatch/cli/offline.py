"""Look at a run without its daemon: its settings, its journal (read only), its checkpoints on disk."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from podwatch.cli.common import Where
from podwatch.domain.errors import HostError

if TYPE_CHECKING:
    from podwatch.checkpoints.catalogue import Catalogue
    from podwatch.config.settings import Settings
    from podwatch.journal.journal import Journal


def load(where: Where) -> "Settings":
    """The configuration that ``podwatch run`` would use. Raises ConfigurationError (exit 78)."""
    from podwatch.config.loading import load_settings

    path = Path(where.config) if where.config else None
    return load_settings(path, environ=os.environ, run=where.run).settings


def journal_path(settings: "Settings") -> Path:
    return settings.state_dir / settings.run_id / "journal.sqlite"


@contextmanager
def read_journal(where: Where) -> Iterator["Journal"]:
    """The run's journal, never changed by looking. HostError when there is none yet."""
    from podwatch.journal.journal import Journal

    path = journal_path(load(where))
    if not path.exists():
        raise HostError("this run has no journal yet", where=str(path), fix="it is made by the first `podwatch run`")
    journal = Journal.open(path, read_only=True)
    try:
        yield journal
    finally:
        journal.close()


def stored_sets(settings: "Settings") -> frozenset[tuple[int, str]] | None:
    """(step, save_id) of every set the journal knows to be published; None when there is no readable journal."""
    from podwatch.journal.journal import Journal

    path = journal_path(settings)
    if not path.exists():
        return None
    try:
        journal = Journal.open(path, read_only=True)
    except HostError:
        return None
    try:
        return frozenset((s.step, s.save_id) for s in journal.published())
    finally:
        journal.close()


def look(settings: "Settings") -> "Catalogue":
    """A catalogue that has looked twice, which is what it takes to call a set complete. Blocks on the file system."""
    from podwatch.checkpoints.catalogue import Catalogue
    from podwatch.checkpoints.layouts import make_layout
    from podwatch.system.clock import SystemClock

    rules = settings.checkpoints
    catalogue = Catalogue(make_layout(settings), SystemClock(), settle=rules.settle, settle_weak=rules.settle_weak)
    catalogue.rescan()
    catalogue.rescan()
    return catalogue
