"""Values for the store's key from where an operator put them: the environment, an env file, systemd's credentials."""

import stat
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from podwatch.config.trusted_files import read_trusted
from podwatch.domain.errors import ConfigurationError, PermissionDenied


def find_values(
    names: Collection[str],
    secret: Collection[str],
    environ: Mapping[str, str],
    env_file: Path | None = None,
    directory: Path | None = None,
) -> dict[str, str]:
    """The values of ``names`` that are set, by name. A credential in ``directory`` counts before a line of
    ``env_file``, and that before ``environ``. PermissionDenied where another user can write the file, or
    read a line of ``secret`` in it."""
    values = {name: environ[name] for name in names if environ.get(name)}
    if env_file is not None and env_file.exists():
        values |= _from_file(env_file, names, secret)
    if directory is not None:
        for name in names:
            for spelling in (name, name.lower()):
                with suppress(OSError):
                    values[name] = (directory / spelling).read_text().strip()
    return values


def _from_file(path: Path, names: Collection[str], secret: Collection[str]) -> dict[str, str]:
    try:
        lines = read_trusted(path, "the env file").split("\n")
        mode = stat.S_IMODE(path.stat().st_mode)
    except ConfigurationError as error:
        raise PermissionDenied(error.what, where=error.where, fix=error.fix) from error
    values = {}
    for line in lines:
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if equals and name.strip() in names:
            values[name.strip()] = value.strip().strip("\"'")
    if mode & 0o077 and not values.keys().isdisjoint(secret):
        what = "other users can read this env file of secrets"
        raise PermissionDenied(what, where=str(path), fix=f"chmod 600 {path}")
    return values
