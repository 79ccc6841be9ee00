"""Find candidates: trainers that podwatch did not start (docs/attaching.md).

A candidate is a process tree of our user or of trainer.user that has a tie to this run, and holds a CUDA context on a
configured GPU; or that belongs to a launcher and has a checkpoint file open for writing, which is a tie. A name,
arguments or a working directory alone never make a candidate. Readers and tools never count, nor anything interactive
(``operator_shells.py``), nor anything that podwatch started, nor an inference server without a training role beside it.

A process is pending if podwatch neither attaches to it nor starts training beside it: it names the run and has neither
a context nor an open checkpoint yet; or it uses a GPU and looks like an evaluation, or has no tie to this run.

The tree of a candidate is found from its own processes upward, never from a shell downward. ``judge`` is pure;
``gather`` reads /proc and blocks.
"""

import os
import pwd
import re
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from podwatch.domain.process import ProcessIdentity, ProcessRole
from podwatch.system import procfs
from podwatch.trainer.base import Candidate
from podwatch.trainer.operator_shells import barred, carries, children_of, copied, find_interactive, of_users, starter
from podwatch.trainer.process_roles import (
    Roles,
    Target,
    looks_like_reader,
    looks_like_trainer,
    named_in_argv,
    named_in_environment,
    named_in_files,
    program,
    repeats_command,
    script_of,
)
from podwatch.trainer.process_tree import Process, read

if TYPE_CHECKING:
    from podwatch.config.settings import Settings

__all__ = ["Judged", "Process", "Run", "copied_environment", "gather", "holders", "judge", "run_of"]

_START = "PODWATCH_START_ID"
"""Variable of each process of a supervisor's tree."""
_WORKER = "podwatch.hooks.child_main"
"""What runs the command of a hook or an evaluation: all of it is below this process."""
_TOOLS = frozenset(
    {
        "tail", "less", "more", "cat", "grep", "rg", "vim", "nvim", "vi", "nano", "emacs", "watch", "top", "htop",
        "tensorboard", "rsync", "scp", "rclone", "b2", "aws", "s5cmd", "wandb", "nvidia-smi", "nvtop", "nvitop",
        "gpustat", "dcgmi", "dcgm-exporter", "nv-hostengine", "nvidia-persiste", "nvidia-cuda-mps", "Xorg", "podwatch",
        "tar", "du", "find", "ls", "inotifywait", "git", "lsof", "strace", "py-spy", "gdb", "code-server",
        "jupyter-lab", "jupyter", "tee", "cp", "mv", "rm", "ln", "sleep", "ssh", "curl", "wget", "pip", "make",
    }
)  # fmt: skip
"""Programs that read, copy or show; by the name of what really runs (``python -m tensorboard.main`` -> below)."""
_TOOL_MODULES = ("tensorboard", "wandb", "podwatch", "http.server", "nvitop", "gpustat", "py_spy", "pip", "venv")
_CHECKPOINT = re.compile(
    r"(?i)(?:step|checkpoint|ckpt|iter|epoch|version|state)[a-z]*[-_=.]?\d|\.(?:ckpt|pth?|safetensors|distcp)(?:\W|$)"
)
"""Matches a checkpoint path below output_dir in any layout: the directory of a step, or a file of weights."""


@dataclass(frozen=True, slots=True)
class Run:
    """How podwatch recognises a trainer of this run. Paths are real paths. ``gpus`` empty: any GPU counts.
    ``checkpoint_dir`` is set where checkpoints are not below output_dir. ``users`` may train here (None: anyone)."""

    output_dir: str
    gpus: frozenset[int] = frozenset()
    users: frozenset[int] | None = None
    checkpoint_dir: str = ""
    command: tuple[str, ...] = ()
    cwd: str = ""


@dataclass(frozen=True, slots=True)
class Judged:
    """Candidates and pending processes, each given by the top of its tree."""

    candidates: tuple[Candidate, ...] = ()
    pending: tuple[Candidate, ...] = ()
    eligible: frozenset[ProcessIdentity] = field(default=frozenset(), compare=False)
    """Every process that by its user and kind could be the top of a trainer's tree: an interrupted stop of one of them
    can be finished."""


def run_of(settings: "Settings") -> Run:
    """Build the ``Run`` from the configuration. Blocks: resolves paths."""
    trainer, gpu = settings.trainer, settings.gpu
    return Run(
        output_dir=os.path.realpath(trainer.output_dir),
        gpus=frozenset((*gpu.inference, *gpu.trainer)),
        users=users_of(trainer.user),
        checkpoint_dir=os.path.realpath(trainer.checkpoint_dir) if trainer.checkpoint_dir is not None else "",
        command=trainer.command,
        cwd=os.path.realpath(trainer.cwd or trainer.output_dir.parent),
    )


def users_of(user: str) -> frozenset[int]:
    """Return the users whose processes can be trainers: our own, and the one that training runs as."""
    found = {os.geteuid()}
    if user:
        try:
            found.add(pwd.getpwnam(user).pw_uid)
        except KeyError:
            if user.isdigit():
                found.add(int(user))
    return frozenset(found)


def tool(process: Process) -> bool:
    running, _ = program(process.argv)
    if process.name in _TOOLS or running in _TOOLS:
        return True
    return any(running == name or running.startswith(name + ".") for name in _TOOL_MODULES)


class _Pod:
    """The processes of the pod, and facts derived from all of them."""

    def __init__(self, processes: Iterable[Process], run: Run) -> None:
        self.run = run
        self.all = tuple(processes)
        self.by_pid = {p.pid: p for p in self.all}
        self.interactive = find_interactive(self.all)
        below = children_of(self.all)
        self.starters = frozenset(p.pid for p in self.all if starter(p, below.get(p.pid, ())))
        self.barred = barred(self.all, run.users)
        self.ours = frozenset(p.pid for p in self.all if any(q.ours for q in (p, *self._above(p))))

    def stops(self, process: Process) -> bool:
        """Return whether a tree ends below ``process``. PID 1 adopts every orphan, so it is part of a tree only if it
        is a training launcher."""
        return process.pid in self.barred or (process.pid == 1 and not process.launcher_like)

    def chain(self, process: Process) -> list[Process]:
        """Return the process, then its parents up to the top of its tree."""
        found = [process]
        parent = self.by_pid.get(process.parent_pid)
        while parent is not None and parent not in found and not self.stops(parent) and carries(parent, found[-1]):
            found.append(parent)
            parent = self.by_pid.get(parent.parent_pid)
        return found

    def counts(self, process: Process) -> bool:
        return (
            of_users(process, self.run.users)
            and process.pid not in self.ours
            and process.pid not in self.interactive
            and process.pid not in self.starters
            and not tool(process)
        )

    def _above(self, process: Process) -> list[Process]:
        found: list[Process] = []
        parent = self.by_pid.get(process.parent_pid)
        while parent is not None and parent not in found and parent.pid != 1:
            found.append(parent)
            parent = self.by_pid.get(parent.parent_pid)
        return found


def judge(processes: Iterable[Process], run: Run) -> Judged:
    """Return what trains here, or may be about to, without podwatch; one entry per tree, ordered by pid."""
    pod = _Pod(processes, run)
    found: dict[int, Candidate] = {}
    waiting: dict[int, Candidate] = {}
    at_work: set[int] = set()
    saving: set[int] = set()
    chains = {process.pid: pod.chain(process) for process in pod.all if pod.counts(process)}
    servers = _servers(chains.values())
    for process in pod.all:
        if (chain := chains.get(process.pid)) is None:
            if (asks := _live_writer(process, pod)) is not None:
                waiting.setdefault(asks.launcher.pid, asks)
            continue
        top = chain[-1]
        if top.pid in servers:
            continue
        tie = _tie(process, chain, run)
        if tie:  # a process that only writes there may be an evaluation with redirected output
            at_work.add(top.pid)
        context, writes = _context(process, run.gpus), _saves(process, chain, run)
        if not (context or writes):
            if tie:
                waiting.setdefault(
                    top.pid, _candidate(top, tie, awaits=_CONTEXT if process.cuda is not None else _UNSEEN)
                )
        elif not writes and any(looks_like_reader(p.argv) for p in chain) and not _trains(chain):
            reason = f"{context}, but {script_of(process.argv) or process.name} looks like an evaluation"
            waiting.setdefault(top.pid, replace(_candidate(top, reason, awaits=_END), holds_gpu=True))
        else:
            known = found.get(top.pid)
            if writes:
                saving.add(top.pid)
            if known is None or (context and not known.holds_gpu):
                found[top.pid] = _candidate(top, context or writes, holds_gpu=bool(context))
    for pid in found.keys() - at_work - saving:
        reason = f"{found[pid].reason}, and nothing ties it to this run"
        waiting[pid] = replace(found.pop(pid), reason=reason, awaits=_END)
    return Judged(
        tuple(replace(found[pid], of_run=pid in at_work) for pid in sorted(found)),
        tuple(replace(waiting[pid], of_run=pid in at_work) for pid in sorted(waiting) if pid not in found),
        frozenset(p.identity for p in pod.all if pod.counts(p)),
    )


def _servers(chains: Iterable[Sequence[Process]]) -> frozenset[int]:
    """The tops of trees that serve a model: an inference server or its engine, with no training role below it."""
    roles: dict[int, set[ProcessRole]] = {}
    serving: set[int] = set()
    for process, *above in chains:
        top = above[-1] if above else process
        roles.setdefault(top.pid, set()).add(process.role)
        if top.role in _SERVING:
            serving.add(top.pid)
    return frozenset(pid for pid in serving if not roles[pid] & _TRAINING)


_SERVING = frozenset({ProcessRole.INFERENCE, ProcessRole.ENGINE})
_TRAINING = frozenset({ProcessRole.LAUNCHER, ProcessRole.TRAINER, ProcessRole.ORCHESTRATOR})
_CONTEXT = "a CUDA context or an open checkpoint"
_UNSEEN = f"{_CONTEXT} (neither can be seen here: give podwatch CAP_SYS_PTRACE, or run it as root)"
_END = "its end"


def _candidate(top: Process, reason: str, *, awaits: str = "", holds_gpu: bool = False) -> Candidate:
    text = " ".join(top.argv) or top.name
    return Candidate(top.identity, text, reason, holds_gpu=holds_gpu, age=top.age, awaits=awaits)


def _live_writer(process: Process, pod: _Pod) -> Candidate | None:
    """Return a notebook or REPL that writes this run's checkpoints: never a trainer, but podwatch starts none beside
    it."""
    if process.pid not in pod.interactive or process.pid in pod.ours or not of_users(process, pod.run.users):
        return None
    written = _checkpoint_files(process, pod.run)
    if not written or tool(process):
        return None
    reason = f"process {process.pid} ({process.name}) is interactive and writes {written[0]}"
    return replace(_candidate(process, reason, awaits=_END), attachable=False)


def holders(processes: Iterable[Process], *, gpus: frozenset[int], own_pid: int) -> tuple[str, ...]:
    """Return every process that holds a CUDA context on these GPUs, as text; our own trees are included."""
    return tuple(
        f"pid {p.pid} ({p.name}) has a context on {_devices(p)}"
        for p in processes
        if p.pid != own_pid and _context(p, gpus)
    )


def _devices(process: Process) -> str:
    return ", ".join(f"/dev/nvidia{n}" for n in sorted(process.gpus)) or "a GPU"


def _context(process: Process, gpus: frozenset[int]) -> str:
    if process.cuda and (not gpus or not process.gpus or process.gpus & gpus):
        return f"process {process.pid} ({process.name}) holds a CUDA context on {_devices(process)}"
    return ""


def _saves(process: Process, chain: Sequence[Process], run: Run) -> str:
    """Return the reason if this is, or runs below, a launcher and has a checkpoint file open for writing; else
    empty."""
    written = _checkpoint_files(process, run)
    if written and any(p.launcher_like or p.names_run for p in chain):
        return f"process {process.pid} ({process.name}) writes {written[0]}"
    return ""


def _checkpoint_files(process: Process, run: Run) -> list[str]:
    return [path for path in process.writes if _of_checkpoint(path, run)]


def _of_checkpoint(path: str, run: Run) -> bool:
    if run.checkpoint_dir and _below(path, run.checkpoint_dir):
        return True
    return _below(path, run.output_dir) and bool(_CHECKPOINT.search(path[len(run.output_dir) :]))


def _tie(process: Process, chain: Sequence[Process], run: Run) -> str:
    """Return why this is likely to be or become this run's training; empty if nothing suggests it. The working
    directory of a launcher counts only here, because this makes no candidate."""
    if _reads_only(chain):
        return ""
    if process.names_run and not tool(process):
        return process.names_run
    if not any(p.launcher_like for p in chain):
        return ""
    if process.writes:
        return f"process {process.pid} ({process.name}) writes {process.writes[0]}"
    if process.launcher_like and _below(process.cwd, run.output_dir):
        return f"{process.name} runs in {process.cwd}"
    return ""


def _reads_only(chain: Sequence[Process]) -> bool:
    return any(looks_like_reader(p.argv) for p in chain) and not _trains(chain)


def _trains(chain: Sequence[Process]) -> bool:
    """Return whether a title in this chain is prime-rl's or an engine's, which outweighs the name of a script."""
    return any("::" in p.name or "::" in " ".join(p.argv[:1]) for p in chain)


def _below(path: str, root: str) -> bool:
    return bool(path) and (path == root or path.startswith(root.rstrip("/") + "/"))


# -- reading of /proc ------------------------------------------------------------------------------------------------


def gather(run: Run, roles: Roles, *, own_pid: int) -> list[Process]:
    """Read every process of the pod. Processes with a supervisor's marker, podwatch's own tree, and the worker of a
    hook or an evaluation, also of another podwatch's, are ``ours``."""
    roots = tuple(root for root in (run.output_dir, run.checkpoint_dir) if root)
    own = {own_pid, *procfs.descendants(own_pid)}
    above = _ancestors(own_pid)
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    target = Target(run.output_dir, follow_links=True)
    result: list[Process] = []
    started: set[int] = set()
    for pid in procfs.all_pids():
        found = read(pid, roles)
        if found is None:
            continue
        inside = {fd: path for fd, path in found.links.items() if any(_below(path, root) for root in roots)}
        marked = bool(procfs.environment_values(pid, (_START,)))
        if marked:
            started.add(pid)
        process = replace(
            found,
            writes=tuple(procfs.open_for_writing(pid, inside)),
            ours=pid in own or marked or program(found.argv)[0] == _WORKER,
            above_us=pid in above,
            age=found.identity.age(now),
            links={},
        )
        result.append(process)
    copies = copied(started, result) - own if started else frozenset()
    result = [replace(process, ours=False) if process.pid in copies else process for process in result]
    for n, process in enumerate(result):
        if not process.ours and of_users(process, run.users):
            result[n] = replace(process, names_run=_names_run(process, run, target))
    return result


def copied_environment(pids: Collection[int]) -> frozenset[int]:
    """Those of ``pids``, which have a supervisor's marker, that an operator gave it (``operator_shells.copied``).
    Blocks: reads every process of the pod."""
    above = _ancestors(os.getpid())
    roles = Roles(())
    seen = [found for pid in procfs.all_pids() if (found := read(pid, roles)) is not None]
    return copied(pids, [replace(process, above_us=process.pid in above) for process in seen])


def _names_run(process: Process, run: Run, target: Target) -> str:
    """Return how the process names the run, as text; empty if it does not, or cannot train."""
    if not _may_train(process):
        return ""
    argv, cwd = process.argv, process.cwd
    if run.command and repeats_command(argv, cwd, run.command, run.cwd):
        return "its command is this run's"
    if said := named_in_argv(argv, cwd, target) or named_in_files(argv, cwd, target):
        return said
    # A variable is inherited by everything that is started from the same shell.
    trains = process.launcher_like or looks_like_trainer(argv) or script_of(argv) == script_of(run.command)
    return named_in_environment(procfs.environment_items(process.pid), cwd, target) if trains else ""


def _may_train(process: Process) -> bool:
    """Return whether this is a known launcher, or Python with a script or module to run."""
    if tool(process) or looks_like_reader(process.argv):
        return False
    if process.launcher_like:
        return True
    exe = process.exe.rpartition("/")[2] or (process.argv[0].rpartition("/")[2] if process.argv else "")
    return exe.startswith(("python", "pypy")) and bool(script_of(process.argv))


def _ancestors(pid: int) -> Collection[int]:
    found: list[int] = []
    status = procfs.read_stat(pid)
    while status is not None and status.parent_pid not in (0, *found):
        found.append(status.parent_pid)
        status = procfs.read_stat(status.parent_pid)
    return found
