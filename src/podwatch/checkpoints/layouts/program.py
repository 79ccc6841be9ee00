"""The program that a command runs, behind its wrappers and launchers: ``uv run torchrun -m x`` runs module ``x``.

Only the program counts, not words in arguments, so that an editor or a pager on ``rl.toml`` is no trainer. The text of
a shell script is read, because many trainers are started by one.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from podwatch.system.reading import read_file

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
