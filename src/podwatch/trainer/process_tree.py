"""Processes and process trees, read from /proc."""

import contextlib
import os
import signal
import time
from collections.abc import Collection, Container, Iterable

from podwatch.domain.errors import PermissionDenied
from podwatch.domain.process import ProcessIdentity, ProcessSample
from podwatch.system import procfs
from podwatch.system.procfs import boot_id, from_here, is_alive, pid_namespace, send_signal
from podwatch.trainer.find import read_pod, read_process
from podwatch.trainer.process_roles import Roles
from podwatch.trainer.rules import SoughtRun, own_processes, serves_terminals, to_signal
from podwatch.trainer.supervisor_files import SupervisorRecord, read_end

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


class LocalTree:
    """A tree in which every descendant ever seen stays ours until it ends, an operator's terminal in it left out: that
    is neither listed nor signalled. Blocks: use a worker.

    ``record``: of the start, if a supervisor made it. The descendants of a living supervisor are ours, it is not. So
    are processes with the start's marker, and with ``own_session`` those in the session that the launcher opened:
    orphans of a supervisor that was killed. ``users``: whose processes count (None: anyone's).
    """

    def __init__(
        self,
        launcher: ProcessIdentity,
        roles: Roles,
        *,
        record: SupervisorRecord | None = None,
        own_session: bool = False,
        users: frozenset[int] | None = None,
    ) -> None:
        self._launcher, self._roles, self._record = launcher, roles, record
        self._own_session, self._users = own_session, users
        self._servers: set[ProcessIdentity] = set()
        """The terminal servers in which an operator's shell was seen: they stay the operator's. One listing of
        processes can miss the shell, because the kernel skips children while their siblings end."""
        self._seen: frozenset[tuple[ProcessIdentity, int, str]] = frozenset()
        self._spares: frozenset[int] = frozenset()
        self._missed_at: float | None = None
        self._turn = 0
        self._read: dict[int, tuple[tuple[object, ...], ProcessSample]] = {}
        """Of the last look: what shows that nothing has changed, and what was read."""
        self._supervisor = None if record is None else record.supervisor
        self._known: set[ProcessIdentity] = {launcher}
        self._copies: set[ProcessIdentity] = set()
        """Processes with the start id that an operator gave it, as judged when they were first seen."""

    def _ended(self) -> float | None:
        """Return when the launcher ended: as recorded, or as first missed here. None at that first look: all processes
        in its session then count as its own."""
        with contextlib.suppress(OSError):
            if self._record and (at := read_end(self._record.directory, self._record.start_id)) is not None:
                return at
        before = self._missed_at
        if before is None and not is_alive(self._launcher):
            self._missed_at = time.clock_gettime(time.CLOCK_BOOTTIME)
        return before

    def living(self, *, sweep: bool = False) -> tuple[ProcessSample, ...]:
        """Return the launcher first (if it lives), then the rest by pid. ``sweep`` also searches marker and session."""
        if sweep and self._record is not None:
            self._known.update(self._marked(self._record.start_id))
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

    def _marked(self, start_id: str) -> set[ProcessIdentity]:
        """Return the processes that the start id proves to be ours. An operator's shell or debugger can have a copy of
        the environment: a process that was not ours when it was first seen never is."""
        run = SoughtRun("", self._users, start_ids=frozenset({start_id}))
        processes = read_pod(run, self._roles)
        own = {
            p.identity for p in own_processes(processes, run) if p.identity.start_ticks >= self._launcher.start_ticks
        }
        self._copies |= {p.identity for p in processes if p.start_id == start_id} - own - self._known
        return own - self._copies

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
        pids = [identity.pid for identity in identities]
        stuck = frozenset(pid for pid in pids if procfs.hangs(pid))
        tree = [found for pid in pids if pid not in stuck and (found := read_process(pid, self._roles)) is not None]
        ours = to_signal(tree, self._users, started=self._record is not None)
        self._servers.update(p.identity for p in tree if p.pid not in ours and serves_terminals(p))
        spared = {p.pid for p in tree if p.pid not in ours or p.identity in self._servers}
        return frozenset(spared | (self._spares & stuck))

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
