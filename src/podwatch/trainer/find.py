"""Read the pod's processes as ``rules`` judges them. Blocks: use a worker, with ``procfs.patiently``."""

import os
import pwd
import time
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from podwatch.domain.process import FoundTree, PodProcess, ProcessIdentity, ProcessRole
from podwatch.system import procfs
from podwatch.trainer.process_roles import Roles, Target, named_in_argv, named_in_files, program
from podwatch.trainer.rules import SoughtRun, classify_trees

if TYPE_CHECKING:
    from podwatch.config.settings import Settings

__all__ = ["find_trees", "read_pod", "read_process", "sought_run", "users_of"]

_START_ID = "PODWATCH_START_ID"
"""Variable of each process that a supervisor of podwatch started, also another podwatch's."""
_RUNS_COMMANDS = "podwatch.hooks.child_main"
"""What runs the command of a hook or an evaluation: all of it is below this process."""


def sought_run(
    settings: "Settings", start_ids: Collection[str] = (), attach: ProcessIdentity | None = None
) -> SoughtRun:
    """Return what the configuration says about the trainer. Resolves paths."""
    trainer, gpu = settings.trainer, settings.gpu
    return SoughtRun(
        output_dir=os.path.realpath(trainer.output_dir),
        users=users_of(trainer.user),
        checkpoint_dir=os.path.realpath(trainer.checkpoint_dir) if trainer.checkpoint_dir is not None else "",
        gpus=frozenset((*gpu.inference, *gpu.trainer)),
        command=trainer.command,
        cwd=os.path.realpath(trainer.cwd or trainer.output_dir.parent),
        start_ids=frozenset(start_ids),
        attach=attach,
    )


def users_of(user: str) -> frozenset[int]:
    """Return whose processes can be the trainer: our own user's, and that of ``trainer.user``."""
    found = {os.geteuid()}
    if user:
        try:
            found.add(pwd.getpwnam(user).pw_uid)
        except KeyError:
            if user.isdigit():
                found.add(int(user))
    return frozenset(found)


def find_trees(run: SoughtRun, roles: Roles, *, own_pid: int = 0) -> tuple[FoundTree, ...]:
    return classify_trees(read_pod(run, roles, own_pid=own_pid), run)


def read_pod(run: SoughtRun | None, roles: Roles, *, own_pid: int = 0) -> list[PodProcess]:
    """Return every process of the pod that runs, kernel threads left out. ``own_pid``: podwatch (0: this process).
    Without ``run``, nothing is read that ties a process to it."""
    own_pid = own_pid or os.getpid()
    own, above = {own_pid, *procfs.descendants(own_pid)}, procfs.ancestors(own_pid)
    found = [process for pid in procfs.all_pids() if (process := read_process(pid, roles, run)) is not None]
    target = Target(run.output_dir, follow_links=True) if run is not None else None
    return [
        replace(
            process,
            podwatch=process.pid in own or program(process.argv)[0] == _RUNS_COMMANDS,
            above_podwatch=process.pid in above,
            names_output=_names_output(process, target) if run and target and _may_name(process, run, own) else "",
        )
        for process in found
    ]


def read_process(pid: int, roles: Roles, run: SoughtRun | None = None) -> PodProcess | None:
    """Return the facts that /proc shows of one process; None if it has ended, or is a kernel thread. One that is stuck
    in the kernel has its name as its command. Without ``run``, its open files and its environment are not read."""
    line = procfs.read_stat(pid)
    if line is None or line.state in "ZXx":
        return None
    argv = procfs.command(pid)
    if not argv and pid != 1:
        if not procfs.hangs(pid):
            return None
        argv = (line.name,)
    exe, role = procfs.executable(pid), roles.classify(line.name, argv)
    process = PodProcess(
        identity=ProcessIdentity(pid, line.start_ticks, procfs.boot_id(), procfs.pid_namespace()),
        parent_pid=line.parent_pid,
        name=line.name,
        argv=argv,
        exe=exe,
        users=procfs.users(pid) or (),
        group=line.group,
        session=line.session,
        tty=line.tty,
        role=role if roles.runs_program(exe, argv) else ProcessRole.OTHER,
    )
    return process if run is None else _with_ties(process, run)


def _with_ties(process: PodProcess, run: SoughtRun) -> PodProcess:
    pid, links = process.pid, procfs.open_files(process.pid)
    use = None if links is None else procfs.cuda_use_of(links.values())
    inside = {fd: path for fd, path in (links or {}).items() if _inside(path, run)}
    return replace(
        process,
        cwd=procfs.working_directory(pid) or "",
        cuda=None if use is None else use.context,
        gpus=frozenset() if use is None else use.gpus,
        writes=tuple(procfs.open_for_writing(pid, inside)),
        start_id=procfs.environment_value(pid, _START_ID) or "",
        age=process.identity.age(time.clock_gettime(time.CLOCK_BOOTTIME)),
    )


def _inside(path: str, run: SoughtRun) -> bool:
    return any(root and path.startswith(root.rstrip("/") + "/") for root in (run.output_dir, run.checkpoint_dir))


def _may_name(process: PodProcess, run: SoughtRun, own: Collection[int]) -> bool:
    """Whether files that its command names are worth reading."""
    users = run.users is None or (bool(process.users) and run.users.issuperset(process.users))
    return users and process.pid not in own and len(process.argv) > 1


def _names_output(process: PodProcess, target: Target) -> str:
    """Return, as text, how a path that leads through links, or a configuration file, names output_dir."""
    return named_in_argv(process.argv, process.cwd, target) or named_in_files(process.argv, process.cwd, target)
