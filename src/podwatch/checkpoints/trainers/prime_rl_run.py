"""One prime-rl run: its command line by version (resume flags, target step, W&B continuity), its files other than the
checkpoints, and the directory that it writes to.
"""

import heapq
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podwatch.checkpoints import command_line
from podwatch.checkpoints.command_line import program
from podwatch.checkpoints.layout import SAVES, Concern, Recognition, ResumeCommand, Site
from podwatch.checkpoints.step_names import is_plain_dir, newest_steps, step_names
from podwatch.domain.errors import ConfigurationError
from podwatch.domain.run import is_id, valid_ids
from podwatch.system.files import opened

# -- command line ------------------------------------------------------------------------------------------------------

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
    """``seen`` is the variant by the files on disk. Then, in this order: the command's own flags and the TOML files
    that it names, the trainer's source in ``cwd``."""
    old = command_line.has_flag(command, _OLD)
    new = command_line.has_flag(command, ("--resume", *_NEW, "--run.name", "--run.dir", "--clean")) or any(
        isinstance(document.get(table), dict)
        for document in command_line.toml_documents(command, cwd)
        for table in ("run", "resume")  # unknown before 2026-08-13, and prime-rl refuses an unknown table
    )
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


# -- files of a run ----------------------------------------------------------------------------------------------------

ENTRIES = ("rl", "sft")
"""prime-rl's training programs."""


def looks_like_run(directory: Path) -> bool:
    """Whether it is a run directory as prime-rl creates it since 2026-08: each launch creates ``logs/attempt_N``, and a
    step directory below ``checkpoints/`` has the orchestrator's half or, for SFT, the trainer's."""
    if has_attempts(directory):
        return True
    checkpoints = directory / "checkpoints"
    return any(
        is_plain_dir(checkpoints / f"step_{step}" / half)
        for step in newest_steps(checkpoints)
        for half in ("orchestrator", "trainer")
    )


def has_attempts(directory: Path) -> bool:
    """Whether it has ``logs/attempt_N`` or ``logs/latest``, which each launch makes since 2026-08-13."""
    return is_plain_dir(directory / "logs" / "attempt_1") or os.path.islink(directory / "logs" / "latest")  # noqa: PTH114


def holds_sft(output_dir: Path, checkpoints: Path) -> bool:
    """Whether the newest steps were saved by supervised fine-tuning: a data loader's state, and no orchestrator."""
    if is_plain_dir(output_dir / "run_default"):
        return False
    newest = [checkpoints / f"step_{step}" for step in newest_steps(checkpoints)]
    if any(is_plain_dir(step / "orchestrator") for step in newest):
        return False
    return any(is_plain_dir(step / "trainer" / "dataloader") for step in newest)


def command_runs(command: Sequence[str], cwd: Path) -> str:
    """The prime-rl program that the command runs, as written there; else empty. ``rl`` or ``sft`` counts only with
    arguments: other programs can have such short names."""
    seen = program(command, cwd)
    module = seen.runs("prime_rl")
    if module:
        return module
    if seen.name in ENTRIES and any(a == "@" or a.startswith(("--", "@")) for a in seen.arguments):
        return seen.name
    match = re.search(r"\b(rl|sft)\s+(?:@|--)", seen.shell)
    return f"{match[1]} ({seen.name})" if match else ""


def runs_sft(command: Sequence[str], cwd: Path) -> bool:
    """Whether the command is prime-rl's supervised fine-tuning, which has no orchestrator."""
    runs = command_runs(command, cwd)
    return runs.split(" ")[0] == "sft" or ".sft" in runs


def recognise(site: Site) -> Recognition | None:
    runs = command_runs(site.command, site.working_directory)
    if runs:
        return Recognition("prime-rl", f"the command runs {runs}", certain=True)
    checkpoints = (site.checkpoint_dir or site.output_dir) / "checkpoints"
    for step in heapq.nlargest(3, step_names(checkpoints)):
        for half in ("orchestrator", "trainer"):
            if is_plain_dir(checkpoints / f"step_{step}" / half):
                return Recognition("prime-rl", f"checkpoints/step_{step} contains {half}/", certain=True)
    if is_plain_dir(site.output_dir / "run_default"):
        return Recognition("prime-rl", "run_default/ exists", certain=True)
    return None


# -- run directory -----------------------------------------------------------------------------------------------------
# Since 2026-08-13 (upstream e26b50503) a run writes to ``output_dir/run.dir``; ``run.dir`` defaults to ``run.name``,
# and ``run.name`` to a new random name at each start. A resume needs the directory of the run that saved, so it needs
# the name. Before that a run writes to output_dir itself.

_OUTPUT = ("--output-dir",)
_NAME = ("--run.name",)
_DIRECTORY = ("--run.dir",)
_CKPT = ("--ckpt", "--trainer.ckpt")
_INTERVAL = ("--ckpt.interval", "--trainer.ckpt.interval")


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """``base`` is prime-rl's output_dir. ``name`` is the run's directory in it; empty: prime-rl makes a new one at each
    start."""

    base: Path
    name: str

    @property
    def path(self) -> Path | None:
        return Path(os.path.normpath(self.base / self.name)) if self.name else None


def run_directory(command: Sequence[str], cwd: Path, output_dir: Path | None = None) -> RunDirectory:
    """The run directory that a version with run directories uses for this command. ``output_dir`` fills the
    placeholder. Reads the TOML files that the command names."""
    base = command_line.flag_value(command, _OUTPUT) or ""
    name = command_line.flag_value(command, _NAME) or ""
    directory = command_line.flag_value(command, _DIRECTORY) or ""
    for document in reversed(command_line.toml_documents(command, cwd)):
        run = _table(document, "run")
        base = base or _text(document.get("output_dir"))
        name = name or _text(run.get("name"))
        directory = directory or _text(run.get("dir"))
    base = base or "outputs"
    if output_dir is not None:
        base = base.replace("{output_dir}", str(output_dir))
    return RunDirectory(Path(os.path.normpath(cwd / base)), directory or name)


def concerns(site: Site) -> tuple[Concern, ...]:
    """Reports a run directory that a resume cannot find, and a run that saves nothing."""
    if not site.command or not command_runs(site.command, site.working_directory):
        return ()
    shell = program(site.command, site.working_directory).shell
    if not shell:
        return (*_directory(site, site.command, sure=True), *_saves(site, site.command))
    try:
        words = (*site.command, *shlex.split(shell, comments=True))
    except ValueError:
        return ()  # quotes that do not close, a here-document
    if any(word.startswith(("$@", "$*", "${@", "${*")) for word in words):
        return ()  # its arguments can contain more
    return (*_directory(site, words, sure=False), *_saves(site, words))


def _directory(site: Site, command: Sequence[str], *, sure: bool) -> tuple[Concern, ...]:
    """``sure``: not a shell script, in which variables and ``cd`` can change the meaning."""
    cwd = site.working_directory
    below = [run for run in runs_below(site.output_dir) if run.name != "run_default"]  # older versions: orchestrator's
    on_disk = has_attempts(site.output_dir) or bool(below)
    if not on_disk and not hints(command, cwd, "").new_flags:
        return ()
    says = run_directory(command, cwd, site.output_dir)
    ours = os.path.realpath(site.output_dir)
    if says.path is None:
        own = site.output_dir if site.output_dir.parent == says.base else None
        if own is None:
            found = runs_below(says.base)
            own = found[0] if found else says.base / "NAME"
        return (
            Concern(
                "run.name",
                "prime-rl has no run.name: each start writes to a new directory with a random name below"
                f" {says.base}, so no resume finds a checkpoint",
                f'add "--run.name", "{own.name}" to trainer.command and set trainer.output_dir = "{own}"',
                certain=True,
            ),
        )
    if not sure or os.path.realpath(says.path) == ours:
        return ()
    return (
        Concern(
            "run.name",
            f"prime-rl writes this run to {says.path}, but trainer.output_dir is {site.output_dir}",
            f'set trainer.output_dir = "{says.path}", or correct --output-dir and --run.name in trainer.command',
            certain=True,
        ),
    )


def _saves(site: Site, command: Sequence[str]) -> tuple[Concern, ...]:
    """Reports missing saves: ``--ckpt`` enables saving; without an interval prime-rl saves only at the end."""
    cwd = site.working_directory
    sections = [
        section
        for document in command_line.toml_documents(command, cwd)
        for holder in (document, _table(document, "trainer"))
        if isinstance(section := holder.get("ckpt"), dict)
    ]
    flags = [word.partition("=")[0].replace("_", "-") for word in command]
    if not sections and not any(f in _CKPT or f.startswith(tuple(f"{c}." for c in _CKPT)) for f in flags):
        text = "prime-rl saves no checkpoints: neither the command nor its configuration has ckpt"
        return (Concern(SAVES, text, 'add "--ckpt", "--ckpt.interval", "10" to trainer.command', certain=True),)
    if not command_line.has_flag(command, _INTERVAL) and not any(s.get("interval") for s in sections):
        text = "prime-rl saves only at the end of training: ckpt.interval is not set"
        return (Concern(SAVES, text, 'add "--ckpt.interval", "10" to trainer.command', certain=True),)
    return ()


def runs_below(base: Path) -> tuple[Path, ...]:
    """Run directories directly below ``base``, the newest first."""
    found: list[tuple[int, Path]] = []
    try:
        with os.scandir(base) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) and looks_like_run(Path(entry.path)):
                    found.append((entry.stat(follow_symlinks=False).st_mtime_ns, Path(entry.path)))
    except OSError:
        return ()
    return tuple(path for _, path in sorted(found, reverse=True))


def _table(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = document.get(name)
    return section if isinstance(section, dict) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) and "\0" not in value else ""
