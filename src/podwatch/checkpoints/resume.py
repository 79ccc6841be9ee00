"""The command of a start from one step (which arguments are removed from the configured one, and which are added), and
the step that a running command resumes from.

Only whole arguments are changed, never the text of ``sh -c``.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from podwatch.checkpoints.command import PLACEHOLDERS, Command, can_be_value, without_settings
from podwatch.checkpoints.command_files import value_at
from podwatch.checkpoints.command_table import CommandTable, ResumeRule
from podwatch.checkpoints.shapes import ResumeCommand
from podwatch.domain.errors import ConfigurationError, PodwatchError

if TYPE_CHECKING:
    from podwatch.checkpoints.layout import Layout

_HYDRA_PLAIN = re.compile(r"[A-Za-z0-9_./:@%+~-]+")
"""Hydra accepts a value of these characters unquoted; any other needs quotes."""
_OWN_WAY = ("{step}", "{checkpoint}")


@dataclass(frozen=True, slots=True)
class StartPoint:
    """What a start begins from; None: a fresh one. ``place``: the directory of the checkpoints."""

    step: int | None
    checkpoint: Path | None
    output_dir: Path
    place: Path

    def filled(self, text: str) -> str:
        values = {
            "{step}": "" if self.step is None else str(self.step),
            "{checkpoint}": "" if self.checkpoint is None else str(self.checkpoint),
            "{output_dir}": str(self.output_dir),
            "{place}": str(self.place),
        }
        for name, value in values.items():
            text = text.replace(name, value)
        return text


def resume_command(
    rule: ResumeRule,
    command: Command,
    start: StartPoint,
    override: str | Sequence[str],
    *,
    more: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> ResumeCommand:
    """The command for this start. ``more``: arguments besides those of the step, of any but a fresh start.
    ConfigurationError where it is unknown which arguments to pass, or where they would not reach the trainer."""
    resuming = start.step is not None and override != "none"
    valued = (*rule.drop, *(rule.drop_for_resume if resuming else ()))
    bare = (*rule.drop_bare, *(rule.drop_bare_for_resume if resuming else ()))
    if resuming and not isinstance(override, str):
        more_valued, more_bare = settings_in(override)
        valued, bare = (*valued, *more_valued), (*bare, *more_bare)
    kept, removed = without_settings(command.argv, valued, bare)
    extra = _arguments(rule, kept, override) if resuming else ()
    if resuming:
        extra = tuple(_filled(a, start, quoted=override == "auto") for a in (*extra, *more))
    if extra and not command.passes_arguments_on():
        raise ConfigurationError(
            "the command is a shell script that does not pass arguments on, so the trainer gets no resume arguments",
            where="trainer.command",
            fix='add "$@" after the trainer in the script, or put {resume_args} into the command; or set'
            ' trainer.resume_args = "none" and read $PODWATCH_RESUME_ARGS in the script',
        )
    return _built(Command(kept, command.cwd), start, extra, environment or {}, removed)


def resume_settings_in_script(rule: ResumeRule, command: Command) -> tuple[str, ...]:
    """The resume arguments in the text of a shell script, which podwatch does not change."""
    _, found = without_settings(command.script_words, rule.drop, rule.drop_bare)
    return found


def _arguments(rule: ResumeRule, kept: Sequence[str], override: str | Sequence[str]) -> tuple[str, ...]:
    if not isinstance(override, str):
        return tuple(override)
    if any(p in word for p in _OWN_WAY for word in kept):
        return ()
    if rule.add is None:
        raise ConfigurationError(
            rule.ask or "podwatch does not know how this trainer resumes",
            where="trainer.resume_args",
            fix=f'set it to, for example, {rule.example}; "none" if a script reads PODWATCH_STEP',
        )
    return rule.add


def settings_in(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The settings that the operator's own resume arguments give, with a value and without: in the command they belong
    to its fresh start."""
    valued, bare = list[str](), list[str]()
    for word, following in pairwise((*arguments, "--")):
        name, equals, _ = word.partition("=")
        if equals or (word.startswith("--") and can_be_value(following)):
            valued.append(name.lstrip("+~"))
        elif word.startswith("--") and word != "--":
            bare.append(word)
    return [name for name in valued if name], bare


def _filled(argument: str, start: StartPoint, *, quoted: bool) -> str:
    """``quoted``: a path with blanks or brackets is quoted inside a Hydra override."""
    name, equals, template = argument.partition("=")
    value = start.filled(template)
    if not equals or not quoted or name.startswith("-") or _HYDRA_PLAIN.fullmatch(value):
        return start.filled(argument)
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"{name}='{escaped}'"


def _built(
    command: Command, start: StartPoint, extra: Sequence[str], environment: Mapping[str, str], removed: Sequence[str]
) -> ResumeCommand:
    """Fill the placeholders and add the resume arguments.

    ``{resume_args}`` alone becomes the arguments, inside a longer text their shell-quoted form. Without it they are
    appended, unless the command itself contains ``{step}`` or ``{checkpoint}``. At a fresh start an argument with
    ``{step}`` or ``{checkpoint}`` is left out, with the flag before it if that takes it as its value. The values are
    also exported as ``PODWATCH_STEP``, ``PODWATCH_CHECKPOINT`` and ``PODWATCH_RESUME_ARGS`` for scripts.
    """
    argv: list[str] = []
    placed = any(p in word for p in PLACEHOLDERS for word in command.argv)
    for word in command.argv:
        if word == "{resume_args}":
            argv.extend(extra)
        elif start.step is None and any(p in word for p in _OWN_WAY):
            if argv and argv[-1].startswith("-") and "=" not in argv[-1] and not word.startswith("-"):
                argv.pop()
        else:
            argv.append(start.filled(word).replace("{resume_args}", shlex.join(extra)))
    if extra and not placed:
        name = command.name_of_shell()
        argv.extend([name, *extra] if name else extra)
    exported = {
        "PODWATCH_STEP": start.filled("{step}"),
        "PODWATCH_CHECKPOINT": start.filled("{checkpoint}"),
        "PODWATCH_RESUME_ARGS": shlex.join(extra),
    }
    return ResumeCommand(tuple(argv), {**environment, **exported}, tuple(removed))


# -- step that a running command resumes from --------------------------------------------------------------------------

_NUMBER = re.compile(r"\d{1,15}")
_STARTING = 1.0
"""Seconds: the start time of a process is a clock tick (10 ms, rounded down), and these programs import for seconds
before they read their files."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """``named_by`` is the source of the step, worded as the subject of a sentence."""

    step: int
    named_by: str


def resumed(
    layout: "Layout",
    argv: Sequence[str],
    *,
    override: str | Sequence[str] = "auto",
    cwd: Path | None,
    began_wall: float,
) -> Resumed | None:
    """The step that a running command resumes from: by the resume arguments in it (a number, or a checkpoint that is
    here), or, without such arguments, by a configuration file that it names. None where they name no step, the newest
    one ("latest", -1), or several. ``override``: the operator's own resume arguments.

    Only files that have not changed since the process started (``began_wall``, epoch seconds) prove what it read, and
    only if all of them are readable. ``cwd`` is the working directory of that process; None: unknown, no file is read.
    Blocks: reads small files and can list the checkpoint directories.
    """
    try:
        flags = layout.resume_command(argv, 0, override if not isinstance(override, str) else (), {}).removed
    except (PodwatchError, OSError):
        return None
    if flags:
        step = _of_flags(layout, flags)
        return None if step is None else Resumed(step, "its command")
    return None if cwd is None else _of_files(layout.trainer.command, Command(argv, cwd), began_wall)


def _of_flags(layout: "Layout", flags: Sequence[str]) -> int | None:
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


def _step_at(layout: "Layout", value: str) -> set[int]:
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


def _of_files(table: CommandTable, command: Command, began_wall: float) -> Resumed | None:
    said: dict[str, object] = {}
    """A later file overrides an earlier one, key by key."""
    by: dict[str, str] = {}
    for file in command.files if table.step_in_files else ():
        if file.document is None or file.changed_wall > began_wall + _STARTING:
            return None
        for key in (*table.step_in_files, *table.step_counts_if):
            if (value := value_at(file.document, key)) is not None:
                said[key], by[key] = value, Path(file.name).name
    on = [command.has(switch) or said.get(switch) is True for switch in table.step_counts_if]
    steps = [(key, said[key]) for key in table.step_in_files if key in said]
    if not steps or not any(on or [True]):
        return None
    key, step = steps[0]
    if not isinstance(step, int) or isinstance(step, bool) or step < 1 or any(other != step for _, other in steps):
        return None
    return Resumed(step, f"{by[key]}, which its command names,")
