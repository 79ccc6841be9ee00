"""From a file, the environment and flags to one checked Settings, or to every problem at once.

Order (DESIGN section 7): ``-c``, ``$PODWATCH_CONFIG``, ``./podwatch.toml``, ``/etc/podwatch/podwatch.toml`` (or
``/etc/podwatch/NAME.toml`` with ``--run NAME``); then the environment, then flags, each stronger than the one before.
"""

import json
import os
import re
import tomllib
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

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
from podwatch.config.problems import ConfigurationProblems, Problem, Sources, explain_errors, find_secrets
from podwatch.config.settings import Settings
from podwatch.config.toml_lines import key_lines
from podwatch.domain.errors import ConfigurationError
from podwatch.domain.secrets import register_address, register_argv, register_document, register_named

Source = Literal["default", "file", "environment", "flag"]
FILE_NAME = "podwatch.toml"
ETC = Path("/etc/podwatch")
_AT = re.compile(r"\s*\(at (?:line (\d+), column (\d+)|end of document)\)$")


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """The effective settings and where each came from. ``path`` is None when environment and flags were enough.

    ``refused`` is set when the file could not be used and the last good copy stands in for it (last_good.py).
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
    """Load and check everything. Raises ConfigurationError (exit 78) naming every problem with file and line.

    ``overrides`` are flags by dotted key. Without ``search`` only ``path`` (or nothing) is read.
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
    """As load_settings, for a text that was read already; ``path`` is only named in messages."""
    data = parse_toml(text, path)
    lines = key_lines(text)
    flags = _flags(overrides or {})
    variables, problems = _variables(environ)
    problems += find_secrets(data, lines, path)
    inputs = _Inputs(flags=flags, variables=variables, data=data)
    token = _INPUTS.set(inputs)
    try:
        with relative_to(environ):
            loaded = _FromSources()
    except ValidationError as error:
        where = Sources(
            path=path, lines=lines, file=flatten(data), environment=inputs.environment, flags=flatten(flags)
        )
        problems += explain_errors(error, where)
        if path is None and all(problem.missing for problem in problems):
            raise ConfigurationError(
                "no configuration file",
                where=", ".join(str(place) for place in search_path(environ, run)),
                fix="write one with `podwatch config init`, or name one with -c FILE",
            ) from error
    finally:
        _INPUTS.reset(token)
    if problems:
        raise ConfigurationProblems(problems)
    settings = Settings.model_validate({name: getattr(loaded, name) for name in Settings.model_fields})
    sources: dict[str, Source] = dict.fromkeys(known_keys(), "default")
    sources |= dict.fromkeys(flatten(data), "file")
    sources |= dict.fromkeys(inputs.environment, "environment")
    sources |= dict.fromkeys(flatten(flags), "flag")
    _learn_secrets(settings, environ)
    return LoadedSettings(settings, path, sources, _warnings(settings, sources), text)


def _learn_secrets(settings: Settings, environ: Mapping[str, str]) -> None:
    """What the configuration and the environment hold of secrets is known to the scrubber from here on."""
    register_named(environ)
    trainer = settings.trainer
    register_named(trainer.env)
    for command in (trainer.command, trainer.resume_args, *trainer.start_before, *trainer.stop_also):
        register_argv(command)
    register_argv(settings.notify.command)
    for url in settings.notify.urls:
        register_address(url)
    register_document(settings.model_dump(mode="json"))


def search_path(environ: Mapping[str, str], run: str = "") -> tuple[Path, ...]:
    """Where a configuration is looked for, in order."""
    if run:
        return (ETC / f"{run}.toml",)
    named = environ.get("PODWATCH_CONFIG", "")
    return (*((Path(named),) if named else ()), Path(FILE_NAME), ETC / FILE_NAME)


def find_file(path: Path | None, *, environ: Mapping[str, str], run: str = "") -> Path | None:
    """The file to use, absolute. A file that was named must exist; the usual places may be empty (None)."""
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
            continue  # without a current directory there is no file in it
        try:
            place.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise ConfigurationError(f"cannot look for {place}: {error.strerror}", where=str(place.parent)) from error
        return place
    return None


def named_file(path: Path, environ: Mapping[str, str]) -> Path:
    """Absolute, by the directory in which the command was typed. Raises ConfigurationError where that is gone."""
    try:
        return resolved(path, environ.get(TYPED_IN, ""))
    except ValueError as error:
        raise ConfigurationError(
            f"the configuration {error}", where=str(path), fix="name it by its full path"
        ) from error


def parse_toml(text: str, path: Path | None) -> dict[str, Any]:
    """Raises ConfigurationError with line and column."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        at = _AT.search(message)
        line, column = (at[1], at[2]) if at and at[1] else (str(len(text.splitlines()) or 1), "1")
        raise ConfigurationError(
            f"this is not TOML: {_AT.sub('', message)}", where=f"{path}:{line}:{column}", fix="correct that line"
        ) from error


def changes_needing_restart(old: Settings, new: Settings) -> tuple[str, ...]:
    """Dotted keys that differ and that a running podwatch cannot take over (DESIGN section 4, SIGHUP)."""
    fixed: tuple[str, ...] = ("run_id", "state_dir", "trainer.layout", "trainer.output_dir", "trainer.checkpoint_dir")
    fixed += ("checkpoints.custom", "sync.store", "http.enabled", "http.host", "http.port")
    return tuple(key for key in fixed if _get(old, key) != _get(new, key))


@dataclass(slots=True)
class _Inputs:
    flags: dict[str, Any]
    variables: dict[str, str]
    data: dict[str, Any]
    environment: dict[str, Any] = field(default_factory=dict)


_INPUTS: ContextVar[_Inputs] = ContextVar("podwatch_settings_inputs")


class _FromSources(Settings, BaseSettings):
    """Settings, fed by pydantic-settings from the inputs of the current load."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_nested_delimiter="__")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        inputs = _INPUTS.get()
        return (_Flags(settings_cls, inputs), _Environment(settings_cls, inputs), _File(settings_cls, inputs))


class _Flags(PydanticBaseSettingsSource):
    def __init__(self, settings_cls: type[BaseSettings], inputs: _Inputs) -> None:
        super().__init__(settings_cls)
        self._flags = inputs.flags

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self._flags.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return self._flags


class _Environment(EnvSettingsSource):
    """PODWATCH_* of the mapping that was passed in; lists as JSON or with commas."""

    def __init__(self, settings_cls: type[BaseSettings], inputs: _Inputs) -> None:
        self._inputs = inputs
        super().__init__(settings_cls)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return dict(self._inputs.variables)

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        text = str(value).strip()
        if text.startswith(("[", "{")):
            return json.loads(text)
        is_list = get_origin(field.annotation) is tuple
        if str in get_args(field.annotation) and not is_list:
            raise ValueError("a plain word is meant")
        if is_list:
            return [piece.strip() for piece in text.split(",") if piece.strip()]
        return value

    def __call__(self) -> dict[str, Any]:
        values = super().__call__()
        self._inputs.environment = flatten(values)
        return values


class _File(TomlConfigSettingsSource):
    """The text was read and parsed before, from a descriptor whose owner was checked; it is not opened again."""

    def __init__(self, settings_cls: type[BaseSettings], inputs: _Inputs) -> None:
        self._data = inputs.data
        super().__init__(settings_cls, toml_file=Path(os.devnull))
        self.init_kwargs = self._data


def _variables(environ: Mapping[str, str]) -> tuple[dict[str, str], list[Problem]]:
    """The settings among the environment, by the lower-case names pydantic-settings looks for."""
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
            problems.append(Problem(f"{name} is not valid JSON", where="environment", fix='for example ["a", "b"]'))
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
    """Flags as the nested mapping the models take. Text for a list is read as in the environment: JSON or commas."""
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
                raise ConfigurationError(f"{section} is a setting and a section at once", where=f"command line, {key}")
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
            f"the configuration named by {named_by} {what}",
            where=str(path),
            fix=f"correct the path, or write the file with `podwatch config init -o {path}`",
        )
    return path


def _warnings(settings: Settings, sources: Mapping[str, Source]) -> tuple[str, ...]:
    found: list[str] = []
    if not settings.sync.store:
        found.append("NOT BACKED UP: [sync] store is not set, checkpoints exist on this pod only")
    if not settings.gpu.inference:
        found.append("[gpu] inference is empty: a silent death of the inference engine cannot be seen by GPU memory")
    if not settings.trainer.command:
        found.append("[trainer] command is empty: podwatch can attach to a trainer but never start one")
    both = set(settings.gpu.inference) & set(settings.gpu.trainer)
    if both:
        found.append(f"GPU {', '.join(map(str, sorted(both)))} is shared by inference and trainer: judged by its share")
    return tuple(found)


def _get(settings: Settings, key: str) -> object:
    value: object = settings
    for name in key.split("."):
        value = getattr(value, name)
    return value
