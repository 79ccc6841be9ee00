"""One training command, read in one way: the program behind wrappers, launchers and shells, and one lookup of a setting
over flags, ``key=value`` overrides and the configuration files that the command names.

Nothing is executed. Scripts and configuration files are read only if they are small regular files.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from podwatch.checkpoints.command_files import SUFFIXES, ConfigFile, read_config, value_at
from podwatch.checkpoints.shell_words import ShellCommand, has_variable, shell_commands, uses_resume_variables
from podwatch.system.files import read_file

PLACEHOLDERS = ("{step}", "{checkpoint}", "{resume_args}")
_TRUTH = frozenset({"true", "false", "1", "0", "yes", "no"})
_CONFIG_FLAGS = ("config", "config_file", "job.config_file", "config_path", "cfg", "yaml")


class Command:
    """``cwd``: the working directory of the command; None: unknown, and no file is read. Files are read when they are
    first needed, once: that blocks.

    A setting is found by its names. ``ckpt.interval`` stands for ``--ckpt.interval``, ``ckpt.interval=``,
    ``+ckpt.interval=`` and the key ``interval`` of the table ``ckpt`` in a file; ``-`` and ``_`` are the same.
    """

    def __init__(self, argv: Sequence[str], cwd: Path | None = None, *, shown: bool = False) -> None:
        """``shown``: what its files contain is shown, so they must be their maker's (``open_file``)."""
        self.argv = tuple(argv)
        self.cwd = cwd
        self._shown = shown

    # -- what runs ----------------------------------------------------------------------------------------------------

    @cached_property
    def programs(self) -> tuple["Program", ...]:
        """The programs that it starts: one, or those of its shell script in their order."""
        return tuple(_programs(self.argv, self.cwd, set())) or (Program(),)

    @property
    def program(self) -> "Program":
        """The first that a launcher or an interpreter runs, else the first."""
        return next((p for p in self.programs if p.launcher or p.module or p.script), self.programs[0])

    @cached_property
    def is_shell(self) -> bool:
        """Whether a shell runs it: the trainer is another process then."""
        words = _unwrapped(list(self.argv))
        return bool(words) and _shell_parts(words) is not None

    @cached_property
    def words(self) -> tuple[str, ...]:
        """Its arguments, with those of the commands in its shell script."""
        inside = [word for program in self.programs if program.shell for word in program.words]
        return (*self.argv, *inside)

    @property
    def script_words(self) -> tuple[str, ...]:
        """The words of its shell script alone, without the arguments that it is given."""
        words = _unwrapped(list(self.argv))
        script = _shell_parts(words) if words else None
        if script is None:
            return ()
        text = script.text if script.inline else _script_text(script.script, self.cwd)
        inside = _inside(text, replace(script, given=()), self.cwd, set())
        return tuple(word for program in inside for word in program.words)

    def passes_arguments_on(self) -> bool:
        """Whether an argument at its end reaches the trainer. True also where that is unknown."""
        if any(p in word for p in PLACEHOLDERS for word in self.argv):
            return True
        inside = [program for program in self.programs if program.shell]
        if not inside or any(uses_resume_variables(program.shell) for program in inside):
            return True
        trains = [p for p in inside if p.launcher or p.module or p.script]
        return any(program.passes for program in trains or inside)

    def hides_exit_code(self) -> bool:
        """Whether a shell pipes the trainer's output on without pipefail: ``train | tee log`` exits with tee's 0."""
        inside = [program for program in self.programs if program.shell]
        trains = [p for p in inside if p.launcher or p.module or p.script] or inside
        return any(p.piped and "pipefail" not in p.shell for p in trains) and "pipefail" not in self.argv

    def name_of_shell(self) -> str:
        """The word that ``sh -c TEXT`` needs before the first argument: empty if it has one, or is no such command."""
        words = _unwrapped(list(self.argv))
        opened = _shell_parts(words) if words else None
        if opened is None or not opened.inline or opened.script or not any(p.passes for p in self.programs):
            return ""
        return Path(words[0]).name

    # -- the lookup ---------------------------------------------------------------------------------------------------

    def has(self, *names: str) -> bool:
        """Whether a flag or an override of any of these names is there, with or without a value."""
        wanted = _Names(names)
        return any(wanted.match(word) for word in self.words)

    def given(self, *names: str) -> str | None:
        """The last value that the words give to any of the names: ``--x v``, ``--x=v``, ``x=v``. None: none does, or
        its value is a variable of a shell."""
        wanted = _Names(names)
        value: str | None = None
        for position, word in enumerate(self.words):
            if not wanted.match(word):
                continue
            _, equals, inline = word.partition("=")
            following = self.words[position + 1 : position + 2]
            if equals:
                value = _plain_text(inline)
            elif following and can_be_value(following[0]):
                value = following[0]
        return None if value is not None and self.is_shell and has_variable(value) else value

    def written(self, *names: str) -> str:
        """How the words write the setting that ``given`` reads (``--output-dir``); empty if none of the names is
        there."""
        wanted = _Names(names)
        return next((word.partition("=")[0] for word in reversed(self.words) if wanted.match(word)), "")

    def configured(self, *names: str) -> object:
        """The last value that a configuration file gives to any of the names; None if none does."""
        found: object = None
        for file in self.files:
            for name in names if file.document is not None else ():
                value = value_at(file.document or {}, name)
                found = found if value is None else value
        return found

    def value(self, *names: str) -> str | None:
        """The value of the words, else of the files. Only texts, numbers and truth values count."""
        if (direct := self.given(*names)) is not None:
            return direct
        found = self.configured(*names)
        if isinstance(found, bool):
            return str(found).lower()
        return str(found) if isinstance(found, str | int) and "\0" not in str(found) else None

    def number(self, *names: str) -> int | None:
        """The same, as a positive count; None for everything else. A flag that is no such number leaves the word to
        the files."""
        direct = positive(self.given(*names))
        return direct if direct is not None else positive(self.configured(*names))

    @cached_property
    def files(self) -> tuple[ConfigFile, ...]:
        """The configuration files that its programs name, in order: ``@ FILE``, ``@FILE``, ``--config FILE`` and
        arguments that are such a file. Later ones override earlier ones."""
        found: dict[tuple[str, Path], None] = {}
        for program in self.programs:
            if program.cwd is not None:
                found.update(dict.fromkeys((name, program.cwd) for name in _named(program.arguments)))
        return tuple(read_config(name, cwd, shown=self._shown) for name, cwd in found)

    @property
    def documents(self) -> list[Mapping[str, Any]]:
        return [file.document for file in self.files if file.document is not None]


class _Names:
    """Names of settings, compared with words."""

    def __init__(self, names: Sequence[str]) -> None:
        self.flags = {_same(name.lstrip("-")) for name in names}
        self.keys = {_same(name) for name in names if not name.startswith("-")}

    def match(self, word: str) -> bool:
        name, equals, _ = word.partition("=")
        if name.startswith("-"):
            return name.startswith("--") and _same(name[2:]) in self.flags
        return (bool(equals) and _same(name.lstrip("+")) in self.keys) or (
            name.startswith("~") and _same(name[1:]) in self.keys
        )


def without_settings(
    command: Sequence[str], valued: Sequence[str], bare: Sequence[str] = ()
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(command without these settings, the removed words). ``bare`` flags have at most a truth value. What contains one
    of podwatch's placeholders stays: the operator chose the place of the step."""
    with_value, alone = _Names(valued), _Names(bare)
    kept: list[str] = []
    removed: list[str] = []
    position = 0
    while position < len(command):
        word, following = command[position], [*command[position + 1 : position + 2]]
        taken = [word]
        if word.startswith("-") and "=" not in word:
            takes = with_value.match(word) and bool(following) and can_be_value(following[0])
            takes = takes or (alone.match(word) and bool(following) and following[0].lower() in _TRUTH)
            taken += following if takes else []
        named = with_value.match(word) or alone.match(word)
        ours = any(p in part for p in PLACEHOLDERS for part in taken)
        if not named:
            taken = [word]
        (removed if named and not ours else kept).extend(taken)
        position += len(taken)
    return tuple(kept), tuple(removed)


def without_words(command: Sequence[str], removed: Sequence[str]) -> tuple[str, ...]:
    """``command`` without the words that were removed from it, in their order."""
    left, kept = list(removed), list[str]()
    for word in command:
        if left and word == left[0]:
            del left[0]
        else:
            kept.append(word)
    return tuple(kept)


def can_be_value(word: str) -> bool:
    """Whether ``word`` can be the value of the flag before it: no flag, but possibly a negative number (-1: the newest
    step), and not prime-rl's ``@``, which precedes a file."""
    return word != "@" and (not word.startswith("-") or re.fullmatch(r"-\d+", word) is not None)


def positive(found: object) -> int | None:
    """A count, or None if it is absent or not a positive whole number."""
    if isinstance(found, bool) or not isinstance(found, int | str):
        return None
    try:
        value = int(found)
    except ValueError:
        return None
    return value if value > 0 else None


def _same(name: str) -> str:
    return name.replace("_", "-")


def _plain_text(text: str) -> str:
    """A value as Hydra reads it, without its quotes."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _named(arguments: Sequence[str]) -> Iterator[str]:
    """Names of configuration files among the arguments of a program."""
    flags = _Names([f"--{name}" for name in _CONFIG_FLAGS])
    before = ""
    for word in arguments:
        name, equals, inline = word.partition("=")
        if before == "@" or flags.match(before) or before == "-c":
            found = word
        elif word.startswith("@"):
            found = word[1:]
        elif flags.match(name) and equals:
            found = inline
        else:
            found = word if not word.startswith("-") and not before.startswith("-") and not equals else ""
        if found.endswith(SUFFIXES) and not has_variable(found):
            yield found
        before = word


# -- the program behind wrappers, launchers and shells -----------------------------------------------------------------
# ``uv run torchrun -m x`` runs module ``x``. Only the program counts, not words in arguments, so that an editor or a
# pager on ``rl.toml`` is no trainer.

LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "composer", "torch.distributed.run", "torch.distributed.launch")
_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "ash")
_WRAPPERS: Mapping[str, str] = {
    "nohup": "", "setsid": "", "exec": "-a", "time": "-o -f", "stdbuf": "-i -o -e", "nice": "-n", "ionice": "-c -n -p",
    "numactl": "-N -m -C -i -p -w --cpunodebind --membind --physcpubind --interleave --preferred", "env": "-u -C -S",
}  # fmt: skip
"""Name -> its options with a value."""
_RUNNERS = ("uv", "uvx", "poetry", "pixi", "pdm", "hatch", "rye", "conda", "mamba", "micromamba")
_STARTERS = ("srun", "mpirun", "mpiexec", "docker", "podman", "ray", "taskset", "timeout", "sudo", "apptainer",
             "singularity", "nsys", "flock", "xvfb-run", "chrt", "prlimit")  # fmt: skip
"""Programs that start another one after options of many forms."""
_WITH_VALUE = frozenset({"--env-file", "--extra", "--group", "--with", "--python", "-p", "--project", "--directory"})
_WITH_VALUE |= {"-n", "--name", "-e", "--environment", "--only-group", "--with-requirements", "--cwd"}
"""Options of the runners."""
_SHELL_VALUES = frozenset({"-o", "+o", "-O", "+O", "--rcfile", "--init-file"})
_PYTHON = re.compile(r"(?:python|pypy)[0-9.]*")
_SCRIPT_LIMIT = 256 * 1024
_MOST_SCRIPTS = 16
"""So many shell scripts are read of one command."""


@dataclass(frozen=True, slots=True)
class Program:
    """``launcher`` starts the trainer on every GPU and can be empty; ``name`` is the program or script without its
    directory, ``module`` the name after ``-m``; ``arguments`` are its arguments."""

    name: str = ""
    module: str = ""
    launcher: str = ""
    arguments: tuple[str, ...] = ()
    script: str = ""
    """The script as written in the command, with its directory."""
    words: tuple[str, ...] = ()
    """All words from the launcher on."""
    cwd: Path | None = None
    """Where it runs; None: unknown."""
    shell: str = ""
    """The text of the shell script that starts it, or that it is; empty: no shell, or it cannot be read."""
    passes: bool = False
    """The shell script passes its own arguments on to it."""
    piped: bool = False
    """Another program reads its output."""

    def runs(self, modules: Sequence[str]) -> bool:
        """Whether its module is one of these or below one."""
        return any(
            fnmatchcase(self.module, name) or self.module.startswith(f"{name}.") for name in modules if self.module
        )

    @property
    def own_words(self) -> tuple[str, ...]:
        """The words of the launcher alone."""
        return self.words[: len(self.words) - len(self.arguments)]


def _programs(words: Sequence[str], cwd: Path | None, texts: set[str]) -> Iterator[Program]:
    """``texts``: of the shell scripts that are being read. Each is read once, so that one which calls itself ends."""
    words = _unwrapped(list(words))
    if not words:
        return
    script = _shell_parts(words)
    if script is None:
        yield replace(_plain(words), cwd=cwd)
        return
    if not script.inline:
        name = Path(script.script).name or Path(words[0]).name
        yield Program(name, arguments=script.given, script=script.script, words=tuple(words), cwd=cwd)
    text = script.text if script.inline else _script_text(script.script, cwd)
    for inner in _inside(text, script, cwd, texts):
        yield replace(inner, shell=f"{text}\n{inner.shell}" if inner.shell else text)


def _inside(text: str, script: "_Shell", cwd: Path | None, texts: set[str]) -> Iterator[Program]:
    if text in texts or len(texts) >= _MOST_SCRIPTS:
        return
    texts.add(text)
    for found in shell_commands(text, script.given, script.script):
        if found.words[:1] == ("cd",):
            cwd = _moved(cwd, found.words[1:])
            continue
        for program in _programs(found.words, cwd, texts):
            yield _as_called(program, found)


def _as_called(program: Program, found: ShellCommand) -> Program:
    passes = found.passes and (program.passes or not program.shell)
    piped = program.piped or found.piped
    return replace(program, passes=passes, piped=piped)


def _moved(cwd: Path | None, to: Sequence[str]) -> Path | None:
    if cwd is None or len(to) != 1 or has_variable(to[0]) or to[0] in ("-", "~"):
        return None
    return cwd / to[0]


def _unwrapped(words: list[str]) -> list[str]:
    while words:
        name = Path(words[0]).name
        if name in _STARTERS:
            return _started(words)
        runs = name in _RUNNERS and (name == "uvx" or "run" in words[1:4])
        if not runs and name not in _WRAPPERS:
            return words
        valued = _WITH_VALUE if runs else _WRAPPERS[name].split()
        words = words[words.index("run") + 1 if runs and "run" in words[1:4] else 1 :]
        while words and (words[0].startswith("-") or re.match(r"[A-Za-z_]\w*=", words[0])):
            if runs and words[0] in ("-m", "--module"):
                return ["python", "-m", *words[1:]]
            words = words[2 if words[0] in valued else 1 :]
    return words


def _started(words: list[str]) -> list[str]:
    """What a starter starts: the words after ``--``, else from the first interpreter, shell, launcher or script on; the
    starter itself if there is none."""
    if "--" in words[1:-1]:
        return _unwrapped(words[words.index("--") + 1 :])
    for position, word in enumerate(words[1:], start=1):
        name = Path(word).name
        known = (*LAUNCHERS, *_SHELLS, *_RUNNERS)
        if name in known or _PYTHON.fullmatch(name) or (not word.startswith("-") and name.endswith((".py", ".sh"))):
            return _unwrapped(words[position:])
    return words


def _plain(words: list[str]) -> Program:
    whole = tuple(words)
    launcher = ""
    name, module, script, rest = _python(words)
    while name in LAUNCHERS or module in LAUNCHERS:
        launcher = launcher or (name if name in LAUNCHERS else module)
        name, module, script, rest = _launched(rest)
    return Program(name, module, launcher, tuple(rest), script, whole)


def _python(words: list[str]) -> tuple[str, str, str, list[str]]:
    """(program, module, script, arguments) of a plain command or of ``python ...``."""
    if _PYTHON.fullmatch(Path(words[0]).name):
        words = words[1:]
        while words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
            words = words[2 if words[0] in ("-W", "-X") else 1 :]
        if len(words) > 1 and words[0] == "-m":
            return "", words[1], "", words[2:]
        if words and words[0] == "-c":
            return "", "", "", []
        return (Path(words[0]).name, "", words[0], words[1:]) if words else ("", "", "", [])
    script = words[0] if words[0].endswith((".py", ".sh")) else ""
    return Path(words[0]).name, "", script, words[1:]


def _launched(words: list[str]) -> tuple[str, str, str, list[str]]:
    """The program that a launcher starts: the first script or ``-m module`` among its arguments."""
    for position, word in enumerate(words):
        if word in ("-m", "--module") and position + 1 < len(words):
            return "", words[position + 1], "", words[position + 2 :]
        if word.endswith(".py"):
            return Path(word).name, "", word, words[position + 1 :]
    rest = words
    while rest and rest[0].startswith("-"):
        rest = rest[1:]
    return (Path(rest[0]).name, "", rest[0], rest[1:]) if rest else ("", "", "", [])


@dataclass(frozen=True, slots=True)
class _Shell:
    """``sh -c TEXT NAME ARGUMENTS`` (``inline``), or ``sh SCRIPT ARGUMENTS``; ``given`` are the arguments."""

    inline: bool
    text: str = ""
    script: str = ""
    given: tuple[str, ...] = ()
    """With ``sh -c``, the word before them is ``$0``: ``script``."""


def _shell_parts(words: list[str]) -> _Shell | None:
    first = Path(words[0]).name
    if first not in _SHELLS:
        return _Shell(False, "", words[0], tuple(words[1:])) if first.endswith(".sh") else None
    rest, inline = words[1:], False
    while rest and rest[0][:1] in ("-", "+") and rest[0] != "--":
        inline = inline or (not rest[0].startswith("--") and rest[0][0] == "-" and "c" in rest[0])
        rest = rest[2 if rest[0] in _SHELL_VALUES else 1 :]
    if inline and rest:
        return _Shell(True, rest[0], rest[1] if len(rest) > 1 else "", tuple(rest[2:]))
    return _Shell(False, "", rest[0] if rest else "", tuple(rest[1:]))


def _script_text(script: str, cwd: Path | None) -> str:
    """The text of a shell script; empty if it cannot be read: the start itself reports that better."""
    try:
        return read_file(Path(script) if cwd is None else cwd / script, _SCRIPT_LIMIT).decode(errors="replace")
    except (OSError, ValueError):
        return ""


# -- number of processes -----------------------------------------------------------------------------------------------

_ELSEWHERE = frozenset({"--hostfile", "-H", "--include", "-i", "--exclude", "-e"})
"""With these options deepspeed uses other hosts or GPUs than its numbers."""


def launched_processes(command: Command) -> int | None:
    """The number of processes, as far as the launcher's own arguments determine it; None: no launcher, or not
    determined. Its configuration files, hostfiles and the environment are not read."""
    program = next((p for p in command.programs if p.launcher), Program())
    own = Command(program.own_words)
    if program.launcher in _TORCHRUN:
        return times(own.given("--nproc-per-node"), own.given("--nnodes"))
    if program.launcher == "accelerate":
        return positive(own.given("--num-processes"))
    if program.launcher == "deepspeed" and not {word.partition("=")[0] for word in own.argv} & _ELSEWHERE:
        return times(own.given("--num-gpus"), own.given("--num-nodes"))
    return None


def times(on_each: str | None, nodes: str | None) -> int | None:
    """The product; None for ``auto``, ``gpu`` and ranges of nodes (``1:4``), which the launcher resolves at its
    start."""
    each, count = positive(on_each), positive(nodes if nodes is not None else "1")
    return each * count if each is not None and count is not None else None
