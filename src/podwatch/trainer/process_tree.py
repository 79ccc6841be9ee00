"""Processes and process trees, read from /proc."""

import os
import signal
import time
from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from podwatch.domain.errors import PermissionDenied
from podwatch.domain.process import ProcessIdentity, ProcessRole, ProcessSample
from podwatch.system import procfs
from podwatch.system.procfs import boot_id, from_here, is_alive, pid_namespace, send_signal
from podwatch.trainer.process_roles import Roles

# -- facts about one process -----------------------------------------------------------------------------------------
# Before any judgement; ``read`` reads them from /proc and blocks.


@dataclass(frozen=True, slots=True)
class Process:
    """Facts about one process.

    ``users`` are its real and effective user id, empty where unknown. ``exe`` is the program that the kernel runs,
    whatever argv says (empty where denied). ``tty`` is 0 without a controlling terminal; ``foreground`` is the process
    group that this terminal is given to. ``stdin`` is what descriptor 0 points at. ``cuda`` is None where it cannot be
    read. ``writes`` are files of the run open for writing. ``above_us`` marks the ancestors of podwatch.
    """

    identity: ProcessIdentity
    parent_pid: int
    name: str
    argv: tuple[str, ...]
    cwd: str = ""
    cuda: bool | None = None
    gpus: frozenset[int] = frozenset()
    writes: tuple[str, ...] = ()
    users: tuple[int, ...] = ()
    exe: str = ""
    session: int = 0
    group: int = 0
    tty: int = 0
    foreground: int = -1
    stdin: str = ""
    above_us: bool = False
    roles: Roles = field(kw_only=True, compare=False, repr=False)
    """The names that are known of trainers."""
    links: dict[int, str] = field(default_factory=dict, compare=False, repr=False)
    """Descriptor -> what it points at, for callers that need more."""

    @property
    def pid(self) -> int:
        return self.identity.pid

    @property
    def role(self) -> ProcessRole:
        return self.roles.classify(self.name, self.argv)

    @property
    def runs_what_it_says(self) -> bool:
        """Whether the program that the kernel runs can be what argv says."""
        return self.roles.runs_program(self.exe, self.argv)

    @property
    def launcher_like(self) -> bool:
        """Whether its title or command is that of a known launcher or trainer, and its program can run one: a ``sleep``
        that calls itself torchrun does not count."""
        known = self.role in (ProcessRole.LAUNCHER, ProcessRole.TRAINER, ProcessRole.ORCHESTRATOR)
        return known and self.runs_what_it_says


def read(pid: int, roles: Roles) -> Process | None:
    """Return the facts that tell whether ``pid`` is interactive and whose it is; None if it is gone, ended, or a kernel
    thread. A process that is stuck in the kernel has its name as its command."""
    status = procfs.read_stat(pid)
    if status is None or status.state in "ZXx":
        return None
    argv = procfs.command(pid)
    if not argv and procfs.hangs(pid):
        argv = (status.name,)
    if not argv and pid != 1:
        return None
    links = procfs.open_files(pid)
    use = None if links is None else procfs.cuda_use_of(links.values())
    return Process(
        identity=ProcessIdentity(pid, status.start_ticks, boot_id(), pid_namespace()),
        parent_pid=status.parent_pid,
        name=status.name,
        argv=argv,
        cwd=procfs.working_directory(pid) or "",
        cuda=None if use is None else use.context,
        gpus=frozenset() if use is None else use.gpus,
        users=procfs.users(pid) or (),
        exe=procfs.executable(pid),
        session=status.session,
        group=status.group,
        tty=status.tty,
        foreground=status.foreground,
        stdin=(links or {}).get(0, ""),
        links=links or {},
        roles=roles,
    )


# -- trees -----------------------------------------------------------------------------------------------------------

_ENDED = frozenset("ZXx")


READ_EVERY = 8
"""A process that used no CPU is read again at every eighth look: CPU is counted in hundredths of a second, and a change
of its title takes less. Opening a GPU takes more."""


def sample(status: procfs.ProcStat, roles: Roles) -> ProcessSample:
    """Return what podwatch knows of a living process. ``cuda`` is None if /proc cannot be read."""
    pid, argv = status.pid, procfs.command(status.pid)
    if not argv and procfs.hangs(pid):
        argv = (status.name,)
    use = procfs.cuda_use(pid)
    return ProcessSample(
        identity=ProcessIdentity(pid, status.start_ticks, boot_id(), pid_namespace()),
        parent_pid=status.parent_pid,
        name=status.name,
        command=" ".join(argv),
        role=roles.classify(status.name, argv),
        state=status.state,
        cuda=None if use is None else use.context,
        gpus=frozenset() if use is None else use.gpus,
    )


def marked(start_id: str, users: frozenset[int] | None = None) -> list[ProcessIdentity]:
    """Return the living processes of these users (None: any) whose environment has the id of this start, as far as it
    can be read. Scans /proc."""
    found = []
    for pid in procfs.all_pids():
        if users is not None and not users.issuperset(procfs.users(pid) or (-1,)):
            continue
        if procfs.environment_value(pid, "PODWATCH_START_ID") == start_id:
            status = procfs.read_stat(pid)
            if status is not None and status.state not in _ENDED:
                found.append(ProcessIdentity(pid, status.start_ticks, boot_id(), pid_namespace()))
    return found


def leads_session(launcher: ProcessIdentity) -> bool:
    """Return whether it opened a session of its own (``setsid``), which no outside process can join."""
    status = procfs.read_stat(launcher.pid)
    return status is not None and status.start_ticks == launcher.start_ticks and status.session == launcher.pid


def in_session(
    launcher: ProcessIdentity, ended: float | None = None, known: Container[ProcessIdentity] = ()
) -> list[ProcessIdentity]:
    """Return the living processes of the session that ``launcher`` opened: its descendants by the kernel's rule,
    whatever their environment and parent now are. Empty once the launcher's pid is another process's.

    ``ended``: seconds since boot at which the launcher had ended, if known. The kernel does not reuse a session's
    number while a process of it lives; so if all of them started after that end, and none is ``known``, a process in
    between may have had the number, and they do not count as ours."""
    if not from_here(launcher):
        return []
    leader = procfs.read_stat(launcher.pid)
    if leader is not None and leader.start_ticks != launcher.start_ticks:
        return []
    found: list[ProcessIdentity] = []
    ours = leader is not None or ended is None
    last = 0 if ended is None else int(ended * os.sysconf("SC_CLK_TCK")) + 1
    for pid in procfs.all_pids():
        status = procfs.read_stat(pid)
        if status is None or status.session != launcher.pid or status.start_ticks < launcher.start_ticks:
            continue
        identity = ProcessIdentity(pid, status.start_ticks, boot_id(), pid_namespace())
        ours = ours or status.start_ticks <= last or identity in known
        if status.state not in _ENDED:
            found.append(identity)
    return found if ours else []


class TreeRules(Protocol):
    """What depends on who started the trainer."""

    def launcher_ended(self) -> float | None:
        """Return when the launcher ended (seconds since boot), if that was recorded."""
        ...

    def spared(self, processes: Collection[Process]) -> frozenset[int]:
        """Return the pids among ``processes`` that are below the trainer and not part of it: an operator's terminal.
        They are neither listed nor signalled."""
        ...

    def copied(self, pids: Collection[int]) -> frozenset[int]:
        """Return those of ``pids`` that are not below the trainer and have its environment because an operator gave it
        to them."""
        ...


class AllOurs:
    """No end was recorded, and everything below the trainer is part of it."""

    def launcher_ended(self) -> float | None:
        return None

    def spared(self, processes: Collection[Process]) -> frozenset[int]:
        return frozenset()

    def copied(self, pids: Collection[int]) -> frozenset[int]:
        return frozenset()


_ALL_OURS = AllOurs()


class LocalTree:
    """A tree in which every descendant ever seen stays ours until it ends. Blocks: use a worker.

    ``supervisor`` is a living supervisor: its descendants are ours, it is not. ``start_id`` adds the processes with
    that marker, ``own_session`` those in the session that the launcher opened: orphans of a supervisor that was killed.
    """

    def __init__(
        self,
        launcher: ProcessIdentity,
        roles: Roles,
        *,
        start_id: str = "",
        supervisor: ProcessIdentity | None = None,
        own_session: bool = False,
        users: frozenset[int] | None = None,
        rules: TreeRules = _ALL_OURS,
    ) -> None:
        self._launcher, self._roles = launcher, roles
        self._own_session, self._users = own_session, users
        self._rules = rules
        self._seen: frozenset[tuple[ProcessIdentity, int, str]] = frozenset()
        self._spares: frozenset[int] = frozenset()
        self._missed_at: float | None = None
        self._turn = 0
        self._read: dict[int, tuple[tuple[object, ...], ProcessSample]] = {}
        """Of the last look: what shows that nothing has changed, and what was read."""
        self._start_id = start_id
        self._supervisor = supervisor
        self._known: set[ProcessIdentity] = {launcher}
        self._copies: set[ProcessIdentity] = set()
        """Processes with the marker that an operator gave it, as judged when they were first seen."""

    def _ended(self) -> float | None:
        """Return when the launcher ended: as recorded, or as first missed here. None at that first look: all processes
        in its session then count as its own."""
        if (at := self._rules.launcher_ended()) is not None:
            return at
        before = self._missed_at
        if before is None and not is_alive(self._launcher):
            self._missed_at = time.clock_gettime(time.CLOCK_BOOTTIME)
        return before

    def living(self, *, sweep: bool = False) -> tuple[ProcessSample, ...]:
        """Return the launcher first (if it lives), then the rest by pid. ``sweep`` also searches marker and session."""
        if sweep and self._start_id:
            self._known.update(self._marked())
        if sweep and self._own_session:
            self._known.update(in_session(self._launcher, self._ended(), self._known))
        roots = sorted(self._known, key=lambda identity: identity.start_ticks)
        if self._supervisor is not None and is_alive(self._supervisor):
            roots.insert(0, self._supervisor)
        pids: set[int] = set()
        for root in roots:
            if root.pid not in pids and is_alive(root):  # else what is below it is known, too
                pids.update((root.pid, *procfs.descendants(root.pid)))
        if self._supervisor is not None and from_here(self._supervisor):
            pids.discard(self._supervisor.pid)
        samples = self._samples(sorted(pids))
        living = {found.identity for found in samples}
        # Only single additions and removals: an abandoned look that hung can return and run at the same time.
        for identity in list(self._known):
            if identity not in living:
                self._known.discard(identity)
        spared = self._spared(samples, fresh=sweep)
        samples = [found for found in samples if found.identity.pid not in spared]
        self._known.difference_update([identity for identity in self._known if identity.pid in spared])
        self._known.update(found.identity for found in samples)
        return tuple(sorted(samples, key=lambda found: found.identity != self._launcher))

    def _samples(self, pids: Iterable[int]) -> list[ProcessSample]:
        """Return those that live. One that used no CPU since the last look is what it was then."""
        self._turn += 1
        fresh: dict[int, tuple[tuple[object, ...], ProcessSample]] = {}
        for pid in pids:
            status = procfs.read_stat(pid)
            if status is None or status.state in _ENDED:
                continue
            mark = (status.start_ticks, status.cpu_ticks, status.name, status.parent_pid, status.state)
            before = self._read.get(pid)
            known = before is not None and before[0] == mark and (pid + self._turn) % READ_EVERY
            fresh[pid] = before if before is not None and known else (mark, sample(status, self._roles))
        self._read = fresh
        return [found for _, found in fresh.values()]

    def _marked(self) -> set[ProcessIdentity]:
        """Return the processes that the marker proves to be ours. One that is not below the supervisor, or below a
        process that was, can have a copy of the environment: a shell or a debugger of an operator."""
        found = set(marked(self._start_id, self._users)) - self._copies
        roots = [identity.pid for identity in self._known if is_alive(identity)]
        if self._supervisor is not None and is_alive(self._supervisor):
            roots.append(self._supervisor.pid)
        below = {pid for root in roots for pid in (root, *procfs.descendants(root))}
        if outside := {identity for identity in found if identity.pid not in below}:
            earlier = {one for one in outside if one.start_ticks < self._launcher.start_ticks}
            pids = self._rules.copied([one.pid for one in outside - earlier])
            self._copies |= earlier | {one for one in outside if one.pid in pids}
        return found - self._copies

    def _spared(self, samples: Collection[ProcessSample], *, fresh: bool) -> frozenset[int]:
        """Return the spared pids. Without ``fresh``, judge again only if a process came, went or became another
        program: this runs every two seconds."""
        seen = frozenset((found.identity, found.parent_pid, found.command) for found in samples)
        if fresh or seen != self._seen:
            self._spares = self._judge([p.identity for p in samples])
            self._seen = seen
        return self._spares

    def _judge(self, identities: Iterable[ProcessIdentity]) -> frozenset[int]:
        """Judge who is spared. A process that is stuck in the kernel keeps its last judgement."""
        facts = {identity.pid: read(identity.pid, self._roles) for identity in identities}
        stuck = frozenset(pid for pid in facts if procfs.hangs(pid))
        judged = self._rules.spared([found for pid, found in facts.items() if found is not None and pid not in stuck])
        return judged | (self._spares & stuck)

    @property
    def turned(self) -> bool:
        """Whether the launcher was last seen to be an operator's shell (``uv run rl; exec bash``): training ended."""
        return self._launcher.pid in self._spares

    def signal(self, identities: Iterable[ProcessIdentity], number: int) -> int:
        """Send by pidfd after comparing the ticks; return how many got it. A process that cannot be signalled does not
        stop the others; raises PermissionDenied if none could be. A process that became interactive meanwhile gets
        nothing."""
        sent = 0
        denied: PermissionDenied | None = None
        targets = list(identities)
        spared = self._judge(targets)
        for identity in targets:
            if identity.pid in spared:
                continue
            try:
                sent += send_signal(identity, number)
            except PermissionDenied as error:
                denied = error
        if denied is not None and sent == 0 and number != signal.SIGCONT:
            raise denied
        return sent
