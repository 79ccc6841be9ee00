"""How a process names the run: its output directory in the command, a configuration file or the environment, or a
repetition of the run's command. That never makes a process a trainer; it is a reason to wait (docs/attaching.md).

Pure, except for ``in_files``, which reads configuration files that a command names.
"""

import os
import re
import shlex
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from podwatch.system.files import read_small
from podwatch.trainer.roles import program

T = TypeVar("T")

_OUTPUT: Final = re.compile(
    r"^o$|(?:^|[-_.])(?:out(?:put)?|save|sav(?:e|ing)|ckpts?|checkpoints?|run|work|default[-_.]root|logging)"
    r"(?:[-_.]?(?:dir(?:ectory)?|path|folder|root|to|base))?$|hydra\.(?:run|sweep)\.dir$",
    re.IGNORECASE,
)
"""Names of options, keys and variables that say where a program writes."""
_READING: Final = re.compile(r"resume|load|from|init|model|input|data|eval|pretrained|restore", re.IGNORECASE)
_VARIABLE: Final = re.compile(
    r"(?:^|_)(?:OUT(?:PUT)?|SAVE|CKPT|CHECKPOINT|RUN|WORK)S?(?:_?(?:DIR|PATH|FOLDER|ROOT))?$", re.I
)
_CONFIGS: Final = (".toml", ".yaml", ".yml", ".json")
_CONFIG_BYTES: Final = 256 << 10
_CONFIG_SECONDS: Final = 1.0
"""Limit for reading one configuration: a file system that hangs must not block the look at the pod."""
_KEY: Final = re.compile(r"""^\s*["']?([A-Za-z0-9_.\-]+)["']?\s*[:=]\s*["']?([^"'#,\n]+?)["']?\s*,?\s*(?:\#.*)?$""")


@dataclass(frozen=True, slots=True)
class Target:
    """The directory to find, as a real path. ``follow_links``: symbolic links in other paths are followed, which reads
    the disk; else paths are compared as written."""

    output_dir: str
    follow_links: bool = False

    def named_by(self, value: str, cwd: str) -> bool:
        """Return whether a process in ``cwd`` means this directory by ``value``."""
        return self.rest(value, cwd) == ()

    def rest(self, value: str, cwd: str) -> tuple[str, ...] | None:
        """Return the path components that are missing from ``value`` to this directory; None if it leads elsewhere."""
        value = value.strip("\"'")
        if not value or value.startswith("-") or "\0" in value:
            return None
        if not cwd and not value.startswith(("/", "~")):  # its directory cannot be read: in doubt it matches
            return () if self.output_dir.endswith("/" + os.path.normpath(value)) else None
        written = os.path.normpath(os.path.join(cwd or "/", os.path.expanduser(value)))  # noqa: PTH111, PTH118
        for path in (written, resolved(written) if self.follow_links else written):
            if path == self.output_dir:
                return ()
            if path != "/" and self.output_dir.startswith(path + "/"):
                return tuple(self.output_dir[len(path) + 1 :].split("/"))
        return None


def in_argv(argv: Sequence[str], cwd: str, target: Target) -> str:
    """Return how a command names the directory as the place it writes to; empty if it does not: ``--output_dir OUT``,
    ``--output-dir=OUT``, ``trainer.output_dir=OUT``, ``--output-dir PARENT --run.name LAST`` (prime-rl). The argument
    of a shell's ``-c`` is read as a command."""
    words = list(argv)
    values = {word.rpartition("=")[2] for word in words}
    for n, word in enumerate(words):
        key, equals, value = word.partition("=")
        if not equals:
            key, value = (word, words[n + 1]) if word.startswith("-") and n + 1 < len(words) else ("", "")
        if not (key and _writes_to(key)):
            continue
        rest = target.rest(value, cwd)
        if rest is not None and values.issuperset(rest):
            return f"its command says {key}={value}" if equals else f"its command says {key} {value}"
    for word in words[1:]:
        if " " in word and (inner := _split(word)) and inner != words and (said := in_argv(inner, cwd, target)):
            return said
    return ""


def in_environment(items: Iterable[tuple[str, str]], cwd: str, target: Target) -> str:
    """Return, as text, the variable that names the directory (only its name); empty if none does."""
    for name, value in items:
        if name not in ("PWD", "OLDPWD", "HOME") and _VARIABLE.search(name) and target.named_by(value, cwd):
            return f"its environment names {target.output_dir} ({name})"
    return ""


def in_files(argv: Sequence[str], cwd: str, target: Target) -> str:
    """Return, as text, the configuration file of this command that names the directory; empty if none does. Best
    effort: one key and value per line. Reads regular files, bounded in size and time. Blocks for at most a second per
    file."""
    paths = [path for word in argv[1:] if (path := _config(word, cwd))]
    for path in paths[:4]:
        text = _within(_CONFIG_SECONDS, lambda path=path: read_small(Path(path), _CONFIG_BYTES))  # type: ignore[misc]
        if text is not None and in_text(
            text.decode("utf-8", "replace"), cwd, target, {word.rpartition("=")[2] for word in argv}
        ):
            return f"its configuration {os.path.basename(path)} names {target.output_dir}"  # noqa: PTH119
    return ""


def in_text(text: str, cwd: str, target: Target, beside: Collection[str] = ()) -> bool:
    """Return whether a line of TOML, YAML or JSON gives the directory to a key that says where to write; or a directory
    above it, and the rest is among the values of other lines or in ``beside`` (prime-rl: ``output_dir``,
    ``run.name``)."""
    pairs = [
        (found[1], found[2].strip())
        for line in text.splitlines()
        if (found := _KEY.match(line.strip().strip("{}").strip()))
    ]
    values = {value for _, value in pairs} | set(beside)
    for key, value in pairs:
        rest = target.rest(value, cwd) if _writes_to(key) else None
        if rest is not None and values.issuperset(rest):
            return True
    return False


def repeats(argv: Sequence[str], cwd: str, command: Sequence[str], command_cwd: str) -> bool:
    """Return whether ``argv`` is the run's own command: the same program in the same directory (or by the same full
    path), and one's arguments all among the other's, so that resume flags make no difference."""
    name, arguments = program(argv)
    known, wanted = program(command)
    mine, theirs = set(arguments), set(wanted)
    if not known or name != known or not (mine <= theirs or theirs <= mine):
        return False
    return cwd == command_cwd or any(word.startswith("/") and word in argv for word in command[1:])


def _writes_to(key: str) -> bool:
    bare = key.lstrip("-+~")
    return bool(_OUTPUT.search(bare)) and not _READING.search(bare)


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _config(word: str, cwd: str) -> str:
    value = word.rpartition("=")[2].lstrip("@")
    return os.path.join(cwd or "/", value) if value.endswith(_CONFIGS) else ""  # noqa: PTH118


def resolved(path: str) -> str:
    """Return ``path`` without symbolic links; as written if resolving hangs."""
    return _within(_CONFIG_SECONDS, lambda: os.path.realpath(path)) or os.path.normpath(path)


def _within(seconds: float, call: Callable[[], T]) -> T | None:
    """Return the result of ``call`` within this time; None if it fails or hangs (its thread is then abandoned)."""
    found: list[T] = []

    def work() -> None:
        try:
            found.append(call())
        except OSError:
            return

    thread = threading.Thread(target=work, name="podwatch-config-look", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
