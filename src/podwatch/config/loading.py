"""Load file, environment and flags into one validated Settings, or report every problem at once.

The file is the first of ``-c``, ``$PODWATCH_CONFIG``, ``./podwatch.toml``, ``/etc/podwatch/podwatch.toml`` (or
``/etc/podwatch/NAME.toml`` with ``--run NAME``). The environment overrides the file; flags override both.
"""

import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import EnvSettingsSource

from podwatch.client.trusted import read_trusted
from podwatch.config.directory import TYPED_IN, relative_to, resolved
from podwatch.config.keys import (
    ENV_PREFIX,
    OPERATIONAL,
    OPERATIONAL_PREFIXES,
    env_name,
    flatten,
    known_keys,
    known_sections,
    suggest_env,
    walk,
)
from podwatch.config.problems import ConfigurationProblems, Problem, Sources, explain_errors, find_secrets, key_lines
from podwatch.config.settings import Settings
from podwatch.domain.errors import ConfigurationError
from podwatch.domain.manifest import valid_run_id
from podwatch.domain.secrets import register_address, register_argv, register_document, register_named

Source = Literal["default", "file", "environment", "flag"]
FILE_NAME = "podwatch.toml"
ETC = Path("/etc/podwatch")
_AT = re.compile(r"\s*\(at (?:line (\d+), column (\d+)|end of document)\)$")


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """The effective settings and the source of each. ``path`` is None if environment and flags were enough.

    ``refused`` is the reason why the file could not be used, if its last good copy was used instead.
    """

    settings: Settings
    path: Path | None
    sources: Mapping[str, Source] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    text: str = field(default="", repr=False)
    """The file as it was read, for the last good copy."""
    refused: str = ""


def load_settings(
    path: Path | None,
    *,
    environ: Mapping[str, str],
    overrides: Mapping[str, object] | None = None,
    search: bool = True,
    run: str = "",
) -> LoadedSettings:
    """Load and validate the settings. ConfigurationError (exit 78) lists every problem with file and line.

    ``overrides`` are flags by dotted key. With ``search`` false, only ``path`` (or no file) is read.
    """
    found = find_file(path, environ=environ, run=run) if search or path else None
    text = read_trusted(found) if found is not None else ""
    return load_text(text, found, environ=environ, overrides=overrides or {}, run=run)


def load_text(
    text: str,
    path: Path | None,
    *,
    environ: Mapping[str, str],
    overrides: Mapping[str, object] | None = None,
    run: str = "",
) -> LoadedSettings:
    """Like load_settings, for text that is already read; ``path`` is only used in messages."""
    data = parse_toml(text, path)
    lines = key_lines(text)
    flags = _flags(overrides or {})
    variables, problems = _variables(environ)
    problems += find_secrets(data, lines, path)
    environment = _Environment(variables)()
    settings = None
    try:
        with relative_to(environ):
            settings = Settings.model_validate(_merged(_merged(data, environment), flags))
    except ValidationError as error:
        where = Sources(
            path=path, lines=lines, file=flatten(data), environment=flatten(environment), flags=flatten(flags)
        )
        problems += explain_errors(error, where)
        if path is None and all(problem.missing for problem in problems):
            raise ConfigurationError(
                "no configuration file",
                where=", ".join(str(place) for place in search_path(environ, run)),
                fix="write one with `podwatch config init`, or name one with -c FILE",
            ) from error
    if problems or settings is None:
        raise ConfigurationProblems(problems)
    sources: dict[str, Source] = dict.fromkeys(known_keys(), "default")
    sources |= dict.fromkeys(flatten(data), "file")
    sources |= dict.fromkeys(flatten(environment), "environment")
    sources |= dict.fromkeys(flatten(flags), "flag")
    _learn_secrets(settings, environ)
    return LoadedSettings(settings, path, sources, _warnings(settings, sources), text)


def _learn_secrets(settings: Settings, environ: Mapping[str, str]) -> None:
    """Register the secrets of the configuration and the environment with the scrubber."""
    register_named(environ)
    trainer = settings.trainer
    register_named(trainer.env)
    for command in (trainer.command, trainer.resume_args, *trainer.start_before, *trainer.stop_also):
        register_argv(command)
    register_argv(settings.notify.command)
    for url in (*settings.notify.urls, *settings.notify.heartbeat_urls):
        register_address(url)
    register_document(settings.model_dump(mode="json"))


def search_path(environ: Mapping[str, str], run: str = "") -> tuple[Path, ...]:
    """The paths that are searched for a configuration, in order."""
    if run:
        return (ETC / f"{run}.toml",)
    named = environ.get("PODWATCH_CONFIG", "")
    return (*((Path(named),) if named else ()), Path(FILE_NAME), ETC / FILE_NAME)


def find_file(path: Path | None, *, environ: Mapping[str, str], run: str = "") -> Path | None:
    """The absolute path of the file to use. A named file must exist; None if the default places have no file."""
    if path is not None:
        return _must_exist(named_file(path, environ), "-c/--config")
    if run:
        return _must_exist(ETC / f"{run}.toml", f"--run {run}")
    if environ.get("PODWATCH_CONFIG"):
        return _must_exist(named_file(Path(environ["PODWATCH_CONFIG"]), environ), "PODWATCH_CONFIG")
    for name in search_path({}):
        try:
            place = resolved(name, environ.get(TYPED_IN, ""))
        except ValueError:
            continue  # the current directory is gone
        try:
            place.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise ConfigurationError(f"cannot read {place}: {error.strerror}", where=str(place.parent)) from error
        return place
    return None


def named_file(path: Path, environ: Mapping[str, str]) -> Path:
    """``path`` made absolute by the directory in which the command was typed. ConfigurationError if that is gone."""
    try:
        return resolved(path, environ.get(TYPED_IN, ""))
    except ValueError as error:
        raise ConfigurationError(f"the configuration {error}", where=str(path), fix="use its absolute path") from error


def parse_toml(text: str, path: Path | None) -> dict[str, Any]:
    """The parsed document. ConfigurationError with line and column."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        at = _AT.search(message)
        line, column = (at[1], at[2]) if at and at[1] else (str(len(text.splitlines()) or 1), "1")
        raise ConfigurationError(
            f"not valid TOML: {_AT.sub('', message)}", where=f"{path}:{line}:{column}", fix="correct that line"
        ) from error


def changes_needing_restart(old: Settings, new: Settings) -> tuple[str, ...]:
    """Dotted keys that differ and that a running podwatch cannot change on reload."""
    fixed: tuple[str, ...] = ("run_id", "state_dir", "trainer.layout", "trainer.output_dir", "trainer.checkpoint_dir")
    fixed += ("checkpoints.custom", "sync.store", "http.enabled", "http.host", "http.port")
    return tuple(key for key in fixed if _get(old, key) != _get(new, key))


def _merged(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Both nested mappings; where both have a value, that of ``high``."""
    merged = dict(low)
    for key, value in high.items():
        below = merged.get(key)
        merged[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


class _Environment(EnvSettingsSource):
    """PODWATCH_* of the given mapping, as a nested mapping; lists as JSON or separated by commas."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        # pydantic-settings reads only the fields and the configuration of the model.
        super().__init__(Settings, env_prefix=ENV_PREFIX, env_nested_delimiter="__")  # type: ignore[arg-type]

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return dict(self._variables)

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        text = str(value).strip()
        if text.startswith(("[", "{")):
            return json.loads(text)
        is_list = get_origin(field.annotation) is tuple
        if str in get_args(field.annotation) and not is_list:
            raise ValueError("the value is a plain word")
        if is_list:
            return [piece.strip() for piece in text.split(",") if piece.strip()]
        return value


def _variables(environ: Mapping[str, str]) -> tuple[dict[str, str], list[Problem]]:
    """The settings in the environment, by the lower-case names that pydantic-settings expects."""
    variables: dict[str, str] = {}
    problems: list[Problem] = []
    names = {env_name(key) for key in known_keys()} | {env_name(section) for section in known_sections()}
    extra_env = env_name("trainer.env") + "__"
    for name, value in environ.items():
        if not name.startswith(ENV_PREFIX) or name in OPERATIONAL or name.startswith(OPERATIONAL_PREFIXES):
            continue
        if name.startswith(extra_env):
            variables[extra_env.lower() + name[len(extra_env) :]] = value
        elif name not in names:
            problems.append(Problem(f"unknown setting {name}", where="environment", fix=suggest_env(name)))
        elif value.strip().startswith(("[", "{")) and not _is_json(value):
            problems.append(
                Problem(f"{name} is not valid JSON", where="environment", fix='write for example ["a", "b"]')
            )
        else:
            variables[name.lower()] = value
    return variables, problems


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _flags(dotted: Mapping[str, object]) -> dict[str, Any]:
    """Flags as a nested mapping for the models. Text for a list is JSON or separated by commas."""
    fields = dict(walk())
    nested: dict[str, Any] = {}
    for key, given in dotted.items():
        value = given
        if isinstance(given, str) and key in fields:
            annotation = fields[key].annotation
            text = given.strip()
            if text.startswith(("[", "{")) and annotation is not str:
                value = _json_or_text(text)
            elif get_origin(annotation) is tuple:
                value = [piece.strip() for piece in text.split(",") if piece.strip()]
        *sections, leaf = key.split(".")
        target = nested
        for section in sections:
            inner = target.setdefault(section, {})
            if not isinstance(inner, dict):
                raise ConfigurationError(
                    f"{section} is used both as a setting and as a section", where=f"command line, {key}"
                )
            target = inner
        target[leaf] = value
    return nested


def _json_or_text(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _must_exist(path: Path, named_by: str) -> Path:
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise ConfigurationError(
            f"the configuration given by {named_by} {what}",
            where=str(path),
            fix=f"correct the path, or write the file with `podwatch config init -o {path}`",
        )
    return path


def _warnings(settings: Settings, sources: Mapping[str, Source]) -> tuple[str, ...]:
    found: list[str] = []
    if not settings.sync.store:
        found.append("NOT BACKED UP: [sync] store is not set; checkpoints exist on this pod only")
    if not settings.gpu.inference:
        found.append("[gpu] inference is empty: podwatch cannot detect a silent death of the inference engine")
    if not settings.trainer.command:
        found.append("[trainer] command is empty: podwatch can attach to a running trainer but cannot start one")
    both = set(settings.gpu.inference) & set(settings.gpu.trainer)
    if both:
        numbers = ", ".join(map(str, sorted(both)))
        found.append(f"inference and trainer share GPU {numbers}: podwatch judges it by its learned share of memory")
    return tuple(found)


def _get(settings: Settings, key: str) -> object:
    value: object = settings
    for name in key.split("."):
        value = getattr(value, name)
    return value


# -- last good copy --------------------------------------------------------------------------------------------------


# A daemon that refuses to start because of a typo guards nothing. It therefore keeps a copy of each file that it loaded
# in ``<state_dir>/<run_id>/``, uses it when the file cannot be loaded, and reports that. Without one it exits with 78.

COPY_NAME = "last-good.json"
COPY_VERSION = 1
_SETTING = re.compile(r"""^\s*(state_dir|run_id)\s*=\s*(["'])(.*?)\2""", re.M)


def last_good_path(state_dir: Path, run_id: str) -> Path:
    return state_dir / run_id / COPY_NAME


def save_last_good(loaded: LoadedSettings) -> None:
    """Store a copy of the file that was just loaded, atomically and fsynced. Does nothing for settings without a file
    or from a copy. Raises OSError, which the daemon can ignore.
    """
    if loaded.path is None or loaded.refused:
        return
    target = last_good_path(loaded.settings.state_dir, loaded.settings.run_id)
    record = {"schema_version": COPY_VERSION, "path": str(loaded.path), "text": loaded.text}
    content = json.dumps(record).encode()
    if target.is_file() and target.read_bytes() == content:
        return
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = target.with_name(f".{COPY_NAME}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def load_last_good(
    path: Path, *, environ: Mapping[str, str], overrides: Mapping[str, object] | None = None, run: str = ""
) -> LoadedSettings | None:
    """The settings of the last good copy of the file at ``path``; None without a usable copy.

    Environment and flags apply as usual.
    """
    for copy in _copies(path, environ, overrides or {}):
        try:
            record = json.loads(read_trusted(copy))
            if record["path"] != str(path) or record["schema_version"] != COPY_VERSION:
                continue
            return load_text(str(record["text"]), path, environ=environ, overrides=overrides, run=run)
        except (ConfigurationError, ValueError, KeyError, TypeError):
            continue
    return None


def load_or_last_good(
    path: Path | None, *, environ: Mapping[str, str], overrides: Mapping[str, object] | None = None, run: str = ""
) -> LoadedSettings:
    """Like load_settings, but uses the last good copy of an unusable file, with ``refused`` set to the reason. Without
    a copy it raises the file's own ConfigurationError."""
    try:
        return load_settings(path, environ=environ, overrides=overrides, run=run)
    except ConfigurationError as error:
        where = _named(path, environ, run)
        copy = load_last_good(where, environ=environ, overrides=overrides, run=run) if where is not None else None
        if copy is None:
            raise
        return replace(copy, refused=str(error))


def _named(path: Path | None, environ: Mapping[str, str], run: str) -> Path | None:
    if path is not None:
        return named_file(path, environ)
    try:
        return find_file(None, environ=environ, run=run)
    except ConfigurationError:
        return named_file(Path(environ["PODWATCH_CONFIG"]), environ) if environ.get("PODWATCH_CONFIG") else None


def _copies(path: Path, environ: Mapping[str, str], overrides: Mapping[str, object]) -> list[Path]:
    """Possible copies. state_dir and run_id are read from the broken file line by line, because these two lines are
    usually intact; then the default state_dir with every run."""
    told: dict[str, str] = {}
    try:
        told = {name: value for name, _, value in _SETTING.findall(read_trusted(path))}
    except ConfigurationError:
        pass
    for name in ("state_dir", "run_id"):
        value = overrides.get(name) or environ.get(f"PODWATCH_{name.upper()}")
        if value:
            told[name] = str(value)
    default = Settings.model_fields["state_dir"].default
    places = [named_file(Path(told["state_dir"]), environ)] if "state_dir" in told else []
    places.append(Path(default))
    found: list[Path] = []
    for place in dict.fromkeys(places):
        if valid_run_id(told.get("run_id", "")):
            found.append(last_good_path(place, told["run_id"]))
        try:
            found += sorted(place.glob(f"*/{COPY_NAME}"), key=lambda file: file.stat().st_mtime, reverse=True)
        except OSError:
            continue
    return [copy for copy in dict.fromkeys(found) if copy.is_file()]
