"""Files of NAME=value lines: written by `podwatch config init` and `podwatch install`, read as systemd reads them. And
values for the store's key from where an operator put them: the environment, such a file, systemd's credentials."""

import re
import stat
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

from podwatch.config.store_kinds import KINDS
from podwatch.config.trusted_files import read_trusted
from podwatch.domain.errors import ConfigurationError, PermissionDenied
from podwatch.domain.secrets import register_named
from podwatch.system.files import read_file

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ENDS = re.compile(r"\r\n|[\r\n]")  # as systemd: U+2028 and others end no line


def read_env_file(path: Path) -> dict[str, str]:
    """Return the NAME=value lines of an environment file, and register the values with the scrubber. Blank lines, ``#``
    comments, an ``export`` prefix and quotes are understood; nothing is expanded. Others must not be able to read it:
    it holds secrets, and code written by a model runs on this machine. Raises ConfigurationError, as ``read_trusted``,
    whose text never contains a value."""
    values = parse_env(read_trusted(path, "the environment file", secret=True), where=str(path))
    register_named(values, all_of_it=True)
    return values


def parse_env(text: str, *, where: str, names: Collection[str] | None = None) -> dict[str, str]:
    """The pure part of ``read_env_file``. With ``names`` only those: other lines can be wrong. Raises
    ConfigurationError naming the line, never its content."""
    result: dict[str, str] = {}
    for number, raw in enumerate(_ENDS.split(text), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        name, separator, value = line.removeprefix("export ").lstrip().partition("=")
        name, value = name.rstrip(), value.strip()
        if names is not None and name not in names:
            continue
        if not separator or not NAME.fullmatch(name):
            raise ConfigurationError("not a NAME=value line", where=f"{where} line {number}", fix="write NAME=value")
        if value[:1] in ("'", '"'):
            quote = value[0]
            end = _closing(value, quote)
            tail = value[end + 1 :].strip() if end > 0 else ""
            if end < 0 or (tail and not tail.startswith("#")):
                raise ConfigurationError(
                    f"the value of {name} has no closing quote",
                    where=f"{where} line {number}",
                    fix=f"end it with {quote}",
                )
            value = value[1:end]
            if quote == '"':
                value = re.sub(r'\\(["\\$`])', r"\1", value)
        else:
            value = re.split(r"\s+#", value, maxsplit=1)[0].rstrip()
        result[name] = value
    return result


def _closing(value: str, quote: str) -> int:
    n = 1
    while n < len(value):
        if value[n] == "\\" and quote == '"':
            n += 2
            continue
        if value[n] == quote:
            return n
        n += 1
    return -1


def env_lines(secrets: Mapping[str, str], by: str = "podwatch config init") -> str:
    """NAME=value lines, with commented lines for a missing B2 key. A value with blanks or quotes is double-quoted with
    backslashes, as systemd reads it. ConfigurationError for a value that is not one line of UTF-8."""
    lines = [f"# Secrets, written by `{by}`. Keep mode 0600. Training never receives the B2 key."]
    for name in KINDS["b2"].key:
        if name not in secrets:
            lines.append(f"# {name}=")
    for name, value in secrets.items():
        if not fits_a_line(value):
            raise ConfigurationError(
                f"cannot write {name} into an env file: its value is not one line of UTF-8", fix="correct the variable"
            )
        plain = bool(value) and all(character.isalnum() or character in "_-./:+=,@%" for character in value)
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        lines.append(f"{name}={value}" if plain else f'{name}="{escaped}"')
    return "\n".join(lines) + "\n"


def is_text(value: str) -> bool:
    """Whether a file can hold the value: the system gives bytes that are no UTF-8 as lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def fits_a_line(value: str) -> bool:
    """Whether an env file can hold ``value``: one line of UTF-8."""
    return is_text(value) and not {"\n", "\r"} & {*value}


# -- the store's key -------------------------------------------------------------------------------------------------

OWN = "PODWATCH_"
"""Before an AWS name: podwatch's alone, which the trainer does not get; it counts first."""


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
        text = read_trusted(path, "the env file")
        mode = stat.S_IMODE(path.stat().st_mode)
    except ConfigurationError as error:
        raise PermissionDenied(error.what, where=error.where, fix=error.fix) from error
    values = parse_env(text, where=str(path), names=names)
    if mode & 0o077 and not values.keys().isdisjoint(secret):
        what = "other users can read this env file of secrets"
        raise PermissionDenied(what, where=str(path), fix=f"chmod 600 {path}")
    return values


def claim_own(environ: MutableMapping[str, str], files: Iterable[Path]) -> None:
    """Move the AWS_* variables that came from one of podwatch's own environment files to PODWATCH_AWS_*: so neither
    training nor another child gets them. What the user gave to everything stays. Roles, web identities and the paths of
    AWS's files are read by boto3, also in the child, under their own names; they are no secrets. Unreadable files give
    none. Blocks."""
    for path in files:
        try:
            text = read_file(path).decode("utf-8", "replace")
        except OSError:
            continue
        for name in environ.keys() & KINDS["s3"].names:
            with suppress(ConfigurationError):
                if parse_env(text, where=str(path), names={name}).get(name) == environ[name]:
                    environ.setdefault(OWN + name, environ.pop(name))
