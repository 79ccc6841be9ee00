"""Small tools for training commands: read flags, take resume flags out, fill placeholders, read the TOML they name.

Only whole arguments are handled; the text of ``sh -c`` is never changed.
"""

import os
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podwatch.checkpoints.layouts.base import ResumeCommand
from podwatch.domain.secrets import register_document
from podwatch.system.files import read_descriptor
from podwatch.system.reading import opened

PLACEHOLDERS = ("{step}", "{checkpoint}", "{resume_args}")
_TRUTH = frozenset({"true", "false", "1", "0", "yes", "no"})
_TOML_LIMIT = 4 * 1024 * 1024


def flag_value(command: Sequence[str], names: Sequence[str]) -> str | None:
    """The last value given for any of ``names``, as ``--x v`` or ``--x=v``; ``-`` and ``_`` are the same in names."""
    wanted = {_plain(n) for n in names}
    value: str | None = None
    for position, argument in enumerate(command):
        name, equals, inline = argument.partition("=")
        if _plain(name) in wanted:
            if equals:
                value = inline
            elif position + 1 < len(command):
                value = command[position + 1]
    return value


def has_flag(command: Sequence[str], names: Sequence[str]) -> bool:
    wanted = {_plain(n) for n in names}
    return any(_plain(a.partition("=")[0]) in wanted for a in command)


def strip_flags(
    command: Sequence[str], valued: Sequence[str], bare: Sequence[str] = ()
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(command without these flags, the removed arguments). A flag whose value contains one of podwatch's placeholders
    stays: the operator chose the place of the step. ``bare`` flags have at most a truth value."""
    with_value, alone = {_plain(n) for n in valued}, {_plain(n) for n in bare}
    kept: list[str] = []
    removed: list[str] = []
    position = 0
    while position < len(command):
        argument = command[position]
        name, equals, _ = argument.partition("=")
        following = command[position + 1] if position + 1 < len(command) else None
        taken = [argument]
        if _plain(name) in with_value:
            if not equals and following is not None and not following.startswith("--"):
                taken.append(following)
        elif _plain(name) in alone:
            if not equals and following is not None and following.lower() in _TRUTH:
                taken.append(following)
        else:
            taken = []
        if not taken:
            kept.append(argument)
            position += 1
            continue
        ours = any(p in a for p in PLACEHOLDERS for a in taken)
        (kept if ours else removed).extend(taken)
        position += len(taken)
    return tuple(kept), tuple(removed)


def strip_keys(command: Sequence[str], keys: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(command without these overrides, the removed ones): ``key=value`` as Hydra and OmegaConf read it, also as
    ``+key=``, ``++key=``, ``~key``. One that contains a placeholder stays, as with flags."""
    kept: list[str] = []
    removed: list[str] = []
    for argument in command:
        name, equals, _ = argument.partition("=")
        named = name.lstrip("+~") in keys and (bool(equals) or name.startswith("~"))
        ours = any(p in argument for p in PLACEHOLDERS)
        (removed if named and not ours else kept).append(argument)
    return tuple(kept), tuple(removed)


def key_value(command: Sequence[str], keys: Sequence[str]) -> str | None:
    """The last value that an override gives to any of ``keys``, without quotes; None if there is none."""
    value: str | None = None
    for argument in command:
        name, equals, text = argument.partition("=")
        if equals and name.lstrip("+") in keys:
            value = text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
    return value


def build(
    command: Sequence[str],
    *,
    step: int | None,
    checkpoint: Path | None,
    output_dir: Path,
    resume_args: Sequence[str],
    environment: Mapping[str, str],
    removed: Sequence[str],
) -> ResumeCommand:
    """Fill the placeholders and add the resume arguments.

    ``{resume_args}`` alone becomes the arguments, inside a longer text their shell-quoted form. Without it they are
    appended, unless the command itself contains ``{step}`` or ``{checkpoint}``. At a fresh start an argument with
    ``{step}`` or ``{checkpoint}`` is left out, with the flag before it if that takes it as its value. The values are
    also exported as ``PODWATCH_STEP``, ``PODWATCH_CHECKPOINT`` and ``PODWATCH_RESUME_ARGS`` for scripts.
    """
    own_way = any(p in a for p in ("{step}", "{checkpoint}") for a in command)
    values = {
        "{step}": "" if step is None else str(step),
        "{checkpoint}": "" if checkpoint is None else str(checkpoint),
        "{output_dir}": str(output_dir),
    }

    def fill(text: str) -> str:
        for name, value in values.items():
            text = text.replace(name, value)
        return text

    extra = [fill(a) for a in resume_args]
    argv: list[str] = []
    placed = False
    for argument in command:
        if argument == "{resume_args}":
            argv.extend(extra)
            placed = True
            continue
        if step is None and ("{step}" in argument or "{checkpoint}" in argument):
            if argv and argv[-1].startswith("-") and "=" not in argv[-1] and not argument.startswith("-"):
                argv.pop()
            continue
        placed = placed or "{resume_args}" in argument
        argv.append(fill(argument).replace("{resume_args}", shlex.join(extra)))
    if not placed and not own_way:
        argv.extend(extra)
    exported = {
        "PODWATCH_STEP": values["{step}"],
        "PODWATCH_CHECKPOINT": values["{checkpoint}"],
        "PODWATCH_RESUME_ARGS": shlex.join(extra),
    }
    return ResumeCommand(tuple(argv), {**environment, **exported}, tuple(removed))


@dataclass(frozen=True, slots=True)
class TomlFile:
    """A TOML file that a command names. ``changed_wall``: epoch seconds of its last change by the clock of its file
    system, 0.0 where it cannot be read. ``document`` is None for a file that cannot be read or is not TOML."""

    name: str
    changed_wall: float
    document: Mapping[str, Any] | None


def toml_documents(command: Sequence[str], cwd: Path | None) -> list[Mapping[str, Any]]:
    """The TOML files a command names as ``@ file.toml`` or ``@file.toml``, in order. Unreadable ones are left out: the
    trainer itself reports them better."""
    return [file.document for file in toml_files(command, cwd) if file.document is not None]


def toml_files(command: Sequence[str], cwd: Path | None) -> list[TomlFile]:
    """As ``toml_documents``, including unreadable files. Blocks: reads at most 4 MiB of each."""
    files: list[TomlFile] = []
    for position, argument in enumerate(command):
        name = argument[1:] if argument.startswith("@") else ""
        if argument == "@" and position + 1 < len(command):
            name = command[position + 1]
        if name.endswith(".toml"):
            files.append(_toml_file(name, Path(name) if cwd is None else cwd / name))
    return files


def _toml_file(name: str, path: Path) -> TomlFile:
    try:
        with opened(path) as file:
            changed = os.fstat(file.fileno()).st_ctime
            document = tomllib.loads(read_descriptor(file.fileno(), _TOML_LIMIT, str(path)).decode())
    except (OSError, ValueError, RecursionError):
        return TomlFile(name, 0.0, None)
    register_document(document)
    return TomlFile(name, changed, document)


def positive(text: str | None) -> int | None:
    """A step count from a flag, or None if it is absent or not a positive number."""
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        return None
    return value if value > 0 else None


def _plain(name: str) -> str:
    return name.replace("_", "-")
