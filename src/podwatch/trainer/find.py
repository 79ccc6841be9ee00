"""Read the pod's processes as ``rules`` judges them. Blocks: use a worker, with ``procfs.patiently``."""

import os
import pwd
import time
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from podwatch.domain.process import FoundTree, PodProcess, ProcessIdentity, ProcessRole
from podwatch.system import procfs
from podwatch.trainer.names_of_run import Target, is_below, named_in_argv, named_in_files
from podwatch.trainer.process_roles import Roles, program
from podwatch.trainer.rules import SoughtRun, classify_trees, writers_beside

if TYPE_CHECKING:
    from podwatch.config.settings import Settings

__all__ = ["PodReader", "find_trees", "read_pod", "read_process", "sought_run", "users_of"]

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


def read_pod(run: SoughtRun, roles: Roles, *, own_pid: int = 0) -> list[PodProcess]:
    """Return every process of the pod that runs, kernel threads left out. ``own_pid``: podwatch (0: this process)."""
    return PodReader(roles).read(run, own_pid=own_pid)


READ_EVERY, YOUNG_SECONDS = 12, 120.0
"""A process that used no CPU is read again at every twelfth reading, a young one at every reading: CPU is counted in
hundredths of a second, and opening a file takes less. Saving a checkpoint takes more."""


class PodReader:
    """Reads the processes of the pod again and again. Blocks."""

    def __init__(self, roles: Roles) -> None:
        self._roles = roles
        self._turn = 0
        self._place: tuple[object, ...] = ()
        """What of the run decides what is read of a process."""
        self._known: dict[int, tuple[tuple[object, ...], PodProcess | None]] = {}
        """What shows that nothing has changed, and what was read: None for a thread of the kernel."""
        self._answered: tuple[object, tuple[FoundTree, ...]] | None = None
        """What ``find_writers`` was asked, and its answer: the same while no process has changed."""
        self._before: frozenset[ProcessIdentity] = frozenset()

    def knew(self, identity: ProcessIdentity) -> bool:
        """Return whether the reading before the last one found it."""
        return identity in self._before

    def read(self, run: SoughtRun, *, own_pid: int = 0, but: Collection[int] = ()) -> list[PodProcess]:
        """Return every process that runs but those of these pids. ``own_pid``: podwatch (0: this process)."""
        own_pid = own_pid or os.getpid()
        own, above = {own_pid, *procfs.descendants(own_pid)}, procfs.ancestors(own_pid)
        place = run.output_dir, run.checkpoint_dir, run.users
        kept, self._known = self._known if place == self._place else {}, {}
        self._before = frozenset(process.identity for _, process in kept.values() if process is not None)
        self._place, self._turn = place, self._turn + 1
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        found = []
        for pid in procfs.all_pids():
            line = procfs.read_stat(pid) if pid not in but else None
            if line is None or line.state in "ZXx":
                continue
            mark = (line.start_ticks, line.cpu_ticks, line.parent_pid, line.group, line.session, line.name)
            before = kept.get(pid)
            again = (pid + self._turn) % READ_EVERY == 0
            young = before is not None and before[1] is not None and before[1].identity.age(now) < YOUNG_SECONDS
            if before is None or before[0] != mark or again or young:
                before = (mark, self._read(line, run, own, None if before is None else before[1]))
            self._known[pid] = before
            if (process := before[1]) is not None:
                ours = pid in own or program(process.argv)[0] == _RUNS_COMMANDS
                age = process.identity.age(now)
                found.append(replace(process, podwatch=ours, above_podwatch=pid in above, age=age))
        return found

    def _read(
        self, line: procfs.ProcStat, run: SoughtRun, own: Collection[int], before: PodProcess | None
    ) -> PodProcess | None:
        process = read_process(line.pid, self._roles, run)
        if process is None or not run.output_dir or not _may_name(process, run, own):
            return process
        if before is not None and (before.argv, before.cwd) == (process.argv, process.cwd):
            return replace(process, names_output=before.names_output)  # its configuration was read when it was loaded
        target = Target(run.output_dir, follow_links=True)
        said = named_in_argv(process.argv, process.cwd, target) or named_in_files(process.argv, process.cwd, target)
        return replace(process, names_output=said)

    def find_writers(self, run: SoughtRun, ours: Collection[ProcessIdentity]) -> tuple[FoundTree, ...]:
        """Return what may write checkpoints of the run beside ``ours``, the trainer that podwatch watches and its
        supervisor. Blocks."""
        pids = {identity.pid for identity in ours}
        above = {parent for pid in pids for parent in procfs.ancestors(pid)} - pids
        before = list(self._known.values())
        processes = self.read(run, but=pids)
        question = run, frozenset(pids), frozenset(above)
        young = any(process.age < YOUNG_SECONDS for process in processes)
        if self._answered is None or young or self._answered[0] != question or before != list(self._known.values()):
            self._answered = question, writers_beside(processes, run, pids, above)
        return self._answered[1]


def read_process(pid: int, roles: Roles, run: SoughtRun | None = None) -> PodProcess | None:
    """Return the facts that /proc shows of one process; None if it has ended, or is a kernel thread. One that is stuck
    in the kernel has its name as its command. Without ``run``, its open files and its environment are not read."""
    line = procfs.read_stat(pid)
    if line is None or line.state in "ZXx":
        return None
    argv = procfs.command(pid, wait=True)
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
    )


def _inside(path: str, run: SoughtRun) -> bool:
    return is_below(path, run.output_dir) or is_below(path, run.checkpoint_dir)


def _may_name(process: PodProcess, run: SoughtRun, own: Collection[int]) -> bool:
    """Whether files that its command names are worth reading."""
    users = run.users is None or (bool(process.users) and run.users.issuperset(process.users))
    return users and process.pid not in own and len(process.argv) > 1
