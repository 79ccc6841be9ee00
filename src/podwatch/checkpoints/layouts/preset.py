"""How to resume a trainer from one step: which arguments are removed from its command, and which are added."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from podwatch.checkpoints.layouts import argv
from podwatch.checkpoints.layouts.base import ResumeCommand, Site
from podwatch.checkpoints.layouts.program import program
from podwatch.domain.errors import ConfigurationError
from podwatch.domain.wandb import valid_ids

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
    kept, removed = argv.strip_flags(command, flags, bare)
    kept, overrides = argv.strip_keys(kept, preset.keys)
    extra: tuple[str, ...] = ()
    if override == "auto":
        extra = _automatic(preset, site, kept, step, checkpoint)
    elif step is not None and not isinstance(override, str):
        extra = tuple(override)
    run = valid_ids(wandb).get("shared", "") if preset.wandb else ""
    return argv.build(
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
