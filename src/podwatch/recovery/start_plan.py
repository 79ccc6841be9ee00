"""One start, decided in full: argv, environment, digests of the small files named in the command."""

import hashlib
import os
import re
import secrets
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from podwatch.checkpoints.command import Command
from podwatch.checkpoints.layout import Layout
from podwatch.config.settings import Settings
from podwatch.domain.errors import ConfigurationError
from podwatch.domain.run import StartRecord, given_in, identity
from podwatch.domain.secrets import scrub, scrub_argv
from podwatch.recovery.command_diff import grouped
from podwatch.system.files import read_file
from podwatch.trainer.start_and_adopt import StartPlan

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
    own["PODWATCH_RESUME_ARGS"] = resume.environment.get(
        "PODWATCH_RESUME_ARGS", shlex.join(_added_words(trainer.command, resume.argv))
    )
    if settings.nodes.rank is not None and settings.nodes.count is not None:
        own["PODWATCH_NODE_RANK"], own["PODWATCH_NODE_COUNT"] = str(settings.nodes.rank), str(settings.nodes.count)
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
        environment_names=tuple(sorted(plan.env)),
        config_digests=config_digests(plan.argv, cwd),
        command=tuple(scrub(group) for group in grouped(trainer.command)),
    )
    first = None if step is None else layout.first_step_after(step)
    return Prepared(plan, record, resume.removed, first, ids)


def _added_words(command: Sequence[str], argv: Sequence[str]) -> list[str]:
    """Return the words of ``argv`` that the command does not have: what a layout of another package passes on."""
    had, added = Counter(command), list[str]()
    for word in argv:
        if had[word]:
            had[word] -= 1
        else:
            added.append(word)
    return added


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


def config_digests(argv: Sequence[str], cwd: Path) -> tuple[tuple[str, str], ...]:
    """Return (path, SHA-256) of every small regular file that the command names as its configuration. Unreadable files
    are left out."""
    found: dict[str, str] = {}
    for path in named_files(argv, cwd):
        try:
            found[path] = hashlib.sha256(read_file(path, MAX_DIGEST_BYTES, shown=True)).hexdigest()
        except (OSError, ValueError):
            continue
    return tuple(sorted(found.items()))


def named_files(argv: Sequence[str], cwd: Path) -> tuple[str, ...]:
    """Return the path of every file that a command names, as ``f``, ``@f`` or ``--x=f``, also inside its shell script,
    and of its own script. Files that training writes are no configuration: values of settings that name a log or an
    output, and logs by their names; targets of redirections and ``tee`` are no arguments of a program. Blocks."""
    command = Command(argv, cwd)
    named = [*_named_by(argv[1:], cwd)]
    for program in command.programs:
        if program.cwd is not None:
            named += _named_by((program.script, *(program.words if program.shell else ())), program.cwd)
    paths = dict.fromkeys(os.path.normpath(path) for path in named)
    return tuple(path for path in paths if _is_file(path))


def _named_by(words: Sequence[str], cwd: Path) -> Iterator[Path]:
    before = ""
    for word in words:
        name, equals, value = word.rpartition("=")
        setting = name if equals else before if before.startswith("-") and "=" not in before else ""
        before = word
        if not word or _OUTPUTS.search(setting) or word.endswith(_LOGS):
            continue
        yield from (cwd / part for part in dict.fromkeys((word, word.lstrip("@"), value.lstrip("@"))) if part)


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


_OUTPUTS = re.compile(
    r"(?:^|[-_.])(?:log|logs|logfile|logging|out|output|outputs|report|metrics|trace|profile)(?:[-_.]|$)"
)
_LOGS = (".log", ".out", ".err", ".pid", ".jsonl", ".csv")


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
