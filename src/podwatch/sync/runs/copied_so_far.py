"""What an import or a copy has put into the store, kept on this machine's disk so that an interrupted one continues."""

import json
import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from podwatch.stores.base import StoredPart, Upload


class Notes:
    """Of one checkpoint, one line for each thing. A hint only: everything is checked against the store. Without a path
    nothing is kept. Thread-safe."""

    def __init__(self, path: Path | None) -> None:
        self.stored: dict[str, tuple[str, tuple[str, ...]]] = {}
        """Key -> file id, and the SHA-1 of each part."""
        self.uploads: dict[str, Upload] = {}
        """Key -> the unfinished upload."""
        self._parts: dict[str, dict[int, str]] = {}
        self._path, self._lock = path, threading.Lock()
        if path is None:
            return
        with suppress(OSError, ValueError, KeyError, TypeError):
            for line in path.read_text().splitlines():
                doc = json.loads(line)
                key = str(doc["key"])
                if "number" in doc:
                    self._parts.setdefault(str(doc["upload"]), {})[int(doc["number"])] = str(doc["note"])
                elif "upload" in doc:
                    self.uploads[key] = Upload(key, str(doc["upload"]))
                else:
                    self.stored[key] = (str(doc["file_id"]), tuple(str(h) for h in doc["sha1"]))

    def parts(self, upload: Upload, spans: Sequence[tuple[int, int]]) -> dict[int, StoredPart]:
        """The parts that were sent; ``spans`` are (offset, length) of all."""
        sent = self._parts.get(upload.id, {})
        return {n: StoredPart.noted(note, spans[n - 1][1]) for n, note in sent.items() if 0 < n <= len(spans)}

    def sent(self, key: str, file_id: str, hashes: Iterable[str]) -> None:
        self._add({"key": key, "file_id": file_id, "sha1": list(hashes)})

    def begun(self, upload: Upload) -> None:
        self._add({"key": upload.key, "upload": upload.id})

    def part(self, upload: Upload, number: int, part: StoredPart) -> None:
        self._add({"key": upload.key, "upload": upload.id, "number": number, "note": part.note})

    def _add(self, document: dict[str, object]) -> None:
        if self._path is None:
            return
        with self._lock, suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._path.open("a") as file:
                file.write(json.dumps(document) + "\n")
                file.flush()
                os.fsync(file.fileno())

    def done(self) -> None:
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()
