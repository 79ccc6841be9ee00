"""Finds the difference between the running trainer and ``[trainer] command``, and raises command-changed.

For an attached trainer its command line in /proc counts; for one that podwatch started, the configured command of that
start. Files that the command names are compared by their digests. Comparing blocks: it reads /proc and small files.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from podwatch.checkpoints.command import without_settings
from podwatch.checkpoints.layout import Layout
from podwatch.checkpoints.resume import settings_in
from podwatch.config.settings import Settings
from podwatch.domain.errors import PodwatchError
from podwatch.domain.finding import FindingKind, Severity
from podwatch.domain.run import StartRecord
from podwatch.domain.secrets import MASK, scrub
from podwatch.domain.snapshot import Supervision
from podwatch.recovery.command_diff import differences
from podwatch.recovery.context import RecoveryContext
from podwatch.recovery.start_plan import changed_configs, changed_files, config_digests, working_directory
from podwatch.system import procfs
from podwatch.trainer.process_roles import program
from podwatch.trainer.trainer_handle import TrainerHandle

COMMAND_POLL: Final = 60.0
"""Seconds between two comparisons of the running command with the configured one; each hashes a few small files."""
SHOWN = 8
"""Lines of a difference that a finding shows; `podwatch restart --dry-run` shows all."""


@dataclass(frozen=True, slots=True)
class Difference:
    """``arguments`` and ``directory`` are lines (``- runs``, ``+ configured``), ``files`` are those that
    changed."""

    arguments: tuple[str, ...] = ()
    directory: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.arguments or self.directory or self.files)

    @property
    def lines(self) -> tuple[str, ...]:
        return (*self.arguments, *self.directory)

    def summary(self) -> str:
        parts = []
        if self.lines:
            more = len(self.lines) - SHOWN
            text = "; ".join(self.lines[:SHOWN]) + (f"; and {more} more" if more > 0 else "")
            parts.append(f"the running command (-) differs from [trainer] command (+): {text}")
        if self.files:
            parts.append(f"files changed since the start: {', '.join(scrub(name) for name in self.files)}")
        return "; ".join(parts)


class RunningCommand:
    """Keeps the digests of an attached trainer's files from the first comparison on."""

    def __init__(self) -> None:
        self._digests: tuple[str, tuple[tuple[str, str], ...]] = ("", ())

    def difference(
        self, handle: TrainerHandle, record: StartRecord | None, settings: Settings, layout: Layout
    ) -> Difference:
        """Return the difference; empty if nothing differs or nothing can be compared. Blocks."""
        if not settings.trainer.command:
            return Difference()
        if record is not None and record.start_id == handle.start_id and record.command:
            arguments = differences(record.command, settings.trainer.command, _shown)
            wanted = str(working_directory(settings))
            directory = (f"- in {record.cwd}", f"+ in {wanted}") if wanted != record.cwd else ()
            return Difference(arguments, directory, changed_configs(record))
        if handle.supervision is not Supervision.ATTACH:
            return Difference()
        return self._attached(handle, settings, layout)

    def _attached(self, handle: TrainerHandle, settings: Settings, layout: Layout) -> Difference:
        argv = procfs.command(handle.launcher.pid)
        cwd = procfs.working_directory(handle.launcher.pid) or ""
        if not argv or renamed(argv):
            return Difference()
        configured = settings.trainer.command
        arguments = differences(_compared(argv, settings, layout), _compared(configured, settings, layout), _shown)
        wanted = str(working_directory(settings))
        directory = (f"- in {cwd}", f"+ in {wanted}") if cwd and cwd != wanted else ()
        if self._digests[0] != handle.start_id:
            self._digests = (handle.start_id, config_digests(argv, Path(cwd or "/")))
        return Difference(arguments, directory, changed_files(self._digests[1]))


class CommandWatch:
    """Compares the watched trainer's command from time to time."""

    def __init__(self, context: RecoveryContext) -> None:
        self.context = context
        self._running = RunningCommand()
        self._comparing: asyncio.Task[None] | None = None

    async def difference(self) -> Difference:
        """Return how the watched trainer differs from the configured command; empty if none is watched or it ended."""
        tools, handle = self.context.tools, self.context.handle
        if handle is None:
            return Difference()
        start = self.context.run.last_start
        try:
            if await handle.exit_status() is not None:
                return Difference()
            return await tools.blocking(self._running.difference, handle, start, tools.settings, tools.layout)
        except (OSError, PodwatchError):  # nothing is known, so nothing differs
            return Difference()

    async def compare_command(self) -> None:
        """Raise, update or clear the finding about a changed command."""
        handle, found = self.context.handle, await self.difference()
        if handle is not self.context.handle:
            return None
        if handle is None or not found:
            return self.context.notes.clear(FindingKind.COMMAND_CHANGED)
        self.context.notes.add(
            FindingKind.COMMAND_CHANGED,
            Severity.WARNING,
            f"a restart would not start the trainer that runs now (pid {handle.launcher.pid}): {found.summary()}",
            f"`podwatch config init --pid {handle.launcher.pid}` prints the configuration of the running command;"
            " `podwatch restart --dry-run` shows what a restart would run",
        )
        return None

    def compare_soon(self, now: float) -> None:
        """Start a comparison if one is due. Called at each tick of the sensing loop; never blocks."""
        if now - self.context.command_looked_at < COMMAND_POLL:
            return
        if self._comparing is None or self._comparing.done():
            self.context.command_looked_at = now
            self._comparing = asyncio.create_task(self.compare_command(), name="podwatch-command")

    async def close(self) -> None:
        if self._comparing is not None:
            self._comparing.cancel()
            await asyncio.gather(self._comparing, return_exceptions=True)


def _shown(group: str) -> str:
    """Return ``group`` without secrets; text from run.json is scrubbed already."""
    return group if MASK in group else scrub(group)


def renamed(argv: tuple[str, ...]) -> bool:
    """Return whether a title (``PRIME-RL::Launcher``) has replaced the command line, so that its arguments are
    unknown."""
    return len(argv) == 1 and ("::" in argv[0] or " " in argv[0])


def _compared(command: tuple[str, ...], settings: Settings, layout: Layout) -> tuple[str, ...]:
    """Return ``command`` without resume flags (they differ at every start), wrappers and interpreters (``uv run``, a
    path to Python)."""
    own = settings.trainer.resume_args
    plain = layout.resume_command(command, None, own, {}).argv
    if not isinstance(own, str):
        plain, _ = without_settings(plain, *settings_in(own))
    name, arguments = program(plain)
    return (name, *arguments) if name else tuple(plain)
