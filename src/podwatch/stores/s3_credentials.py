"""Where S3 credentials come from, in the order of AWS's own tools: variables, a profile, the container, the machine.

Temporary ones (a role's) carry ``renew``, the place to read them again: the upload child and a long-lived daemon do so
without asking anybody. Nothing here is printed, and the scrubber learns every value.
"""

import json
import re
import stat
import time
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from podwatch.client.trusted_configuration import check_trusted, read_trusted
from podwatch.domain.errors import ConfigurationError, PermissionDenied, RemoteError
from podwatch.domain.secrets import register, register_temporary, url_secrets
from podwatch.system.files import read_file

ACCESS, SECRET, TOKEN = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"
NAMES = (
    ACCESS, SECRET, TOKEN, "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION",
    "AWS_PROFILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "AWS_CA_BUNDLE",
)  # fmt: skip
"""The variables that podwatch understands; with PODWATCH_ in front they are podwatch's alone and come first."""
OWN = "PODWATCH_"
_CONTAINER = "http://169.254.170.2"
_MACHINE = "http://169.254.169.254"
_ROLE = "/latest/meta-data/iam/security-credentials/"
_PATIENCE = 2.0
"""Seconds for the metadata service of the machine: a pod without one must not wait long."""
EARLY = 300.0
"""Seconds before their end at which temporary credentials are read again: AWS has new ones five minutes earlier."""


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Those of ``[sync]``."""

    s3_endpoint: str = ""
    s3_region: str = ""
    s3_profile: str = ""
    s3_addressing: str = "auto"


@dataclass(frozen=True, slots=True)
class S3Credentials:
    """``expires`` in epoch seconds, 0 for never; ``renew`` empty or ``container:URL``, ``machine:URL``,
    ``profile:NAME:CREDENTIALS:CONFIG``. ``ca``: a file of certificates, empty for the usual ones."""

    access_key: str
    secret: str = field(repr=False)
    token: str = field(default="", repr=False)
    expires: float = 0.0
    renew: str = field(default="", repr=False)
    endpoint: str = ""
    region: str = ""
    addressing: str = "auto"
    ca: str = ""

    def stale(self, wall: float) -> bool:
        return bool(self.renew and self.expires and wall > self.expires - EARLY)

    def register(self) -> None:
        """Register them with the scrubber. Temporary ones have a token: a new set every few hours."""
        if not self.token:
            register(self.secret, self.access_key)
            return
        seconds = self.expires - time.time() if self.expires else None
        register_temporary(self.secret, self.token, self.access_key, now=time.monotonic(), seconds=seconds)

    def renewed(self) -> "S3Credentials":
        """Read again where they came from. Blocks for some seconds at most; raises RemoteError, ConfigurationError."""
        kind, _, rest = self.renew.partition(":")
        if kind == "profile":
            name, credentials, config = [*rest.split("\n", 2), "", ""][:3]
            found = _profile(name, Path(credentials), Path(config), required=True)
            return self if found is None else self._with(found)
        if kind == "container":
            return self._with(_container(rest))
        if kind == "machine":
            found = _machine(rest)
            if found is not None:
                return self._with(found)
            raise RemoteError("the machine gives no credentials for its role any more", where=rest)
        return self

    def _with(self, found: "S3Credentials") -> "S3Credentials":
        return replace(self, access_key=found.access_key, secret=found.secret, token=found.token, expires=found.expires)


def find(
    values: Mapping[str, str], wanted: S3Settings = S3Settings(), home: Path | None = None
) -> S3Credentials | None:
    """Credentials and endpoint from ``values`` (variables), else from the files and services that they name.

    None if there are none anywhere. Raises ConfigurationError for half a key, an unknown profile or a bad endpoint,
    PermissionDenied for a credentials file that others can read. May ask the machine's metadata service: blocks.
    """
    given = {name: values.get(OWN + name) or values.get(name) or "" for name in NAMES}
    if values.get(OWN + ACCESS):
        given |= {name: values.get(OWN + name, "") for name in (ACCESS, SECRET, TOKEN)}  # one pair, never mixed
    home = home or Path(values.get("HOME") or "~").expanduser()
    credentials = Path(given["AWS_SHARED_CREDENTIALS_FILE"] or home / ".aws/credentials")
    config = Path(given["AWS_CONFIG_FILE"] or home / ".aws/config")
    profile = wanted.s3_profile or given["AWS_PROFILE"]
    found: S3Credentials | None = None
    if not wanted.s3_profile and (given[ACCESS] or given[SECRET]):
        for name in (ACCESS, SECRET):
            if not given[name]:
                raise ConfigurationError(
                    "half of the store's key is missing", where=name, fix=f"set {ACCESS} and {SECRET}"
                )
        found = S3Credentials(given[ACCESS], given[SECRET], given[TOKEN])
    found = found or _profile(profile or "default", credentials, config, required=bool(profile))
    if found is None:
        found = _role(values)
    if found is None:
        return None
    found.register()
    chosen = _sections(credentials, config, profile or "default")
    endpoint = wanted.s3_endpoint or given["AWS_ENDPOINT_URL_S3"] or given["AWS_ENDPOINT_URL"]
    endpoint = endpoint or chosen.get("endpoint_url", "")
    register(*url_secrets(endpoint))
    ca = given["AWS_CA_BUNDLE"] or chosen.get("ca_bundle", "")
    _check_ca(ca)
    region = wanted.s3_region or given["AWS_REGION"] or given["AWS_DEFAULT_REGION"] or chosen.get("region", "")
    return replace(
        found,
        endpoint=check_endpoint(endpoint),
        region=region,
        addressing=wanted.s3_addressing,
        ca=ca,
    )


def _check_ca(path: str) -> None:
    """PermissionDenied if another user could choose whom podwatch sends the key to."""
    try:
        if path:
            check_trusted(Path(path), "the file of certificates")
    except ConfigurationError as error:
        raise PermissionDenied(error.what, where=error.where, fix=error.fix) from error
    except OSError:
        return  # whoever opens it says so


def check_endpoint(endpoint: str) -> str:
    """Without a trailing slash. Raises ConfigurationError for what is no plain URL; http:// only where written out."""
    if not endpoint:
        return ""
    parts = urlsplit(endpoint)
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or parts.query
        or parts.fragment
        or "@" in parts.netloc
    ):
        raise ConfigurationError(
            "the S3 endpoint is not a URL such as https://host",
            where="[sync] s3_endpoint",
            fix="write it with https://",
        )
    if parts.path.strip("/"):
        raise ConfigurationError(
            "the S3 endpoint has a path",
            where="[sync] s3_endpoint",
            fix="write the host only; the bucket is in [sync] store",
        )
    return f"{parts.scheme}://{parts.netloc}"


def claim_own(environ: MutableMapping[str, str], files: Iterable[Path]) -> None:
    """Move the AWS_* variables that came from one of podwatch's own environment files to PODWATCH_AWS_*: so neither
    training nor another child gets them. What the user gave to everything stays. Unreadable files give none. Blocks."""
    for name in own_names(environ, files):
        value = environ.pop(name)
        environ.setdefault(OWN + name, value)


def own_names(environ: Mapping[str, str], files: Iterable[Path]) -> frozenset[str]:
    """The AWS_* variables whose present value is that of one of these files."""
    own: set[str] = set()
    for path in files:
        try:
            text = read_file(path).decode("utf-8", "replace")
        except OSError:
            continue
        for line in re.split(r"[\r\n]", text):
            name, equals, value = line.strip().removeprefix("export ").partition("=")
            name, value = name.strip(), value.strip().strip("\"'")
            if equals and name.startswith("AWS_") and environ.get(name) == value:
                own.add(name)
    return frozenset(own)


# -- files -----------------------------------------------------------------------------------------------------------


def _sections(credentials: Path, config: Path, profile: str) -> dict[str, str]:
    """What both files say of a profile; the credentials file wins. Absent files say nothing."""
    values: dict[str, str] = {}
    for path, section in ((config, profile if profile == "default" else f"profile {profile}"), (credentials, profile)):
        values |= _section(path, section)
    return values


def _section(path: Path, section: str) -> dict[str, str]:
    try:
        path.stat()
        text = read_trusted(path, "the AWS file")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise PermissionDenied(
            f"the AWS file cannot be read: {error.strerror}", where=str(path), fix="let podwatch's user read it"
        ) from error
    except ConfigurationError as error:
        raise PermissionDenied(error.what, where=error.where, fix=error.fix) from error
    import configparser  # an upload child needs none of it

    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(text)
    except configparser.Error:
        raise ConfigurationError("not a file of AWS profiles", where=str(path), fix="correct it") from None
    if not parser.has_section(section):
        return {}
    found = dict(parser.items(section))
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        mode = 0
    if "aws_secret_access_key" in found and mode & 0o077:
        raise PermissionDenied("other users can read this file of secrets", where=str(path), fix=f"chmod 600 {path}")
    return found


def _profile(name: str, credentials: Path, config: Path, *, required: bool) -> S3Credentials | None:
    values = _sections(credentials, config, name)
    access, secret = values.get("aws_access_key_id", ""), values.get("aws_secret_access_key", "")
    if access and secret:
        token = values.get("aws_session_token", "")
        # Another program writes temporary ones; read them again at each job, and when they are refused.
        renew = f"profile:{name}\n{credentials}\n{config}" if token else ""
        found = S3Credentials(access, secret, token, renew=renew)
        found.register()
        return found
    if required:
        indirect = next(
            (k for k in ("sso_session", "sso_start_url", "role_arn", "credential_process") if k in values), ""
        )
        what = f"the AWS profile {name!r} has no keys" + (
            f", only {indirect}, which podwatch does not use" if indirect else ""
        )
        fix = "put keys into it, for example with `aws configure export-credentials`, or correct [sync] s3_profile"
        raise ConfigurationError(what, where=str(credentials), fix=fix)
    return None


# -- roles -----------------------------------------------------------------------------------------------------------


def _role(values: Mapping[str, str]) -> S3Credentials | None:
    """Of the container (ECS, EKS Pod Identity), else of the machine (EC2, IMDSv2)."""
    relative, full = (
        values.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"),
        values.get("AWS_CONTAINER_CREDENTIALS_FULL_URI"),
    )
    if relative or full:
        token = values.get("AWS_CONTAINER_AUTHORIZATION_TOKEN", "")
        file = values.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "")
        return _container("\n".join((f"{_CONTAINER}{relative}" if relative else str(full), token, file)))
    if values.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return None
    return _machine(values.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "") or _MACHINE)


def _container(source: str) -> S3Credentials:
    """``source``: URL, token and token file, one a line."""
    url, token, file = [*source.split("\n", 2), "", ""][:3]
    parts = urlsplit(url)
    if parts.scheme != "https" and parts.hostname not in ("169.254.170.2", "169.254.170.23", "127.0.0.1", "localhost"):
        raise ConfigurationError(
            "the container's credentials come from an untrusted address",
            where="AWS_CONTAINER_CREDENTIALS_FULL_URI",
            fix="use https://, or the address of ECS or EKS",
        )
    if file:
        try:
            token = read_file(file, 1 << 16).decode().strip()
        except OSError as error:
            raise PermissionDenied(f"cannot read the token: {error.strerror}", where=file) from error
    register_temporary(token, now=time.monotonic())
    document = _asked(url, {"Authorization": token} if token else {}, patience=_PATIENCE * 2)
    if document is None:
        raise RemoteError("the container's credentials cannot be read", where=parts.netloc, fix="podwatch tries again")
    return _temporary(json.loads(document), f"container:{source}")


def _machine(base: str) -> S3Credentials | None:
    """By IMDSv2: a session token first. None where there is no such service, or no role."""
    token = _asked(f"{base}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "300"}, method="PUT")
    if token is None:
        return None
    header = {"X-aws-ec2-metadata-token": token}
    role = (_asked(f"{base}{_ROLE}", header) or "").strip().splitlines()
    document = _asked(f"{base}{_ROLE}{role[0]}", header) if role else None
    return None if document is None else _temporary(json.loads(document), f"machine:{base}")


def _asked(url: str, headers: Mapping[str, str], *, method: str = "GET", patience: float = _PATIENCE) -> str | None:
    """None where nobody answers, or with an error. Never through a proxy."""
    import urllib.error
    import urllib.request

    request = urllib.request.Request(url, headers=dict(headers), method=method)  # noqa: S310 - an address of ours
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=patience) as answer:
            return str(answer.read(1 << 16).decode())
    except (urllib.error.URLError, OSError, ValueError):
        return None


def _temporary(document: Any, renew: str) -> S3Credentials:
    try:
        access, secret = str(document["AccessKeyId"]), str(document["SecretAccessKey"])
        from podwatch.stores.s3_xml import wall_of  # XML parsers: 1 MiB that a daemon with another store does not need

        token, expires = str(document.get("Token") or ""), wall_of(str(document.get("Expiration") or ""))
    except (TypeError, KeyError, AttributeError):
        raise RemoteError("the role's credentials are not what AWS documents", where=renew.partition(":")[0]) from None
    found = S3Credentials(access, secret, token, expires or time.time() + 3600.0, renew)
    found.register()
    return found


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of ``environ`` that ``find`` looks at, also those of a container's role."""
    names = {n for n in environ if n.startswith(("AWS_", OWN + "AWS_"))}
    return {n: environ[n] for n in names | {"HOME"} if environ.get(n)}
