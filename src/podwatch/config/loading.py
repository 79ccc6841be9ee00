"""Load file, environment and flags into one validated Settings, or report every problem at once.

The file is the first of ``-c``, ``$PODWATCH_CONFIG``, ``./podwatch.toml``, ``/etc/podwatch/podwatch.toml`` (or
``/etc/podwatch/NAME.toml`` with ``--run NAME``). The environment overrides the file; flags override both. Tests set
times by a file of their own (``test_times.py``), which overrides file and environment.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from podwatch.config.command_directory import TYPED_IN, resolved
from podwatch.config.problems import ConfigurationProblems, Problem, explain_errors, find_fixed, find_secrets
from podwatch.config.setting_names import (
    ENV_PREFIX,
    OPERATIONAL,
    OPERATIONAL_PREFIXES,
    env_name,
    fixed_keys,
    flatten,
    known_keys,
    known_sections,
    suggest_env,
    walk,
)
from podwatch.config.settings import Settings
from podwatch.config.test_times import setting_times
from podwatch.config.toml_text import parse_toml
from podwatch.config.trusted_files import read_trusted
from podwatch.domain.errors import ConfigurationError
from podwatch.domain.secrets import register_address, register_argv, register_document, register_named

Source = Literal["default", "file", "environment", "PODWATCH_TEST_TIMES", "flag"]
FILE_NAME = "podwatch.toml"
ETC = Path("/etc/podwatch")


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
    """Load and validate the settings. ConfigurationError (exit 78) lists every problem with the place of its value.

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
    variables, problems = _variables(environ)
    problems += find_secrets(data, path)
    layers: dict[Source, dict[str, Any]] = {
        "file": data,
        "environment": _from_environment(variables),
        "PODWATCH_TEST_TIMES": _flags(setting_times(environ)),
        "flag": _flags(overrides or {}),
    }
    sources: dict[str, Source] = dict.fromkeys(known_keys(), "default")
    for name, layer in layers.items():
        given = dict.fromkeys(flatten(layer), name)
        sources |= given
        if name != "PODWATCH_TEST_TIMES":
            problems += find_fixed(given, given, path)
            layers[name] = _without_fixed(layer)  # one problem for each is enough
    settings = None
    try:
        context = {"directory": environ.get(TYPED_IN, "")}
        settings = Settings.model_validate(reduce(_merged, layers.values()), context=context)
    except ValidationError as error:
        problems += explain_errors(error, sources, path)
        if path is None and all(problem.missing for problem in problems):
            raise ConfigurationError(
                "no configuration file",
                where=", ".join(str(place) for place in search_path(environ, run)),
                fix="write one with `podwatch config init`, or name one with -c FILE",
            ) from error
    if problems or settings is None:
        raise ConfigurationProblems(problems)
    learn_secrets(settings, environ)
    return LoadedSettings(settings, path, sources, _warnings(settings, sources), text)


def given_keys(
    path: Path | None, *, environ: Mapping[str, str], overrides: Mapping[str, object], run: str = ""
) -> frozenset[str]:
    """The dotted keys that file, environment or flags set; the file need not be valid otherwise."""
    found = find_file(path, environ=environ, run=run)
    data = parse_toml(read_trusted(found), found) if found is not None else {}
    variables = {key for key in known_keys() if env_name(key) in environ}
    return frozenset((*flatten(data), *variables, *flatten(_flags(overrides))))


def learn_secrets(settings: Settings, environ: Mapping[str, str]) -> None:
    """Register the secrets of the configuration and the environment with the scrubber."""
    register_named(environ)
    register_named(settings.trainer.env)
    register_argv(settings.trainer.resume_args)
    for _, command in commands(settings):
        register_argv(command)
    for url in (*settings.notify.urls, *settings.notify.heartbeat_urls):
        register_address(url)
    register_document(settings.model_dump(mode="json"))


def commands(settings: Settings) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every command that podwatch runs because the configuration says so, with the key that names it."""
    trainer = settings.trainer
    named = [("trainer.command", trainer.command)]
    named += [("trainer.start_before", command) for command in trainer.start_before]
    named += [("trainer.stop_also", command) for command in trainer.stop_also]
    named += [(f"hooks, {hook.name}", hook.command) for hook in settings.hooks]
    named += [("evaluation.command", settings.evaluation.command), ("notify.command", settings.notify.command)]
    named += [("end_pod.command", settings.end_pod.command)]
    if settings.wandb.enabled and settings.wandb.python is not None:
        named.append(("wandb.python", (str(settings.wandb.python),)))
    return ((key, command) for key, command in named if command)


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


def _without_fixed(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A layer without the values that no configuration sets."""
    return {
        name: _without_fixed(value, f"{prefix}{name}.") if isinstance(value, dict) else value
        for name, value in data.items()
        if f"{prefix}{name}" not in fixed_keys()
    }


def _merged(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Both nested mappings; where both have a value, that of ``high``."""
    merged = dict(low)
    for key, value in high.items():
        below = merged.get(key)
        merged[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _from_environment(variables: Mapping[str, str]) -> dict[str, Any]:
    """The settings among ``variables`` as a nested mapping."""
    if not variables:
        return {}
    # 10 MiB that a podwatch without variables does not need
    from pydantic_settings import EnvSettingsSource, SettingsError

    class Environment(EnvSettingsSource):
        def decode_complex_value(self, field_name: str, field: FieldInfo | None, value: Any) -> Any:
            if field is None:  # of a table that the operator names, such as a provider
                return _json_or_text(str(value).strip())
            decoded = _decoded(field, str(value))
            if str in get_args(field.annotation) and decoded == value:
                raise ValueError("the value is a plain word")
            return decoded

    # pydantic-settings reads only the fields and the configuration of the model.
    source = Environment(Settings, env_prefix=ENV_PREFIX, env_nested_delimiter="__")  # type: ignore[arg-type]
    source.env_vars = variables
    try:
        return source()
    except SettingsError as error:
        raise ConfigurationError(
            f"cannot be read: {error}", where="environment", fix="write lists and tables as JSON"
        ) from error


def _decoded(field: FieldInfo, text: str) -> object:
    """The value of a setting that is written as text: lists as JSON or separated by commas."""
    stripped = text.strip()
    if stripped.startswith(("[", "{")) and field.annotation is not str:
        return _json_or_text(stripped)
    if get_origin(field.annotation) is tuple:
        return [piece.strip() for piece in stripped.split(",") if piece.strip()]
    return text


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
    """Flags as a nested mapping for the models."""
    fields = dict(walk())
    nested: dict[str, Any] = {}
    for key, given in dotted.items():
        value = _decoded(fields[key], given) if isinstance(given, str) and key in fields else given
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
    try:
        is_file, is_directory = path.is_file(), path.is_dir()
    except OSError as error:  # a directory above it is closed to this user
        raise ConfigurationError(
            f"{error.strerror}: cannot read the configuration given by {named_by}",
            where=str(path),
            fix="let podwatch's user enter every directory above it",
        ) from error
    if not is_file:
        what = "is a directory" if is_directory else "does not exist"
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
    if times := sum(source == "PODWATCH_TEST_TIMES" for source in sources.values()):
        found.append(f"PODWATCH_TEST_TIMES sets {times} of podwatch's times: for tests only")
    return tuple(found)
