"""How a process names the run: output_dir as the value of an option that says where to write, in its command or in a
configuration file that the command names; the run's configuration file; the run's command.

Pure, except for ``named_in_files``, which reads configuration files, and a ``Target`` that follows links.
"""

import os
import re
import shlex
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, TypeVar

from podwatch.system.files import read_small
from podwatch.trainer.process_roles import program

T = TypeVar("T")

_WRITES: Final = re.compile(
    r"^o$|(?:^|[-_.])(?:out(?:put)?|save|sav(?:e|ing)|ckpts?|checkpoints?|run|work|default[-_.]root|logging)"
    r"(?:[-_.]?(?:dir(?:ectory)?|path|folder|root|to|base))?$|hydra\.(?:run|sweep)\.dir$",
    re.IGNORECASE,
)
"""Names of options and keys that say where a program writes."""
_READS: Final = re.compile(r"resume|load|from|init|model|input|data|eval|pretrained|restore", re.IGNORECASE)
_RUN_NAME: Final = re.compile(r"(?:^|[-_.])(?:run|exp(?:eriment)?)[-_.]?name$", re.IGNORECASE)
_CONFIGS: Final = (".toml", ".yaml", ".yml", ".json")
_CONFIG_BYTES: Final = 256 << 10
_CONFIG_SECONDS: Final = 1.0
"""Limit for reading one configuration: a file system that hangs must not block the search of the pod."""
_KEY: Final = re.compile(r"""^\s*["']?([A-Za-z0-9_.\-]+)["']?\s*[:=]\s*["']?([^"'#,\n]+?)["']?\s*,?\s*(?:\#.*)?$""")


@dataclass(frozen=True, slots=True)
class Target:
    """The directory to find, as a real path. ``follow_links``: symbolic links in other paths are followed, which reads
    the disk; else paths are compared as written."""

    output_dir: str
    follow_links: bool = False

    def rest(self, value: str, cwd: str) -> tuple[str, ...] | None:
        """Return the path components that are missing from ``value``, of a process in ``cwd``, to this directory; None
        if it leads elsewhere."""
        value = value.strip("\"'")
        if not value or value.startswith("-") or "\0" in value:
            return None
        if not cwd and not value.startswith(("/", "~")):  # its directory cannot be read: in doubt it matches
            return () if self.output_dir.endswith("/" + os.path.normpath(value)) else None
        written = path_of(value, cwd)
        for path in (written, resolved(written) if self.follow_links else written):
            if path == self.output_dir:
                return ()
            if path != "/" and self.output_dir.startswith(path + "/"):
                return tuple(self.output_dir[len(path) + 1 :].split("/"))
        return None


def path_of(value: str, cwd: str) -> str:
    """Return the absolute path that a process in ``cwd`` means."""
    return os.path.normpath(os.path.join(cwd or "/", os.path.expanduser(value)))  # noqa: PTH111, PTH118 - text


def words_of(argv: Sequence[str]) -> list[str]:
    """Return the words of a command, those of the argument of ``sh -c`` included."""
    found = list(argv)
    for word in argv[1:]:
        if " " in word:
            try:
                found += shlex.split(word)
            except ValueError:
                found += word.split()
    return found


@lru_cache(maxsize=1024)
def options_of(argv: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return (name, value) of ``--name value``, ``--name=value`` and ``name=value``."""
    words = words_of(argv)
    found = []
    for n, word in enumerate(words):
        key, equals, value = word.partition("=")
        if equals:
            found.append((key.lstrip("-+~"), value.strip("\"'")))
        elif word.startswith("-") and n + 1 < len(words):
            found.append((word.lstrip("-"), words[n + 1]))
    return tuple(found)


def writes_to(key: str) -> bool:
    """Return whether an option or key of this name says where a program writes."""
    return bool(_WRITES.search(key)) and not _READS.search(key)


def _named(pairs: Iterable[tuple[str, str]], values: Collection[str], cwd: str, target: Target) -> str:
    """Return the key that names the directory, whole or with its last parts among ``values`` (prime-rl: ``--output-dir
    PARENT --run.name LAST``); empty if none does."""
    for key, value in pairs:
        rest = target.rest(value, cwd) if writes_to(key) else None
        if rest is not None and set(rest).issubset(values):
            return f"{key} {value}"
    return ""


def named_in_argv(argv: Sequence[str], cwd: str, target: Target) -> str:
    """Return, as text, how a command names the directory as the place it writes to; empty if it does not."""
    pairs = options_of(tuple(argv))
    said = _named(pairs, {value for _, value in pairs}, cwd, target)
    return f"its command says {said}" if said else ""


def named_in_files(argv: Sequence[str], cwd: str, target: Target) -> str:
    """Return, as text, the configuration file of this command that names the directory; empty if none does. Best
    effort: one key and value per line. Reads regular files, bounded in size and time. Blocks for at most a second per
    file."""
    for path in configuration_files(argv, cwd)[:4]:
        text = _within(_CONFIG_SECONDS, path, lambda path=path: read_small(Path(path), _CONFIG_BYTES))  # type: ignore[misc]
        values = {value for _, value in options_of(tuple(argv))}
        if text is not None and named_in_text(text.decode("utf-8", "replace"), cwd, target, values):
            return f"its configuration {os.path.basename(path)} names {target.output_dir}"  # noqa: PTH119
    return ""


def named_in_text(text: str, cwd: str, target: Target, beside: Collection[str] = ()) -> bool:
    """Return whether a line of TOML, YAML or JSON gives the directory to a key that says where to write; or a directory
    above it, and the rest is among the values of other lines or in ``beside`` (prime-rl: ``output_dir``,
    ``run.name``)."""
    pairs = [
        (found[1], found[2].strip())
        for line in text.splitlines()
        if (found := _KEY.match(line.strip().strip("{}").strip()))
    ]
    return bool(_named(pairs, {value for _, value in pairs} | set(beside), cwd, target))


def names_another_output(argv: Sequence[str], cwd: str, output_dir: str) -> bool:
    """Return whether a command says that it writes elsewhere, or gives its run another name."""
    parts = output_dir.split("/")
    for key, value in options_of(tuple(argv)):
        if _RUN_NAME.search(key) and value not in parts:
            return True
        if writes_to(key) and "/" in value and not value.startswith("-"):
            path = path_of(value, cwd)
            if not is_below(path, output_dir) and not is_below(output_dir, path):
                return True
    return False


def configuration_files(argv: Sequence[str], cwd: str) -> list[str]:
    """Return the paths of the configuration files that a command names: ``@ x.toml``, ``--config=x.yaml``."""
    values = (word.rpartition("=")[2].lstrip("@") for word in words_of(argv)[1:])
    return [path_of(value, cwd) for value in values if value.endswith(_CONFIGS)]


def repeats_command(argv: Sequence[str], cwd: str, command: Sequence[str], command_cwd: str) -> bool:
    """Return whether ``argv`` is the run's own command: the same program in the same directory (or by the same full
    path), and one's arguments all among the other's, so that resume flags make no difference."""
    name, arguments = program(argv)
    known, wanted = program(command)
    mine, theirs = set(arguments), set(wanted)
    if not known or name != known or not (mine <= theirs or theirs <= mine):
        return False
    return cwd == command_cwd or any(word.startswith("/") and word in argv for word in command[1:])


def is_below(path: str, root: str) -> bool:
    """Return whether ``path`` is ``root`` or inside it. Empty paths are not."""
    return bool(path and root) and (path == root or path.startswith(root.rstrip("/") + "/"))


def resolved(path: str) -> str:
    """Return ``path`` without symbolic links; as written if resolving hangs."""
    return _within(_CONFIG_SECONDS, path, lambda: os.path.realpath(path)) or os.path.normpath(path)


_reading: Final[dict[str, threading.Thread]] = {}
"""Mount point -> the thread that has not returned from it."""


def _within(seconds: float, path: str, call: Callable[[], T]) -> T | None:
    """Return the result of ``call``, which reads ``path``, within this time; None if it fails or hangs. A mount that
    hangs is not read again before the thread that is stuck there has returned."""
    mount = _mount_of(path)
    if (stuck := _reading.get(mount)) is not None and stuck.is_alive():
        return None
    found: list[T] = []

    def work() -> None:
        try:
            found.append(call())
        except OSError:
            return

    thread = threading.Thread(target=work, name="podwatch-config-look", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        _reading[mount] = thread
    return found[0] if found else None


def _mount_of(path: str) -> str:
    """Return the mount point that a path is on, as written: links on it are not followed, and nothing is touched."""
    try:
        lines = Path("/proc/self/mounts").read_text(errors="replace").splitlines()
    except OSError:
        return "/"
    points = (line.split(" ")[1].replace("\\040", " ") for line in lines if line.count(" ") > 1)
    return max((point for point in points if is_below(path, point)), key=len, default="/")
