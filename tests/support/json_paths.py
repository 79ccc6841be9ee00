"""Field paths of JSON documents and of schemas: ``a.b``, ``a[].b`` for the items of a list, ``a.*`` for free keys."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]


def paths_of(document: object, known: Collection[str] = ()) -> set[str]:
    """Every path in the document. Where ``known`` has ``path.*``, the keys below ``path`` are free: one path."""
    return set(_paths(document, "", known))


def _paths(value: object, path: str, known: Collection[str]) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            below = f"{path}." if path else ""
            name = f"{below}*" if f"{below}*" in known and f"{below}{key}" not in known else f"{below}{key}"
            yield name
            yield from _paths(inner, name, known)
    elif isinstance(value, list):
        for inner in value:
            if isinstance(inner, dict | list):
                yield from _paths(inner, f"{path}[]", known)


def schema_paths(schema: Schema, path: str = "", parts: Schema | None = None) -> set[str]:
    """Every path that a JSON schema names. ``parts``: what ``$ref`` names."""
    parts = schema.get("$defs", {}) if parts is None else parts
    if "$ref" in schema:
        schema = parts[schema["$ref"].rpartition("/")[2]]
    found: set[str] = set()
    below = f"{path}." if path else ""
    for name, inner in schema.get("properties", {}).items():
        found |= {f"{below}{name}"} | schema_paths(inner, f"{below}{name}", parts)
    if path and isinstance(schema.get("additionalProperties"), dict):
        found |= {f"{below}*"} | schema_paths(schema["additionalProperties"], f"{below}*", parts)
    if isinstance(schema.get("items"), dict):
        found |= schema_paths(schema["items"], f"{path}[]", parts)
    for inner in schema.get("anyOf", ()):
        found |= schema_paths(inner, path, parts)
    return found


def example_paths(example: object, path: str = "") -> set[str]:
    """Every path of an example, in which a key in capitals stands for free keys."""
    found: set[str] = set()
    below = f"{path}." if path else ""
    if isinstance(example, dict):
        for key, inner in example.items():
            name = f"{below}*" if key.isupper() else f"{below}{key}"
            found |= {name} | example_paths(inner, name)
    elif isinstance(example, list) and example and isinstance(example[0], dict):
        found |= example_paths(example[0], f"{path}[]")
    return found
