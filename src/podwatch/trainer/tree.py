"""A process tree seen from outside, through /proc: for trainers we attached to and for keepers that do not answer."""

import signal
from collections.abc import Iterable

from podwatch.domain.errors import PermissionDenied
from podwatch.domain.process import ProcessIdentity, ProcessSample
from podwatch.system import procfs
from podwatch.system.identity import boot_id, from_here, is_alive, pid_namespace, send_signal
from podwatch.trainer.roles import classify

_ENDED = frozenset("ZXx")


def sample(pid: int) -> ProcessSample | None:
    """One living process; None when it is gone or a zombie. ``cuda`` is None where /proc may not be read."""
    status = procfs.read_stat(pid)
    if status is None or status.state in _ENDED:
        return None
    argv = procfs.command(pid)
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


class LocalTree:
    """Every descendant ever seen stays ours until it ends (DESIGN section 2, "Supervise"). Blocking: use a worker.

    ``keeper`` is a living keeper: its descendants are ours, itself it is not. ``start_id`` adds what carries the
    marker, which finds orphans of a keeper that was killed.
    """

    def __init__(self, launcher: ProcessIdentity, *, start_id: str = "", keeper: ProcessIdentity | None = None) -> None:
        self._launcher = launcher
        self._start_id = start_id
        self._keeper = keeper
        self._known: set[ProcessIdentity] = {launcher}

    def remember(self, identities: Iterable[ProcessIdentity]) -> None:
        """These were seen in the tree by someone else (the keeper)."""
        self._known.update(identities)

    def living(self, *, sweep: bool = False) -> tuple[ProcessSample, ...]:
        """The launcher first (if it lives), then the rest by pid. ``sweep`` also looks for the marker."""
        if sweep and self._start_id:
            self._known.update(marked(self._start_id))
        self._known = {identity for identity in self._known if is_alive(identity)}
        pids: set[int] = set()
        roots = [identity.pid for identity in self._known]
        if self._keeper is not None and is_alive(self._keeper):
            roots.append(self._keeper.pid)
        for root in roots:
            pids.update(procfs.descendants(root))
        pids.update(identity.pid for identity in self._known)
        if self._keeper is not None and from_here(self._keeper):
            pids.discard(self._keeper.pid)
        samples = [found for pid in sorted(pids) if (found := sample(pid)) is not None]
        self._known.update(found.identity for found in samples)
        return tuple(sorted(samples, key=lambda found: found.identity != self._launcher))

    def signal(self, identities: Iterable[ProcessIdentity], number: int) -> int:
        """Send by pidfd, ticks compared; how many got it. One that may not be signalled does not stop the others;
        PermissionDenied is raised when none could be."""
        sent = 0
        denied: PermissionDenied | None = None
        for identity in identities:
            try:
                sent += send_signal(identity, number)
            except PermissionDenied as error:
                denied = error
        if denied is not None and sent == 0 and number != signal.SIGCONT:
            raise denied
        return sent
