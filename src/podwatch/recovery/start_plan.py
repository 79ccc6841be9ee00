"""One start, decided in full: argv, environment, digests of the small files named in the command. And the difference
between the running trainer and ``[trainer] command``.

For an attached trainer its command line in /proc counts; for one that podwatch started, the configured command of that
start. Files that the command names are compared by their digests. ``CommandWatch`` blocks: it reads /proc and small
files.
"""

import asyncio
import hashlib
import os
import secrets
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from podwatch.checkpoints.layouts.base import Layout
from podwatch.config.settings import Settings
from podwatch.domain.errors import ConfigurationError, PodwatchError
from podwatch.domain.finding import FindingKind, Severity
from podwatch.domain.run import StartRecord, given_in, identity
from podwatch.domain.secrets import MASK, scrub, scrub_argv
from podwatch.domain.snapshot import Supervision
from podwatch.policy.command_diff import differences, grouped
from podwatch.recovery.context import RecoveryContext
from podwatch.system import procfs
from podwatch.system.files import read_file
from podwatch.trainer.base import StartPlan, TrainerHandle
from podwatch.trainer.process_roles import program

MAX_DIGEST_BYTES = 1 << 20
"""A larger file named in a command is data, not configuration."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """``removed`` are the resume flags taken out of the configured command. ``first_step`` is the lowest step number a
    correct resume can show (None for a fresh start)."""

    plan: StartPlan
    record: StartRecord
    removed: tuple[str, ...]
    first_step: int | None
    wandb: Mapping[str, str]


def new_id() -> str:
    return secrets.token_hex(8)


def working_directory(settings: Settings) -> Path:
    return settings.trainer.cwd or settings.trainer.output_dir.parent


def prepare(
    settings: Settings,
    layout: Layout,
    *,
    step: int | None,
    environment: Mapping[str, str],
    wandb: Mapping[str, str],
    wall: float,
    start_id: str = "",
) -> Prepared:
    """Build the plan. Blocks (reads config files). Raises ConfigurationError when no command is configured."""
    trainer = settings.trainer
    if not trainer.command:
        raise ConfigurationError(
            "no command is configured, so training cannot be started",
            where="[trainer] command",
            fix="set it, or let `podwatch config init` copy it from the running trainer",
        )
    ids = wandb_identity(layout, step, environment, wandb)
    resume = layout.resume_command(trainer.command, step, trainer.resume_args, ids)
    added = {name: value for name, value in resume.environment.items() if not environment.get(name)}
    cwd = working_directory(settings)
    own = {"PODWATCH_RUN_ID": settings.run_id, "PODWATCH_STEP": "" if step is None else str(step)}
    own["PODWATCH_CHECKPOINT"] = "" if step is None else str(checkpoint_path(layout, step))
    if settings.nodes.rank is not None and settings.nodes.count is not None:
        own["PODWATCH_NODE_RANK"], own["PODWATCH_NODE_COUNT"] = str(settings.nodes.rank), str(settings.nodes.count)
    own["PODWATCH_RESUME_ARGS"] = shlex.join(added_arguments(trainer.command, resume.removed, resume.argv))
    plan = StartPlan(
        start_id=start_id or new_id(),
        argv=resume.argv,
        cwd=str(cwd),
        env={**environment, **added, **own},
        user=trainer.user,
        nofile=trainer.nofile,
        step=step,
        before=trainer.start_before,
    )
    record = StartRecord(
        start_id=plan.start_id,
        wall=wall,
        argv=scrub_argv(plan.argv),
        cwd=plan.cwd,
        user=plan.user,
        step=step,
        environment_names=tuple(sorted(plan.env)),
        config_digests=config_digests(plan.argv, cwd),
        command=tuple(scrub(group) for group in grouped(trainer.command)),
    )
    first = None if step is None else layout.first_step_after(step)
    return Prepared(plan, record, resume.removed, first, ids)


def wandb_identity(
    layout: Layout, step: int | None, environment: Mapping[str, str], known: Mapping[str, str]
) -> dict[str, str]:
    """Return the W&B run ids of a start from ``step``; a fresh start (None) never continues earlier W&B runs.

    ``known`` are the ids in the run record, or those that came with a checkpoint from the store. If the trainer reads
    W&B's own variable, podwatch chooses the id, so that nothing depends on a disk that may be gone. Blocks.
    """
    variables = layout.wandb_variables()
    given = given_in(environment, variables)
    ids = given if step is None else identity(known, layout.wandb_identity(), given)
    return ids or ({"shared": secrets.token_hex(4)} if variables == ("WANDB_RUN_ID",) else {})


def checkpoint_path(layout: Layout, step: int) -> Path:
    """Return the directory of the first part that a resume needs."""
    parts = layout.steps().get(step, ())
    for part in parts:
        if part.required:
            return part.path
    return parts[0].path if parts else layout.output_dir


def added_arguments(command: Sequence[str], removed: Sequence[str], argv: Sequence[str]) -> list[str]:
    """Return the arguments that the layout added: ``argv`` without its common beginning and end with the command."""
    left, base = list(removed), list[str]()
    for argument in command:
        if argument in left:
            left.remove(argument)
        else:
            base.append(argument)
    added = list(argv)
    while base and added and base[0] == added[0]:
        base, added = base[1:], added[1:]
    while base and added and base[-1] == added[-1]:
        base, added = base[:-1], added[:-1]
    return added


def config_digests(argv: Sequence[str], cwd: Path) -> tuple[tuple[str, str], ...]:
    """Return (path, SHA-256) of every small regular file that the command names: ``f``, ``@f``, ``--x=f``. argv[0] is
    not configuration. Unreadable files are left out."""
    found: dict[str, str] = {}
    for path in named_files(argv, cwd):
        try:
            found[path] = hashlib.sha256(read_file(path, MAX_DIGEST_BYTES, shown=True)).hexdigest()
        except (OSError, ValueError):
            continue
    return tuple(sorted(found.items()))


def named_files(argv: Sequence[str], cwd: Path) -> tuple[str, ...]:
    """Return the path of every file that the arguments of a command name: ``f``, ``@f``, ``--x=f``. Blocks."""
    found: dict[str, None] = {}
    for argument in argv[1:]:
        for name in (argument, argument.lstrip("@"), argument.rpartition("=")[2].lstrip("@")):
            path = cwd / name
            try:
                if name and path.is_file():
                    found[os.path.normpath(path)] = None
            except (OSError, ValueError):
                continue
    return tuple(found)


def changed_configs(record: StartRecord | None) -> tuple[str, ...]:
    """Return the files of the last start that have changed since, or are gone. Blocks."""
    return () if record is None else changed_files(record.config_digests)


def changed_files(digests: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return the paths of (path, SHA-256) pairs whose file has changed or is gone. Blocks."""
    changed = []
    for name, digest in digests:
        try:
            now = hashlib.sha256(read_file(name, MAX_DIGEST_BYTES, shown=True)).hexdigest()
        except OSError:
            now = ""
        if now != digest:
            changed.append(name)
    return tuple(changed)


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
        if record is not None and record.start_id == handle.start_id:
            arguments = differences(record.command, settings.trainer.command, _shown) if record.command else ()
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
        """Return how the watched trainer differs from the configured command; empty if none is watched."""
        tools, handle, record = self.context.tools, self.context.handle, self.context.tools.record.current
        if handle is None:
            return Difference()
        start = record.last_start if record is not None else None
        try:
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
            "`podwatch config adopt` writes the running command into the configuration; `podwatch restart --dry-run`"
            " shows what a restart would run",
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
