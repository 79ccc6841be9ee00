"""prime-rl's command line by version: resume flags, target step, W&B continuity."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from podwatch.checkpoints.layouts import command_line
from podwatch.checkpoints.layouts.base import ResumeCommand
from podwatch.checkpoints.layouts.step_dirs import is_plain_dir
from podwatch.domain.errors import ConfigurationError
from podwatch.domain.run import is_id, valid_ids
from podwatch.system.reading import opened

_OLD = ("--ckpt.resume-step", "--trainer.ckpt.resume-step", "--orchestrator.ckpt.resume-step")
_NEW = ("--resume.step", "--resume.dir")
WANDB_VARIABLES = ("PRL_RUN_ID", "WANDB_SHARED_RUN_ID")
"""From August 2026, and v0.6.0 to v0.8.0. Not WANDB_RUN_ID: versions with two W&B runs would both claim it."""
_RUN_LINK = re.compile(r"^(?:offline-)?run-\d{8}_\d{6}-(.+)$")


@dataclass(frozen=True, slots=True)
class Hints:
    """``variant`` is A, B or empty; ``new_flags``: ``--resume.step N`` (2026-08-13 on) instead of ``--ckpt.resume-step
    N``. Layout and flag changed five days apart, so a layout-B trainer of those days takes the old flag: its source or
    a resume flag in the command shows which."""

    variant: str
    new_flags: bool


def hints(command: Sequence[str], cwd: Path, seen: str) -> Hints:
    """``seen`` is the variant by the files on disk. Then, in this order: the command's own flags, the trainer's source
    in ``cwd``."""
    old = command_line.has_flag(command, _OLD)
    new = command_line.has_flag(command, ("--resume", *_NEW, "--run.name", "--run.dir", "--clean"))
    source = cwd / "src" / "prime_rl"
    installed = is_plain_dir(source)
    variant = seen
    if not variant and new:
        variant = "B"
    if not variant and installed:
        variant = "A" if (source / "trainer" / "runs.py").exists() else "B"
    if not variant and old:
        variant = "A"
    if old != new:
        return Hints(variant, new)
    if installed:
        return Hints(variant, variant != "A" and _mentions(source / "trainer" / "ckpt.py", "ResumeConfig"))
    return Hints(variant, variant == "B")


def resume_command(
    command: Sequence[str],
    step: int | None,
    override: str | Sequence[str],
    wandb: Mapping[str, str],
    known: Hints,
    *,
    checkpoint: Path | None,
    output_dir: Path,
    cwd: Path,
) -> ResumeCommand:
    """The command for a start from ``step`` (None: fresh). ConfigurationError if "auto" cannot determine the flag of
    this version."""
    kept, removed = command_line.strip_flags(command, (*_OLD, *_NEW), ("--resume",))
    extra: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    if step is not None:
        says_itself = any(p in a for p in ("{step}", "{checkpoint}") for a in kept)
        if override == "auto" and not says_itself:
            if not known.variant:
                raise ConfigurationError(
                    "podwatch cannot determine the prime-rl version, so not which flag resumes it",
                    where="trainer.resume_args",
                    fix='set it to ["--ckpt.resume-step", "{step}"] or, for versions from August 2026, '
                    '["--resume.step", "{step}"]',
                )
            extra = ("--resume.step", "{step}") if known.new_flags else ("--ckpt.resume-step", "{step}")
        elif not isinstance(override, str):
            extra = tuple(override)
        arguments, environment = _wandb(kept, wandb, known, cwd)
        if override != "none":
            extra = (*extra, *arguments)
    return command_line.build(
        kept,
        step=step,
        checkpoint=checkpoint,
        output_dir=output_dir,
        resume_args=extra,
        environment=environment,
        removed=removed,
    )


def _wandb(
    command: Sequence[str], wandb: Mapping[str, str], known: Hints, cwd: Path
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Arguments and environment that continue the W&B run. Never one WANDB_RUN_ID for a version with two runs."""
    ids = valid_ids(wandb)
    if known.variant == "B":
        shared = ids.get("shared") or ids.get("orchestrator") or ids.get("trainer")
        return (), {"PRL_RUN_ID": shared} if shared else {}
    if "trainer" in ids and "orchestrator" in ids:
        # --wandb.shared exists from v0.5.0 on, exactly where wandb.id does not: passing the id there aborts the start.
        later = command_line.has_flag(command, ("--wandb.shared",)) or any(
            isinstance(w := d.get("wandb"), dict) and "shared" in w for d in command_line.toml_documents(command, cwd)
        )
        if later or command_line.has_flag(command, ("--trainer.wandb.id", "--orchestrator.wandb.id")):
            return (), {}
        return ("--trainer.wandb.id", ids["trainer"], "--orchestrator.wandb.id", ids["orchestrator"]), {}
    return (), {"WANDB_SHARED_RUN_ID": ids["shared"]} if "shared" in ids else {}


def wandb_identity(output_dir: Path, variant: str) -> Mapping[str, str]:
    """``{"trainer": id, "orchestrator": id}`` where two runs exist, else ``{"shared": id}``, else nothing."""
    trainer = _latest_run(output_dir / "wandb")
    if variant == "B":
        return {"shared": trainer} if trainer else {}
    orchestrator = _latest_run(output_dir / "run_default" / "wandb")
    if trainer and orchestrator and trainer != orchestrator:
        return {"trainer": trainer, "orchestrator": orchestrator}
    either = trainer or orchestrator
    return {"shared": either} if either else {}


def _latest_run(directory: Path) -> str:
    try:
        name = (directory / "latest-run").readlink().name
    except OSError:
        return ""
    match = _RUN_LINK.match(name)
    return match.group(1) if match and is_id(match.group(1)) else ""


def target_step(command: Sequence[str], cwd: Path) -> int | None:
    """``--max-steps`` on the command line, else top-level ``max_steps`` of the TOML files it names (the last wins)."""
    direct = command_line.positive(command_line.flag_value(command, ("--max-steps", "--trainer.max-steps")))
    if direct is not None:
        return direct
    found = None
    for document in command_line.toml_documents(command, cwd):
        value = document.get("max_steps")
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            found = value
    return found


def broadcasts_by_nccl(command: Sequence[str], cwd: Path) -> bool:
    """Whether weights reach the engine by NCCL or NIXL, without the file system: then a resume needs no broadcast
    directory."""
    names = ("--weight-broadcast.type", "--trainer.weight-broadcast.type", "--orchestrator.weight-broadcast.type")
    kind = command_line.flag_value(command, names)
    if kind is None:
        for document in command_line.toml_documents(command, cwd):
            section = document.get("weight_broadcast")
            if isinstance(section, dict) and isinstance(section.get("type"), str):
                kind = section["type"]
    return kind is not None and kind.lower() in ("nccl", "nixl")


def _mentions(path: Path, word: str) -> bool:
    try:
        with opened(path) as file:
            return word.encode() in file.read(500_000)
    except OSError:
        return False
