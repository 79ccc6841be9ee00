"""The configuration files that a training command names: TOML, YAML and JSON, read as data."""

import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podwatch.domain.secrets import register_document
from podwatch.system.files import opened, read_descriptor

SUFFIXES = (".toml", ".yaml", ".yml", ".json")
LARGEST = 4 * 1024 * 1024
"""Bytes. A larger file is data."""
_DEEPEST = 32
_YAML_LINE = re.compile(r"( *)(?:- )?([\w./-]{1,200}) *:(?: +(.*))?$")
_NUMBER = re.compile(r"[+-]?\d{1,18}")
_TRUTH = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """``changed_wall``: epoch seconds of its last change by the clock of its file system, 0.0 where it cannot be read.
    ``document`` is None for a file that cannot be read or parsed."""

    name: str
    changed_wall: float
    document: Mapping[str, Any] | None


def read_config(name: str, cwd: Path, *, shown: bool = False) -> ConfigFile:
    """The file as the command names it. Blocks: reads at most 4 MiB of a regular file. Its secrets are registered with
    the scrubber. ``shown``: as for ``open_file``."""
    path = cwd / name
    try:
        with opened(path, shown=shown) as file:
            changed = os.fstat(file.fileno()).st_ctime
            document = parsed(name, read_descriptor(file.fileno(), LARGEST, str(path)).decode())
    except (OSError, ValueError, RecursionError):
        return ConfigFile(name, 0.0, None)
    register_document(document)
    return ConfigFile(name, changed, document)


def parsed(name: str, text: str) -> Mapping[str, Any]:
    """The document in ``text``, by the suffix of its name. Raises ValueError or RecursionError."""
    if name.endswith(".toml"):
        return tomllib.loads(text)
    found = json.loads(text) if name.endswith(".json") else plain_yaml(text)
    if not isinstance(found, dict):
        raise ValueError("no mapping")
    return found


def plain_yaml(text: str) -> dict[str, Any]:
    """The plain values of nested mappings, which is all that a setting needs: lists, anchors, tags, flow mappings and
    texts of several lines are left out. Linear in the length of the text."""
    root: dict[str, Any] = {}
    open_mappings: list[tuple[int, dict[str, Any]]] = [(-1, root)]
    for line in text.splitlines():
        match = _YAML_LINE.match(line.split(" #", 1)[0].rstrip())
        if match is None or line.lstrip().startswith(("#", "- ")):
            continue
        depth, key, value = len(match[1]), match[2], match[3] or ""
        while open_mappings[-1][0] >= depth:
            open_mappings.pop()
        if len(open_mappings) > _DEEPEST:
            raise ValueError("nested too deeply")
        holder = open_mappings[-1][1]
        if value:
            holder[key] = _scalar(value)
            continue
        inner: dict[str, Any] = {}
        holder[key] = inner
        open_mappings.append((depth, inner))
    return root


def _scalar(text: str) -> object:
    """None for what is no plain value."""
    if text[0] in "[{&*!|>":
        return None
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if text.lower() in _TRUTH:
        return _TRUTH[text.lower()]
    return int(text) if _NUMBER.fullmatch(text) else text


def value_at(document: Mapping[str, Any], name: str) -> object:
    """What a document has under a dotted name (``trainer.ckpt.interval``); None if it has nothing there."""
    value: object = document
    if name in document:
        return document[name]
    for part in name.replace("-", "_").split("."):
        if not isinstance(value, dict):
            return None
        value = value[part] if part in value else value.get(part.replace("_", "-"))
    return value
