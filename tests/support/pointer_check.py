"""Promise 1, as test servers and tests check it: whatever the newest pointer or ``latest.json`` says, all that it
names is in the store, complete, with the recorded bytes. By the description of the layout alone."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

_POINTER = re.compile(r"(.*podwatch/)pointers/(\d+)-(\d+)-[0-9A-Za-z]+\.json")


@dataclass(frozen=True)
class Found:
    """An object as a test server knows it; ``identity`` names these bytes."""

    key: str
    size: int
    identity: str
    body: Path


class Objects(Protocol):
    def newest(self, key: str) -> Found | None: ...


def pointers(names: Iterable[str]) -> Iterator[str]:
    """The keys of each run's ``latest.json`` and of its newest pointer."""
    newest: dict[str, tuple[tuple[int, int], str]] = {}
    for name in sorted(names):
        if name.endswith("podwatch/latest.json"):
            yield name
        elif match := _POINTER.fullmatch(name):
            order = (int(match[2]), int(match[3]))
            newest[match[1]] = max(newest.get(match[1], ((-1, -1), "")), (order, name))
    yield from (key for _, key in newest.values())


class PointerCheck:
    """``problem`` returns what is wrong with one pointer; empty if nothing. Bodies are hashed once."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self.hashed: dict[tuple[str, str], str] = {}

    def problem(self, key: str) -> str:
        newest = self._objects.newest(key)
        if newest is None:
            return ""
        try:
            self._pointer(json.loads(newest.body.read_bytes()), key.partition("podwatch/")[0] + "podwatch/")
        except (KeyError, ValueError, TypeError, RecursionError, AssertionError, OSError) as error:
            return f"{key}: {error!r}"
        return ""

    def _pointer(self, pointer: dict[str, Any], root: str) -> None:
        if pointer["step"] is None:
            return
        folder = f"{root}step_{pointer['step']}/{pointer['save_id']}/"
        manifest = self._objects.newest(f"{folder}manifest.json")
        assert manifest is not None, "manifest is not there"
        body = manifest.body.read_bytes()
        assert len(body) == pointer["manifest_size"], "manifest size"
        assert f"sha256:{hashlib.sha256(body).hexdigest()}" == pointer["manifest_hash"], "manifest hash"
        document = json.loads(body)
        assert (document["step"], document["save_id"]) == (pointer["step"], pointer["save_id"]), "another save"
        for file in document["files"]:
            self._file(folder, file, document["piece_size"])
        exports = self._objects.newest(f"{folder}exports.json")
        listed = {"files": []} if exports is None else json.loads(exports.body.read_bytes())
        for file in listed["files"] if listed.get("complete") else ():
            self._object(f"{folder}{file['part']}/{file['path']}", file["size"], file["hashes"][0])

    def _file(self, folder: str, file: dict[str, Any], piece: int) -> None:
        name, size = f"{folder}{file['part']}/{file['path']}", file["size"]
        if size <= piece:
            assert len(file["hashes"]) == 1, f"hashes of {name}"
            self._object(name, size, file["hashes"][0])
            return
        assert len(file["hashes"]) == -(-size // piece), f"hashes of {name}"
        for number, digest in enumerate(file["hashes"]):
            self._object(f"{name}.piece-{number:05}", min(piece, size - number * piece), digest)

    def _object(self, key: str, size: int, digest: str) -> None:
        stored = self._objects.newest(key)
        assert stored is not None, f"{key} is not there"
        assert stored.size == size, f"{key} has another size"
        assert self._hash(stored, digest.partition(":")[0]) == digest, f"{key} has other bytes"

    def _hash(self, stored: Found, kind: str) -> str:
        known = self.hashed.get((stored.identity, kind))
        if known is None:
            with stored.body.open("rb") as body:
                known = f"{kind}:{hashlib.file_digest(body, kind).hexdigest()}"
            self.hashed[stored.identity, kind] = known
        return known
