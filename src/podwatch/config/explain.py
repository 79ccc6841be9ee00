"""Settings as a commented TOML file, as JSON and as a reference page, all generated from the models."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from podwatch.config.setting_names import described, looks_secret, note_of, unit_of, value_of, walk
from podwatch.config.settings import Section, Settings
from podwatch.config.units import FORMATS
from podwatch.domain.secrets import MASK as REMOVED
from podwatch.domain.secrets import scrub, scrub_argv

MASK = "***"


def plain(field: FieldInfo, value: object) -> object:
    """A value as a user writes it: units and paths as text, tuples as lists."""
    if value is not None and (unit := unit_of(field)):
        return FORMATS[unit](value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return [_entry(item) if isinstance(item, Section) else item for item in value]
    return value


def _entry(table: Section) -> dict[str, object]:
    """One table of a list of tables, without the defaults."""
    known = type(table).model_fields
    return {name: plain(known[name], getattr(table, name)) for name in known if name in table.model_fields_set}


def masked(key: str, value: object) -> object:
    """The value with secrets masked; names stay readable."""
    if isinstance(value, Mapping):
        return {
            name: MASK if looks_secret(str(name), str(text)) else masked(f"{key}.{name}", text)
            for name, text in value.items()
        }
    if isinstance(value, str):
        return MASK if looks_secret("", value) else scrub(value).replace(REMOVED, MASK)
    if key in ("notify.urls", "notify.heartbeat_urls") and isinstance(value, Sequence):
        return [f"{str(url).partition(':')[0]}://{MASK}" for url in value]
    if key.endswith("command") and isinstance(value, Sequence) and not isinstance(value, str):
        return mask_argv([str(argument) for argument in value])
    if isinstance(value, list | tuple):
        return [mask_argv(item) if _is_argv(item) else masked(key, item) for item in value]
    return value


def _is_argv(value: object) -> bool:
    """Whether ``value`` is a list of strings."""
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


def mask_argv(argv: Sequence[str]) -> list[str]:
    """argv with the values of ``--api-key X``, ``--api-key=X``, ``API_KEY=X`` and the like hidden."""
    return list(scrub_argv(argv, MASK))


def to_toml(value: object) -> str:
    """A TOML literal."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{to_toml(str(name))} = {to_toml(item)}" for name, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(to_toml(item) for item in value) + "]"
    raise TypeError(f"no TOML form for {type(value).__name__}")


def render_toml(settings: Settings, sources: Mapping[str, str] | None = None) -> str:
    """The effective settings as loadable TOML without secrets, each with its description and source.

    Values at their default are commented out.
    """
    lines: list[str] = []
    section = ""
    for key, field in walk():
        home, _, name = key.rpartition(".")
        value = value_of(settings, key)
        if home != section:
            absent = home and value_of(settings, home) is None
            lines += ["", f"# {_lower(note_of(home))}", f"{'# ' if absent else ''}[{home}]"]
            section = home
        source = (sources or {}).get(key, "default" if _is_default(field, value) else "file")
        shown = masked(key, plain(field, value))
        lines.append(f"# {described(field)}" + (f" ({source})" if source not in ("default", "file") else ""))
        if shown is None:
            lines.append(f"# {name} =")
        else:
            lines.append(f"{'# ' if source == 'default' else ''}{name} = {to_toml(shown)}")
    return "\n".join(lines) + "\n"


def render_brief(settings: Settings, *, notes: Mapping[str, str], hints: Mapping[str, str]) -> str:
    """The settings that differ from the defaults, as loadable TOML, each with its note. ``hints`` are literals by key
    for settings that the user still has to fill in: commented lines. Nothing is masked."""
    lines: list[str] = []
    section = ""
    for key, field in walk():
        home, _, name = key.rpartition(".")
        value = value_of(settings, key)
        default = _is_default(field, value) or value is None
        if default and key not in hints:
            continue
        if home != section:
            lines += ["", f"[{home}]"]
            section = home
        note = f"  # {' '.join(notes[key].split())}" if notes.get(key) else ""
        lines.append(f"# {name} = {hints[key]}{note}" if default else f"{name} = {to_toml(plain(field, value))}{note}")
    return "\n".join(lines) + "\n"


def to_json(settings: Settings, sources: Mapping[str, str], path: Path | None) -> dict[str, Any]:
    """What ``config show --json`` prints."""
    values = {}
    for key, field in walk():
        value = value_of(settings, key)
        values[key] = {
            "value": masked(key, plain(field, value)),
            "source": sources.get(key, "default"),
            "description": described(field),
        }
    return {"schema_version": 1, "path": str(path) if path else None, "settings": values}


def render_reference() -> str:
    """The lists of docs/configuration.md: every key with its default and meaning."""
    lines: list[str] = []
    section: str | None = None
    for key, field in walk():
        home, _, name = key.rpartition(".")
        if home != section:
            title = f"[{home}]" if home else "Top of the file"
            lines += ["", f"## {title}", ""]
            if home:
                lines += [f"{note_of(home)}.", ""]
            section = home
        lines.append(f"- {_setting(name, field)}: {described(field)}")
    text = "\n".join(lines).lstrip("\n") + "\n"
    return re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", text)


def _setting(name: str, field: FieldInfo) -> str:
    """The key and its default, as in the file; a key without a default says in its description what it is then."""
    if field.is_required():
        return f"`{name}` (required)"
    default = plain(field, _default(field))
    return f"`{name}`" if default is None else f"`{name} = {to_toml(default)}`"


def _lower(text: str) -> str:
    """As a comment begins: in lower case, but for an abbreviation."""
    return text if text[1:2].isupper() else f"{text[:1].lower()}{text[1:]}"


def _is_default(field: FieldInfo, value: object) -> bool:
    return not field.is_required() and value == _default(field)


def _default(field: FieldInfo) -> object:
    return field.get_default(call_default_factory=True)
