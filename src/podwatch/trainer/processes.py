"""Facts about one process of the pod, before any judgement; ``read`` reads them from /proc and blocks."""

from dataclasses import dataclass, field

from podwatch.domain.process import ProcessIdentity, ProcessRole
from podwatch.system import procfs
from podwatch.system.identity import boot_id, pid_namespace
from podwatch.trainer.roles import classify, runs_program


@dataclass(frozen=True, slots=True)
class Process:
    """Facts about one process.

    ``users`` are its real and effective user id, empty where unknown. ``exe`` is the program that the kernel runs,
    whatever argv says (empty where denied). ``tty`` is 0 without a controlling terminal; ``foreground`` is the process
    group that this terminal is given to. ``stdin`` is what descriptor 0 points at. ``cuda`` is None where it cannot be
    read. ``writes`` are files of the run open for writing. ``names_run`` says as text how it names the run's
    output directory or repeats its command. ``ours`` marks podwatch, its children, and trees of any keeper;
    ``above_us`` the ancestors of podwatch. ``age`` is in seconds.
    """

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
    users: tuple[int, ...] = ()
    exe: str = ""
    session: int = 0
    group: int = 0
    tty: int = 0
    foreground: int = -1
    stdin: str = ""
    names_run: str = ""
    above_us: bool = False
    links: dict[int, str] = field(default_factory=dict, compare=False, repr=False)
    """Descriptor -> what it points at, for callers that need more."""

    @property
    def pid(self) -> int:
        return self.identity.pid

    @property
    def launcher_like(self) -> bool:
        """Whether its title or command is that of a known launcher or trainer, and its program can run one: a ``sleep``
        that calls itself torchrun does not count."""
        role = classify(self.name, self.argv)
        known = role in (ProcessRole.LAUNCHER, ProcessRole.TRAINER, ProcessRole.ORCHESTRATOR)
        return known and runs_program(self.exe, self.argv)


def read(pid: int) -> Process | None:
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
    )
