"""Which process trees of the pod are this run's trainer: by a tie, never by a name alone. Pure.

Ties, of processes of podwatch's user or ``trainer.user`` only: started by the run's supervisor (its start id in the
environment); the process that an operator names; a path tie: a file of a checkpoint open for writing, output_dir as
the value of an option that says where to write, or the run's configuration file without another output.

A path tie attaches only together with a training role or a CUDA context. Names of programs make an answer more
careful, never less: an evaluation, a tool, a server, a shell is never a trainer.

A tree is the trainer's own part of a chain of processes: it ends below shells at which commands are typed, terminal
and notebook servers, other users, and podwatch. It continues through a parent that trains, a shell that runs a script,
a parent whose command line ends with the child's (``uv run``, ``timeout 10h``, ``mpirun``), and a ``train.py``.

One file, although long: what is attached to, what is waited for and what a stop may signal must never be two answers.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from podwatch.domain.process import FoundTree, PodProcess, ProcessIdentity, ProcessRole, TreeAnswer
from podwatch.trainer.names_of_run import (
    Target,
    configuration_files,
    is_below,
    named_in_argv,
    names_another_output,
    repeats_command,
)
from podwatch.trainer.process_roles import SHELLS, looks_like_reader, looks_like_trainer, program, script_of

__all__ = [
    "TRAINING",
    "SoughtRun",
    "TrainerChoice",
    "begun_since",
    "choose_trainer",
    "classify_trees",
    "gpu_holders",
    "is_operators",
    "is_tool",
    "may_belong",
    "own_processes",
    "serves_terminals",
    "supervised_start",
    "to_signal",
    "writers_beside",
]


@dataclass(frozen=True, slots=True)
class SoughtRun:
    """How this run's trainer is recognised. Real paths. ``users``: who may train (None: anyone). ``checkpoint_dir`` is
    set where checkpoints are not below output_dir. ``roots``: the directories with one entry for each step, where they
    are known. ``gpus`` empty: any GPU counts. ``start_ids``: of the starts whose end is not recorded. ``attach``: the
    process that an operator named."""

    output_dir: str
    users: frozenset[int] | None = None
    checkpoint_dir: str = ""
    roots: tuple[str, ...] = ()
    gpus: frozenset[int] = frozenset()
    command: tuple[str, ...] = ()
    cwd: str = ""
    start_ids: frozenset[str] = frozenset()
    attach: ProcessIdentity | None = None


# -- one process -------------------------------------------------------------------------------------------------------

TRAINING: Final = frozenset({ProcessRole.LAUNCHER, ProcessRole.TRAINER, ProcessRole.ORCHESTRATOR})
_SERVING: Final = frozenset({ProcessRole.INFERENCE, ProcessRole.ENGINE})
_TERMINALS: Final = frozenset(
    {"tmux", "tmate", "screen", "zellij", "dtach", "abduco", "sshd", "sshd-session", "dropbear", "mosh-server", "ttyd"}
)
_NOTEBOOKS: Final = frozenset(
    {"jupyter", "jupyter-lab", "jupyter-notebook", "jupyter-noteboo", "jupyter-server", "jupyter_server", "jupyterlab",
     "jupyterhub", "jupyterhub-singleuser", "jupyterhub-sing", "notebook", "marimo", "code-server"}
)  # fmt: skip
"""What serves terminals or notebooks, also by names that the kernel cut to 15 characters."""
_CONSOLES: Final = frozenset(
    {"ipykernel_launcher", "ipykernel", "colab_kernel_launcher", "pdb", "ipdb", "gdb", "cuda-gdb"}
)
"""Programs at which an operator types, whatever they run."""
_TOOLS: Final = frozenset({"tensorboard", "tensorboard.main", "wandb", "podwatch", "pip", "http.server"})
"""Python programs that read what training wrote; other tools have neither a role nor a script."""
_SHELL_VALUES: Final = frozenset({"-o", "+o", "-O", "+O", "-C", "--rcfile", "--init-file", "--init-command"})
_PYTHON_VALUES: Final = frozenset({"-W", "-X"})
"""Options whose value is the next word."""
_STDIN: Final = frozenset({"/dev/stdin", "/dev/tty", "/dev/fd/0", "/proc/self/fd/0"})
_PYTHON: Final = re.compile(r"(?:python|pypy)[\d.]*t?")
_CHECKPOINT: Final = re.compile(
    r"(?i)(?:step|checkpoint|ckpt|iter|epoch|version|state)[a-z]*[-_=.]?\d|\.(?:ckpt|pth?|safetensors|distcp)(?:\W|$)"
)
"""Matches a checkpoint path below output_dir in any layout: the directory of a step, or a file of weights."""

_STEP: Final = re.compile(r"/\d[^/]*/")
"""Matches a file below a step's directory that is a number, right below a root of checkpoints: ``/000100/...``."""


def _base(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _is_python(process: PodProcess) -> bool:
    return any(_PYTHON.fullmatch(_base(word)) for word in (process.exe, *process.argv[:1]) if word)


def is_tool(argv: Sequence[str]) -> bool:
    """Return whether it is a Python program that reads what training wrote."""
    return program(argv)[0] in _TOOLS


def _is_shell(process: PodProcess) -> bool:
    """By what the kernel runs, where that is known: ``exec -a torchrun bash`` is a shell."""
    if process.exe and _base(process.exe) != "busybox":
        return _base(process.exe) in SHELLS
    applet = process.argv[1:2] if _base(process.argv[0] if process.argv else "") == "busybox" else process.argv[:1]
    return any(_base(word).lstrip("-") in SHELLS for word in (process.name, *applet))


def _split_options(words: Sequence[str], values: frozenset[str]) -> tuple[list[str], Sequence[str]]:
    """Return the options of an interpreter, and the words from the script, ``-c`` or ``-m`` on."""
    options: list[str] = []
    n = 0
    while n < len(words) and words[n].startswith(("-", "+")) and words[n] not in ("-", "--"):
        options.append(words[n])
        if re.match(r"-[a-zA-Z]*[cm]|--command", words[n]):
            break
        n += 2 if words[n] in values else 1
    return options, words[n:]


def _shell_asks(process: PodProcess) -> bool:
    """Return whether a shell was given neither a script nor a command to run, so that it asks for commands."""
    words = process.argv[2:] if _base((process.argv or ("",))[0]) == "busybox" else process.argv[1:]
    options, rest = _split_options(words, _SHELL_VALUES)
    rest = rest[1:] if rest[:1] in (("-",), ("--",)) else rest
    return not rest or rest[0] in _STDIN or any(re.fullmatch(r"-[a-z]*s[a-z]*", word) for word in options)


def is_operators(process: PodProcess) -> bool:
    """Return whether an operator types commands there, or it serves terminals or notebooks."""
    running, arguments = program(process.argv)
    if serves_terminals(process) or running in _CONSOLES:
        return True
    if _is_shell(process):
        return _shell_asks(process)
    if running.lower() in ("ipython", "ipython3", "ptpython", "bpython"):
        return "-i" in arguments or not any(word.endswith((".py", ".ipy")) for word in arguments)
    if not process.argv or not _PYTHON.fullmatch(_base(process.argv[0])):
        return process.tty != 0 and bool(process.argv) and _is_bare(process)
    options, rest = _split_options(process.argv[1:], _PYTHON_VALUES)
    return any(re.match(r"-[a-bd-ln-zA-VY-Z]*i", word) for word in options) or (process.tty != 0 and not rest)


def _is_bare(process: PodProcess) -> bool:
    """Return whether it is a program on a terminal that was given nothing to run: a shell or a REPL that is not known,
    a monitor. A title (``setproctitle``) is no such command."""
    name = _base(process.argv[0]).lstrip("-")
    return len(process.argv) == 1 and process.role is ProcessRole.OTHER and name == _base(process.exe)


def serves_terminals(process: PodProcess) -> bool:
    """Return whether it serves terminals or notebooks: tmux, sshd, Jupyter."""
    return _is_named(process, _TERMINALS | _NOTEBOOKS)


def _is_named(process: PodProcess, names: frozenset[str]) -> bool:
    running, _ = program(process.argv)
    said = (process.name.split(":")[0].lower(), _base(process.exe), running, running.partition(".")[0])
    return not names.isdisjoint(said)


def _may_train(process: PodProcess) -> bool:
    """Return whether it is a known trainer, or Python with a script that is no tool and reads like no evaluation."""
    if is_tool(process.argv) or looks_like_reader(process.argv) or is_operators(process):
        return False
    return process.role in TRAINING or (_is_python(process) and bool(script_of(process.argv)))


# -- ties --------------------------------------------------------------------------------------------------------------


def _saves(process: PodProcess, run: SoughtRun) -> str:
    for path in process.writes:
        inside = path[len(run.output_dir) :] if is_below(path, run.output_dir) else ""
        of_a_step = any(_STEP.match(path[len(root) :]) for root in run.roots if is_below(path, root))
        if is_below(path, run.checkpoint_dir) or of_a_step or _CHECKPOINT.search(inside):
            return path
    return ""


def _writes_elsewhere(process: PodProcess, run: SoughtRun) -> bool:
    return names_another_output(process.argv, process.cwd, run.output_dir)


def path_tie(process: PodProcess, run: SoughtRun) -> str:
    """Return, as text, what ties this process to the run; empty if nothing does."""
    if is_tool(process.argv):
        return ""
    if saved := _saves(process, run):
        return f"process {process.pid} ({process.name}) writes {saved}"
    if said := named_in_argv(process.argv, process.cwd, Target(run.output_dir)) or process.names_output:
        return said
    known = set(configuration_files(run.command, run.cwd))
    if known.intersection(configuration_files(process.argv, process.cwd)) and not _writes_elsewhere(process, run):
        return "its command names this run's configuration"
    return ""


# -- trees -------------------------------------------------------------------------------------------------------------


class _Pod:
    """The processes of the pod, and what follows from all of them."""

    def __init__(self, processes: Iterable[PodProcess], run: SoughtRun, *, writers: bool = False) -> None:
        self.run, self.writers = run, writers
        self.by_pid = {p.pid: p for p in processes}
        self.below: dict[int, list[PodProcess]] = {}
        for process in self.by_pid.values():
            self.below.setdefault(process.parent_pid, []).append(process)
        self.ties = {pid: path_tie(p, run) for pid, p in self.by_pid.items() if self.may_belong(p)}

    def may_belong(self, process: PodProcess) -> bool:
        """Whether it can be part of a trainer of this run at all."""
        if process.above_podwatch or self.of_podwatch(process) or is_operators(process):
            return False
        return _of_users(process, self.run.users)

    def of_podwatch(self, process: PodProcess) -> bool:
        return any(p.podwatch for p in (process, *self.ancestors(process)) if p.pid != 1)

    def ancestors(self, process: PodProcess) -> list[PodProcess]:
        return _above(process, self.by_pid)

    def top(self, process: PodProcess) -> PodProcess:
        seen = [process]
        parent = self.by_pid.get(process.parent_pid)
        while parent is not None and parent not in seen and self.continues(parent, seen[-1]):
            seen.append(parent)
            parent = self.by_pid.get(parent.parent_pid)
        return seen[-1]

    def continues(self, parent: PodProcess, child: PodProcess) -> bool:
        """Whether a tree that has ``child`` has its parent, too."""
        if not self.may_belong(parent):
            return False
        if parent.role is not ProcessRole.OTHER or parent.cuda or self.ties.get(parent.pid):
            return True
        if parent.pid == 1:
            return False
        if _is_shell(parent):  # one with job control gives each job a group of its own
            return child.group == parent.group or child.session == child.pid
        return _wraps(parent, child) or (_is_python(parent) and looks_like_trainer(parent.argv))

    def unclear_parent(self, top: PodProcess) -> PodProcess | None:
        """The process above a tree if it may be part of it: an unknown Python program."""
        parent = self.by_pid.get(top.parent_pid)
        if parent is None or parent.pid == 1 or not self.may_belong(parent):
            return None
        return parent if _is_python(parent) else None


def _above(process: PodProcess, by_pid: Mapping[int, PodProcess]) -> list[PodProcess]:
    found: list[PodProcess] = []
    parent = by_pid.get(process.parent_pid)
    while parent is not None and parent not in found:
        found.append(parent)
        parent = by_pid.get(parent.parent_pid)
    return found


def _wraps(parent: PodProcess, child: PodProcess) -> bool:
    """``timeout 10h python train.py`` -> ``python train.py``; ``uv run rl @ x`` -> ``python /bin/rl @ x``."""
    name, arguments = program(child.argv)
    words = tuple(_base(word) for word in (name, *arguments))
    return bool(name) and tuple(_base(word) for word in parent.argv[-len(words) :]) == words


def _of_users(process: PodProcess, users: frozenset[int] | None) -> bool:
    return users is None or (bool(process.users) and users.issuperset(process.users))


def classify_trees(processes: Iterable[PodProcess], run: SoughtRun, *, writers: bool = False) -> tuple[FoundTree, ...]:
    """Return what trains this run, or may be about to, one entry for each tree, ordered by pid. ``writers``: beside a
    trainer of the run, also a script with an inference server below it that saves here or is the run's own."""
    pod = _Pod(processes, run, writers=writers)
    trees: dict[int, list[PodProcess]] = {}
    for pid in sorted(pod.ties):
        trees.setdefault(pod.top(pod.by_pid[pid]).pid, []).append(pod.by_pid[pid])
    found = [judged for pid, tree in trees.items() if (judged := _judge(pod.by_pid[pid], tree, pod)) is not None]
    for process in pod.by_pid.values():
        typed = is_operators(process) and _of_users(process, run.users) and not pod.of_podwatch(process)
        if typed and not _is_shell(process) and not serves_terminals(process) and (path := _saves(process, run)):
            reason = f"process {process.pid} ({process.name}) is interactive and writes {path}"
            found.append(FoundTree(process, TreeAnswer.ASK, reason, attachable=False, writes=True))
    return tuple(sorted(found, key=lambda tree: tree.top.pid))


def _judge(top: PodProcess, tree: list[PodProcess], pod: _Pod) -> FoundTree | None:
    """Return the answer about one tree; None if it is ignored."""
    run = pod.run
    tie = next((pod.ties[p.pid] for p in tree if pod.ties[p.pid]), "")
    context = next((text for p in tree if (text := _context(p, run))), "")
    training = any(p.role in TRAINING for p in tree)
    trains = bool(tie and (training or context))
    saving = bool(tie and any(_saves(p, run) or _runs_our_script(p, run) for p in tree))
    found = FoundTree(top, TreeAnswer.ASK, tie, trains, writes=trains or saving, members=tuple(tree))
    by_supervisor = bool(top.start_id) and not _given_by_operator(top, pod.ancestors(top))
    if by_supervisor and top.start_id in run.start_ids:
        return replace(found, answer=TreeAnswer.OWN, reason="the run's supervisor started it")
    if run.attach is not None and any(p.identity == run.attach for p in tree):
        return replace(found, answer=TreeAnswer.ATTACH, reason="the operator named it")
    if not training and any(p.role in _SERVING for p in tree):
        return replace(found, trains=False, attachable=False) if pod.writers and saving else None
    if by_supervisor:
        reason = f"another podwatch started it, and {tie}"
        return replace(found, reason=reason, attachable=False) if tie else None
    if _evaluates(tree) and not any(_saves(p, run) for p in tree):
        if pod.writers or not (tie and context):  # beside a trainer it writes no checkpoint
            return None
        reason = f"{context}, but it looks like an evaluation"
        return replace(found, reason=reason, trains=False, writes=False)
    if not tie:
        return _untied(found, context, training, run)
    if not (training or context):
        return replace(found, answer=TreeAnswer.WAIT) if any(map(_may_train, tree)) else None
    if (above := pod.unclear_parent(top)) is not None:
        return replace(found, reason=f"{tie}, and process {above.pid} ({above.name}) may be part of it")
    return replace(found, answer=TreeAnswer.ATTACH, reason=context or tie)


BEGINS_SECONDS: Final = 2.0
"""A younger process may still become another program, or only show its help."""


def _runs_our_script(process: PodProcess, run: SoughtRun) -> bool:
    """Not an engine: a forked one has the command of the trainer that started it, and can outlive it."""
    script = script_of(process.argv)
    known = bool(script) and script == script_of(run.command) and process.role not in _SERVING
    return known and process.age >= BEGINS_SECONDS


def writers_beside(
    processes: Iterable[PodProcess], run: SoughtRun, ours: Collection[int], above: Collection[int]
) -> tuple[FoundTree, ...]:
    """Return what trains, or may, in the run's directories beside the trainer that podwatch watches: see ``writes``.
    ``ours``: pids of its tree and its supervisor; orphans keep the group or session of one. ``above``: of what started
    it, which is no second trainer. Without a watched trainer both are empty."""
    by_pid = {p.pid: p for p in processes}

    def belongs(process: PodProcess) -> bool:
        kin = {process.pid, process.group, process.session, process.parent_pid}
        kin.update(parent for p in _above(process, by_pid) for parent in (p.pid, p.parent_pid))
        return not kin.isdisjoint(ours)

    rest = [p for p in by_pid.values() if p.pid not in above and not belongs(p)]
    found = [tree for tree in classify_trees(rest, run, writers=True) if tree.answer is not TreeAnswer.OWN]
    for process in rest:  # what another user saves there mixes with our checkpoints, too
        if not _of_users(process, run.users) and (process.cuda or _may_train(process)) and _saves(process, run):
            reason = f"process {process.pid} ({process.name}) writes {_saves(process, run)}"
            found.append(FoundTree(process, TreeAnswer.ASK, reason, attachable=False, writes=True))
    return tuple(found)


def _untied(found: FoundTree, context: str, training: bool, run: SoughtRun) -> FoundTree | None:
    """A tree without a tie is a stranger's: where it holds memory that training needs, the start waits for that. Unless
    it runs our command or trains in our directories, and names no other output."""
    if any(_writes_elsewhere(p, run) for p in found.members):
        return None
    if run.command and any(repeats_command(p.argv, p.cwd, run.command, run.cwd) for p in found.members):
        reason = "its command is this run's"
    elif any(p.role in TRAINING and (p.writes or is_below(p.cwd, run.output_dir)) for p in found.members):
        reason = f"it is a trainer at work in {run.output_dir}"
    elif context and training and run.cwd and any(p.cwd == run.cwd for p in found.members):
        reason = f"it is a trainer at work in {run.cwd}"
    else:
        return None
    if context:
        return replace(found, reason=f"{context}, and {reason}")
    return replace(found, answer=TreeAnswer.WAIT, reason=reason)


def _is_prompt(process: PodProcess) -> bool:
    """Return whether an operator types there. A shell without a terminal is a sandbox, of a trainer or an agent."""
    sandbox = _is_shell(process) and process.tty == 0
    return is_operators(process) and not sandbox and not serves_terminals(process)


def _given_by_operator(top: PodProcess, above: Iterable[PodProcess]) -> bool:
    """Return whether an operator gave a process, the topmost that has it, the environment of a trainer, to repeat or
    debug what the trainer did: it is on a terminal, was executed into the container (no parent), or an operator's shell
    or server is above it, whatever it starts away from there."""
    if top.tty != 0 or top.parent_pid == 0 or _is_prompt(top):
        return True
    for process in above:
        if process.pid == 1 or process.podwatch or _supervises(process):
            return False
        if is_operators(process):
            return True
    return False


def _supervises(process: PodProcess) -> bool:
    """Return whether it is podwatch's supervisor: above the trainer, or as init, which may be below a shell."""
    programs = {"keep", "init"}
    return not programs.isdisjoint(process.argv) and any(_base(word) == "supervise.py" for word in process.argv)


def supervised_start(process: PodProcess, directory: str) -> str:
    """Return the start id if it is the supervisor of this directory, or the child that it is about to execute the
    command in; empty if it is neither."""
    return process.argv[-1] if _supervises(process) and process.argv[-3:-1] == ("keep", directory) else ""


def _context(process: PodProcess, run: SoughtRun) -> str:
    if process.cuda and (not run.gpus or not process.gpus or process.gpus & run.gpus):
        return f"process {process.pid} ({process.name}) holds a CUDA context on {_devices(process)}"
    return ""


def _devices(process: PodProcess) -> str:
    return ", ".join(f"/dev/nvidia{n}" for n in sorted(process.gpus)) or "a GPU"


_READ_ONLY: Final = frozenset(
    {"--help", "-h", "--version", "--dry-run", "--eval-only", "--evaluate", "--test-only", "--validate", "--predict"}
)
"""Options with which a script of training only reads, or does nothing."""
_EVALUATE: Final = frozenset({"--do-eval", "--do-predict"})
"""The same, of Hugging Face's scripts, unless ``--do-train`` is there, too."""


def _evaluates(tree: Sequence[PodProcess]) -> bool:
    """By the names of its scripts or an option. A title of a trainer outweighs a name: the script is then a wrapper."""
    titled = any("::" in p.name or "::" in "".join(p.argv[:1]) for p in tree)
    return any(map(_only_reads, tree)) or (not titled and any(looks_like_reader(p.argv) for p in tree))


def _only_reads(process: PodProcess) -> bool:
    options = {word.partition("=")[0].replace("_", "-") for word in process.argv if word.startswith("-")}
    return not options.isdisjoint(_READ_ONLY) or (not options.isdisjoint(_EVALUATE) and "--do-train" not in options)


def may_belong(processes: Iterable[PodProcess], run: SoughtRun) -> frozenset[ProcessIdentity]:
    """Return the processes that by user and kind can be part of a trainer: where no operator types, nor podwatch's."""
    pod = _Pod(processes, run)
    return frozenset(p.identity for p in pod.by_pid.values() if pod.may_belong(p))


def gpu_holders(processes: Iterable[PodProcess], run: SoughtRun) -> tuple[str, ...]:
    """Return, as text, every process that holds a CUDA context on the run's GPUs, our own included."""
    return tuple(f"pid {p.pid} ({p.name}) has a context on {_devices(p)}" for p in processes if _context(p, run))


def own_processes(processes: Iterable[PodProcess], run: SoughtRun) -> tuple[PodProcess, ...]:
    """Return the processes that have one of the run's start ids from its supervisor: not those to which an operator
    gave a copy of that environment, as the topmost process that has it shows. ``processes``: all of the pod."""
    by_pid = {p.pid: p for p in processes}
    found = []
    for process in by_pid.values():
        chain = [process, *_above(process, by_pid)]
        if process.start_id not in run.start_ids or not _of_users(process, run.users):
            continue
        if process.above_podwatch or any(p.podwatch for p in chain if p.pid != 1):
            continue
        last = max(n for n, p in enumerate(chain) if p.start_id in run.start_ids)
        if not _given_by_operator(chain[last], chain[last + 1 :]):
            found.append(process)
    return tuple(found)


def to_signal(
    tree: Collection[PodProcess], users: frozenset[int] | None = None, *, started: bool = False
) -> frozenset[int]:
    """Return the pids of a trainer's tree that a stop may signal: not where an operator types commands, with everything
    below, nor what serves a terminal, nor other users (None: any).

    ``started``: our supervisor started it, so by descent all of it is the trainer's, its sandboxes and what it runs as
    other users included. The exception is a server of terminals that the command started: where an operator types in
    it, that shell, everything below, and the server; and a server of notebooks, with everything below."""
    by_pid = {p.pid: p for p in tree}
    tops: set[int] = set()
    servers: set[int] = set()
    for process in tree:
        above = _above(process, by_pid)
        prompt = _is_prompt(process)
        serving = [p.pid for p in above if serves_terminals(p)]
        if started and ((prompt and serving) or _is_named(process, _NOTEBOOKS)):
            tops.add(process.pid)
            servers.update(serving)
        elif not started and (prompt or serves_terminals(process) or not _of_users(process, users)):
            tops.add(process.pid)
            if prompt and process.session == process.pid and above and _serves_one(above[0]):
                tops.add(above[0].pid)
    left = tops | {p.pid for p in tree if any(above.pid in tops for above in _above(p, by_pid))}
    return frozenset(by_pid.keys() - left - servers)


def _serves_one(process: PodProcess) -> bool:
    """Whether what is above a shell in a session of its own gives that shell its terminal (``script``, ``sudo``). A
    Python program may be the trainer, and the shell its sandbox."""
    return process.role is ProcessRole.OTHER and not _is_python(process) and not _is_shell(process)


# -- which one ---------------------------------------------------------------------------------------------------------

SEEN_LATE: Final = 30.0
"""podwatch can notice the end of a trainer this many seconds after its operator started the next."""


@dataclass(frozen=True, slots=True)
class TrainerChoice:
    """``attach``: the one tree to attach to. ``waits_for``: what prevents a start; an operator decides."""

    attach: FoundTree | None = None
    waits_for: tuple[FoundTree, ...] = ()

    @property
    def unclear(self) -> tuple[FoundTree, ...]:
        """Several trainers, of which any could be this run's."""
        trainers = tuple(tree for tree in self.waits_for if tree.answer is TreeAnswer.ATTACH)
        return trainers if len(trainers) > 1 else ()

    @property
    def trees(self) -> tuple[FoundTree, ...]:
        """Beside each of them podwatch starts no trainer."""
        return self.waits_for if self.attach is None else (self.attach,)


def begun_since(trees: Iterable[FoundTree], ended_ago: float | None) -> list[FoundTree]:
    """Return the trees that did not run at the same time as the trainer that ended so many seconds ago."""
    return [tree for tree in trees if ended_ago is None or tree.top.age < ended_ago + SEEN_LATE]


def choose_trainer(
    trees: Iterable[FoundTree], *, ended_ago: float | None, ignored: Collection[str] = ()
) -> TrainerChoice:
    """Choose while no trainer of podwatch lives. ``ended_ago``: seconds since the last one ended (None: none did, as
    far as is known). A tree that is older ran at the same time, so it does not continue the run: podwatch does not
    attach to it, and waits for it only if it trains this run. ``ignored``: start ids that an operator declared to be
    none of this run's."""
    seen = [t for t in trees if t.start_id not in ignored and t.answer is not TreeAnswer.OWN]
    newer = begun_since(seen, ended_ago)
    rest = tuple(t for t in seen if t.trains or t in newer)
    attachable = [t for t in rest if t.answer is TreeAnswer.ATTACH]
    if len(attachable) == 1 and attachable[0] in newer:
        return TrainerChoice(attachable[0])
    return TrainerChoice(None, rest)
