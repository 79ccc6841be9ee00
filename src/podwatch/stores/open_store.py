"""Open a store by its URL. What a kind of store needs is imported only when one is opened.

An installed package can add a scheme by an entry point, which has the signature of ``open_store``. It is imported only
when such a store is opened. Its URL belongs to the package: podwatch puts no prefix before the object names.
"""

import re
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from urllib.parse import unquote, urlsplit

from podwatch.config import plugins
from podwatch.config.store_kinds import EXAMPLES, KINDS
from podwatch.domain.errors import ConfigurationError, IntegrityError
from podwatch.domain.safe_names import check_relative_path
from podwatch.stores.base import ObjectStore
from podwatch.stores.credentials import Credentials
from podwatch.stores.local import LocalStore
from podwatch.system.child import importing_without

_LOADING = threading.Lock()
_BUCKETS = {"b2": re.compile(r"[A-Za-z0-9-]{6,63}"), "s3": re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")}
"""S3 itself allows lower case only; older buckets and other servers are less strict."""


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """A parsed store URL. ``prefix`` goes before the run's own names; ``path``: the directory, where it is one of this
    machine."""

    scheme: str
    bucket: str = ""
    prefix: str = ""
    path: Path | None = None


def parse_store_url(url: str) -> StoreLocation:
    """``b2://bucket[/prefix]``, ``s3://bucket[/prefix]``, ``file:///absolute/path``, or the URL of an added store, of
    which only the scheme counts here. Raises ConfigurationError."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        path = Path(unquote(parts.path))
        if parts.netloc or not path.is_absolute() or ".." in path.parts:
            raise ConfigurationError(
                "the store is not an absolute path", where=url, fix='write "file:///path", with three slashes'
            )
        return StoreLocation("file", path=path)
    if parts.scheme in _BUCKETS:
        kind, prefix = parts.scheme, parts.path.strip("/")
        names = " and ".join(KINDS[kind].key)
        if "@" in parts.netloc or ":" in parts.netloc:
            raise ConfigurationError(
                "the store URL must not contain credentials", where=f"{kind}://...", fix=f"set {names} instead"
            )
        if "?" in url or "#" in url:  # what follows would be left out: another prefix, perhaps another run's
            raise ConfigurationError("the store URL contains ? or #", where=url, fix="use a prefix without them")
        if not _BUCKETS[kind].fullmatch(parts.netloc) or ".." in parts.netloc:
            fix = f'write "{kind}://bucket" or "{kind}://bucket/prefix"'
            raise ConfigurationError("not a bucket name", where=url, fix=fix)
        if prefix:
            try:
                check_relative_path(prefix)
            except IntegrityError:
                raise ConfigurationError("not a usable prefix", where=url, fix="use plain path segments") from None
        return StoreLocation(kind, bucket=parts.netloc, prefix=prefix)
    scheme, _, rest = url.partition("://")
    if plugins.find(plugins.STORES, scheme) is not None:
        if "@" in rest.partition("/")[0]:
            raise ConfigurationError(
                "the store URL must not contain credentials", where=f"{scheme}://...", fix="remove them from the URL"
            )
        return StoreLocation(scheme)
    raise ConfigurationError("unknown kind of store", where=url, fix=f"use {EXAMPLES}")


def load(kind: str) -> None:
    """Import what a store of this kind (``b2``, ``s3``) needs before it is opened, because that takes a moment."""
    if kind == "b2":
        # A store's answers are JSON or bytes, whose encodings nothing has to guess. Nothing else imports these two: a
        # thread that did so now would find them missing.
        needless = importing_without("chardet", "charset_normalizer")
        with _LOADING, needless, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # requests warns that it finds no guesser
            import b2sdk.v3  # noqa: F401
        from podwatch.stores.b2 import B2Store  # noqa: F401
    elif kind == "s3":
        from podwatch.stores.s3 import S3Store  # noqa: F401


def open_store(
    url: str,
    credentials: Credentials | None,
    *,
    writer_id: str,
    connections: int = 4,
    features: Mapping[str, object] = MappingProxyType({}),
) -> ObjectStore:
    """The store behind ``url``. Opening is lazy: the first call raises RemoteError if it fails.

    ``connections`` is the number of parallel connections the caller will use; ``features``: what an earlier store of
    this URL found out about it (``ObjectStore.features``). Raises ConfigurationError for a bad URL or missing
    credentials.
    """
    location = parse_store_url(url)
    if location.path is not None:
        return LocalStore(location.path, writer_id=writer_id)
    if location.scheme not in _BUCKETS:
        return _added(url, credentials, writer_id=writer_id, connections=connections)
    if credentials is None:
        raise ConfigurationError(
            "the store has no credentials",
            where=url,
            fix=f"set {' and '.join(KINDS[location.scheme].key)} in the environment, in an env_file, or as systemd"
            " credentials",
        )
    load(location.scheme)
    if location.scheme == "s3":
        from podwatch.stores.s3 import S3Store

        if credentials.s3 is None:
            raise ConfigurationError("these credentials are not for S3", where=url, fix="read them again for this URL")
        return S3Store(
            location.bucket,
            credentials.s3,
            writer_id=writer_id,
            prefix=location.prefix,
            connections=connections,
            features=features,
        )
    from podwatch.stores.b2 import B2Store

    return B2Store(location.bucket, credentials, writer_id=writer_id, connections=connections)


def _added(url: str, credentials: Credentials | None, *, writer_id: str, connections: int) -> ObjectStore:
    """The store of an installed package. ConfigurationError if the package fails."""
    plugin = plugins.find(plugins.STORES, url.partition("://")[0])
    assert plugin is not None  # the URL was parsed
    opener = plugin.load()
    with plugin.blamed():
        store: ObjectStore = opener(url, credentials, writer_id=writer_id, connections=connections)
    plugin.check_protocol(store, ObjectStore)
    return store


def same_filesystem(url: str, output_dir: Path) -> bool:
    """Is the store a directory on output_dir's own filesystem? Then it is no backup."""
    location = parse_store_url(url)
    return location.path is not None and _device(location.path) == _device(output_dir)


def _device(path: Path) -> int:
    for candidate in (path, *path.parents):
        try:
            return candidate.stat().st_dev
        except OSError:
            continue
    return -1
