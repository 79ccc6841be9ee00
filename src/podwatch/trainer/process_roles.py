"""What a process of the trainer's tree is for, judged by its name and command.

Used only for display and to notice that the engine is gone: a process is *ours* by descent, never by its name.

And how a process names the run: its output directory in the command, a configuration file or the environment, or a
repetition of the run's command. That never makes a process a trainer; it is a reason to wait (docs/attaching.md).

Pure, except for ``named_in_files``, which reads configuration files that a command names.
"""

import os
import re
import shlex
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Final, TypeVar

from podwatch.domain.process import ProcessIdentity, ProcessNames, ProcessRole, ProcessSample
from podwatch.system.files import read_small

COMM_LENGTH = 15
"""The kernel cuts a process name to this many characters: ``VLLM::EngineCore`` is shown as ``VLLM::EngineCor``."""

_REMEMBERED = 1024
"""Command lines whose role is kept."""
_COMMAND_LENGTH = 4096
"""Characters of a command line that patterns are tried on."""

# Titles of vLLM, in every version of interest. Their prefix can be changed with VLLM_PROCESS_NAME_PREFIX, so only what
# follows "::" counts.
_ENGINE = re.compile(r"\w+::(EngineCor|Worker|DPCoordinat)")
_API = re.compile(r"\w+::APIServer")

ANY_TRAINER = ProcessNames(
    # Console scripts have the script's name as comm.
    programs={"vllm-router": ProcessRole.INFERENCE, "torchrun": ProcessRole.TRAINER},
    modules={
        "vllm.entrypoints.openai.api_server": ProcessRole.INFERENCE,
        "vllm_router.launch_router": ProcessRole.INFERENCE,
        "torch.distributed.run": ProcessRole.TRAINER,
        "torch.distributed.launch": ProcessRole.TRAINER,
    },
)
"""What many trainers start. Their own processes are declared by their layouts."""
_PYTHON = re.compile(r"python[\d.]*|pypy[\d.]*")


class Roles:
    """Tells the role of a process by its name and command. ``names`` are what the layouts declare."""

    def __init__(self, names: Iterable[ProcessNames]) -> None:
        every = (*names, ANY_TRAINER)
        self._titles = tuple(title for known in every for title in known.titles.items())
        self._programs = {name: role for known in reversed(every) for name, role in known.programs.items()}
        self._modules = {name: role for known in reversed(every) for name, role in known.modules.items()}
        # The same tree is classified every two seconds.
        self._remembered = lru_cache(maxsize=1024)(self._classify)

    def classify(self, name: str, command: Sequence[str] | str) -> ProcessRole:
        """Return the role, from the kernel's name (cut to 15 characters) and the command line. Titles win over
        programs."""
        return self._remembered(name, tuple(command.split() if isinstance(command, str) else command))

    def _classify(self, name: str, argv: tuple[str, ...]) -> ProcessRole:
        title = argv[0] if len(argv) == 1 else " ".join(argv)  # setproctitle replaces the whole command line
        for text in (title, name):
            for prefix, role in self._titles:
                if text.startswith(prefix) or (len(text) == COMM_LENGTH and prefix.startswith(text)):
                    # "PRIME-RL::Train" and the like are unique within 15 characters
                    return role
            if _API.match(text):
                return ProcessRole.INFERENCE
            if _ENGINE.match(text):
                return ProcessRole.ENGINE
        return self._program_role(argv) or self._programs.get(name) or ProcessRole.OTHER

    def _program_role(self, argv: Sequence[str]) -> ProcessRole | None:
        name, arguments = program(argv)
        if name in self._modules:
            return self._modules[name]
        if name == "vllm":
            return ProcessRole.INFERENCE if arguments[:1] == ("serve",) else None
        return self._programs.get(name)

    def runs_program(self, exe: str, argv: Sequence[str]) -> bool:
        """Return whether the executable (``exe``, empty if unknown) can be what argv says. Launchers are Python
        programs, or uv, or a program of that name; after ``setproctitle`` argv names no program at all."""
        base = _last(exe)
        if not base or _PYTHON.match(base) or base in ("uv", "uvx", "pixi", "conda", "micromamba", "env"):
            return True
        return bool(argv) and base in (_last(argv[0]), program(argv)[0]) and base in self._programs


class RolePatterns:
    """Roles by the operator's own patterns, for a layout that knows no process titles. The first role whose pattern
    matches the command line counts, before what podwatch recognises; where none matches, that stays.

    Not applied to the launcher, whose end is judged as the run's, nor to shells, whose command line contains the whole
    script. Otherwise these would get the role of a process that they started, and the end of that process would go
    unnoticed.
    """

    def __init__(self, patterns: Mapping[ProcessRole, Sequence[str]]) -> None:
        self._patterns = [(role, re.compile(pattern)) for role, few in patterns.items() for pattern in few]
        self._known: dict[str, ProcessRole | None] = {}

    def applied(self, tree: tuple[ProcessSample, ...], launcher: ProcessIdentity | None) -> tuple[ProcessSample, ...]:
        """Return the same processes with their roles. Pure except for its cache: this runs every two seconds."""
        if not self._patterns:
            return tree
        if len(self._known) > _REMEMBERED:
            self._known.clear()
        return tuple(
            sample
            if sample.identity == launcher or (role := self._role(sample.command)) in (None, sample.role)
            else replace(sample, role=role)
            for sample in tree
        )

    def _role(self, command: str) -> ProcessRole | None:
        if command not in self._known:
            text = command[:_COMMAND_LENGTH]
            shell = program(text.split())[0] in SHELLS
            found = None if shell else next((role for role, p in self._patterns if p.search(text)), None)
            self._known[command] = found
        return self._known[command]


SHELLS = frozenset({"sh", "bash", "dash", "zsh", "fish", "ksh", "ash"})


def program(argv: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return what really runs, without wrappers and interpreters: (name, its arguments).

    ``uv run --no-sync rl @ x`` -> ("rl", ("@", "x")); ``python -m pkg.mod a`` -> ("pkg.mod", ("a",));
    ``/x/bin/python /x/bin/torchrun a`` -> ("torchrun", ("a",)).
    """
    return _program(tuple(argv))


@lru_cache(maxsize=1024)
def _program(argv: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Cached, because each look needs it several times for every process."""
    rest = list(argv)
    for _ in range(6):  # nested wrappers, bounded
        if not rest:
            return "", ()
        name = _last(rest[0])
        if name == "uv" and rest[1:2] == ["run"]:
            rest = _skip_options(
                rest[2:], {"--with", "--extra", "--group", "--project", "--directory", "-p", "--python"}
            )
        elif name == "env":
            rest = _skip_options(rest[1:], {"-u", "-C"})
            while rest and "=" in rest[0]:
                rest = rest[1:]
        elif name in ("nohup", "setsid", "stdbuf", "nice", "ionice", "numactl", "taskset"):
            rest = _skip_options(rest[1:], {"-n", "-c", "-o", "-e", "-i"})
        elif _PYTHON.fullmatch(name):
            module = _module_of(rest[1:])
            if module is not None:
                return module
            rest = _skip_options(rest[1:], {"-W", "-X"})
            if rest:
                return _last(rest[0]), tuple(rest[1:])
        else:
            return name, tuple(rest[1:])
    return "", ()


_LAUNCHES_SCRIPTS = frozenset(
    {"torchrun", "accelerate", "deepspeed", "torch.distributed.run", "torch.distributed.launch",
     "accelerate.commands.launch", "debugpy", "coverage", "viztracer", "nsys", "ipython", "ray", "mpirun", "mpiexec",
     "srun", "horovodrun", "python", "uv"}
)  # fmt: skip
"""Programs that run a script or module among their own arguments."""


def script_of(argv: Sequence[str]) -> str:
    """Return the script or module that this command finally runs: ``eval.py`` of ``torchrun --nproc 2 eval.py``,
    ``train.sh`` of ``bash train.sh``. The program's own name if it runs none; empty for a bare interpreter."""
    name, arguments = program(argv)
    if name in SHELLS:
        return next((_last(word) for word in arguments if not word.startswith("-")), "")
    if name in _LAUNCHES_SCRIPTS:
        for n, word in enumerate(arguments):
            if word in ("-m", "--module") and n + 1 < len(arguments):
                return arguments[n + 1]
            if not word.startswith("-") and word.endswith((".py", ".sh")):
                return _last(word)
    return "" if _PYTHON.fullmatch(name) else name


_READS = re.compile(
    r"(?:^|[^a-z])(?:eval|bench|infer|serve|generat|sampl|test|plot|monitor|watch|sync|upload|back_?up|clean|prune|"
    r"convert|merg|export|view|dashboard|probe|inspect|analy[sz]|report|download|notebook|score|judge|chat|demo)",
    re.IGNORECASE,
)
_TRAINS = re.compile(r"train|(?:^|[^a-z])(?:sft|grpo|ppo|dpo|rlhf|rloo|kto|rl|fine-?_?tun)", re.IGNORECASE)


def looks_like_reader(argv: Sequence[str]) -> bool:
    """Return whether the script's name suggests that it reads what training wrote: ``eval.py``, ``lm_eval``,
    ``sync_to_hf.py``. A name that suggests training, as in ``train_and_eval.py``, does not."""
    script = script_of(argv)
    return bool(_READS.search(script)) and not _TRAINS.search(script)


def looks_like_trainer(argv: Sequence[str]) -> bool:
    """Return whether the script's name suggests training: ``train.py``, ``sft``, ``train_and_eval.py``."""
    return bool(_TRAINS.search(script_of(argv)))


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


PORT_FLAGS = ("--port", "--server.port", "--inference.server.port")
"""vLLM and vllm-router; prime-rl's ``inference``."""


def port_of(command: Sequence[str] | str) -> int | None:
    """Return the port in the command line of an inference server; None if there is none."""
    argv = command.split() if isinstance(command, str) else list(command)
    for n, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        if flag in PORT_FLAGS:
            text = value if equals else (argv[n + 1] if n + 1 < len(argv) else "")
            if text.isdigit() and 0 < int(text) < 65_536:
                return int(text)
    return None


def _module_of(words: list[str]) -> tuple[str, tuple[str, ...]] | None:
    for n, word in enumerate(words):
        if word == "-m" and n + 1 < len(words):
            return words[n + 1], tuple(words[n + 2 :])
        if not word.startswith("-"):
            return None
    return None


def _skip_options(words: list[str], with_value: set[str]) -> list[str]:
    n = 0
    while n < len(words) and words[n].startswith("-"):
        n += 2 if words[n] in with_value else 1
    return words[n:]


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


def named_in_argv(argv: Sequence[str], cwd: str, target: Target) -> str:
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
        if " " in word and (inner := _split(word)) and inner != words and (said := named_in_argv(inner, cwd, target)):
            return said
    return ""


def named_in_files(argv: Sequence[str], cwd: str, target: Target) -> str:
    """Return, as text, the configuration file of this command that names the directory; empty if none does. Best
    effort: one key and value per line. Reads regular files, bounded in size and time. Blocks for at most a second per
    file."""
    paths = [path for word in argv[1:] if (path := _config(word, cwd))]
    for path in paths[:4]:
        text = _within(_CONFIG_SECONDS, lambda path=path: read_small(Path(path), _CONFIG_BYTES))  # type: ignore[misc]
        if text is not None and named_in_text(
            text.decode("utf-8", "replace"), cwd, target, {word.rpartition("=")[2] for word in argv}
        ):
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
    values = {value for _, value in pairs} | set(beside)
    for key, value in pairs:
        rest = target.rest(value, cwd) if _writes_to(key) else None
        if rest is not None and values.issuperset(rest):
            return True
    return False


def repeats_command(argv: Sequence[str], cwd: str, command: Sequence[str], command_cwd: str) -> bool:
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
