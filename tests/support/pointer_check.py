"""Promise 1, as the test servers check it at every event: whatever a ``latest.json`` says, everything that it names is
in the store, complete, with the recorded bytes."""

import hashlib
import json
from pathlib import Path
from typing import Any, Protocol


class Found(Protocol):
    """An object as a test server knows it; ``identity`` names these bytes."""

    @property
    def key(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def identity(self) -> str: ...
    @property
    def body(self) -> Path: ...


class Objects(Protocol):
    def newest(self, key: str) -> Found | None: ...
    def version(self, key: str, file_id: str) -> Found | None:
        """The finished object that ``file_id`` names; None if there is none."""
        ...


class PointerCheck:
    """``problem`` returns what is wrong with one pointer; empty if nothing. Bodies are hashed once."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._hashed: dict[tuple[str, int], list[str]] = {}

    def problem(self, key: str) -> str:
        newest = self._objects.newest(key)
        if newest is None:
            return ""
        try:
            self._pointer(json.loads(newest.body.read_bytes()))
        except (KeyError, ValueError, TypeError, RecursionError, AssertionError, OSError) as error:
            return f"{key}: {error!r}"
        return ""

    def _pointer(self, pointer: dict[str, Any]) -> None:
        if pointer["step"] is None:
            return
        key = pointer["manifest_key"]
        manifest = self._objects.version(key, pointer["manifest_file_id"])
        assert manifest is not None, "manifest is not there"
        body = manifest.body.read_bytes()
        assert len(body) == pointer["manifest_size"], "manifest size"
        assert hashlib.sha1(body).hexdigest() == pointer["manifest_sha1"], "manifest hash"
        self._document(json.loads(body), pointer)
        beside = self._objects.newest(key.removesuffix("manifest.json") + "optional.json")
        if beside is not None:  # what no resume needs, where it was stored
            self._document(json.loads(beside.body.read_bytes()), pointer)

    def _document(self, doc: dict[str, Any], pointer: dict[str, Any]) -> None:
        assert (doc["step"], doc["save_id"]) == (pointer["step"], pointer["save_id"]), "manifest of another save"
        for file in doc["files"]:
            stored = self._objects.version(file["key"], file["file_id"])
            assert stored is not None, f"{file['path']} is not there"
            assert stored.size == file["size"], f"{file['path']} has another size"
            assert self._hashes(stored, doc["part_size"]) == file["parts_sha1"], f"{file['path']} has other bytes"

    def _hashes(self, stored: Found, part_size: int) -> list[str]:
        known = self._hashed.get((stored.identity, part_size))
        if known is None:
            known = []
            with stored.body.open("rb") as body:
                while data := body.read(part_size):
                    known.append(hashlib.sha1(data).hexdigest())
            self._hashed[stored.identity, part_size] = known
        return known
