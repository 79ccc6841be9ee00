"""Opens a store for a command: the configured one, or the one that ``--store`` names, without a configuration."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from podwatch.cli.common import Where
from podwatch.domain.errors import PodwatchError, RemoteError

if TYPE_CHECKING:
    from podwatch.config.settings import Settings
    from podwatch.store.objects.base import Objects


def open_configured_objects(settings: "Settings") -> "Objects":
    """The configured store, with the key that the daemon would use, that of the run's service included.
    ConfigurationError, PermissionDenied."""
    from podwatch.cli.offline import require_store, store_access
    from podwatch.store.objects.open import open_objects

    url = require_store(settings)
    _refuse_absent(url)
    return open_objects(url, store_access(settings), connections=settings.sync.connections)


@contextmanager
def opened(where: Where, url: str) -> "Iterator[tuple[Objects, str, str]]":
    """The store, the prefix of all runs in it, and the configured run ("" with ``url``, which needs no
    configuration)."""
    from podwatch.cli.offline import load
    from podwatch.store.objects.access import access_from
    from podwatch.store.objects.open import open_objects, parse_url

    if url:
        prefix, own = parse_url(url).prefix, where.run
        _refuse_absent(url)
        store = open_objects(url, access_from(url, os.environ), connections=2)
    else:
        settings = load(where)
        store = open_configured_objects(settings)
        prefix, own = parse_url(settings.sync.store).prefix, settings.run_id
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
