"""The store's key: its parts and its possible sources. Never printed."""

import os
import stat
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podwatch.client.trusted_configuration import read_trusted
from podwatch.domain.errors import ConfigurationError, PermissionDenied
from podwatch.domain.secrets import register, url_secrets
from podwatch.stores.s3_credentials import ACCESS, NAMES, OWN, SECRET, TOKEN, S3Credentials, S3Settings, find, variables

if TYPE_CHECKING:  # an upload child starts without it
    from podwatch.config.settings import Settings

KEY_ID, KEY, ENDPOINT = "B2_APPLICATION_KEY_ID", "B2_APPLICATION_KEY", "B2_ENVIRONMENT"
"""The b2 tool's names."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """A B2 key: ``endpoint`` is empty for Backblaze itself, else the URL of another B2-compatible service. Or the
    credentials of an S3 store, in ``s3``."""

    key_id: str = ""
    key: str = field(default="", repr=False)
    endpoint: str = ""
    s3: S3Credentials | None = None

    def to_json(self) -> dict[str, Any]:
        """For a child's standard input only: it has the secret."""
        return asdict(self)

    def variables(self) -> dict[str, str]:
        """The environment that gives these credentials to another podwatch, under names that training never gets. A
        role's are left out: each process reads them for itself."""
        values = {KEY_ID: self.key_id, KEY: self.key, ENDPOINT: self.endpoint}
        if (s3 := self.s3) is not None:
            keys = {} if s3.renew else {ACCESS: s3.access_key, SECRET: s3.secret, TOKEN: s3.token}
            keys |= {"AWS_ENDPOINT_URL_S3": s3.endpoint, "AWS_REGION": s3.region, "AWS_CA_BUNDLE": s3.ca}
            values = {OWN + name: value for name, value in keys.items()}
        return {name: value for name, value in values.items() if value}

    @classmethod
    def from_json(cls, document: "Mapping[str, Any] | None") -> "Credentials | None":
        if document is None:
            return None
        found = document["s3"]
        return cls(**{**document, "s3": None if found is None else S3Credentials(**found)})


def credentials_for(settings: "Settings", environ: Mapping[str, str] | None = None) -> Credentials | None:
    """Those of the configured store; read again at each call and registered with the scrubber. ``environ``: this
    process's own by default. Raises as ``credentials_from_environment``."""
    sync, directory = settings.sync, os.environ.get("CREDENTIALS_DIRECTORY")
    s3 = S3Settings(sync.s3_endpoint, sync.s3_region, sync.s3_profile, sync.s3_addressing)
    place = Path(directory) if directory else None
    env = os.environ if environ is None else environ
    return credentials_from_environment(env, settings.trainer.env_file, place, sync.store, s3)


def credentials_from_environment(
    env: Mapping[str, str],
    env_file: Path | None = None,
    directory: Path | None = None,
    url: str = "",
    s3: S3Settings = S3Settings(),  # noqa: B008 - frozen
) -> Credentials | None:
    """Key and endpoint for the store ``url`` from (in this order) systemd's CREDENTIALS_DIRECTORY, an env file, the
    environment; for S3 also from what these name (``s3_credentials.find``), which may block for some seconds.

    A file that others can read is refused with PermissionDenied. None for a directory, and if there is no key anywhere;
    half a key is a ConfigurationError. The scrubber knows the values from then on.
    """
    if url.startswith("file://"):
        return None
    wanted = (*NAMES, *(OWN + name for name in NAMES)) if url.startswith("s3://") else (KEY_ID, KEY, ENDPOINT)
    values: dict[str, str] = {n: env[n] for n in wanted if env.get(n)}
    if env_file is not None and env_file.exists():
        values |= _read_env_file(env_file, wanted)
    if directory is not None:
        for name in wanted:
            for spelling in (name, name.lower()):
                try:
                    values[name] = (directory / spelling).read_text().strip()
                except OSError:
                    continue
    if url.startswith("s3://"):
        found = find(variables(env) | values, s3)
        return None if found is None else Credentials(s3=found)
    register(values.get(KEY_ID, ""), values.get(KEY, ""), *url_secrets(values.get(ENDPOINT, "")))
    if KEY_ID not in values and KEY not in values:
        return None
    for name in (KEY_ID, KEY):
        if name not in values:
            raise ConfigurationError(
                "half of the store's key is missing", where=name, fix=f"set both {KEY_ID} and {KEY}"
            )
    return Credentials(values[KEY_ID], values[KEY], values.get(ENDPOINT, ""))


def _read_env_file(path: Path, wanted: Collection[str]) -> dict[str, str]:
    try:
        lines = read_trusted(path, "the env file").split("\n")
        mode = stat.S_IMODE(path.stat().st_mode)
    except ConfigurationError as error:
        raise PermissionDenied(error.what, where=error.where, fix=error.fix) from error
    values = {}
    for line in lines:
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if equals and name.strip() in wanted:
            values[name.strip()] = value.strip().strip("\"'")
    if mode & 0o077 and not {KEY, SECRET, OWN + SECRET}.isdisjoint(values):
        raise PermissionDenied(
            "other users can read this env file of secrets", where=str(path), fix=f"chmod 600 {path}"
        )
    return values
