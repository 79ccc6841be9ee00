"""Converts podwatch's dataclasses to JSON-safe values."""

import dataclasses
from collections.abc import Mapping, Set
from enum import Enum
from pathlib import PurePath


def plain(value: object) -> object:
    """The JSON-safe value: dataclasses become objects, enums their values, sets sorted lists, unknown types text."""
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, Set):
        return sorted((plain(v) for v in value), key=str)
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, PurePath):
        return str(value)
    return repr(value)
