"""A process tree seen from outside, through /proc: for trainers we attached to and for keepers that do not answer."""

import os
import signal
import time
from collections.abc import Callable, Collection, Container, Iterable

from podwatch.domain.errors import PermissionDenied
from podwatch.domain.process import ProcessIdentity, ProcessSample
from podwatch.system import procfs
from podwatch.system.identity import boot_id, from_here, is_alive, pid_namespace, send_signal
from podwatch.trainer.processes import Process, read
from podwatch.trainer.roles import classify

_ENDED = frozenset("ZXx")


def sample(pid: int) -> ProcessSample | None:
    """One living process; None when it is gone or a zombie. ``cuda`` is None where /proc may not be read."""
    status = procfs.read_stat(pid)
    if status is None or status.state in _ENDED:
        return None
    argv = procfs.command(pid)
    if not argv and procfs.hangs(pid):
        argv = (status.name,)
    use = procfs.cuda_use(pid)
    return ProcessSample(
        identity=ProcessIdentity(pid, status.start_ticks, boot_id(), pid_namespace()),
        parent_pid=status.parent_pid,
        name=status.name,
        command=" ".join(argv),
        role=classify(status.name, argv),
        state=status.state,
        cuda=None if use is None else use.context,
        gpus=frozenset() if use is None else use.gpus,
    )


def marked(start_id: str) -> list[ProcessIdentity]:
    """Living processes whose environment says they belong to this start, where it may be read. Costs a whole scan."""
    found = []
    for pid in procfs.all_pids():
        if procfs.environment_value(pid, "PODWATCH_START_ID") == start_id:
            status = procfs.read_stat(pid)
            if status is not None and status.state not in _ENDED:
                found.append(ProcessIdentity(pid, status.start_ticks, boot_id(), pid_namespace()))
    return found


def leads_session(launcher: ProcessIdentity) -> bool:
    """Whether it opened a session of its own (``setsid``), which nobody can join from outside."""
    status = procfs.read_stat(launcher.pid)
    return status is not None and status.start_ticks == launcher.start_ticks and status.session == launcher.pid


def in_session(
    launcher: ProcessIdentity, ended: float | None = None, known: Container[ProcessIdentity] = ()
) -> list[ProcessIdentity]:
    """Living processes of the session that ``launcher`` opened: its descendants by the kernel's rule, whatever they did
    to their environment and wherever they were re-parented to. None once its number is another process's.

    ``ended``: seconds since boot at which the launcher had ended, where that is known. A session's number is given to
    nobody while a process of it lives; so if all of them began after that end, and none is ``known``, an unknown one
    may have had the number and be gone as well: they are not taken for ours."""
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
    """Every descendant ever seen stays ours until it ends (DESIGN section 2, "Supervise"). Blocking: use a worker.

    ``keeper`` is a living keeper: its descendants are ours, itself it is not. ``start_id`` adds what carries the
    marker, ``own_session`` what is in the session that the launcher opened: orphans of a keeper that was killed.
    ``ended`` tells when the launcher ended (seconds since boot), where that was recorded. ``spare`` gives the pids
    among processes that are not the trainer's although they are below it: an operator's terminal. They are neither
    listed nor signalled.
    """

    def __init__(
        self,
        launcher: ProcessIdentity,
        *,
        start_id: str = "",
        keeper: ProcessIdentity | None = None,
        own_session: bool = False,
        ended: Callable[[], float | None] = lambda: None,
        spare: Callable[[Collection[Process]], frozenset[int]] = lambda _: frozenset(),
    ) -> None:
        self._launcher = launcher
        self._own_session = own_session
        self._recorded_end = ended
        self._spare = spare
        self._seen: frozenset[tuple[ProcessIdentity, int, str]] = frozenset()
        self._spares: frozenset[int] = frozenset()
        self._missed_at: float | None = None
        self._start_id = start_id
        self._keeper = keeper
        self._known: set[ProcessIdentity] = {launcher}

    def remember(self, identities: Iterable[ProcessIdentity]) -> None:
        """These were seen in the tree by someone else (the keeper)."""
        self._known.update(identities)

    def _ended(self) -> float | None:
        """When the launcher had ended, as recorded, or as first missed here; None at that first look: who is in its
        session then is taken for its own."""
        if (at := self._recorded_end()) is not None:
            return at
        before = self._missed_at
        if before is None and not is_alive(self._launcher):
            self._missed_at = time.clock_gettime(time.CLOCK_BOOTTIME)
        return before

    def living(self, *, sweep: bool = False) -> tuple[ProcessSample, ...]:
        """The launcher first (if it lives), then the rest by pid. ``sweep`` also looks for marker and session."""
        if sweep and self._start_id:
            self._known.update(marked(self._start_id))
        if sweep and self._own_session:
            self._known.update(in_session(self._launcher, self._ended(), self._known))
        # One change at a time, and none that takes another's back: a look that hung and was left behind may come back.
        for identity in list(self._known):
            if not is_alive(identity):
                self._known.discard(identity)
        pids: set[int] = set()
        roots = [identity.pid for identity in list(self._known)]
        if self._keeper is not None and is_alive(self._keeper):
            roots.append(self._keeper.pid)
        for root in roots:
            pids.update(procfs.descendants(root))
        pids.update(identity.pid for identity in list(self._known))
        if self._keeper is not None and from_here(self._keeper):
            pids.discard(self._keeper.pid)
        samples = [found for pid in sorted(pids) if (found := sample(pid)) is not None]
        spared = self._spared(samples, fresh=sweep)
        samples = [found for found in samples if found.identity.pid not in spared]
        self._known.difference_update([identity for identity in self._known if identity.pid in spared])
        self._known.update(found.identity for found in samples)
        return tuple(sorted(samples, key=lambda found: found.identity != self._launcher))

    def _spared(self, samples: Collection[ProcessSample], *, fresh: bool) -> frozenset[int]:
        """Without ``fresh`` judged again only when a process came, went or became another program: this is asked every
        two seconds."""
        seen = frozenset((found.identity, found.parent_pid, found.command) for found in samples)
        if fresh or seen != self._seen:
            self._spares = self._judge([p.identity for p in samples])
            self._seen = seen
        return self._spares

    def _judge(self, identities: Iterable[ProcessIdentity]) -> frozenset[int]:
        """Who is spared. Of one that is stuck in the kernel nothing new can be known: it stays what it was."""
        facts = {identity.pid: read(identity.pid) for identity in identities}
        stuck = frozenset(pid for pid in facts if procfs.hangs(pid))
        judged = self._spare([found for pid, found in facts.items() if found is not None and pid not in stuck])
        return judged | (self._spares & stuck)

    @property
    def turned(self) -> bool:
        """Whether the launcher became an operator's shell (``uv run rl; exec bash``), as last seen: training ended."""
        return self._launcher.pid in self._spares

    def signal(self, identities: Iterable[ProcessIdentity], number: int) -> int:
        """Send by pidfd, ticks compared; how many got it. One that may not be signalled does not stop the others;
        PermissionDenied is raised when none could be. What became interactive in the meantime gets nothing."""
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
