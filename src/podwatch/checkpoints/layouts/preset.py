"""How a trainer is told to resume from one step: what is taken out of its command, and what is put in."""

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
"""Hydra takes a value of these as it stands; any other needs quotes."""


@dataclass(frozen=True, slots=True)
class Preset:
    """``add`` is what a resume needs, with placeholders; None: it cannot be known, and ``ask`` says why."""

    add: tuple[str, ...] | None
    flags: tuple[str, ...] = ()
    """Flags with a value that are taken out first, at every start."""
    bare: tuple[str, ...] = ()
    """The same for flags that stand alone."""
    resuming: tuple[str, ...] = ()
    """Flags with a value that are taken out only for a resume: at a fresh start they name where to begin."""
    resuming_bare: tuple[str, ...] = ()
    """The same for flags that stand alone (``--finetune`` starts again at step 0)."""
    keys: tuple[str, ...] = ()
    """What is taken out at every start of ``key=value`` overrides (Hydra, OmegaConf)."""
    fresh: tuple[str, ...] = ()
    """What a fresh start needs so that the trainer does not find something by itself."""
    ask: str = ""
    example: str = '["--resume", "{checkpoint}"]'
    wandb: bool = True
    """The trainer hands W&B's own variables on, and has one W&B run."""


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
    """A start from ``step`` (None: fresh). ConfigurationError where "auto" does not know what to pass, or how.

    ``wandb`` names the W&B run of this very start: at a fresh one it is a new one.
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
            preset.ask or "this layout does not know how its trainer resumes",
            where="trainer.resume_args",
            fix=f'set it, for example to {preset.example}; "none" if a script reads PODWATCH_STEP',
        )
    if preset.add and not passes_on(command, site.working_directory):
        raise ConfigurationError(
            "the command is a shell script that does not pass arguments on, so it would never see how to resume",
            where="trainer.command",
            fix='write "$@" behind the trainer in the script, or {resume_args} into the command; or set'
            ' trainer.resume_args = "none" and read $PODWATCH_RESUME_ARGS in the script',
        )
    return tuple(_quoted(a, preset, step, checkpoint) for a in preset.add)


def passes_on(command: Sequence[str], cwd: Path) -> bool:
    """Would an argument at the end of this command reach the trainer? True also where that cannot be seen."""
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
