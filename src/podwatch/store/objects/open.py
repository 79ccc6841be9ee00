"""A store by its URL. What a kind of store needs is imported only when one is opened.

An installed package can add a scheme by an entry point: it is called with the URL, ``access`` and the number of
connections, and returns something with the seven operations.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from podwatch.config import plugins
from podwatch.config.store_kinds import EXAMPLES, KINDS
from podwatch.domain.errors import ConfigurationError, IntegrityError
from podwatch.domain.safe_names import check_relative_path
from podwatch.store.objects.base import Objects

if TYPE_CHECKING:
    from podwatch.store.objects.b2 import B2Access
    from podwatch.store.objects.s3 import S3Access

_BUCKETS = {"b2": re.compile(r"[A-Za-z0-9-]{6,63}"), "s3": re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")}
"""S3 itself allows lower case only; older buckets and other servers are less strict."""


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """``prefix`` goes before the run's own names; ``path``: the directory, where it is one of this machine."""

    scheme: str
    bucket: str = ""
    prefix: str = ""
    path: Path | None = None


def parse_url(url: str) -> StoreUrl:
    """``b2://bucket[/prefix]``, ``s3://bucket[/prefix]``, ``file:///absolute/path``, or the URL of an added store, of
    which only the scheme counts. Raises ConfigurationError."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        path = Path(unquote(parts.path))
        if parts.netloc or not path.is_absolute() or ".." in path.parts:
            fix = 'write "file:///path", with three slashes'
            raise ConfigurationError("the store is not an absolute path", where=url, fix=fix)
        return StoreUrl("file", path=path)
    if "@" in parts.netloc or (":" in parts.netloc and parts.scheme in _BUCKETS):
        kind = KINDS.get(parts.scheme)
        fix = f"set {' and '.join(kind.key)} instead" if kind else "remove them from the URL"
        raise ConfigurationError("the store URL must not contain credentials", where=f"{parts.scheme}://...", fix=fix)
    if parts.scheme not in _BUCKETS:
        if plugins.find(plugins.STORES, parts.scheme) is None:
            raise ConfigurationError("unknown kind of store", where=url, fix=f"use {EXAMPLES}")
        return StoreUrl(parts.scheme)
    if "?" in url or "#" in url:  # what follows would be left out: another prefix, perhaps another run's
        raise ConfigurationError("the store URL contains ? or #", where=url, fix="use a prefix without them")
    if not _BUCKETS[parts.scheme].fullmatch(parts.netloc) or ".." in parts.netloc:
        fix = f'write "{parts.scheme}://bucket" or "{parts.scheme}://bucket/prefix"'
        raise ConfigurationError("not a bucket name", where=url, fix=fix)
    prefix = parts.path.strip("/")
    try:
        return StoreUrl(parts.scheme, parts.netloc, check_relative_path(prefix) if prefix else "")
    except IntegrityError:
        raise ConfigurationError("not a usable prefix", where=url, fix="use plain path segments") from None


def open_objects(
    url: str, access: "B2Access | S3Access | None", *, connections: int = 8, checksum: str = "sha256"
) -> Objects:
    """Opening asks nobody: the first call raises what is wrong. ``checksum``: see ``Checked.verifies``. Raises
    ConfigurationError for a bad URL, or access that does not fit it."""
    place = parse_url(url)
    if place.path is not None:
        from podwatch.store.objects.directory import DirectoryObjects

        return DirectoryObjects(place.path)
    if place.scheme == "b2":
        from podwatch.store.objects.b2 import B2Access, B2Objects

        if isinstance(access, B2Access):
            return B2Objects(place.bucket, access, connections=connections)
    elif place.scheme == "s3":
        from podwatch.store.objects.s3 import S3Access, S3Objects

        if isinstance(access, S3Access):
            return S3Objects(place.bucket, access, connections=connections, checksum=checksum)
    else:
        return _added(place.scheme, url, access, connections)
    names = " and ".join(KINDS[place.scheme].key)
    raise ConfigurationError("the store has no credentials", where=url, fix=f"set {names}")


def _added(scheme: str, url: str, access: Any, connections: int) -> Objects:
    plugin = plugins.find(plugins.STORES, scheme)
    assert plugin is not None  # the URL was parsed
    opener = plugin.load()
    with plugin.blamed():
        store: Objects = opener(url, access, connections=connections)
    plugin.check_protocol(store, Objects)
    return store
