"""Compare the running trainer with ``[trainer] command``.

For an attached trainer its command line in /proc counts; for one that podwatch started, the configured command of that
start. Files that the command names are compared by their digests. Blocks: reads /proc and small files.
"""

from dataclasses import dataclass
from pathlib import Path

from podwatch.checkpoints.layouts.base import Layout
from podwatch.config.settings import Settings
from podwatch.domain.run import StartRecord
from podwatch.domain.secrets import MASK, scrub
from podwatch.domain.snapshot import Supervision
from podwatch.policy.command_diff import differences
from podwatch.recovery import start_plan
from podwatch.system import procfs
from podwatch.trainer.base import TrainerHandle
from podwatch.trainer.roles import program

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
        if record is not None and record.start_id == handle.start_id:
            arguments = differences(record.command, settings.trainer.command, _shown) if record.command else ()
            wanted = str(start_plan.working_directory(settings))
            directory = (f"- in {record.cwd}", f"+ in {wanted}") if wanted != record.cwd else ()
            return Difference(arguments, directory, start_plan.changed_configs(record))
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
        wanted = str(start_plan.working_directory(settings))
        directory = (f"- in {cwd}", f"+ in {wanted}") if cwd and cwd != wanted else ()
        if self._digests[0] != handle.start_id:
            self._digests = (handle.start_id, start_plan.config_digests(argv, Path(cwd or "/")))
        return Difference(arguments, directory, start_plan.changed_files(self._digests[1]))


def _shown(group: str) -> str:
    """Return ``group`` without secrets; text from the run record is scrubbed already."""
    return group if MASK in group else scrub(group)


def renamed(argv: tuple[str, ...]) -> bool:
    """Return whether a title (``PRIME-RL::Launcher``) has replaced the command line, so that its arguments are
    unknown."""
    return len(argv) == 1 and ("::" in argv[0] or " " in argv[0])


def _compared(command: tuple[str, ...], settings: Settings, layout: Layout) -> tuple[str, ...]:
    """Return ``command`` without resume flags (they differ at every start), wrappers and interpreters (``uv run``, a
    path to Python)."""
    plain = layout.resume_command(command, None, settings.trainer.resume_args, {}).argv
    name, arguments = program(plain)
    return (name, *arguments) if name else tuple(plain)
