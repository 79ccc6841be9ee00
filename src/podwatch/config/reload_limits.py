"""Which changed settings a reload refuses, and which take effect only at the next start of podwatch. Pure."""

from podwatch.config.setting_names import known_keys, submodel, value_of
from podwatch.config.settings import AT_START, LIVE, REFUSED, Section, Settings


def refused_by_reload(old: Settings, new: Settings) -> tuple[str, ...]:
    """Dotted keys that differ and with which podwatch refuses the whole reload."""
    return tuple(key for key in _changed(old, new) if _mark(key) == REFUSED)


def waits_for_restart(old: Settings, new: Settings) -> tuple[str, ...]:
    """Changed keys that take effect only at the next start of podwatch."""
    return tuple(key for key in _changed(old, new) if _mark(key) != LIVE)


def _changed(old: Settings, new: Settings) -> tuple[str, ...]:
    return tuple(key for key in known_keys() if value_of(old, key) != value_of(new, key))


def _mark(key: str) -> object:
    """The mark of the setting, else of the nearest section around it."""
    model: type[Section] = Settings
    mark: object = AT_START
    for name in key.split("."):
        field = model.model_fields[name]
        mark = field.json_schema_extra or model.model_config.get("json_schema_extra") or mark
        model = submodel(field) or model
    return mark
