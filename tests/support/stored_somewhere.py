"""A store of each kind for one test: how podwatch names it, trouble on demand, and what was sent to it.

``violations()`` are the moments at which the newest pointer lied. The B2 and S3 stand-ins look at each of their events,
``Directory`` all the time.
"""

import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support import b2server, s3server
from tests.support.b2server import B2Server
from tests.support.pointer_check import PointerCheck, pointers
from tests.support.s3server import S3Server
from tests.support.store_layout import Files

LOOK_SECONDS = 0.02
FAULTS: tuple[dict[str, Any], ...] = (
    {"action": "status", "status": 503},
    {"action": "status", "status": 500},
    {"action": "reset"},
    {"action": "hang", "seconds": 0.5},
    {"action": "slow", "seconds": 0.5},
    {"action": "lost"},
)


_DOCUMENTS = ("/intent.json", "/manifest.json", "/pinned", "/exports.json")


class Server:
    """The B2 or the S3 stand-in. ``moments``: requests of an upload in their order, each with the end of the name.
    ``pieces``: those that the upload child makes."""

    def __init__(self, process: B2Server | S3Server) -> None:
        self.process = process
        if isinstance(process, B2Server):
            self.url, self.part = f"b2://{b2server.BUCKET}", "5MB"
            self.moments = (
                ("b2_upload_file", "/intent.json"), ("b2_upload_file", ".piece-00001"),
                ("b2_upload_file", "/manifest.json"), ("b2_upload_file", ".json"), ("b2_upload_file", "/latest.json"),
            )  # fmt: skip
            self._sends = ("b2_upload_file",)
            self.environment = {
                "B2_APPLICATION_KEY_ID": b2server.KEY_ID, "B2_APPLICATION_KEY": b2server.KEY,
                "B2_ENVIRONMENT": process.url,
            }  # fmt: skip
        else:
            self.url, self.part = f"s3://{s3server.BUCKET}", "5MiB"
            self.moments = (
                ("PutObject", "/intent.json"), ("PutObject", ".piece-00001"),
                ("PutObject", "/manifest.json"), ("PutObject", ".json"), ("PutObject", "/latest.json"),
            )  # fmt: skip
            self._sends = ("PutObject",)
            self.environment = {
                "AWS_ACCESS_KEY_ID": s3server.KEY_ID, "AWS_SECRET_ACCESS_KEY": s3server.KEY,
                "AWS_ENDPOINT_URL_S3": process.url, "AWS_EC2_METADATA_DISABLED": "true",
            }  # fmt: skip

        self.pieces = tuple((self._sends[0], f".piece-0000{number}") for number in range(3))

    def trouble(self, chance: random.Random, faults: int) -> None:
        for _ in range(faults):
            request = chance.choice([*(name for name, _ in self.moments), "*"])
            self.process.fault(request, skip=chance.randrange(4), **chance.choice(FAULTS))

    def clear(self) -> None:
        self.process.admin("clear")

    def violations(self) -> list[str]:
        return self.process.violations()

    def suffered(self, request: str) -> int:
        """How many requests of this kind met a fault."""
        return sum(e["ep"] == "fault" and e["on"] == request for e in self.process.events())

    def sent(self) -> dict[str, Counter[tuple[str, int]]]:
        """``step_<N>/<save id>`` -> how often each part of its files arrived."""
        found: dict[str, Counter[tuple[str, int]]] = {}
        for event in self.process.events():
            name = event["name"]
            if event["ep"] in self._sends and "/step_" in name and not name.endswith(_DOCUMENTS):
                save = "/".join(name.split("/podwatch/")[1].split("/")[:2])
                found.setdefault(save, Counter())[name, event.get("part", 0)] += 1
        return found


class Directory:
    """A store in a directory, read all the time by a thread."""

    part = "5MB"
    environment: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, root: Path) -> None:
        self.root, self.url = root, f"file://{root}"
        self.looks = 0
        self._found: list[str] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def trouble(self, chance: random.Random, faults: int) -> None:
        """A directory has none that a test could make."""

    def clear(self) -> None:
        pass

    def violations(self) -> list[str]:
        return list(self._found)

    def _watch(self) -> None:
        files = Files(self.root)
        check = PointerCheck(files)
        while not self._ended.wait(LOOK_SECONDS):
            for key in pointers(files.names()):
                self.looks += 1
                if problem := check.problem(key):
                    self._found.append(problem)


@contextmanager
def server(kind: str, directory: Path) -> Iterator[Server]:
    with B2Server(directory) if kind == "b2" else S3Server(directory) as process:
        yield Server(process)


@contextmanager
def store(kind: str, directory: Path) -> Iterator[Server | Directory]:
    if kind != "directory":
        with server(kind, directory) as made:
            yield made
        return
    watched = Directory(directory)
    try:
        yield watched
    finally:
        watched.close()
