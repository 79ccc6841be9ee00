"""Runs as their pods left them in a store, put there by the product's own publisher."""

import hashlib
import os
import time
from dataclasses import replace
from pathlib import Path

from podwatch.domain.checkpoint import FileEntry
from podwatch.domain.lease import Heartbeat
from podwatch.store.documents import SaveIntent
from podwatch.store.interfaces import Author
from podwatch.store.inventory import Stored
from podwatch.store.keys import RunKeys
from podwatch.store.objects.base import Objects
from podwatch.store.objects.directory import DirectoryObjects
from podwatch.store.publish import Publisher
from tests.support.memory_objects import AlwaysHolds

COMMAND = ("python", "train.py")


class _Timed(AlwaysHolds):
    until = float("inf")

    def wall(self) -> float:
        return time.time()

    def boottime(self) -> float:
        return 0.0


def publisher_of(store: Objects, keys: RunKeys, generation: int = 1) -> Publisher:
    lease = _Timed(generation, float("inf"))
    return Publisher(store, keys, lease, lease)


def send_save(store: Objects, keys: RunKeys, step: int, *, layout: str = "custom") -> tuple[SaveIntent, dict[str, str]]:
    """Every object of a save of two files, and its intent."""
    bodies = {"model.bin": os.urandom(200), "sub/state": os.urandom(50)}
    files = tuple(FileEntry(path, "checkpoint", len(body), 1) for path, body in bodies.items())
    intent = SaveIntent(keys.run_id, step, f"save{step}", "w1", 1, time.time(), layout, 100, files)
    folder = keys.save(step, intent.save_id)
    store.put(folder + "intent.json", intent.to_bytes())
    algorithm, hashes = "sha1" if store.url.startswith("b2:") else "sha256", {}
    for piece in intent.objects():
        body = bodies[piece.name.removeprefix("checkpoint/").partition(".piece-")[0]]
        part = body[piece.offset : piece.offset + piece.size]
        store.put(folder + piece.name, part)
        hashes[piece.name] = f"{algorithm}:{hashlib.new(algorithm, part).hexdigest()}"
    return intent, hashes


def past_run(store: Objects, keys: RunKeys, *steps: int) -> list[Stored]:
    """Saves of these steps, each made the newest in its turn."""
    publisher, author = publisher_of(store, keys), Author(keys.run_id, "w1", lineage="line", train_command=COMMAND)
    return [publisher.publish(*send_save(store, keys, step), author) for step in steps]


def put_beat(store: Objects, keys: RunKeys, **fields: object) -> None:
    """A heartbeat that was written just now by a run that is well, with these fields changed."""
    now = time.time()
    beat = Heartbeat(
        writer_id="w1", generation=1, state="running", phase="running", overall="ok", desired="running", host="pod-1",
        step=25, written_wall=now, step_wall=now - 3, last_stored_step=20,
    )  # fmt: skip
    store.put(keys.heartbeat, replace(beat, **fields).to_bytes())  # type: ignore[arg-type]


def aged(root: Path, days: float) -> None:
    """The store's times of everything in a directory, so many days ago."""
    then = time.time() - days * 86400
    for path in root.rglob("*"):
        os.utime(path, (then, then))


def directory_of(path: Path) -> DirectoryObjects:
    path.mkdir(parents=True, exist_ok=True)
    return DirectoryObjects(path)


def tree(root: Path) -> dict[str, Path]:
    return {p.relative_to(root).as_posix(): p for p in sorted(root.rglob("*")) if p.is_file()}
