"""How to resume a trainer from one step (which arguments are removed from its command, and which are added), and which
step a running command resumes from.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podwatch.checkpoints import command_line
from podwatch.checkpoints.command_line import program
from podwatch.checkpoints.layout import Layout, ResumeCommand, Site
from podwatch.domain.errors import ConfigurationError, PodwatchError
from podwatch.domain.run import valid_ids

_ENTRIES = ("{step}", "{checkpoint}", "{resume_args}")
_HYDRA_PLAIN = re.compile(r"[A-Za-z0-9_./:@%+~-]+")
"""Hydra accepts a value of these characters unquoted; any other needs quotes."""


@dataclass(frozen=True, slots=True)
class Preset:
    """``add`` has the arguments for a resume, with placeholders; None: unknown, and ``ask`` is the reason."""

    add: tuple[str, ...] | None
    flags: tuple[str, ...] = ()
    """Flags with a value that are removed first, at every start."""
    bare: tuple[str, ...] = ()
    """The same for flags without a value."""
    resuming: tuple[str, ...] = ()
    """Flags with a value that are removed only for a resume: at a fresh start they name the initial model."""
    resuming_bare: tuple[str, ...] = ()
    """The same for flags without a value (``--finetune`` restarts at step 0)."""
    keys: tuple[str, ...] = ()
    """``key=value`` overrides (Hydra, OmegaConf) that are removed at every start."""
    fresh: tuple[str, ...] = ()
    """Arguments for a fresh start, so that the trainer does not resume automatically."""
    ask: str = ""
    example: str = '["--resume", "{checkpoint}"]'
    wandb: bool = True
    """The trainer passes on W&B's own variables, and has one W&B run."""


def resume_command(
    preset: Preset,
    site: Site,
    command: Sequence[str],
    step: int | None,
    override: str | Sequence[str],
    wandb: Mapping[str, str],
    *,
    checkpoint: Path | None,
) -> ResumeCommand:
    """The command for a start from ``step`` (None: fresh). ConfigurationError where "auto" does not know which
    arguments to pass, or how.

    ``wandb`` names the W&B run of this start: a fresh start has a new one.
    """
    resuming = step is not None and override != "none"
    flags = (*preset.flags, *(preset.resuming if resuming else ()))
    bare = (*preset.bare, *(preset.resuming_bare if resuming else ()))
    kept, removed = command_line.strip_flags(command, flags, bare)
    kept, overrides = command_line.strip_keys(kept, preset.keys)
    extra: tuple[str, ...] = ()
    if override == "auto":
        extra = _automatic(preset, site, kept, step, checkpoint)
    elif step is not None and not isinstance(override, str):
        extra = tuple(override)
    run = valid_ids(wandb).get("shared", "") if preset.wandb else ""
    return command_line.build(
        kept,
        step=step,
        checkpoint=checkpoint,
        output_dir=site.output_dir,
        resume_args=extra,
        environment={"WANDB_RUN_ID": run, "WANDB_RESUME": "allow"} if run else {},
        removed=(*removed, *overrides),
    )


def _automatic(
    preset: Preset, site: Site, command: Sequence[str], step: int | None, checkpoint: Path | None
) -> tuple[str, ...]:
    if any(p in a for p in ("{step}", "{checkpoint}") for a in command):
        return ()
    if step is None:
        return preset.fresh
    if preset.add is None:
        raise ConfigurationError(
            preset.ask or "podwatch does not know how this trainer resumes",
            where="trainer.resume_args",
            fix=f'set it, for example to {preset.example}; "none" if a script reads PODWATCH_STEP',
        )
    if preset.add and not passes_on(command, site.working_directory):
        raise ConfigurationError(
            "the command is a shell script that does not pass arguments on, so the trainer gets no resume arguments",
            where="trainer.command",
            fix='add "$@" after the trainer in the script, or put {resume_args} into the command; or set'
            ' trainer.resume_args = "none" and read $PODWATCH_RESUME_ARGS in the script',
        )
    return tuple(_quoted(a, preset, step, checkpoint) for a in preset.add)


def passes_on(command: Sequence[str], cwd: Path) -> bool:
    """Whether an argument at the end of this command would reach the trainer. True also where that is unknown."""
    if any(p in a for p in _ENTRIES for a in command):
        return True
    found = program(command, cwd)
    if found.launcher != "sh" or not found.shell:
        return True
    return found.name != "sh" and re.search(r"\$(?:@|\*|\{@|\{\*|PODWATCH_|\{PODWATCH_)", found.shell) is not None


def _quoted(text: str, preset: Preset, step: int, checkpoint: Path | None) -> str:
    """A path with blanks or brackets must be quoted inside a Hydra override."""
    name, equals, _ = text.partition("=")
    if not preset.keys or not equals or name.startswith("-"):
        return text
    value = text[len(name) + 1 :].replace("{step}", str(step)).replace("{checkpoint}", str(checkpoint or ""))
    if _HYDRA_PLAIN.fullmatch(value):
        return f"{name}={value}"
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"{name}='{escaped}'"


# -- step that a running command resumes from ------------------------------------------------------------------------

_NUMBER = re.compile(r"\d{1,15}")
_STARTING = 1.0
"""Seconds: the start time of a process is a clock tick (10 ms, rounded down), and these programs import for seconds
before they read their files."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """``named_by`` is the source of the step, worded as the subject of a sentence."""

    step: int
    named_by: str


@dataclass(frozen=True, slots=True)
class _Settings:
    """The keys of the step in a trainer's TOML. ``flag`` precedes the file's name; empty: ``@ FILE``. ``switches``: one
    of these keys must be true, or a flag of that name given, for the step to count; empty: it always counts."""

    keys: tuple[str, ...]
    flag: str = ""
    switches: tuple[str, ...] = ()


_SETTINGS: Mapping[str, _Settings] = {
    "prime-rl": _Settings(  # until 2026-08 one key per role; since then one for all
        ("ckpt.resume_step", "trainer.ckpt.resume_step", "orchestrator.ckpt.resume_step", "resume.step")
    ),
    "torchtitan": _Settings(
        ("checkpoint.load_step",), "--job.config_file", ("checkpoint.enable", "checkpoint.enable_checkpoint")
    ),
}


def resumed(layout: Layout, command: Sequence[str], *, cwd: Path | None, began_wall: float) -> Resumed | None:
    """The step that ``command`` resumes from: by the layout's resume flags in it (a number, or a checkpoint that is
    here), or, without such flags, by a TOML file that it names. None where they name no step, the newest one ("latest",
    -1), or several.

    Only files that have not changed since the process of ``command`` started (``began_wall``, epoch seconds) prove what
    it read, and only if all of them are readable. ``cwd`` is the working directory of that process; None: unknown, no
    file is read. Blocks: reads small files and can list the checkpoint directories.
    """
    try:
        flags = layout.resume_command(command, 0, (), {}).removed
    except (PodwatchError, OSError):
        return None
    if flags:
        step = _of_flags(layout, flags)
        return None if step is None else Resumed(step, "its command")
    settings = _SETTINGS.get(layout.name)
    return None if settings is None or cwd is None else _of_files(settings, command, cwd, began_wall)


def _of_flags(layout: Layout, flags: Sequence[str]) -> int | None:
    found: set[int] = set()
    for word in flags:
        name, equals, inline = word.partition("=")
        if word.startswith("-") and not equals:
            continue
        value = (inline if equals else name).strip("'\"")
        if _NUMBER.fullmatch(value):
            found.add(int(value))
        elif value:
            found.update(_step_at(layout, value))
    return found.pop() if len(found) == 1 else None


def _step_at(layout: Layout, value: str) -> set[int]:
    """The step whose directory ``value`` is, absolute or as the end of its path."""
    wanted = os.path.normpath(value)
    try:
        return {
            step
            for step in layout.steps()
            for path in layout.step_paths(step)
            if str(path) == wanted or (not wanted.startswith(os.sep) and str(path).endswith(os.sep + wanted))
        }
    except OSError:
        return set()


def _of_files(settings: _Settings, command: Sequence[str], cwd: Path, began_wall: float) -> Resumed | None:
    named = command
    if settings.flag:
        named = ("@", command_line.flag_value(command, (settings.flag,)) or "")
    said: dict[str, object] = {}
    """A later file overrides an earlier one, key by key."""
    by: dict[str, str] = {}
    for file in command_line.toml_files(named, cwd):
        if file.document is None or file.changed_wall > began_wall + _STARTING:
            return None
        for key in (*settings.keys, *settings.switches):
            if (value := _at(file.document, key)) is not None:
                said[key], by[key] = value, Path(file.name).name
    on = [command_line.has_flag(command, (f"--{switch}",)) or said.get(switch) is True for switch in settings.switches]
    steps = [(key, said[key]) for key in settings.keys if key in said]
    if not steps or not any(on or [True]):
        return None
    key, step = steps[0]
    if not isinstance(step, int) or isinstance(step, bool) or step < 1 or any(other != step for _, other in steps):
        return None
    return Resumed(step, f"{by[key]}, which its command names,")


def _at(document: Mapping[str, Any], key: str) -> object:
    value: object = document
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value
