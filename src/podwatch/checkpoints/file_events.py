"""Triggers a rescan as soon as a file changes. Events are hints: without them podwatch only reacts later.

Only the layout's roots and the steps being written are watched, each without recursion, and only for files and
directories that were closed, moved, created or deleted: the library's default also reports every single write, which
slows the writer down. Never rollouts, broadcasts or logs.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from watchdog import events
from watchdog.observers import Observer

logging.getLogger("watchdog").setLevel(logging.CRITICAL)
"""This logger reports an error for each watch that is removed while its thread waits, as ``refresh`` does."""
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


class Watcher:
    """Calls ``wake`` (from its own thread, so ``wake`` must be thread-safe) soon after something changed in
    ``roots()``.

    For a root that does not exist yet, its nearest existing parent is watched. Call ``refresh`` after each rescan: it
    follows changed roots and replaces an observer that died. Errors of the system are not raised; ``warn`` receives one
    line per cause.
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
        self._watches: dict[Path, Any] = {}
        self._wanted: dict[Path, frozenset[str] | None] = {}
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        self._signal = threading.Event()
        self._ending = threading.Event()
        self._waker: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        """False if no event can arrive now; rescans continue at their interval."""
        return self._observer is not None and self._healthy()

    def start(self) -> None:
        with self._lock:
            if self._waker is None:
                self._ending.clear()
                self._waker = threading.Thread(target=self._run, name="checkpoint-events", daemon=True)
                self._waker.start()
        self.refresh()

    def stop(self) -> None:
        with self._lock:
            waker, self._waker = self._waker, None
            self._ending.set()
            self._signal.set()
            self._end_observer()
        if waker is not None and waker is not threading.current_thread():
            waker.join(timeout=5.0)

    def refresh(self) -> None:
        """Watch the present ``roots()``. Cheap when nothing changed. Not for the event loop: it can block on a disk."""
        try:
            wanted = _plan(self._roots())
        except OSError as error:
            self._complain(f"cannot list the checkpoint directories to watch: {error.strerror}")
            return
        with self._lock:
            if self._waker is None:
                return
            if self._observer is not None and not self._healthy():
                self._warn("the watcher of checkpoint events died and was restarted; rescans continued meanwhile")
                self._end_observer()
            if self._observer is None and not self._begin_observer():
                return
            self._wanted = wanted
            for path in [p for p in self._watches if p not in wanted]:
                self._drop(path)
            for path in wanted:
                # A directory that was removed and created again has a new inode: its old watch gets no events.
                identity = _identity(path)
                old = self._watches.get(path)
                if old is not None and old[1] != identity:
                    self._drop(path)
                if identity is not None and path not in self._watches:
                    self._add(path, identity)

    def _begin_observer(self) -> bool:
        try:
            observer = Observer()
            observer.daemon = True
            observer.start()
        except Exception as error:  # the library raises many kinds (OSError, RuntimeError, its own)
            self._complain(f"file events are not available ({error}); podwatch finds checkpoints by rescans alone")
            return False
        self._observer = observer
        return True

    def _end_observer(self) -> None:
        observer, self._observer = self._observer, None
        self._watches = {}
        if observer is not None:
            try:
                observer.stop()
                observer.join(timeout=5.0)
            except Exception as error:
                self._complain(f"the watcher of checkpoint events did not stop cleanly: {error}")

    def _healthy(self) -> bool:
        observer = self._observer
        return bool(observer.is_alive()) and all(e.is_alive() for e in list(observer.emitters))

    def _add(self, path: Path, identity: tuple[int, int]) -> None:
        try:
            watch = self._observer.schedule(_Handler(self, path), str(path), recursive=False, event_filter=_FILTER)
        except FileNotFoundError:
            return
        except Exception as error:
            text = f"cannot watch {path} for events ({error}); podwatch finds its checkpoints by rescans alone"
            self._complain(text, cause=str(error))  # else each new step would repeat it
            return
        self._watches[path] = (watch, identity)

    def _drop(self, path: Path) -> None:
        watch, _ = self._watches.pop(path)
        try:
            self._observer.unschedule(watch)
        except Exception as error:
            self._complain(f"cannot stop watching {path}: {error}")

    def _complain(self, line: str, cause: str = "") -> None:
        if (cause or line) not in self._warned:
            self._warned.add(cause or line)
            self._warn(line)

    def noticed(self, watched: Path, changed: str) -> None:
        """Handle an event below ``watched``. A parent watched for a missing root wakes only for names on the way to
        that root."""
        names = self._wanted.get(watched)
        if names is None or Path(changed).name in names or Path(changed) == watched:
            self._signal.set()

    def _run(self) -> None:
        while True:
            self._signal.wait()
            if self._ending.wait(self._debounce):
                return
            self._signal.clear()
            try:
                self._wake()
            except RuntimeError:
                return  # the event loop is closed


class _Handler(events.FileSystemEventHandler):
    def __init__(self, watcher: Watcher, watched: Path) -> None:
        self._watcher = watcher
        self._watched = watched

    def on_any_event(self, event: events.FileSystemEvent) -> None:
        self._watcher.noticed(self._watched, str(event.src_path))
        if event.dest_path:
            self._watcher.noticed(self._watched, str(event.dest_path))


def _plan(roots: tuple[Path, ...]) -> dict[Path, frozenset[str] | None]:
    """Directory to watch -> names that matter there (None: all)."""
    plan: dict[Path, frozenset[str] | None] = {}
    for root in roots:
        if root.is_dir():
            plan[root] = None
            continue
        name, parent = root.name, root.parent
        while not parent.is_dir() and parent != parent.parent:
            name, parent = parent.name, parent.parent
        known = plan.get(parent, frozenset())
        plan[parent] = None if known is None else known | {name}
    return plan


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_dev, status.st_ino)
