"""Open a store by its URL, and find the credentials for it. b2sdk is imported only when a b2:// store is opened."""

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from podwatch.domain.errors import ConfigurationError, IntegrityError, PermissionDenied
from podwatch.domain.remote import check_relative_path
from podwatch.stores.base import ObjectStore
from podwatch.stores.local import LocalStore

KEY_ID, KEY, ENDPOINT = "B2_APPLICATION_KEY_ID", "B2_APPLICATION_KEY", "B2_ENVIRONMENT"
_BUCKET = re.compile(r"^[A-Za-z0-9-]{6,63}$")


@dataclass(frozen=True, slots=True)
class Credentials:
    """``endpoint`` is empty for Backblaze itself, else the URL of another B2-compatible service."""

    key_id: str
    key: str = field(repr=False)
    endpoint: str = ""


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """A parsed store URL. ``prefix`` goes before the run's own names; ``path`` is for ``file://`` only."""

    scheme: str
    bucket: str = ""
    prefix: str = ""
    path: Path | None = None


def parse_store_url(url: str) -> StoreLocation:
    """``b2://bucket[/prefix]`` or ``file:///absolute/path``. Raises ConfigurationError."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        path = Path(unquote(parts.path))
        if parts.netloc or not path.is_absolute() or ".." in path.parts:
            raise ConfigurationError(
                "store is not an absolute path", where=url, fix='write "file:///path", with three slashes'
            )
        return StoreLocation("file", path=path)
    if parts.scheme == "b2":
        prefix = parts.path.strip("/")
        if "@" in parts.netloc or ":" in parts.netloc:
            raise ConfigurationError(
                "store URL must not hold credentials", where="b2://...", fix=f"set {KEY_ID} and {KEY} instead"
            )
        if not _BUCKET.match(parts.netloc):
            raise ConfigurationError("not a bucket name", where=url, fix='write "b2://bucket" or "b2://bucket/prefix"')
        if prefix:
            try:
                check_relative_path(prefix)
            except IntegrityError:
                raise ConfigurationError("not a usable prefix", where=url, fix="use plain path segments") from None
        return StoreLocation("b2", bucket=parts.netloc, prefix=prefix)
    raise ConfigurationError("unknown kind of store", where=url, fix='use "b2://bucket[/prefix]" or "file:///path"')


def open_store(url: str, credentials: Credentials | None, *, writer_id: str, connections: int = 4) -> ObjectStore:
    """The store behind ``url``. Opening is lazy: trouble shows at the first call, as a RemoteError.

    ``connections`` is the number of parallel connections the caller will use. Raises ConfigurationError for a bad URL
    or missing credentials.
    """
    location = parse_store_url(url)
    if location.path is not None:
        return LocalStore(location.path, writer_id=writer_id)
    if credentials is None:
        raise ConfigurationError(
            "no credentials for the store",
            where=url,
            fix=f"set {KEY_ID} and {KEY} in the environment, in an env_file, or as systemd credentials",
        )
    from podwatch.stores.b2 import B2Store

    return B2Store(location.bucket, credentials, writer_id=writer_id, connections=connections)


def same_filesystem(url: str, output_dir: Path) -> bool:
    """Does a ``file://`` store lie on output_dir's own filesystem? Then it is no backup (DESIGN section 5)."""
    location = parse_store_url(url)
    return location.path is not None and _device(location.path) == _device(output_dir)


def _device(path: Path) -> int:
    for candidate in (path, *path.parents):
        try:
            return candidate.stat().st_dev
        except OSError:
            continue
    return -1


def credentials_from_environment(
    env: Mapping[str, str], env_file: Path | None = None, directory: Path | None = None
) -> Credentials | None:
    """Key and endpoint from (in this order) systemd's CREDENTIALS_DIRECTORY, an env file, the environment.

    A file that others can read is refused with PermissionDenied: a secret everyone can read is none. None if there is
    no key anywhere; half a key is a ConfigurationError.
    """
    values: dict[str, str] = {n: env[n] for n in (KEY_ID, KEY, ENDPOINT) if env.get(n)}
    if env_file is not None and env_file.exists():
        values |= _read_env_file(env_file)
    if directory is not None:
        for name in (KEY_ID, KEY, ENDPOINT):
            for spelling in (name, name.lower()):
                try:
                    values[name] = (directory / spelling).read_text().strip()
                except OSError:
                    continue
    if KEY_ID not in values and KEY not in values:
        return None
    for name in (KEY_ID, KEY):
        if name not in values:
            raise ConfigurationError(
                "half of the store's key is missing", where=name, fix=f"set both {KEY_ID} and {KEY}"
            )
    return Credentials(values[KEY_ID], values[KEY], values.get(ENDPOINT, ""))


def _read_env_file(path: Path) -> dict[str, str]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise PermissionDenied(
            f"env file cannot be read: {error.strerror}",
            where=str(path),
            fix="give podwatch's user the right to read it",
        ) from error
    with os.fdopen(descriptor, encoding="utf-8", errors="replace") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        lines = file.read().splitlines()
    values = {}
    for line in lines:
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if equals and name.strip() in (KEY_ID, KEY, ENDPOINT):
            values[name.strip()] = value.strip().strip("\"'")
    if mode & 0o077 and KEY in values:
        raise PermissionDenied("env file with secrets is open to others", where=str(path), fix=f"chmod 600 {path}")
    return values
