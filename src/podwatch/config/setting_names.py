"""The dotted names of all settings, and which names look like a secret."""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, get_args, get_origin

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from podwatch.config.settings import FIXED, Section, Settings
from podwatch.domain.secrets import name_strength, url_secrets
from podwatch.system.environment_without_secrets import EXPORTED

ENV_PREFIX = "PODWATCH_"
OPERATIONAL = EXPORTED | frozenset(
    {
        "PODWATCH_CONFIG",
        "PODWATCH_RUNTIME_DIR",
        "PODWATCH_DEBUG",
        "PODWATCH_UNDER_INIT",
        "PODWATCH_BY_HAND",
        "PODWATCH_SILENT_SECONDS",
        "PODWATCH_ADOPT",
        "PODWATCH_TAKE_OVER",
        "PODWATCH_FRESH",
        "PODWATCH_RETRY",
        "PODWATCH_JOB_PIPE",
        "PODWATCH_JOB_PROCESS",
        "PODWATCH_DIRECTORY",
        "PODWATCH_LABEL",
        "PODWATCH_TEST_TIMES",
        "PODWATCH_TRAINING_PYTHONPATH",
    }
)
"""PODWATCH_* variables that are not settings: exported to training, or read by commands."""
OPERATIONAL_PREFIXES = ("PODWATCH_HOOK_", "PODWATCH_HEARTBEAT_", "PODWATCH_AWS_")


_STORE_KEY = re.compile(r"^(?:b2_)?(?:application|account)_?key(?:_?id)?$|^(?:secret|access)_?key(?:_?id)?$", re.I)


def looks_secret(name: str, value: str = "") -> bool:
    """Whether an environment variable or flag of this name (or with this value) must not be written or shown."""
    return name_strength(name) > 0 or bool(url_secrets(value))


def is_credential_key(name: str) -> bool:
    """Whether a TOML key names store credentials."""
    return bool(_STORE_KEY.match(name) or (name.isupper() and looks_secret(name)))


def submodel(field: FieldInfo) -> type[Section] | None:
    """The section of a field, also for ``| None``. A list of sections (``[[log_rules]]``) is one key: None."""
    if get_origin(field.annotation) is tuple:
        return None
    for candidate in (field.annotation, *get_args(field.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def entry_of(field: FieldInfo) -> type[Section] | None:
    """The tables of a list of tables, such as ``[[hooks]]``; None for any other setting."""
    kinds = get_args(field.annotation) if get_origin(field.annotation) is tuple else ()
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def described(field: FieldInfo) -> str:
    """What the setting means; of a list of tables also its keys."""
    entry, text = entry_of(field), field.description or ""
    return text if entry is None else f"{text}: {', '.join(entry.model_fields)}"


def note_of(section: str) -> str:
    """What the section is about: the first line of its text."""
    model: type[Section] = Settings
    for name in section.split("."):
        model = submodel(model.model_fields[name]) or model
    return (model.__doc__ or "").partition("\n")[0].removesuffix(".")


def walk(model: type[Section] = Settings) -> Iterator[tuple[str, FieldInfo]]:
    """Every leaf setting with its dotted name, sections in their order, plain keys first."""
    return ((key, field) for key, field in _leaves(model) if field.json_schema_extra != FIXED)


def walk_fixed() -> Iterator[tuple[str, FieldInfo]]:
    """The same of the values that no configuration sets."""
    return ((key, field) for key, field in _leaves(Settings) if field.json_schema_extra == FIXED)


def _leaves(model: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    sections: list[tuple[str, type[Section]]] = []
    for name, field in model.model_fields.items():
        section = submodel(field)
        if section is not None:
            sections.append((name, section))
        else:
            yield f"{prefix}{name}", field
    for name, section in sections:
        yield from _leaves(section, f"{prefix}{name}.")


def unit_of(field: FieldInfo) -> Any:
    """The reader of a value with a unit; None for a setting without a unit."""
    marks = list(field.metadata)
    for member in get_args(field.annotation):  # ``Size | None``
        marks += getattr(member, "__metadata__", ())
    return next((mark.func for mark in marks if isinstance(mark, BeforeValidator)), None)


def value_of(settings: Settings, key: str) -> object:
    """The effective value; None also for a key in an absent section."""
    value: object = settings
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


@cache
def known_keys() -> tuple[str, ...]:
    return tuple(name for name, _ in walk())


@cache
def fixed_keys() -> frozenset[str]:
    """Names that a test can set and a configuration cannot."""
    return frozenset(name for name, _ in walk_fixed())


@cache
def known_sections() -> tuple[str, ...]:
    """Dotted section names, parents first."""
    found: dict[str, None] = {}
    for name, _ in _leaves(Settings):
        parts = name.split(".")
        for length in range(1, len(parts)):
            found.setdefault(".".join(parts[:length]))
    return tuple(found)


def env_name(key: str) -> str:
    return ENV_PREFIX + key.upper().replace(".", "__")


def similar(word: str, words: Sequence[str], cutoff: float) -> list[str]:
    """The most similar of ``words`` as a list of one, or an empty list if none is similar enough (0 to 1)."""
    import difflib  # 0.15 MiB that a daemon with a valid configuration does not need

    return difflib.get_close_matches(word, words, n=1, cutoff=cutoff)


def suggest_key(path: tuple[str, ...]) -> str:
    """The fix for an unknown key: the nearest name in its section, else the same name in another section."""
    section, name = ".".join(path[:-1]), path[-1].replace("-", "_").lower()
    siblings = _names_in(section)
    if name in siblings:
        return f'write "{name}"'
    leaves: dict[str, list[str]] = {}
    for key in known_keys():
        leaves.setdefault(key.rpartition(".")[2], []).append(key)
    # The right name in another section is a better guess than a similar name.
    if name not in leaves and (close := similar(name, siblings, cutoff=0.6)):
        return f'did you mean "{close[0]}"?'
    if close := similar(name, list(leaves), cutoff=0.75):
        homes = [key.rpartition(".")[0] for key in leaves[close[0]]]
        places = " or ".join(f"in [{home}]" if home else "at the top of the file" for home in homes)
        return f'did you mean "{close[0]}" {places}?'
    return "remove it" + (f"; the keys of [{section}] are {', '.join(siblings)}" if section and siblings else "")


def suggest_env(name: str) -> str:
    """The fix for an unknown PODWATCH_* variable."""
    names = [env_name(key) for key in known_keys()] + sorted(OPERATIONAL)
    upper = name.upper()
    if upper in names:
        return f"write it in capitals: {upper}"
    flat = {candidate.replace("__", "_"): candidate for candidate in names}
    if upper.replace("__", "_") in flat:
        return f"did you mean {flat[upper.replace('__', '_')]}? (two underscores between section and key)"
    close = similar(upper, names, cutoff=0.7)
    return f"did you mean {close[0]}?" if close else "unset it, or see docs/configuration.md for the names"


def _names_in(section: str) -> list[str]:
    prefix = f"{section}." if section else ""
    inside = [key[len(prefix) :].split(".")[0] for key in known_keys() if key.startswith(prefix)]
    return list(dict.fromkeys(inside))


def flatten(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping as dotted leaves; a mapping that is a setting itself (``trainer.env``) is one leaf."""
    leaves: dict[str, Any] = {}
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in known_keys():
            leaves |= flatten(value, f"{key}.")
        else:
            leaves[key] = value
    return leaves
