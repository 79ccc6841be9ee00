"""The step that a running command resumes from, by its own resume flags or the TOML files that it names."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podwatch.checkpoints.layouts import argv
from podwatch.checkpoints.layouts.base import Layout
from podwatch.domain.errors import PodwatchError

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
        named = ("@", argv.flag_value(command, (settings.flag,)) or "")
    said: dict[str, object] = {}
    """A later file overrides an earlier one, key by key."""
    by: dict[str, str] = {}
    for file in argv.toml_files(named, cwd):
        if file.document is None or file.changed_wall > began_wall + _STARTING:
            return None
        for key in (*settings.keys, *settings.switches):
            if (value := _at(file.document, key)) is not None:
                said[key], by[key] = value, Path(file.name).name
    on = [argv.has_flag(command, (f"--{switch}",)) or said.get(switch) is True for switch in settings.switches]
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
