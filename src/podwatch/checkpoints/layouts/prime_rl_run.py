"""The directory that one prime-rl run writes to, from its command and configuration files.

Since 2026-08-13 (upstream e26b50503) a run writes to ``output_dir/run.dir``; ``run.dir`` defaults to ``run.name``, and
``run.name`` to a new random name at each start. A resume needs the directory of the run that saved, so it needs the
name. Before that a run writes to output_dir itself.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podwatch.checkpoints.layouts import command_line, prime_rl_command
from podwatch.checkpoints.layouts.base import SAVES, Concern, Site
from podwatch.checkpoints.layouts.command_line import program
from podwatch.checkpoints.layouts.prime_rl_disk import command_runs, has_attempts, looks_like_run

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
    on_disk = has_attempts(site.output_dir) or bool(runs_below(site.output_dir))
    if not on_disk and not prime_rl_command.hints(command, cwd, "").new_flags:
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
