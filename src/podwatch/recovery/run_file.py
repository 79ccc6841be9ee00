"""run.json on disk: read once, changed by one serialized ``edit``, copied beside output_dir.

The file lies in the state directory. Each version is written into a spare file of the same size, whose blocks are
allocated already, and the two then exchange their names: readers see the old version or the new one, and an edit needs
no free space. The copy beside output_dir is read and written in threads of its own, so that a hung volume delays no
decision. Of both the higher counter wins; the copy never supplies a command, a user, or what identifies this podwatch.
"""

import asyncio
import contextlib
import errno
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Final

from podwatch.domain.document import SCHEMA_VERSION
from podwatch.domain.errors import ConfigurationError, HostError, IntegrityError, InternalError, PermissionDenied
from podwatch.domain.run_state import RunState, WrittenAt
from podwatch.system.blocking_calls import Worker, in_time
from podwatch.system.clock import Clock
from podwatch.system.files import read_small, replace_in_reserved_space, unwritable
from podwatch.system.own_directories import Workspace, own_directory
from podwatch.system.pinned_directories import RootReplaced
from podwatch.system.procfs import boot_id, machine_id

NAME: Final = "run.json"
RESERVED_BYTES: Final = 65_536
MAX_BYTES: Final = 1 << 20
MODE: Final = 0o600
"""The command in the document is scrubbed, but not every secret of a custom trainer can be recognized."""
WRITE_SECONDS: Final = 20.0
LOAD_SECONDS: Final = 30.0
MOST_EDITS: Final = 1 << 53
"""A copy that claims more must not outlive every later version."""
COPY_READ_SECONDS: Final = 10.0
COPY_SECONDS: Final = 2.0
"""How long the end of podwatch waits for the copy."""
_DAMAGED: Final = (errno.EINVAL, errno.EFBIG, errno.ELOOP, errno.ENXIO, errno.EISDIR)
"""A FIFO, a device, a link, a directory, or much larger than any version."""
_OWN: Final = "make its directory belong to podwatch's user"

Change = Callable[[RunState], RunState]


class Newer(HostError):  # noqa: N818
    """A newer podwatch wrote it in a way that this one must not guess at."""


def parse(data: bytes) -> RunState:
    """Raises IntegrityError for anything that is no run.json, Newer for one of a newer podwatch."""
    try:
        version = json.loads(data)["schema_version"]
    except (ValueError, TypeError, KeyError, RecursionError):
        version = None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise Newer(
            f"run.json has schema {version}, this podwatch knows {SCHEMA_VERSION}",
            fix="use the newer podwatch again",
        )
    return RunState.from_bytes(data)


def _checked(state: RunState) -> bytes:
    """What is written. Raises InternalError for a state that the next podwatch could not read."""
    try:
        data = state.to_bytes()
        parse(data)
    except (ValueError, IntegrityError) as error:
        raise InternalError(f"run.json would be unreadable: {_shortly(error)}", fix="please report this") from error
    return data


@dataclass(frozen=True, slots=True)
class _ReadCopy:
    """The copy beside output_dir, as it was read. ``unreachable``: why it may exist and cannot be read now."""

    state: RunState | None = None
    other_run: str = ""
    unreachable: HostError | None = None
    unreadable: str = ""


class RunFile:
    """``current`` is what is in force: what was recorded last, and every note since then; ``known`` is false until it
    was read. ``problem``: why it cannot be read or written now, empty if it can. ``news``: what was wrong with a file
    when it was read."""

    def __init__(
        self,
        directory: Path,
        workspace: Workspace,
        run_id: str,
        clock: Clock,
        changed: Callable[[RunState], None] = lambda state: None,
    ) -> None:
        """``changed`` is called with each state that was read or recorded, in any thread."""
        self.path = directory / NAME
        self.run_id, self._workspace, self._clock, self._changed = run_id, workspace, clock, changed
        self.current = self._recorded = RunState(run_id=run_id)
        self.known = False
        self.problem = "run.json has not been read yet"
        self.news: list[str] = []
        self.other_run = ""
        """The run that the copy beside output_dir belongs to, if it is another one."""
        self._writing, self._swapping = threading.RLock(), threading.Lock()
        self._noted: list[Change] = []
        self._worker = Worker("run.json")
        self._recording: asyncio.Task[None] | None = None
        self._copy = _CopyBesideOutput(workspace, run_id)

    # -- read ---------------------------------------------------------------------------------------------------------

    def load(self, *, looking: bool = False) -> RunState | None:
        """Read the newest version; None where there is none. ``looking``: damaged files stay where they are. Blocks.

        Raises HostError or PermissionDenied where the one in the state directory exists and cannot be read: then
        nothing may be decided by its copy alone. ``current`` is that copy all the same, for what only reads.
        """
        with self._writing:
            return self._load(looking=looking)

    def load_within(self, seconds: float) -> None:
        """``load`` for the daemon, which guards without it too: see ``problem``. Blocks for at most this time."""
        try:
            in_time(self.load, seconds=seconds)
        except TimeoutError:
            self.problem = f"the disk of {self.path} does not answer"
        except Exception as error:  # of a HostError it says more
            self.problem = self.problem or f"{type(error).__name__}: {error}"

    def _load(self, *, looking: bool) -> RunState | None:
        try:
            own = self._read_own(looking=looking)
        except HostError as error:
            self.problem = str(error)
            copy, _ = self._copy_as_read(None, looking=looking)
            self._adopt(copy)
            raise
        copy, unreachable = self._copy_as_read(own, looking=looking)
        if own is None and unreachable is not None:
            self.problem = str(unreachable)
            raise unreachable  # a run that is only not visible now must not begin anew
        self.problem, self.known = "", True
        return self._adopt(copy if own is None or (copy is not None and copy.counter > own.counter) else own)

    def _copy_as_read(self, own: RunState | None, *, looking: bool) -> tuple[RunState | None, HostError | None]:
        """The copy, as far as it may decide anything; and why it may exist and cannot be read now."""
        read = self._copy.read()
        self.other_run = read.other_run
        if read.unreadable and not looking:
            self.news.append(read.unreadable)
        return None if read.state is None else read.state.as_a_copy(own), read.unreachable

    def refuse_other_run(self) -> None:
        """Raises ConfigurationError where output_dir belongs to another run."""
        if self.other_run:
            raise ConfigurationError(
                f"the output directory belongs to run {self.other_run!r}, not to {self.run_id!r}",
                where=str(self._workspace.run_copy),
                fix="use another output_dir, the old run_id, or `podwatch run --adopt-existing`",
            )

    def _adopt(self, found: RunState | None) -> RunState | None:
        if found is None:
            return None
        found = found.here(machine_id(), boot_id(), self._clock.monotonic(), self._clock.wall())
        with self._swapping:
            current = self._settle(found, notes=0)
        self._changed(current)
        return current

    def _settle(self, recorded: RunState, notes: int) -> RunState:
        """What is in force with this version, which contains so many of the notes. With ``_swapping``."""
        del self._noted[:notes]
        self._recorded = recorded
        self.current = reduce(lambda state, noted: noted(state), self._noted, recorded)
        return self.current

    def _read_own(self, *, looking: bool) -> RunState | None:
        try:
            data = read_small(self.path, MAX_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PermissionError as error:
            raise PermissionDenied("cannot read run.json", where=str(self.path), fix=_OWN) from error
        except OSError as error:
            if error.errno not in _DAMAGED:
                raise HostError(f"run.json cannot be read: {error.strerror}", where=str(self.path)) from error
            data = b""
        try:
            return parse(data)
        except Newer as error:
            raise Newer(error.what, where=str(self.path), fix=error.fix) from None
        except IntegrityError as error:
            if not looking:
                _move_aside(self.path)
            self.news.append(f"{self.path} was unreadable ({_shortly(error)}); podwatch continues without it")
            return None

    # -- change -------------------------------------------------------------------------------------------------------

    async def edit(self, change: Change) -> RunState:
        """Change the state; durable when this returns. Edits take place one after the other. Raises HostError where it
        cannot be recorded: then nothing has changed, and what depends on it must not happen. Only a disk that hangs in
        the last step leaves open whether it was recorded, and the error says so; ``current`` follows the disk."""
        decided = threading.Semaphore()  # taken once: by the writer before its last step, or by a caller who gives up
        call = asyncio.ensure_future(self._worker.call(self.edit_now, change, decided, timeout=WRITE_SECONDS))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            await asyncio.wait([call], timeout=WRITE_SECONDS)  # the next edit must see this one
            if call.done() and not call.cancelled():
                call.exception()  # retrieved: otherwise asyncio logs it
            raise
        except TimeoutError as error:
            self.problem = self._silent()
            if decided.acquire(blocking=False):
                raise HostError(self.problem, fix="check that disk") from error
            text = f"{self.problem}; whether this was recorded is not known yet"
            raise HostError(text, fix="check that disk, then `podwatch status`") from error

    def edit_now(self, change: Change, decided: threading.Semaphore | None = None) -> RunState:
        """The same for threads and for commands without a daemon. Blocks. Where a caller has taken ``decided``, nothing
        is changed."""
        with self._writing:
            if not self.known:
                self.load()  # what cannot be read is not replaced
            self.refuse_other_run()
            with self._swapping:
                before, notes = self.current, len(self._noted)
            written = WrittenAt(
                machine=machine_id(), boot=boot_id(), monotonic=self._clock.monotonic(), wall=self._clock.wall()
            )
            counter = self._recorded.counter + 1
            after = replace(change(before), counter=counter, written=written, run_id=self.run_id)
            data = _checked(after)
            self._write(data, decided)
            with self._swapping:
                current = self._settle(after, notes)
            self.known, self.problem = True, ""
        self._changed(current)
        self._copy.put(data)
        return current

    def _silent(self) -> str:
        return f"cannot record what podwatch does: the disk of {self.path} does not answer"

    def record_soon(self) -> None:
        """Record what was noted, without waiting. A failure shows as ``problem``."""
        if self._recording is None or self._recording.done():
            self._recording = asyncio.create_task(self._record(), name="podwatch-run.json")

    async def _record(self) -> None:
        with contextlib.suppress(HostError):
            await self.edit(lambda state: state)

    def note(self, change: Change) -> None:
        """Change the state in memory, at once; the next edit records it. For what costs little to lose."""
        with self._swapping:
            self._noted.append(change)
            self.current = change(self.current)

    def _write(self, data: bytes, decided: threading.Semaphore | None) -> None:
        def permit() -> None:
            if decided is not None and not decided.acquire(blocking=False):
                raise HostError(self._silent(), fix="check that disk")

        try:
            if not self.path.parent.is_dir():
                own_directory(self.path.parent, 0o700)
            replace_in_reserved_space(self.path, data, RESERVED_BYTES, MODE, permit)
        except HostError as error:
            self.problem = str(error)
            raise
        except PermissionError as error:
            self.problem = unwritable(self.path, error)
            raise PermissionDenied("cannot write run.json", where=str(self.path), fix=_OWN) from error
        except OSError as error:
            self.problem = unwritable(self.path, error)
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise HostError(
                f"run.json cannot be written: {error.strerror or error}",
                where=str(self.path),
                fix="free some space on its disk" if full else "check its disk",
            ) from error

    @property
    def copy_problem(self) -> str:
        """Why the copy beside output_dir is older than the file; empty if it is not, or not known to be."""
        return self._copy.problem

    def write_copy_again(self) -> None:
        """Try again to write the copy, if that failed. Does not block."""
        self._copy.put_again()

    def close(self) -> None:
        """Let the copy follow, for a short time. Blocks."""
        self._worker.close()
        self._copy.close(COPY_SECONDS)


class _CopyBesideOutput:
    """Reads the copy beside output_dir with a deadline, and writes the newest version there, best effort, in a thread
    that nothing waits for."""

    def __init__(self, workspace: Workspace, run_id: str) -> None:
        self._workspace, self._run_id = workspace, run_id
        self._wake = threading.Condition()
        self._newest: bytes | None = None
        self._failed: bytes | None = None
        self._busy_since: float | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self._problem = ""

    @property
    def problem(self) -> str:
        """Why the newest version is not there; empty if it is, or is just being written."""
        since = self._busy_since
        if since is not None and time.monotonic() - since > COPY_READ_SECONDS:
            return f"the disk of {self._workspace.run_copy} does not answer"
        return self._problem

    def read(self) -> _ReadCopy:
        """Blocks for at most COPY_READ_SECONDS."""
        try:
            return in_time(self._read, seconds=COPY_READ_SECONDS)
        except TimeoutError:
            why = "its disk does not answer"
        except Exception as error:  # of no file: there may be a copy all the same
            why = f"{type(error).__name__}: {error}"
        what = f"the copy of run.json cannot be read: {why}"
        return _ReadCopy(unreachable=HostError(what, where=str(self._workspace.run_copy)))

    def _read(self) -> _ReadCopy:
        where = self._workspace.run_copy
        try:
            copy = parse(self._workspace.tree.read_ours(where, MAX_BYTES))
            if copy.counter > MOST_EDITS:
                raise IntegrityError(f"no run has {copy.counter} edits")
        except (FileNotFoundError, NotADirectoryError):
            return _ReadCopy()
        except HostError as error:  # another user's, or of a newer podwatch
            return _ReadCopy(unreachable=error)
        except (OSError, IntegrityError) as error:
            if isinstance(error, OSError) and error.errno not in _DAMAGED:
                what = f"the copy of run.json cannot be read: {error.strerror}"
                return _ReadCopy(unreachable=HostError(what, where=str(where)))
            return _ReadCopy(unreadable=f"the copy {where} was unreadable ({_shortly(error)})")
        return _ReadCopy(copy) if copy.run_id == self._run_id else _ReadCopy(other_run=copy.run_id)

    def put(self, data: bytes) -> None:
        with self._wake:
            self._newest, self._failed = data, None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="podwatch-run.json-copy", daemon=True)
                self._thread.start()
            self._wake.notify_all()

    def put_again(self) -> None:
        with self._wake:
            failed = self._failed
        if failed is not None:
            self.put(failed)

    def close(self, seconds: float) -> None:
        with self._wake:
            self._wake.wait_for(lambda: self._newest is None and self._busy_since is None, timeout=seconds)
            self._closed = True
            self._wake.notify_all()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._busy_since = None
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._newest is not None or self._closed)
                if self._newest is None or self._closed:
                    return
                data, self._newest, self._busy_since = self._newest, None, time.monotonic()
            written, problem = _try_to_write(self._workspace, data)
            with self._wake:
                self._problem = problem
                self._failed = None if written or self._newest is not None else data


def _try_to_write(workspace: Workspace, data: bytes) -> tuple[bool, str]:
    """Whether the copy was written; and why not, unless that is a replaced directory, which has its own finding."""
    try:
        _write_copy(workspace, data)
    except RootReplaced:
        return False, ""
    except OSError as error:
        return False, unwritable(workspace.run_copy, error)
    except HostError as error:
        return False, str(error)
    return True, ""


def _write_copy(workspace: Workspace, data: bytes) -> None:
    workspace.tree.make(workspace.run_copy.parent, 0o755)
    workspace.tree.write(workspace.run_copy, data, MODE)


def _move_aside(path: Path) -> None:
    with contextlib.suppress(OSError):
        number = 1
        while os.path.lexists(path.with_name(f"{path.name}.corrupt-{number}")):
            number += 1
        path.rename(path.with_name(f"{path.name}.corrupt-{number}"))


def _shortly(error: BaseException) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return "; ".join(line.strip() for line in lines[:3])[:200]
