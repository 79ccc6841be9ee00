"""Triggers a rescan as soon as a file changes. Events are hints: without them podwatch only reacts later.

Only the layout's roots and the steps being written are watched, each without recursion, and only for files and
directories that were closed, moved, created or deleted: the library's default also reports every single write, which
slows the writer down. Never rollouts, broadcasts or logs.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from watchdog import events
from watchdog.observers import Observer

logging.getLogger("watchdog").setLevel(logging.CRITICAL)
"""This logger reports an error for each watch that ends while its thread waits."""
_FILTER = [
    events.FileClosedEvent,
    events.FileCreatedEvent,
    events.FileDeletedEvent,
    events.FileMovedEvent,
    events.DirCreatedEvent,
    events.DirDeletedEvent,
    events.DirMovedEvent,
]
DEBOUNCE = 0.25
"""Seconds from the first event to the wake-up: one save causes hundreds of events, and one rescan is enough for all."""


Roots = Callable[[], tuple[Path, ...]]
"""The directories to watch now. Can block on a disk."""
Wake = Callable[[], None]
Warn = Callable[[str], None]
Plan = Mapping[Path, tuple[object, frozenset[str] | None]]
"""Directory to watch -> its identity, and the names that matter there (None: all)."""


class Watcher:
    """Calls ``wake`` (from a thread of its own, so ``wake`` must be thread-safe) soon after something changed in
    ``roots()``.

    For a root that does not exist yet, its nearest existing parent is watched. Call ``refresh`` after each rescan: it
    begins again where other directories are to be watched, or where the observer died. Errors of the system are not
    raised; ``warn`` receives one line per cause.
    """

    def __init__(
        self,
        roots: Roots,
        wake: Wake,
        *,
        warn: Warn = lambda _line: None,
        debounce: float = DEBOUNCE,
    ) -> None:
        self._roots = roots
        self._wake = wake
        self._warn = warn
        self._debounce = debounce
        self._observer: Any = None
        self._timer: threading.Timer | None = None
        self._wanted: Plan = {}
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        self._started = False

    @property
    def alive(self) -> bool:
        """False if no event can arrive now; rescans continue at their interval."""
        observer = self._observer
        return observer is not None and observer.is_alive() and all(e.is_alive() for e in list(observer.emitters))

    def start(self) -> None:
        self._started = True
        self.refresh()

    def stop(self) -> None:
        with self._lock:
            self._started = False
            self._end()
            if self._timer is not None:
                self._timer.cancel()

    def refresh(self) -> None:
        """Watch the present ``roots()``. Cheap when nothing changed. Not for the event loop: it can block on a disk."""
        try:
            wanted = _plan(self._roots())
        except OSError as error:
            self._complain(f"cannot list the checkpoint directories to watch: {error.strerror}")
            return
        with self._lock:
            if self._started and not (self.alive and wanted == self._wanted):
                self._end()
                self._wanted = wanted
                self._begin()

    def _begin(self) -> None:
        try:
            observer = Observer()
            observer.daemon = True
            observer.start()
        except Exception as error:  # the library raises many kinds (OSError, RuntimeError, its own)
            self._complain(f"file events are not available ({error}); podwatch finds checkpoints by rescans alone")
            return
        self._observer = observer
        for path in self._wanted:
            try:
                observer.schedule(_Handler(self, path), str(path), recursive=False, event_filter=_FILTER)
            except FileNotFoundError:
                continue
            except Exception as error:
                text = f"cannot watch {path} for events ({error}); podwatch finds its checkpoints by rescans alone"
                self._complain(text, cause=str(error))  # else each new step would repeat it

    def _end(self) -> None:
        observer, self._observer = self._observer, None
        if observer is not None:
            try:
                observer.stop()
                observer.join(timeout=5.0)
            except Exception as error:
                self._complain(f"the watcher of checkpoint events did not stop cleanly: {error}")

    def _complain(self, line: str, cause: str = "") -> None:
        if (cause or line) not in self._warned:
            self._warned.add(cause or line)
            self._warn(line)

    def noticed(self, watched: Path, changed: str) -> None:
        """Handle an event below ``watched``. A parent watched for a missing root wakes only for names on the way to
        that root."""
        names = self._wanted.get(watched, (None, None))[1]
        waits = self._timer is not None and self._timer.is_alive()
        if not waits and (names is None or Path(changed).name in names or Path(changed) == watched):
            self._timer = threading.Timer(self._debounce, self._ring)
            self._timer.daemon = True
            self._timer.start()

    def _ring(self) -> None:
        self._timer = None
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._wake()


class _Handler(events.FileSystemEventHandler):
    def __init__(self, watcher: Watcher, watched: Path) -> None:
        self._watcher = watcher
        self._watched = watched

    def on_any_event(self, event: events.FileSystemEvent) -> None:
        self._watcher.noticed(self._watched, str(event.src_path))
        if event.dest_path:
            self._watcher.noticed(self._watched, str(event.dest_path))


def _plan(roots: tuple[Path, ...]) -> Plan:
    names: dict[Path, frozenset[str] | None] = {}
    for root in roots:
        if root.is_dir():
            names[root] = None
            continue
        name, parent = root.name, root.parent
        while not parent.is_dir() and parent != parent.parent:
            name, parent = parent.name, parent.parent
        known = names.get(parent, frozenset())
        names[parent] = None if known is None else known | {name}
    return {path: (_identity(path), wanted) for path, wanted in names.items()}


def _identity(path: Path) -> tuple[int, int] | None:
    """A directory that was removed and created again is another one: the old watch gets no events."""
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_dev, status.st_ino)
