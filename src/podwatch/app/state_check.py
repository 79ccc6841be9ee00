"""Whether podwatch's own files allow it to act: run.json, the journal, the directories, the lock, space for a start.

A full disk, a locked or damaged database or a hung disk must not stop podwatch. What it may still do:

    restart              while run.json can be written and the records of a start have their reserved space
    fresh start          while run.json can be written and the journal can be read: an empty one does not show what is
                         in the store
    delete, publish      also only while the journal can be written: its intents are there

StateCheck tries again until all of it works.
"""

import asyncio
import os
import threading
from functools import partial
from pathlib import Path
from typing import Final

from podwatch.app.paths_and_run_lock import RunLock, RunPaths, guard_paths, unmade_paths
from podwatch.app.shutdown import Exit
from podwatch.config.settings import Settings
from podwatch.domain.errors import Busy, HostError, PodwatchError
from podwatch.domain.event import Emit, Event, EventName
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.domain.run import Mutation
from podwatch.journal import Journal
from podwatch.recovery.run_file import RunFile
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import Clock
from podwatch.system.files import ReservedSpace
from podwatch.system.own_directories import Workspace

OPEN_SECONDS: Final = 30.0
"""A disk that has not opened a file of a few MiB by then hangs; SQLite waits 5 s for a lock, several times."""
TRY_SECONDS: Final = 60.0
RETRY_MIN, RETRY_MAX = 2.0, 60.0
"""Seconds between two attempts to use what does not work."""
RECOVERED: Final = "podwatch's own files can be used again"
START_BYTES: Final = 512 << 10
"""What a start writes in the state directory: the supervisor's source and bytecode, the plan with the environment,
records, the begin of a log."""


async def take_paths_and_lock(settings: Settings) -> tuple[RunPaths, RunLock]:
    """The directories of the run and its lock, as far as they are available. Raises Busy if another
    podwatch guards this run."""
    worker = Worker("run lock")
    one, late = threading.Lock(), False

    def take() -> tuple[RunPaths, RunLock]:
        paths = guard_paths(settings.state_dir, settings.run_id, os.environ)
        taken = RunLock(paths.lock, what_lock(settings.run_id))
        try:
            taken.take_state_lock()
        except BaseException:
            taken.release()
            raise
        with one:
            if late:
                taken.release()  # the caller got another RunLock after the timeout
        return paths, taken

    try:
        return await worker.call(take, timeout=OPEN_SECONDS)
    except TimeoutError:  # the disk hangs; StateCheck takes the lock before podwatch acts
        with one:
            late = True
        paths = unmade_paths(settings.state_dir, settings.run_id, os.environ)
        return paths, RunLock(paths.lock, what_lock(settings.run_id))
    finally:
        worker.close()


def what_lock(run_id: str) -> str:
    return f"the guard of run {run_id}"


async def open_journal(path: Path, clock: Clock) -> Journal:
    """The journal; an empty one in memory where the database cannot be used."""
    worker = Worker("journal-opening")
    try:
        return await worker.call(partial(Journal.open_for_guard, path, wall=clock.wall), timeout=OPEN_SECONDS)
    except TimeoutError:
        return Journal.in_memory(
            path,
            f"the state database cannot be opened: its disk has not answered for {OPEN_SECONDS:.0f} s",
            str(path),
            "check the disk, or set state_dir to a directory on another disk",
            wall=clock.wall,
        )
    finally:
        worker.close()


class StateCheck:
    """Blocks mutations through the MutationGuard. Call ``turn`` at each turn of the sensing loop; it does not block.
    ``reserve`` is the space for a start: whoever starts training frees it before."""

    def __init__(
        self,
        file: RunFile,
        journal: Journal,
        workspace: Workspace,
        clock: Clock,
        *,
        exits: Exit,
        lock: RunLock | None = None,
        emit: Emit,
        missing: str = "",
    ) -> None:
        """``missing``: why podwatch's directory beside output_dir cannot be used; empty if it can."""
        self._file, self._journal, self._workspace, self._clock = file, journal, workspace, clock
        self._lock, self._emit, self._exits, self._missing = lock, emit, exits, missing
        self.reserve = ReservedSpace(file.path.with_name("start.reserve"), START_BYTES)
        self._room = ""
        """Why a start has no space for its records; empty if it has."""
        self._worker = Worker("state-check")
        self._task: asyncio.Task[None] | None = None
        self._pause, self._next = RETRY_MIN, 0.0
        self._troubled_since: float | None = None
        self._began = clock.monotonic()

    # -- what others ask

    def blocked_reason(self, mutation: Mutation) -> str:
        """Why ``mutation`` is blocked, else empty. From any thread: reads frozen values only."""
        obstacle = self._journal.obstacle
        if why := self._why_nothing():
            return why
        if mutation is Mutation.RESTART:
            return self._room
        return obstacle.text if obstacle is not None and obstacle.blank else ""

    def _why_nothing(self) -> str:
        """Why podwatch may change nothing at all."""
        if self._lock is not None and not self._lock.complete:
            return "podwatch cannot lock the run in its state directory"
        return self._file.problem or self._missing

    def findings(self) -> tuple[Finding, ...]:
        return (*self._lock_findings(), *self._copy_findings(), *self._file_findings())

    def _lock_findings(self) -> tuple[Finding, ...]:
        if self._lock is None or not self._lock.problem or self._missing:
            return ()
        text = f"podwatch cannot lock output_dir: {self._lock.problem}; another podwatch would not notice this one"
        fix = "use a file system that can lock files, and one podwatch for each output_dir"
        return (Finding(FindingKind.STATE_UNAVAILABLE, Severity.WARNING, text, self._began, fix, subject="lock"),)

    def _copy_findings(self) -> tuple[Finding, ...]:
        why = self._file.copy_problem
        if not why or self._missing or self._why_nothing():
            return ()  # one finding for one cause
        text = f"the copy of run.json beside output_dir is older than run.json: {why}; a pod that has only output_dir"
        text += " would continue with the older one. podwatch tries again every minute"
        fix = "make its directory belong to podwatch's user, and free some space"
        return (Finding(FindingKind.STATE_UNAVAILABLE, Severity.WARNING, text, self._began, fix, subject="copy"),)

    def _file_findings(self) -> tuple[Finding, ...]:
        obstacle = self._journal.obstacle
        whole, restart = self._why_nothing(), self.blocked_reason(Mutation.RESTART)
        if self._troubled_since is None or not (whole or restart or obstacle is not None):
            return ()
        why = [whole or self._room, obstacle.text if obstacle is not None else ""]
        summary = "; ".join(dict.fromkeys(text for text in why if text))
        does = "it does not restart training either" if restart else "it still restarts training"
        deletes = "podwatch deletes nothing and publishes nothing; " if self.blocked_reason(Mutation.DELETE) else ""
        fix = "make it writable for podwatch's user, and free some space"
        if obstacle is not None:
            fix = obstacle.fix
        return (
            Finding(
                FindingKind.STATE_UNAVAILABLE,
                Severity.CRITICAL,
                f"{summary}; {deletes}{does}",
                self._troubled_since,
                f"{fix}; podwatch then uses it again automatically",
            ),
        )

    @property
    def _troubled(self) -> bool:
        return bool(self._why_nothing() or self._room or self._journal.obstacle is not None)

    # -- trying again

    def turn(self) -> None:
        """Start the next attempt when it is due."""
        now = self._clock.monotonic()
        if self._task is not None and not self._task.done():
            return
        if self._troubled and self._troubled_since is None:
            self._pause, self._next = RETRY_MIN, now
        if now >= self._next:
            self._task = asyncio.create_task(self.try_again(), name="state-check")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=1.0)
        self._worker.close()

    async def try_again(self) -> None:
        """Try everything that does not work."""
        before = self._journal.rebuilt
        try:
            await self._worker.call(self._try, timeout=TRY_SECONDS)
            await self._try_run_file()
        except Busy as error:
            self._say(EventName.DAEMON_STOPPING, str(error), Severity.CRITICAL)
            self._exits.leave(int(error.exit_code))
        except TimeoutError:
            self._room = self._room or "the disk of the state directory does not answer"
        if self._journal.rebuilt and self._journal.rebuilt != before:
            self._say(EventName.STATE_REBUILT, self._journal.rebuilt, Severity.WARNING)
        self._settle()

    def _settle(self) -> None:
        now = self._clock.monotonic()
        if self._troubled:
            self._troubled_since = now if self._troubled_since is None else self._troubled_since
            self._next = now + self._pause
            self._pause = min(2 * self._pause, RETRY_MAX)
        else:
            if self._troubled_since is not None:
                self._say(EventName.STATE_RECOVERED, RECOVERED)
            self._troubled_since = None
            self._next, self._pause = now + RETRY_MAX, RETRY_MIN

    def _try(self) -> None:
        """Blocks. Raises Busy where another podwatch guards this run."""
        if self._lock is not None:
            self._lock.take_state_lock()
            self._lock.take_output_lock(self._workspace)
        self._file.write_copy_again()
        self._room = self.reserve.restore()
        if self._missing:
            self._missing = _problem_of(self._workspace)
        if self._journal.obstacle is not None and (self._lock is None or self._lock.complete):
            try:
                self._journal.return_to_disk()
            except PodwatchError:
                return

    async def _try_run_file(self) -> None:
        if not self._file.problem:
            return
        try:
            await self._file.edit(lambda run: run)
        except HostError:
            return  # its ``problem`` has the reason

    def _say(self, name: EventName, text: str, severity: Severity = Severity.INFO) -> None:
        self._emit(Event(name, self._clock.wall(), text, severity))


def _problem_of(workspace: Workspace) -> str:
    try:
        workspace.probe()
    except HostError as error:
        return str(error)
    return ""
