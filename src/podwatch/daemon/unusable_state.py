"""What podwatch does while its own state (database, directories, records of keeper and run) cannot be used.

A full disk, a locked or damaged database, one of a newer podwatch or a hung disk must not stop podwatch. The journal is
then in memory, and UnusableState decides which actions are allowed:

    delete, publish     never
    restart             while the keeper's record and the run record can be written and synced (tried, not assumed);
                        if the database could not be read, only for a trainer that was seen on this pod, or without
                        a store (else another pod can be the holder of the run)
    a fresh start       only if the database could be read: an empty journal proves nothing

UnusableState retries until the database can be used again, then writes the events of the journal in memory to it. If
the database could not be read before, podwatch restarts inside this process, because pins, pauses, baselines and the
store's state were unknown. Training continues under its keeper.
"""

import asyncio
import contextlib
import json
import os
import sqlite3
import threading
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from podwatch.client.find_daemon import SNAPSHOT
from podwatch.config.settings import Settings
from podwatch.daemon import pause
from podwatch.daemon.paths_and_run_lock import RunLock, RunPaths, guard_paths, unmade_paths
from podwatch.domain.errors import Busy, HostError, PodwatchError
from podwatch.domain.event import Emit, Event, EventName
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.domain.run import Mutation
from podwatch.journal import Journal, load_run_record
from podwatch.journal.without_database import Obstacle
from podwatch.recovery import state_in_journal as recovery_memory
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import Clock
from podwatch.system.files import atomic_write, read_small
from podwatch.system.own_directories import Workspace

OPEN_SECONDS: Final = 30.0
"""A disk that has not opened a file of a few MiB by then hangs; SQLite waits 5 s for a lock, several times."""
RETURN_SECONDS: Final = 60.0
PROVE_SECONDS: Final = 20.0
RETRY_MIN, RETRY_MAX = 2.0, 60.0
"""Seconds between two attempts to use the database again."""
RECOVERED: Final = "the state database is writable again: podwatch has written the events since then to it"
PROOF: Final = ".proof"
KEEPER_BYTES: Final = 256 << 10
"""Bytes that a start writes: the keeper's source and bytecode, the plan with the environment, records, a log."""
RECORD_BYTES: Final = 16 << 10


async def take_ground(settings: Settings) -> tuple[RunPaths, RunLock]:
    """The directories of the run and its lock, as far as they are available. Raises Busy if another
    podwatch guards this run."""
    worker = Worker("ground")
    one, late = threading.Lock(), False

    def take() -> tuple[RunPaths, RunLock]:
        paths = guard_paths(settings.state_dir, settings.run_id, os.environ)
        taken = RunLock(paths.lock, paths.runtime, what_lock(settings.run_id))
        try:
            taken.acquire()
        except BaseException:
            taken.release()
            raise
        with one:
            if late:
                taken.release()  # the caller got another RunLock after the timeout
        return paths, taken

    try:
        return await worker.call(take, timeout=OPEN_SECONDS)
    except TimeoutError:  # the disk hangs; UnusableState takes the lock before it uses the database again
        with one:
            late = True
        paths = unmade_paths(settings.state_dir, settings.run_id, os.environ)
        return paths, RunLock(paths.lock, paths.runtime, what_lock(settings.run_id))
    finally:
        worker.close()


def what_lock(run_id: str) -> str:
    return f"the guard of run {run_id}"


async def open_journal(path: Path, clock: Clock) -> tuple[Journal, Worker]:
    """The journal (in memory where the database cannot be used), and the thread in which it was opened."""
    worker = Worker("journal-opening")
    try:
        opened = await worker.call(_open, path, clock, timeout=OPEN_SECONDS)
    except TimeoutError:
        worker.renew()
        return Journal.in_memory(
            path,
            f"the state database cannot be opened: its disk has not answered for {OPEN_SECONDS:.0f} s",
            str(path),
            "check the disk, or set state_dir to a directory on another disk",
            wall=clock.wall,
            merge=merge_learned,
            read=False,
        ), worker
    return opened, worker


def _open(path: Path, clock: Clock) -> Journal:
    return Journal.open_for_guard(path, wall=clock.wall, merge=merge_learned)


def merge_learned(key: str, known: Any, ours: Any) -> Any:
    """The value to keep, of one in the database and one that was learned while the database could not be read."""
    if key == pause.KEY:
        return ours  # the operator's last command
    if key == recovery_memory.KEY:
        return recovery_memory.joined(known, ours)
    return known


@dataclass(frozen=True, slots=True)
class Records:
    """The places of the records that a restart writes."""

    keeper: Path
    workspace: Workspace


class Exits(Protocol):
    """How a part ends or restarts the daemon; training continues."""

    def leave(self, code: int) -> None: ...

    def restart(self) -> None:
        """Restart the daemon inside this process."""
        ...


class Trained(Protocol):
    @property
    def acting(self) -> bool:
        """Whether a stop or start of training is in progress."""
        ...

    @property
    def trained(self) -> bool:
        """Whether a trainer of this run was seen on this pod."""
        ...


class UnusableState:
    """Blocks mutations through the MutationGuard. Call ``turn`` at each turn of the sensing loop; it does not block."""

    def __init__(
        self,
        journal: Journal,
        clock: Clock,
        records: Records,
        *,
        exits: Exits,
        run: Trained,
        lock: RunLock | None = None,
        store: bool = False,
        emit: Emit,
        worker: Worker | None = None,
    ) -> None:
        """``worker``: the thread in which the journal was opened."""
        self._journal, self._clock, self._records = journal, clock, records
        self._lock, self._store, self._emit = lock, store, emit
        self._exits, self._run = exits, run
        self._worker = worker or Worker("footing")
        self._unproved = "not tried yet"
        self._tried = False
        self._pause = RETRY_MIN
        self._next = 0.0
        self._since = clock.monotonic()
        self._seen = journal.obstacle
        self._task: asyncio.Task[None] | None = None
        self.missing = ""
        """Why a directory or the run record could not be used when the components were built; the daemon restarts once
        it can be."""

    # -- what others ask

    def blocked_reason(self, mutation: Mutation) -> str:
        """Why ``mutation`` is blocked, else empty. From any thread: reads frozen values only."""
        obstacle = self._journal.obstacle
        if obstacle is None and not self.missing:
            return ""
        why = self._why(obstacle)
        if mutation in (Mutation.DELETE, Mutation.PUBLISH):
            return why
        if mutation is Mutation.FRESH_START:
            return why if self.missing or (obstacle is not None and not obstacle.known) else ""
        if self.missing:
            return why
        if self._lock is not None and not self._lock.complete:
            return f"{why}, and podwatch cannot lock the run"
        if self._unproved:
            return f"{why}, and podwatch cannot record a restart: {self._unproved}"
        if obstacle is not None and not obstacle.known and self._store and not self._run.trained:
            return f"{why}, and podwatch cannot know whether another pod holds this run"
        return ""

    def findings(self) -> tuple[Finding, ...]:
        obstacle = self._journal.obstacle
        if (obstacle is None and not self.missing) or not self._tried:
            return ()  # the first attempt to write the records decides what is still possible
        blocked = self.blocked_reason(Mutation.RESTART)
        restarts = "it still restarts training"
        if blocked:
            restarts = "it does not restart training either"
            if not self.missing:
                restarts += blocked.removeprefix(self._why(obstacle)).replace(", and", ", because", 1)
        memory = "keeps its journal in memory, " if obstacle is not None else ""
        summary = f"{self._why(obstacle)}; podwatch {memory}deletes nothing and publishes nothing"
        fix = obstacle.fix if obstacle is not None else "make it writable for podwatch's user, and free some space"
        return (
            Finding(
                FindingKind.STATE_UNAVAILABLE,
                Severity.CRITICAL,
                f"{summary}; {restarts}",
                self._since,
                f"{fix}; podwatch then uses it again automatically",
            ),
        )

    @property
    def unknown(self) -> bool:
        """Whether the database could not be read, so that podwatch knows nothing about the store."""
        return self._journal.obstacle is not None and not self._journal.obstacle.known

    def _why(self, obstacle: Obstacle | None) -> str:
        return obstacle.text if obstacle is not None else self.missing

    # -- looking again

    async def prove(self) -> None:
        """Try whether a restart can be recorded."""
        if self._journal.obstacle is None and not self.missing:
            return
        try:
            call = partial(proved, self._records, probe=bool(self.missing))
            self._unproved = await self._worker.call(call, timeout=PROVE_SECONDS)
        except OSError as error:  # TimeoutError included
            self._unproved = f"the disk does not answer ({error})"
        self._tried = True

    def turn(self) -> None:
        """Start the next attempt when it is due."""
        obstacle, now = self._journal.obstacle, self._clock.monotonic()
        if obstacle is not self._seen:
            if obstacle is not None:
                self._since, self._pause, self._next = now, RETRY_MIN, now
                self._unproved, self._tried = "not tried yet", False
            self._seen = obstacle
        if (obstacle is None and not self.missing) or now < self._next:
            return
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look(), name="footing")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=1.0)
        self._worker.close()

    async def _look(self) -> None:
        try:
            await self._try()
        finally:
            self._next = self._clock.monotonic() + self._pause
            self._pause = min(2 * self._pause, RETRY_MAX)

    async def _try(self) -> None:
        await self.prove()
        obstacle = self._journal.obstacle
        restarts = bool(self.missing) or (obstacle is not None and not obstacle.known)
        if restarts and self._run.acting:
            return None
        if obstacle is not None:
            try:
                rebuilt = await self._worker.call(self._return, obstacle.known, timeout=RETURN_SECONDS)
            except Busy as error:
                self._say(EventName.DAEMON_STOPPING, str(error), Severity.CRITICAL)
                return self._exits.leave(int(error.exit_code))
            except (PodwatchError, OSError, sqlite3.Error):
                return None
            if rebuilt:
                self._say(EventName.STATE_REBUILT, rebuilt, Severity.WARNING)
            if obstacle.known:
                self._say(EventName.STATE_RECOVERED, RECOVERED)
        elif self._unproved or not await self._locked():
            return None
        if restarts:
            self._exits.restart()
        return None

    async def _locked(self) -> bool:
        if self._lock is None or self._lock.complete:
            return True
        try:
            await self._worker.call(self._lock.take_state_lock, timeout=PROVE_SECONDS)
        except Busy as error:
            self._say(EventName.DAEMON_STOPPING, str(error), Severity.CRITICAL)
            self._exits.leave(int(error.exit_code))
        except OSError:
            return False
        return self._lock.complete

    def _return(self, known: bool) -> str:
        """Use the database again; returns why it was rebuilt, else empty. Unknown content is only checked:
        a new daemon must read it, because the journal in memory would overwrite it."""
        if self._lock is not None:
            self._lock.take_state_lock()
            if not self._lock.complete:
                raise HostError("cannot lock the run", where=str(self._journal.path.parent))
        if not known:
            return self._journal.try_disk()
        self._journal.return_to_disk()
        return self._journal.rebuilt

    def _say(self, name: EventName, text: str, severity: Severity = Severity.INFO) -> None:
        self._emit(Event(name, self._clock.wall(), text, severity))


def proved(records: Records, *, probe: bool = False) -> str:
    """Why a restart cannot be recorded; empty if its records were just written and synced. ``probe``: also create
    podwatch's directories beside output_dir. Blocks."""
    try:
        records.keeper.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write(records.keeper, KEEPER_BYTES)
        if probe:
            records.workspace.probe()
            load_run_record(records.workspace)
        tree, beside = records.workspace.tree, records.workspace.outside
        tree.make(beside, 0o755)
        try:
            tree.write(beside / PROOF, b"\0" * RECORD_BYTES)
        finally:
            with contextlib.suppress(OSError, HostError):
                tree.unlink(beside / PROOF)
    except HostError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or records.keeper}: {error.strerror or error}"
    return ""


def _write(directory: Path, size: int) -> None:
    try:
        atomic_write(directory / PROOF, b"\0" * size)
    finally:
        with contextlib.suppress(OSError):
            (directory / PROOF).unlink(missing_ok=True)


def last_pause(runtime: Path) -> dict[str, object] | None:
    """The pause in the last status file, or None. Used where the database cannot be read, which must not end a
    pause. Blocks."""
    try:
        shown = json.loads(read_small(runtime / SNAPSHOT))["daemon"]["pause"]
        if not shown:
            return None
        until = shown["until"]
        return {
            "since": datetime.fromisoformat(shown["since"]).timestamp(),
            "until": None if until is None else datetime.fromisoformat(until).timestamp(),
            "by": str(shown["by"]),
            "reason": str(shown["reason"]),
        }
    except (OSError, ValueError, KeyError, TypeError):
        return None
