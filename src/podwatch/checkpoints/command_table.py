"""What podwatch knows of a trainer's command: the type of a ``[TRAINER.command]`` table in ``layouts.toml``, and the
signs by which a command is recognised as one of this trainer.

Names of settings are as ``Command`` looks them up: ``ckpt.interval`` is a flag, an override and a key of a file.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import ClassVar

from podwatch.checkpoints.command import Command, Program, launched_processes, times
from podwatch.checkpoints.shapes import SAVES, Concern, Recognition, Site
from podwatch.domain.document import Document
from podwatch.system.files import read_file

Names = tuple[str, ...]
Globs = tuple[str, ...]
_SCRIPT_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True)
class CommandSign:
    """What a command shows. Of each list that is not empty one must match; ``programs``, ``modules`` and ``scripts``
    are one list."""

    programs: Names = ()
    modules: Names = ()
    """After ``-m``, or a module above it; also globs."""
    scripts: Globs = ()
    """Of their paths."""
    arguments: Globs = ()
    """Of the words of the program; of a flag's name alone, where the glob has no ``=``."""
    has: Names = ()
    """Settings, with any value or none."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Settings of which one has this value."""
    unless: Globs = ()
    """Arguments of which none may be there."""
    script_has: str = ""
    """A regular expression that the text of the program's own script matches..."""
    script_lacks: str = ""
    """...which does not contain this."""
    certain: bool = True
    """No other trainer's commands show it."""

    def seen_in(self, command: Command) -> str:
        """What it is in this command, as the rest of a sentence that begins with "the command"; empty: not there."""
        runs = self.programs or self.modules or self.scripts
        for program in command.programs:
            name = self._run_by(program)
            words = program.words if program.name.startswith("-") or "=" in program.name else program.arguments
            argument = next((w for w in words if _fits(w, self.arguments)), "") if self.arguments else ""
            if (runs and not name) or (self.arguments and not argument) or any(_fits(w, self.unless) for w in words):
                continue
            if not self._settings_in(command) or (self.script_has and not self._text_fits(program, command.cwd)):
                continue
            return f"runs {name}" if name else f"has {argument.partition('=')[0]}" if argument else "has this setting"
        return ""

    def _run_by(self, program: Program) -> str:
        if program.runs(self.modules):
            return program.module
        if any(fnmatchcase(program.script, glob) for glob in self.scripts if program.script):
            return program.script
        return next((name for name in self.programs if name in (program.name, program.launcher)), "")

    def _text_fits(self, program: Program, cwd: Path | None) -> bool:
        try:
            text = read_file((program.cwd or cwd or Path("/")) / program.script, _SCRIPT_LIMIT).decode(errors="replace")
        except (OSError, ValueError):
            return False
        return re.search(self.script_has, text) is not None and self.script_lacks not in text

    def _settings_in(self, command: Command) -> bool:
        if self.has and not command.has(*self.has):
            return False
        return not self.values or any(command.value(name) == value for name, value in self.values.items())


def _fits(word: str, globs: Globs) -> bool:
    """Flags are compared by their names, and ``-`` and ``_`` in them are the same."""
    word = word.lstrip("+")
    name = word.partition("=")[0]
    return any(
        fnmatchcase(word if "=" in glob else name, glob)
        or (glob.startswith("--") and "*" not in glob and name.replace("_", "-") == glob.replace("_", "-"))
        for glob in globs
    )


@dataclass(frozen=True, slots=True)
class ResumeRule:
    """``add``: the arguments of a resume, with placeholders; None: unknown, and ``ask`` is the reason."""

    add: tuple[str, ...] | None = None
    drop: Names = ()
    """Settings that are removed first, at every start."""
    drop_bare: Names = ()
    """The same for flags without a value."""
    drop_for_resume: Names = ()
    """Removed only for a resume: at a fresh start they name the initial model."""
    drop_bare_for_resume: Names = ()
    """The same for flags without a value (``--finetune`` restarts at step 0)."""
    ask: str = ""
    example: str = '["--resume", "{checkpoint}"]'
    wandb: bool = True
    """The trainer passes on W&B's own variables, and has one W&B run."""


@dataclass(frozen=True, slots=True)
class CommandVariant:
    """The rule of commands that show the sign."""

    sign: CommandSign
    resume: ResumeRule


@dataclass(frozen=True, slots=True)
class ConcernRule:
    """Commands that show the sign save no checkpoints: what is wrong, and what to change."""

    sign: CommandSign
    what: str
    fix: str


@dataclass(frozen=True, slots=True)
class TableChoice:
    """The table of files that applies to commands that show the sign."""

    sign: CommandSign
    table: str


@dataclass(frozen=True, slots=True)
class CommandTable(Document):
    """Lists of names are alternatives: the last one that is given counts."""

    FILE: ClassVar[str] = "layouts.toml"
    ONLY_KNOWN: ClassVar[bool] = True

    signs: tuple[CommandSign, ...] = ()
    resume: ResumeRule = ResumeRule()
    variants: tuple[CommandVariant, ...] = ()
    """The first that fits counts, else ``resume``."""
    concerns: tuple[ConcernRule, ...] = ()
    tables: tuple[TableChoice, ...] = ()
    output: Names = ()
    """The output directory."""
    place: Names = ()
    """The directory of the checkpoints."""
    place_of: str = ""
    """The same made of several settings: ``checkpoints/{project}/{experiment}``."""
    target: Names = ()
    """The step at which training is done."""
    interval: Names = ()
    """Steps between two saves."""
    interval_if: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Setting -> the values with which ``interval`` counts; with any other the trainer saves in another way."""
    keep: Names = ()
    """How many checkpoints the trainer itself leaves."""
    processes: Names = ()
    """Settings of which the product is the number of processes, before what a launcher says."""
    processes_are_known: bool = True
    """False: the command starts other processes, too, and the trainer can load with any number."""
    step_in_files: Names = ()
    """The step of a resume in a configuration file."""
    step_counts_if: Names = ()
    """Settings of which one must be true for that step to count."""

    def rule_of(self, command: Command) -> ResumeRule:
        return next((v.resume for v in self.variants if v.sign.seen_in(command)), self.resume)

    def table_of(self, command: Command) -> str:
        """The table of files for this command; empty: the trainer's own."""
        return next((choice.table for choice in self.tables if choice.sign.seen_in(command)), "")

    def processes_of(self, command: Command) -> int | None:
        """The number of training processes; None: not certain, so nothing is compared."""
        if not self.processes_are_known:
            return None
        each, *more = (command.given(name) for name in self.processes) if self.processes else (None,)
        if each is None:
            return launched_processes(command)
        if None in more and any(word.startswith("--config") for word in command.argv):
            return None  # such a file can set it
        return times(each, *more)

    def concerns_of(self, command: Command) -> tuple[Concern, ...]:
        """What is wrong with a command that saves nothing."""
        found = (rule for rule in self.concerns if rule.sign.seen_in(command))
        return tuple(Concern(SAVES, rule.what, rule.fix, certain=True) for rule in found)

    def recognised(self, layout: str, command: Command, *, certain: bool) -> Recognition | None:
        """Why a command is one of this trainer, by a sign of this certainty; None: it shows none."""
        if not command.argv:
            return None
        for sign in self.signs:
            if sign.certain is certain and (seen := sign.seen_in(command)):
                return Recognition(layout, f"the command {seen}", certain=certain)
        return None

    def save_interval(self, command: Command) -> int | None:
        """Steps from one save to the next; None where neither the command nor a file that it names sets it. A default
        of the trainer is not assumed: another option often decides whether it saves at all."""
        for name, values in self.interval_if.items():
            if command.value(name) not in (None, *values):
                return None
        return command.number(*self.interval)


def command_of(site: Site) -> Command:
    """The configured command of a fresh start."""
    return Command(site.command, site.working_directory)
