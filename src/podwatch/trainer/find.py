"""Candidates: trainers that someone else started (DESIGN section 2, "Supervise").

A candidate is a process tree that holds a CUDA context on a configured GPU, or whose launcher is a training launcher
and that holds a file under output_dir open for writing, or names output_dir in its command or working directory.
Readers and tools never count. ``judge`` is pure; ``gather`` reads /proc and blocks.
"""

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from podwatch.domain.process import ProcessIdentity, ProcessRole
from podwatch.system import procfs
from podwatch.system.identity import boot_id, pid_namespace
from podwatch.trainer.base import Candidate
from podwatch.trainer.roles import SHELLS, classify, program

_TOOLS = frozenset(
    {
        "tail", "less", "more", "cat", "grep", "rg", "vim", "nvim", "vi", "nano", "emacs", "watch", "top", "htop",
        "tensorboard", "rsync", "scp", "rclone", "b2", "aws", "s5cmd", "wandb", "nvidia-smi", "nvtop", "nvitop",
        "gpustat", "dcgmi", "dcgm-exporter", "nv-hostengine", "nvidia-persiste", "nvidia-cuda-mps", "Xorg", "podwatch",
        "tar", "du", "find", "ls", "inotifywait", "git", "lsof", "strace", "py-spy", "gdb", "code-server",
        "jupyter-lab", "jupyter", "tee",
    }
)  # fmt: skip
"""Programs that read, copy or show; by the name of what really runs (``python -m tensorboard.main`` -> below)."""
_TOOL_MODULES = ("tensorboard", "wandb", "podwatch", "http.server", "nvitop", "gpustat", "py_spy")

_BOUNDARIES = frozenset(
    {
        "systemd", "init", "sshd", "tmux", "screen", "login", "su", "sudo", "dockerd", "containerd", "containerd-shim",
        "podman", "conmon", "runc", "tini", "dumb-init", "s6-supervise", "supervisord", "cron", "crond", "kubelet",
        "code", "node", "jupyter-lab", "jupyter", "mosh-server", "zellij", "podwatch",
    }
)  # fmt: skip
"""A tree ends below these: they start things, they are not training."""
_LAUNCHER_ROLES = frozenset({ProcessRole.LAUNCHER, ProcessRole.TRAINER, ProcessRole.ORCHESTRATOR})


@dataclass(frozen=True, slots=True)
class Process:
    """What the judgement needs of one process. ``writes`` are files under output_dir open for writing; ``cuda`` is
    None where it cannot be read; ``ours`` marks podwatch, its children, and trees of any keeper; ``age`` in seconds."""

    identity: ProcessIdentity
    parent_pid: int
    name: str
    argv: tuple[str, ...]
    cwd: str = ""
    cuda: bool | None = None
    gpus: frozenset[int] = frozenset()
    writes: tuple[str, ...] = ()
    ours: bool = False
    age: float = 0.0

    @property
    def tool(self) -> bool:
        running, _ = program(self.argv)
        if self.name in _TOOLS or running in _TOOLS:
            return True
        return any(running == tool or running.startswith(tool + ".") for tool in _TOOL_MODULES)

    @property
    def boundary(self) -> bool:
        """A tree ends below it. PID 1 adopts every orphan, so only a training launcher there is the top of one."""
        return self.starter or (self.identity.pid == 1 and not self.launcher_like)

    @property
    def starter(self) -> bool:
        """By its name. Not by its place: what ``docker exec`` starts has no parent here (0), and the entry point of an
        image can be the trainer itself."""
        if self.name.lstrip("-").split(":")[0] in _BOUNDARIES:
            return True
        # An interactive shell is a person's; ``bash train.sh`` is part of what it runs.
        words = [word for word in self.argv[1:] if word not in ("-l", "-i", "--login", "-il", "-li")]
        return self.name.lstrip("-") in SHELLS and not words

    @property
    def launcher_like(self) -> bool:
        return not self.tool and classify(self.name, self.argv) in _LAUNCHER_ROLES


def judge(processes: Iterable[Process], *, output_dir: str, gpus: frozenset[int]) -> tuple[Candidate, ...]:
    """The candidates among ``processes``, one per tree, named by the tree's top. ``gpus`` empty: any GPU counts."""
    by_pid = {process.identity.pid: process for process in processes}
    theirs = [p for p in by_pid.values() if not (p.tool or p.starter or _any_ours(p, by_pid))]
    found: dict[int, Candidate] = {}
    at_work: set[int] = set()
    for process in theirs:
        top = _top(process, by_pid)
        work = _work(process, by_pid, output_dir)
        if work:  # what only writes there may be an evaluation with its output sent to a file
            at_work.add(top.identity.pid)
        reason = _cuda(process, gpus) or work
        known = found.get(top.identity.pid)
        if reason and (known is None or (process.cuda and not known.holds_gpu)):
            text = " ".join(top.argv) or top.name
            found[top.identity.pid] = Candidate(top.identity, text, reason, holds_gpu=bool(process.cuda), age=top.age)
    return tuple(replace(found[pid], of_run=pid in at_work) for pid in sorted(found))


def holders(processes: Iterable[Process], *, gpus: frozenset[int], own_pid: int) -> tuple[str, ...]:
    """Every process that holds a CUDA context on these GPUs, in words, our own trees included: who is in the way."""
    return tuple(
        f"pid {p.identity.pid} ({p.name}) has a context on {_devices(p)}"
        for p in processes
        if p.identity.pid != own_pid and _cuda(p, gpus)
    )


def _devices(process: Process) -> str:
    return ", ".join(f"/dev/nvidia{n}" for n in sorted(process.gpus)) or "a GPU"


def _cuda(process: Process, gpus: frozenset[int]) -> str:
    if process.cuda and (not gpus or not process.gpus or process.gpus & gpus):
        return f"process {process.identity.pid} ({process.name}) holds a CUDA context on {_devices(process)}"
    return ""


def _work(process: Process, by_pid: Mapping[int, Process], output_dir: str) -> str:
    """A launcher, or what runs below one, at work in output_dir."""
    launchers = [p for p in (process, *_ancestors(process, by_pid)) if p.launcher_like]
    if not launchers:
        return ""
    if process.writes:
        return f"process {process.identity.pid} ({process.name}) writes {process.writes[0]}"
    if process.launcher_like:
        if _below(process.cwd, output_dir):
            return f"{process.name} runs in {process.cwd}"
        for word in process.argv:
            _, _, value = word.rpartition("=")
            named = "/" in value or value == os.path.basename(output_dir)  # noqa: PTH119
            path = os.path.normpath(os.path.join(process.cwd or "/", value))  # noqa: PTH118
            if named and _below(path, output_dir):
                return f"its command names {output_dir}"
    return ""


def _below(path: str, root: str) -> bool:
    return bool(path) and (path == root or path.startswith(root.rstrip("/") + "/"))


def _ancestors(process: Process, by_pid: Mapping[int, Process]) -> list[Process]:
    chain: list[Process] = []
    parent = by_pid.get(process.parent_pid)
    while parent is not None and not parent.boundary and parent not in chain:
        chain.append(parent)
        parent = by_pid.get(parent.parent_pid)
    return chain


def _top(process: Process, by_pid: Mapping[int, Process]) -> Process:
    return ([process, *_ancestors(process, by_pid)])[-1]


def _any_ours(process: Process, by_pid: Mapping[int, Process]) -> bool:
    return any(p.ours for p in (process, *_ancestors(process, by_pid)))


def gather(output_dir: Path, *, own_pid: int) -> list[Process]:
    """Read every process of the pod. Those that carry a keeper's marker, and podwatch's own tree, are ``ours``."""
    root = os.path.realpath(output_dir)
    own = {own_pid, *procfs.descendants(own_pid)}
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    result: list[Process] = []
    for pid in procfs.all_pids():
        status = procfs.read_stat(pid)
        argv = procfs.command(pid)
        if status is not None and procfs.hangs(pid):
            argv = argv or (status.name,)  # stuck in the kernel: its name and what it holds open still tell
        if status is None or status.state in "ZXx" or (not argv and pid != 1):
            continue  # gone, ended, or a kernel thread
        links = procfs.open_files(pid)
        use = None if links is None else procfs.cuda_use_of(links.values())
        inside = {fd: target for fd, target in (links or {}).items() if _below(target, root)}
        identity = ProcessIdentity(pid, status.start_ticks, boot_id(), pid_namespace())
        result.append(
            Process(
                identity=identity,
                parent_pid=status.parent_pid,
                name=status.name,
                argv=argv,
                cwd=procfs.working_directory(pid) or "",
                cuda=None if use is None else use.context,
                gpus=frozenset() if use is None else use.gpus,
                writes=tuple(procfs.open_for_writing(pid, inside)),
                ours=pid in own or procfs.environment_value(pid, "PODWATCH_START_ID") is not None,
                age=identity.age(now),
            )
        )
    return result
