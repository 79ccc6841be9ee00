"""Reads facts from a training command: flags, the TOML files it names, the program behind its launchers, the number of
processes, the save interval; takes resume flags out and fills placeholders.

Only whole arguments are changed, never the text of ``sh -c``.
"""

import os
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podwatch.checkpoints.layout import ResumeCommand, Site
from podwatch.domain.secrets import register_document
from podwatch.system.files import opened, read_descriptor, read_file

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
            if not equals and following is not None and can_be_value(following):
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


def can_be_value(word: str) -> bool:
    """Whether ``word`` can be the value of the flag before it: no flag, but possibly a negative number (-1: the newest
    step), and not prime-rl's ``@``, which precedes a file."""
    return word != "@" and (not word.startswith("-") or re.fullmatch(r"-\d+", word) is not None)


def without(command: Sequence[str], removed: Sequence[str]) -> tuple[str, ...]:
    """``command`` without the words that ``strip_flags`` and then ``strip_keys`` removed from it."""
    kept, left = list(command), list(removed)
    while left:
        remaining = []
        for word in kept:
            if left and word == left[0]:
                del left[0]
            else:
                remaining.append(word)
        if len(remaining) == len(kept):
            break
        kept = remaining
    return tuple(kept)


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


def max_steps_flag(_site: Site, command: Sequence[str]) -> int | None:
    return positive(flag_value(command, ("--max-steps",)))


def _plain(name: str) -> str:
    return name.replace("_", "-")


# -- number of processes ---------------------------------------------------------------------------------------------
# As far as the launcher's own arguments determine it (``torchrun``, ``accelerate launch``, ``deepspeed``). Config
# files, hostfiles and the environment are not read.

_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_ELSEWHERE = ("--hostfile", "-H", "--include", "-i", "--exclude", "-e")
"""With these options deepspeed uses other hosts or GPUs than its numbers."""


def launched(command: Sequence[str]) -> int | None:
    """The number of processes; None: no launcher, or not determined."""
    for position, word in enumerate(command):
        name = Path(word).name
        if name in _TORCHRUN:
            own = _own(command[position + 1 :])
            return _times(flag_value(own, ("--nproc-per-node",)), flag_value(own, ("--nnodes",)))
        if name == "accelerate":
            return positive(flag_value(_own(command[position + 1 :]), ("--num-processes",)))
        if name == "deepspeed":
            own = _own(command[position + 1 :])
            if has_flag(own, _ELSEWHERE):
                return None
            return _times(flag_value(own, ("--num-gpus",)), flag_value(own, ("--num-nodes",)))
    return None


def _own(words: Sequence[str]) -> Sequence[str]:
    """The launcher's own arguments, without those of the launched program."""
    for position, word in enumerate(words):
        if word in ("-m", "--module") or word.endswith(".py"):
            return words[:position]
    return words


def _times(on_each: str | None, nodes: str | None) -> int | None:
    """The product; None for ``auto``, ``gpu`` and ranges of nodes (``1:4``), which the launcher resolves at its
    start."""
    each, count = positive(on_each), positive(nodes if nodes is not None else "1")
    return each * count if each is not None and count is not None else None


# -- program behind wrappers and launchers ---------------------------------------------------------------------------
# ``uv run torchrun -m x`` runs module ``x``. Only the program counts, not words in arguments, so that an editor or a
# pager on ``rl.toml`` is no trainer. The text of a shell script is read, because many trainers are started by one.

LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "composer", "torch.distributed.run", "torch.distributed.launch")
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
_WRAPPERS = {"nohup": 0, "setsid": 0, "exec": 0, "time": 0, "stdbuf": 0, "nice": 0, "ionice": 0, "numactl": 0, "env": 0}
_RUNNERS = ("uv", "uvx", "poetry", "pixi", "pdm", "hatch", "rye", "conda", "mamba", "micromamba")
_WITH_VALUE = frozenset({"--env-file", "--extra", "--group", "--with", "--python", "-p", "--project", "--directory"})
_WITH_VALUE |= {"-n", "--name", "-e", "--environment", "-u", "-c", "--cpunodebind", "--membind", "-o", "-i"}
_SCRIPT_LIMIT = 256 * 1024


@dataclass(frozen=True, slots=True)
class Program:
    """``launcher`` starts the trainer on every GPU and can be empty; ``name`` is the program or script without its
    directory, ``module`` the name after ``-m``; ``arguments`` are its arguments. ``shell`` is the text of a shell
    script, or of ``sh -c``, without comments."""

    name: str = ""
    module: str = ""
    launcher: str = ""
    arguments: tuple[str, ...] = ()
    script: str = ""
    """The script as written in the command, with its directory."""
    shell: str = ""

    def runs(self, *modules: str) -> str:
        """The first of ``modules`` (or a module below it) that this runs, as written there; else empty."""
        for module in modules:
            if self.module == module or self.module.startswith(module + "."):
                return self.module
            found = re.search(rf"-m[ =]+({re.escape(module)}(?:\.[\w.]+)?)(?=[\s;\"'\\]|$)", self.shell)
            if found:
                return found.group(1)
        return ""

    def calls(self, *names: str) -> str:
        """The first of ``names`` that is the program itself, or a command in the shell script; else empty."""
        for name in names:
            if name in (self.name, self.launcher):
                return name
            if re.search(rf"(?:^|[\n;&|(]|\b(?:exec|run|nohup))\s*(?:\S*/)?{re.escape(name)}(?=\s|$)", self.shell):
                return name
        return ""

    def says(self, *words: str) -> str:
        """The first of ``words`` that starts an argument or is in the shell script; else empty."""
        for word in words:
            plain = word.replace("_", "-")
            if any(a.replace("_", "-").startswith(plain) for a in self.arguments):
                return word
            if re.search(rf"(?:^|[\s\"'+]){re.escape(word)}", self.shell):
                return word
        return ""


def program(command: Sequence[str], cwd: Path | None = None) -> Program:
    """Parse one command. Nothing is executed; a script is read only if it is small."""
    words = _unwrapped(list(command))
    if not words:
        return Program()
    first = Path(words[0]).name
    if first in _SHELLS or first.endswith(".sh"):
        return _shell(words, cwd)
    launcher = ""
    name, module, script, rest = _python(words)
    while name in LAUNCHERS or module in LAUNCHERS:
        launcher = launcher or (name if name in LAUNCHERS else module)
        name, module, script, rest = _launched(rest)
    return Program(name, module, launcher, tuple(rest), script)


def _unwrapped(words: list[str]) -> list[str]:
    while words:
        name = Path(words[0]).name
        if name in _RUNNERS and (name == "uvx" or "run" in words[1:4]):
            words = words[words.index("run") + 1 if "run" in words[1:4] else 1 :]
        elif name in _WRAPPERS:
            words = words[1:]
        else:
            return words
        while words and (words[0].startswith("-") or re.match(r"[A-Za-z_]\w*=", words[0])):
            words = words[2 if words[0] in _WITH_VALUE else 1 :]
    return words


def _python(words: list[str]) -> tuple[str, str, str, list[str]]:
    """(program, module, script, arguments) of a plain command or of ``python ...``."""
    if re.fullmatch(r"(?:python|pypy)[0-9.]*", Path(words[0]).name):
        words = words[1:]
        while words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
            words = words[2 if words[0] in ("-W", "-X") else 1 :]
        if len(words) > 1 and words[0] == "-m":
            return "", words[1], "", words[2:]
        if words and words[0] == "-c":
            return "", "", "", []
    return (Path(words[0]).name, "", words[0], words[1:]) if words else ("", "", "", [])


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


def _shell(words: list[str], cwd: Path | None) -> Program:
    rest = words[1:] if Path(words[0]).name in _SHELLS else words
    while rest and rest[0].startswith("-") and not rest[0].endswith("c"):
        rest = rest[1:]
    if len(rest) > 1 and rest[0].startswith("-"):
        return Program("sh", launcher="sh", arguments=tuple(rest[2:]), shell=_uncommented(rest[1]))
    if not rest:
        return Program(Path(words[0]).name)
    path = Path(rest[0]) if cwd is None else cwd / rest[0]
    text = ""
    try:
        text = read_file(path, _SCRIPT_LIMIT).decode(errors="replace")
    except (OSError, ValueError):
        pass  # the start itself reports it better
    return Program(
        Path(rest[0]).name, launcher="sh", arguments=tuple(rest[1:]), script=rest[0], shell=_uncommented(text)
    )


def _uncommented(text: str) -> str:
    joined = re.sub(r"\\\r?\n", " ", text)
    return "\n".join(line for line in joined.splitlines() if not line.lstrip().startswith("#"))


# -- steps that inference can be behind ------------------------------------------------------------------------------
# By-products of these steps are still read.

STEPS_IN_USE = 2
"""prime-rl's defaults: max_async_level 1, later a lag of 1 batch, and one step that is being written."""
MOST = 1000
_ASYNC_KEYS = ("max_async_level", "max_off_policy_steps")
"""The second since 2026-08, when prime-rl began to remove old broadcasts itself."""
_ASYNC_FLAGS = tuple(
    f"--{section}{key.replace('_', '-')}" for key in _ASYNC_KEYS for section in ("", "orchestrator.", "trainer.")
)


def steps_in_use(command: Sequence[str], cwd: Path) -> int:
    """Number of steps below the newest one whose broadcasts and rollouts can still be read: the highest level that the
    command or a configuration file named in it sets, plus one; never fewer than the default. Reads those files."""
    levels = [1]
    for flag in _ASYNC_FLAGS:
        levels.append(_level(flag_value(command, (flag,))))
    for document in toml_documents(command, cwd):
        for section in (document, document.get("orchestrator"), document.get("trainer")):
            if isinstance(section, dict):
                levels.extend(_level(section.get(key)) for key in _ASYNC_KEYS)
    return max(STEPS_IN_USE, max(levels) + 1)


def _level(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        return 0
    try:
        return min(MOST, max(0, int(value)))
    except ValueError:
        return 0


# -- save interval ---------------------------------------------------------------------------------------------------

_INTERVAL_FLAGS: Mapping[str, tuple[str, ...]] = {
    "prime-rl": ("--ckpt.interval", "--trainer.ckpt.interval"),
    "hf": ("--save_steps",),
    "megatron": ("--save-interval",),
    "torchtitan": ("--checkpoint.interval",),
}
_INTERVAL_KEYS: Mapping[str, tuple[str, ...]] = {
    "verl": ("trainer.save_freq",),
    "skyrl": ("trainer.ckpt_interval",),
    "nemo-rl": ("checkpointing.save_period",),
}
"""Overrides as Hydra and OmegaConf read them."""


def save_interval(layout: str, command: Sequence[str], cwd: Path) -> int | None:
    """Steps from one save to the next; None where neither the command nor a TOML file that it names sets it. A default
    of the trainer is not assumed: another option often decides whether it saves at all. Reads small files; can
    block."""
    if layout == "hf" and flag_value(command, ("--save_strategy",)) not in (None, "steps"):
        return None
    direct = positive(flag_value(command, _INTERVAL_FLAGS.get(layout, ())))
    if direct is None:
        direct = positive(key_value(command, _INTERVAL_KEYS.get(layout, ())))
    if direct is not None or layout != "prime-rl":
        return direct
    found = [
        value
        for document in toml_documents(command, cwd)
        for holder in (document, _table(document, "trainer"))
        if (value := _positive(_table(holder, "ckpt").get("interval"))) is not None
    ]
    return found[-1] if found else None


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _table(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = document.get(name)
    return section if isinstance(section, dict) else {}
