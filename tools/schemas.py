"""Writes docs/schema/*.schema.json from the types of the documents:  python tools/schemas.py

A field's description is the text below it in its class, a document's that of the class.
"""

import ast
import inspect
import itertools
import json
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from podwatch.cli.check.report import CheckReport
from podwatch.domain.document import Document, json_schema
from podwatch.domain.lease import Heartbeat
from podwatch.domain.status_document import EventDocument, Status

DIRECTORY = Path(__file__).resolve().parents[1] / "docs" / "schema"
DOCUMENTS: Mapping[str, type[Document]] = {
    "status": Status,
    "event": EventDocument,
    "heartbeat": Heartbeat,
    "check": CheckReport,
}


def texts() -> dict[str, str]:
    """What the repository's schemas contain, by file name."""
    return {f"{name}.schema.json": json.dumps(published(kind), indent=1) + "\n" for name, kind in DOCUMENTS.items()}


def published(kind: type[Document]) -> dict[str, Any]:
    """The schema of a document, with what its classes say about their fields."""
    schema = json_schema(kind)
    classes = {one.__name__: one for one in _subclasses(Document)}
    for name, part in {kind.__name__: schema, **schema.get("$defs", {})}.items():
        part.pop("title", None)
        if "properties" in part:
            part.update(_required(list(part["properties"]), part["required"] if name == Status.__name__ else None))
        for field, rules in part.get("properties", {}).items():
            rules.pop("title", None)
            if text := _texts_of_class(classes[name]).get(field) if name in classes else None:
                rules["description"] = text
    about = " ".join(inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].split())
    first = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": kind.KIND or kind.__name__}
    return {**first, **schema, "description": about}


def _required(every: list[str], without_daemon: list[str] | None) -> dict[str, Any]:
    """All that a document has is written always. Of the status, the parts are absent without a daemon."""
    if without_daemon is None:
        return {"required": every}
    running = {"properties": {"running": {"const": True}}}
    stopped = {"required": ["snapshot_at", "training_alive"], "properties": {"overall": {"const": "unknown"}}}
    return {"required": without_daemon, "if": running, "then": {"required": every}, "else": stopped}


def _subclasses(kind: type) -> set[type]:
    return {kind}.union(*(_subclasses(one) for one in kind.__subclasses__()))


@cache
def _texts_of_class(kind: type) -> dict[str, str]:
    """The text below each field, those of its bases included."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if one is object or not one.__module__.startswith("podwatch."):
            continue
        body = ast.parse(inspect.getsource(one)).body[0].body  # type: ignore[attr-defined]
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[field.target.id] = " ".join(str(text.value.value).split())  # type: ignore[union-attr]
    return found


if __name__ == "__main__":
    for name, text in texts().items():
        (DIRECTORY / name).write_text(text)
    sys.exit(0)
