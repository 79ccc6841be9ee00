"""The store's key: its parts and its possible sources. Never printed."""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from podwatch.domain.errors import ConfigurationError, PermissionDenied
from podwatch.domain.secrets import register, url_secrets
from podwatch.system.reading import open_file

KEY_ID, KEY, ENDPOINT = "B2_APPLICATION_KEY_ID", "B2_APPLICATION_KEY", "B2_ENVIRONMENT"
"""The b2 tool's names."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """``endpoint`` is empty for Backblaze itself, else the URL of another B2-compatible service."""

    key_id: str
    key: str = field(repr=False)
    endpoint: str = ""


def credentials_from_environment(
    env: Mapping[str, str], env_file: Path | None = None, directory: Path | None = None
) -> Credentials | None:
    """Key and endpoint from (in this order) systemd's CREDENTIALS_DIRECTORY, an env file, the environment.

    A file that others can read is refused with PermissionDenied. None if there is no key anywhere; half a key is a
    ConfigurationError. The scrubber knows the values from then on.
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
    register(values.get(KEY_ID, ""), values.get(KEY, ""), *url_secrets(values.get(ENDPOINT, "")))
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
        descriptor = open_file(path, shown=True)
    except OSError as error:
        raise PermissionDenied(
            f"the env file cannot be read: {error.strerror}",
            where=str(path),
            fix="let podwatch's user read it",
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
        raise PermissionDenied(
            "other users can read this env file of secrets", where=str(path), fix=f"chmod 600 {path}"
        )
    return values
