"""One start, decided in full: argv, environment, digests of the small files named in the command."""

import hashlib
import os
import secrets
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from podwatch.checkpoints.layout import Layout
from podwatch.config.settings import Settings
from podwatch.domain.errors import ConfigurationError
from podwatch.domain.run import StartRecord, given_in, identity
from podwatch.domain.secrets import scrub, scrub_argv
from podwatch.policy.command_diff import grouped
from podwatch.system.files import read_file
from podwatch.trainer.base import StartPlan

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
