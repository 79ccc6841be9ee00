"""The base of the sections of the settings: frozen dataclasses, which need no library.

``validation.py`` builds pydantic's models from them. pydantic takes 9 MiB, so the daemon leaves validation to a
process that ends (``loading_child.py``), and holds only these.
"""

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, dataclass_transform, get_type_hints


def setting(
    default: Any = ..., *, default_factory: Callable[[], Any] | None = None, description: str, **limits: Any
) -> Any:
    """A setting of a section, required without a default. ``limits`` are those of pydantic's Field: ge, gt, le,
    min_length, max_length, pattern."""
    about = {"description": description, "limits": limits}
    if default_factory is not None:
        return field(default_factory=default_factory, metadata=about)
    return field(metadata=about) if default is ... else field(default=default, metadata=about)


def section(kind: type[Any]) -> Any:
    """A section that can be absent: it then has its defaults."""
    return field(default_factory=kind)


def check(*names: str, mode: Literal["before", "after"] = "after") -> Callable[[Any], Any]:
    """Validates the settings of these names: a class method that returns the value, or raises ValueError. ``before``:
    gets the value as it was given."""

    def marked(method: Any) -> Any:
        method.__func__.checks_settings = (names, mode)
        return method

    return marked


def check_section(method: Any) -> Any:
    """Validates a section whose settings are valid: returns self, or raises ValueError."""
    method.checks_section = True
    return method


@dataclass(frozen=True, slots=True)
class Unit:
    """Mark in an annotation: the reader of a value with a unit."""

    parse: Callable[[Any], float]


def unit_of(annotation: Any) -> Any:
    """The reader of a value with a unit; also of ``Size | None``, where the mark is inside the union."""
    marks = [*getattr(annotation, "__metadata__", ())]
    for member in getattr(annotation, "__args__", ()):
        marks += getattr(member, "__metadata__", ())
    return next((mark.parse for mark in marks if isinstance(mark, Unit)), None)


@dataclass(frozen=True, slots=True)
class SettingInfo:
    """What is known of one setting. ``annotation`` keeps the marks (``Unit``)."""

    name: str
    annotation: Any
    description: str
    limits: Mapping[str, Any]
    default: Any
    """``...``: required."""

    @property
    def required(self) -> bool:
        return self.default is ...


def _default(of: "Field[Any]") -> Any:
    if of.default_factory is not MISSING:
        return of.default_factory()
    return ... if of.default is MISSING else of.default


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(setting, section))
class Section:
    """One table of the configuration. Built by its constructor it is not validated; ``model_validate`` does that. The
    methods have the names that pydantic's models have."""

    _given: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    @classmethod
    def model_validate(cls, values: Mapping[str, Any]) -> Self:
        """The validated section. Raises pydantic's ValidationError. Imports pydantic."""
        from podwatch.config.validation import validated

        return validated(cls, values)

    @property
    def given(self) -> frozenset[str]:
        """The names that were given: the others have their default."""
        return self._given

    def model_copy(self, *, update: Mapping[str, Any]) -> Self:
        """A copy with these values, which are not validated."""
        return replace(self, **update)  # type: ignore[type-var]

    def model_dump(self, *, mode: Literal["python", "json"] = "python") -> dict[str, Any]:
        """All settings as plain data; ``json``: only with types that JSON has."""
        return {name: _plain(getattr(self, name), mode == "json") for name in settings_of(type(self))}


def settings_of(kind: type[Section]) -> Mapping[str, SettingInfo]:
    """The settings of a section by name, in their order."""
    return _settings_of(kind)  # type: ignore[arg-type]  # a class can be hashed


@cache
def _settings_of(kind: Any) -> Mapping[str, SettingInfo]:
    hints = get_type_hints(kind, include_extras=True)
    found = {}
    for one in fields(kind):
        about = one.metadata
        found[one.name] = SettingInfo(
            one.name, hints[one.name], about.get("description", ""), about.get("limits", {}), _default(one)
        )
    return types.MappingProxyType(found)


def _plain(value: Any, json: bool) -> Any:
    if isinstance(value, Section):
        return value.model_dump(mode="json" if json else "python")
    if isinstance(value, Mapping):
        return {key: _plain(item, json) for key, item in value.items()}
    if isinstance(value, tuple):
        items = tuple(_plain(item, json) for item in value)
        return list(items) if json else items
    return str(value) if json and isinstance(value, Path) else value
