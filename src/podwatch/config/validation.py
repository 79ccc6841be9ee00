"""Validates the settings: pydantic's models, built from the sections. The one module that a process without them must
not import."""

import types
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, field_validator, model_validator

from podwatch.config.command_directory import resolved
from podwatch.config.section_base import Section, Unit, settings_of

S = TypeVar("S", bound=Section)


def validated(kind: type[S], values: Mapping[str, Any]) -> S:
    """The section of these values. Raises pydantic's ValidationError with every problem."""
    made: S = _section_of(model_of(kind).model_validate(values))
    return made


class _Model(BaseModel):
    """A frozen model that rejects unknown keys."""

    # defer_build: only the outermost model needs a validator, which contains those of its sections.
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, defer_build=True)
    section: ClassVar[type[Section]]

    @field_validator("*", mode="after")
    @classmethod
    def _absolute(cls, value: object) -> object:
        """Make paths absolute: the daemon's working directory is ``/``."""
        return resolved(value) if isinstance(value, Path) else value


def model_of(kind: type[Section]) -> type[_Model]:
    """The model that validates a section."""
    return _model_of(kind)  # type: ignore[arg-type]  # a class can be hashed


@cache
def _model_of(kind: Any) -> type[_Model]:
    checks: dict[str, Any] = {}
    for name, method in vars(kind).items():
        if marks := getattr(getattr(method, "__func__", None), "checks_settings", None):
            names, mode = marks
            checks[name] = field_validator(*names, mode=mode)(method)  # type: ignore[no-untyped-call]
        elif getattr(method, "checks_section", False):
            checks[name] = model_validator(mode="after")(method)
    known: dict[str, Any] = {}
    for name, info in settings_of(kind).items():
        # A section that nothing sets is validated like an empty table: as a default, its model would build a validator
        # of its own.
        default: dict[str, Any] = {"default": info.default}
        if isinstance(info.default, Section):
            default = {"default_factory": dict}
        known[name] = (_annotation(info.annotation), Field(**default, **info.limits))
    model: type[_Model] = create_model(kind.__name__, __base__=_Model, __validators__=checks, **known)
    model.section = kind
    return model


def _annotation(of: Any) -> Any:
    """As pydantic reads it: models for sections, validators for units."""
    if isinstance(of, type) and issubclass(of, Section):
        return model_of(of)
    origin, inside = get_origin(of), get_args(of)
    if origin is None or origin is Literal:
        return of
    if origin is Annotated:
        marks = (BeforeValidator(mark.parse) if isinstance(mark, Unit) else mark for mark in inside[1:])
        return Annotated[(_annotation(inside[0]), *marks)]
    read = tuple(item if item is ... else _annotation(item) for item in inside)
    return Union[read] if origin in (Union, types.UnionType) else origin[read]  # noqa: UP007


def _section_of(value: Any) -> Any:
    if isinstance(value, _Model):
        made = value.section(**{name: _section_of(getattr(value, name)) for name in type(value).model_fields})
        object.__setattr__(made, "_given", frozenset(value.model_fields_set))
        return made
    if isinstance(value, tuple):
        return tuple(_section_of(item) for item in value)
    return {key: _section_of(item) for key, item in value.items()} if isinstance(value, dict) else value
