"""The access to a store: which key, from the places where an operator can put one. Nothing here is ever printed.

S3 credentials that are written nowhere are left to boto3, which finds those of a profile, SSO, a web identity, the
container or the machine, and renews them.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from podwatch.config.aws_files import check_certificates
from podwatch.config.env_files import OWN, find_values
from podwatch.config.store_kinds import KINDS
from podwatch.domain.errors import ConfigurationError
from podwatch.domain.secrets import register, register_temporary, url_secrets

if TYPE_CHECKING:  # each brings its library
    from podwatch.config.settings import Settings
    from podwatch.store.objects.b2 import B2Access
    from podwatch.store.objects.s3 import S3Access

    Access = B2Access | S3Access | None

B2_ID, B2_KEY, B2_ENDPOINT = "B2_APPLICATION_KEY_ID", "B2_APPLICATION_KEY", "B2_ENVIRONMENT"
"""The b2 tool's names."""
S3_ID, S3_KEY, S3_TOKEN = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"
_S3_NAMES = KINDS["s3"].names


def access_for(settings: "Settings", environ: Mapping[str, str] | None = None) -> "Access":
    """The access to the configured store, read again at each call: a corrected key counts at once. ``environ``: this
    process's own by default. Raises as ``access_from``."""
    sync = settings.sync
    s3 = {
        "endpoint": sync.s3_endpoint, "region": sync.s3_region, "profile": sync.s3_profile,
        "addressing": sync.s3_addressing,
    }  # fmt: skip
    return access_from(sync.store, os.environ if environ is None else environ, settings.trainer.env_file, s3)


def access_from(
    url: str, environ: Mapping[str, str], env_file: Path | None = None, s3: Mapping[str, str] | None = None
) -> "Access":
    """The access to the store ``url``; None for a directory, and where a B2 key is written nowhere. ``s3``: settings of
    ``S3Access``. Raises ConfigurationError for half a key, PermissionDenied for a file that others can read. The
    scrubber knows the secrets from then on."""
    scheme = url.partition(":")[0]
    place = environ.get("CREDENTIALS_DIRECTORY")
    directory = Path(place) if place else None
    if scheme == "s3":
        names = (*_S3_NAMES, *(OWN + name for name in _S3_NAMES))
        return _s3(find_values(names, (S3_KEY, OWN + S3_KEY), environ, env_file, directory), s3 or {})
    if scheme == "file":
        return None
    return _b2(find_values((B2_ID, B2_KEY, B2_ENDPOINT), (B2_KEY,), environ, env_file, directory))


def variables_of(access: "Access") -> dict[str, str]:
    """The environment that gives this access to another podwatch, under names that training never gets."""
    if access is None:
        return {}
    known = asdict(access)
    if "key_id" in known:
        names = {"key_id": B2_ID, "key": B2_KEY, "endpoint": B2_ENDPOINT}
    else:
        names = {
            "access_key": S3_ID, "secret": S3_KEY, "token": S3_TOKEN, "profile": "AWS_PROFILE",
            "endpoint": "AWS_ENDPOINT_URL_S3", "region": "AWS_REGION", "ca": "AWS_CA_BUNDLE",
        }  # fmt: skip
        names = {field: OWN + name for field, name in names.items()}
    values = {name: known[field] for field, name in names.items()}
    return {name: value for name, value in values.items() if value}


def _b2(values: Mapping[str, str]) -> "B2Access | None":
    endpoint = values.get(B2_ENDPOINT, "")
    register(values.get(B2_ID, ""), values.get(B2_KEY, ""), *url_secrets(endpoint))
    if B2_ID not in values and B2_KEY not in values:
        return None
    _check_whole(values, B2_ID, B2_KEY)
    from podwatch.store.objects.b2 import B2Access

    return B2Access(values[B2_ID], values[B2_KEY], endpoint)


def _s3(values: Mapping[str, str], wanted: Mapping[str, str]) -> "S3Access":
    own = any(values.get(OWN + name) for name in (S3_ID, S3_KEY))  # one pair, never mixed
    pair = {name: values.get(OWN + name if own else name, "") for name in (S3_ID, S3_KEY, S3_TOKEN)}
    given = {name: values.get(OWN + name) or values.get(name) or "" for name in _S3_NAMES}
    if wanted.get("profile"):
        pair = dict.fromkeys(pair, "")
    if pair[S3_ID] or pair[S3_KEY]:
        _check_whole(pair, S3_ID, S3_KEY)
    if pair[S3_TOKEN]:
        register_temporary(pair[S3_KEY], pair[S3_TOKEN], pair[S3_ID])
    else:
        register(pair[S3_KEY], pair[S3_ID])
    endpoint = wanted.get("endpoint") or given["AWS_ENDPOINT_URL_S3"] or given["AWS_ENDPOINT_URL"]
    register(*url_secrets(endpoint))
    check_certificates(given["AWS_CA_BUNDLE"])
    from podwatch.store.objects.s3 import S3Access

    return S3Access(
        pair[S3_ID], pair[S3_KEY], pair[S3_TOKEN], _checked(endpoint),
        wanted.get("region") or given["AWS_REGION"] or given["AWS_DEFAULT_REGION"],
        wanted.get("profile") or ("" if pair[S3_ID] else given["AWS_PROFILE"]),
        wanted.get("addressing") or "auto", given["AWS_CA_BUNDLE"],
    )  # fmt: skip


def _check_whole(values: Mapping[str, str], *names: str) -> None:
    for name in names:
        if not values.get(name):
            what = "half of the store's key is missing"
            raise ConfigurationError(what, where=name, fix=f"set both {' and '.join(names)}")


def _checked(endpoint: str) -> str:
    """Without a trailing slash. Raises ConfigurationError for what is no address of a host."""
    parts = urlsplit(endpoint)
    if not endpoint:
        return ""
    plain = parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc
    if not plain or parts.query or parts.fragment or parts.path.strip("/"):
        what = "the S3 endpoint is not an address such as https://host"
        raise ConfigurationError(what, where="[sync] s3_endpoint", fix="write https:// and the host only")
    return f"{parts.scheme}://{parts.netloc}"
