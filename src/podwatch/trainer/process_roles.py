"""What a process of the trainer's tree is for, judged by its name and command.

Used only for display and to notice that the engine is gone: a process is *ours* by descent, never by its name. Pure.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from podwatch.domain.process import ProcessIdentity, ProcessNames, ProcessRole, ProcessSample

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


SHELLS = frozenset({"sh", "bash", "rbash", "dash", "ash", "zsh", "ksh", "fish", "csh", "tcsh", "nu"})


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
