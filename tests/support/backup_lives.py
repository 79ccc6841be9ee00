"""Lives of one pod's backup, each in a process of its own that is killed at a chosen moment."""

import asyncio
import os
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from podwatch.app.backup import connection, stored_run, uploads
from podwatch.domain.errors import PodwatchError
from podwatch.store.retention import RetentionRules
from podwatch.store.transfer.start import Transfer
from tests.app.backup.backup_world import MB, World, until

PIECES = 6 * MB
"""Of a file of two pieces."""


@dataclass(frozen=True)
class Aim:
    """``what``: put, delete, list, piece, or a moment. ``name``: part of the object's name. ``nth``: of those.
    ``after``: the store has carried it out."""

    what: str
    name: str = ""
    nth: int = 1
    after: bool = False
    seconds: float = 0.0


TARGETS = (
    ("put", "/intent.json"), ("piece", ""), ("put", "/manifest.json"), ("put", "/pointers/"), ("put", "/latest.json"),
    ("put", "/claims/"), ("delete", ""), ("list", ""), ("moment", ""),
)  # fmt: skip


def aims(chance: random.Random, count: int) -> list[Aim]:
    """Each target in turn, before and after what it is, the first or a later one."""
    found = []
    for number in range(count):
        what, name = TARGETS[number % len(TARGETS)]
        nth = chance.randint(1, 8) if what in ("delete", "list") else chance.randint(1, 2)
        found.append(Aim(what, name, nth, chance.random() < 0.5, chance.uniform(0.0, 3.0)))
    return found


class Killer:
    """Ends its process when its aim is reached."""

    def __init__(self, aim: Aim) -> None:
        self._aim, self._seen, self._lock = aim, 0, threading.Lock()
        if aim.what == "moment":
            timer = threading.Timer(aim.seconds, self._kill)
            timer.daemon = True
            timer.start()

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def around(self, what: str, name: str, call: Callable[[], Any]) -> Any:
        with self._lock:
            self._seen += (reached := what == self._aim.what and self._aim.name in name)
            due = reached and self._seen == self._aim.nth
        if due and not self._aim.after:
            self._kill()
        found = call()
        if due:
            self._kill()
        return found

    def watch(self, store: Any) -> Any:
        """The store, whose requests it sees; of a deletion each object."""
        put, listing = store.put, store.list
        store.put = lambda key, *a, **k: self.around("put", f"/{key}", partial(put, key, *a, **k))
        store.list = lambda key, *a, **k: self.around("list", f"/{key}", partial(listing, key, *a, **k))
        if hasattr(store, "_delete"):
            delete = store._delete
            store._delete = lambda key, version: self.around("delete", f"/{key}", partial(delete, key, version))
        else:
            unlink = os.unlink
            os.unlink = lambda *a, **k: self.around("delete", str(a[0]), partial(unlink, *a, **k))  # type: ignore[assignment]
        return store


def live(home: Path, url: str, aim: Aim | None, saves: int = 2) -> None:
    """Store so many saves, remove what is old, leave. What was replaced is old at once."""
    killer = Killer(aim or Aim("never"))
    real = connection.open_objects

    class Watched(Transfer):
        def run(self, access: Any, on_message: Any) -> None:
            def heard(message: dict[str, Any]) -> None:
                on_message(message)
                if message.get("type") == "piece":
                    killer.around("piece", "", lambda: None)

            super().run(access, heard)

    connection.open_objects = lambda *a, **k: killer.watch(real(*a, **k))
    uploads.Transfer = Watched  # type: ignore[misc]
    stored_run.RetentionRules = partial(RetentionRules, superseded=0.0, named=0.0, unfinished=0.0, keep_pointers=2)  # type: ignore[assignment,misc]
    asyncio.run(_live(World(home, url, keep_last=1), saves, patient=aim is None))


async def _live(world: World, saves: int, *, patient: bool) -> None:
    """``patient``: after each save it waits until what earlier lives began is given up."""
    backup = await world.start()
    there = [int(path.name[5:]) for path in (world.output / "checkpoints").glob("step_*")]
    for step in range(max(there, default=0) + 5, max(there, default=0) + 5 * saves + 1, 5):
        world.save(step, PIECES)
        for old in sorted(there)[:-1]:
            world.remove(old)
        there = [*sorted(there)[-1:], step]
        world.scan()
        for _ in range(20):
            try:
                await backup.sync_now()
                break
            except PodwatchError:
                await asyncio.sleep(0.1)
        if patient:
            await until(lambda: world.links() == world.lists() == [])
    await backup.sweep_store()
    await world.stop()
