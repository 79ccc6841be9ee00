"""Processes beside our trainer that write, or may write, into its output_dir.

``judge`` is pure; ``Others.look`` reads /proc and blocks. It is cheap: the open files of a process are read only if it
used CPU since the last look, and occasionally; of most processes only the stat line is read.
"""

import os
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from podwatch.domain.process import TICKS_PER_SECOND, PodProcess, ProcessIdentity, ProcessRole
from podwatch.system import procfs
from podwatch.system.procfs import boot_id, pid_namespace
from podwatch.trainer.process_roles import SHELLS, Roles, program
from podwatch.trainer.rules import is_operators, is_tool

_READERS = ("eval", "lm_eval", "lm-eval", "vllm", "inference", "serve", "generate", "sample", "plot", "convert",
            "merge", "export", "predict", "test", "pytest")  # fmt: skip
"""Programs and scripts with a name that starts like this only read checkpoints."""
_READING_FLAGS = frozenset(
    {"--help", "-h", "--version", "--dry-run", "--dry_run", "--eval-only", "--eval_only", "--evaluate", "--test-only",
     "--test_only", "--validate", "--predict", "--do_eval", "--do_predict"}
)  # fmt: skip
_COPIES = frozenset(
    {"cp", "mv", "ln", "dd", "install", "unzip", "gzip", "pigz", "zstd", "sync", "chown", "chmod", "tar", "rm", "tee",
     "rsync", "scp", "rclone", "b2", "aws", "s5cmd", "git"}
)  # fmt: skip
"""Programs that copy what others wrote."""
_STARTERS = frozenset({"torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed",
                       "accelerate.commands.launch"})  # fmt: skip
_FILES = frozenset({".ckpt", ".pt", ".pth", ".bin", ".safetensors", ".distcp"})
"""Suffixes of checkpoints that are one file."""
READ_EVERY, YOUNG_SECONDS = 12, 120.0
"""A process that used no CPU is read at every twelfth look, a young one at every look: CPU is counted in hundredths of
a second, and opening a file takes less. Saving a checkpoint takes more."""
_LAUNCHERS = frozenset({ProcessRole.LAUNCHER, ProcessRole.TRAINER})
_ENGINES = frozenset({ProcessRole.ENGINE, ProcessRole.INFERENCE})


@dataclass(frozen=True, slots=True)
class Run:
    """What ``judge`` needs to know of our run. ``ours`` are the processes of our tree and its supervisor, ``own`` is
    podwatch; ``roots`` are the directories of step directories, ``users`` those whose trainers count: ours, and
    ``trainer.user``. ``programs`` are what our tree runs (``program_of``)."""

    output_dir: str
    roots: tuple[str, ...]
    ours: frozenset[ProcessIdentity]
    users: frozenset[int]
    own: frozenset[ProcessIdentity] = frozenset()
    programs: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class Seen:
    """One process at one look. ``files`` are those below output_dir that it has open for writing."""

    process: PodProcess
    uid: int
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Other:
    """A process that writes (``writes``), or at least may write, where our trainer does; ``reason`` says why."""

    identity: ProcessIdentity
    argv: tuple[str, ...]
    reason: str
    writes: bool
    sure: bool = True
    """False: judged by its command alone, so it counts as writing only if the next look sees it, too."""


def program_of(argv: tuple[str, ...] | list[str]) -> tuple[str, str]:
    """Return the program, and the script or module that it launches (empty if it is no launcher)."""
    name, arguments = program(argv)
    if name in _STARTERS:
        words = iter(arguments)
        for word in words:
            if word in ("-m", "--module"):
                return name, next(words, "")
            if word.endswith(".py"):
                return name, PurePosixPath(word).name
    return name, ""


def names(argv: Iterable[str], cwd: str, output_dir: str) -> bool:
    """Return whether output_dir itself (no path below it) is a value in these arguments."""
    for word in argv:
        value = word.rpartition("=")[2]
        path = os.path.normpath(os.path.join(cwd or "/", value))  # noqa: PTH118 - text, not the disk
        if path == output_dir and ("/" in value or value == PurePosixPath(output_dir).name):
            return True
    return False


def reads_only(argv: tuple[str, ...]) -> bool:
    """Return whether this is an evaluation, server or conversion, by the name of the program or by a flag."""
    if "--do_train" in argv:
        return False
    name, script = program_of(argv)
    shown = (PurePosixPath(word).name.lower() for word in (name, script) if word)
    return any(word.startswith(_READERS) for word in shown) or any(
        word.partition("=")[0] in _READING_FLAGS for word in argv
    )


def in_checkpoint(path: str, roots: Iterable[str]) -> bool:
    """Return whether this file is part of a checkpoint: below ``root/step_40``, or ``root/step=40.ckpt`` itself."""
    for root in roots:
        if path.startswith(root.rstrip("/") + "/"):
            first, *rest = path[len(root.rstrip("/")) + 1 :].split("/")
            if any(c.isdigit() for c in first) and (rest or PurePosixPath(first).suffix in _FILES):
                return True
    return False


def judge(seen: Mapping[int, Seen], run: Run, looks: Mapping[int, Other | None] | None = None) -> tuple[Other, ...]:
    """Return everything beside our trainer that may write there, one per process tree. ``seen`` is by pid; ``looks``
    are results of ``look_of`` that are known already."""
    found: dict[int, Other] = {}
    pids = {identity.pid for identity in run.ours}
    kin = run.ours | run.own
    above = {pid for identity in run.ours for pid in _ancestors(identity.pid, seen)}
    for pid, one in seen.items():
        other = looks[pid] if looks is not None else look_of(one, run)
        if other is None or pid in above:
            continue  # a wrapper that started ours (`timeout 10h python train.py ...`) is no second trainer
        if one.process.group in pids or one.process.session in pids or _belongs(one.process, seen, kin):
            continue  # orphans, too: a group and a session keep the pid of our process that led them
        found[pid] = other
    return tuple(found[pid] for pid in sorted(found) if not _below_another(pid, seen, found))


def look_of(one: Seen, run: Run) -> Other | None:
    """Return what this process is, wherever it is in the tree; None if it does not write there."""
    process = one.process
    name, _ = program_of(process.argv)
    if is_tool(process.argv) or is_operators(process) or name in _COPIES or name in SHELLS or not process.argv:
        return None

    def other(reason: str, *, writes: bool, sure: bool = True) -> Other:
        return Other(process.identity, process.argv, reason, writes, sure)

    saving = next((path for path in one.files if in_checkpoint(path, run.roots)), "")
    if saving:
        return other(f"it has {saving} open for writing", writes=True)
    role = process.role
    if one.uid not in run.users or role in _ENGINES or reads_only(process.argv):
        return None
    named = names(process.argv, process.cwd, run.output_dir)
    if named and process.cuda:
        return other(f"it holds a CUDA context and its command names {run.output_dir}", writes=True)
    if named and program_of(process.argv) in run.programs:
        return other(f"it runs the same program with {run.output_dir}", writes=True, sure=False)
    if one.files and (role in _LAUNCHERS) and (named or "::" in process.argv[0]):
        return other(f"it is a launcher that has {one.files[0]} open for writing", writes=True, sure=False)
    return other(f"its command names {run.output_dir}", writes=False) if named else None


def _ancestors(pid: int, seen: Mapping[int, Seen]) -> set[int]:
    found: set[int] = set()
    while pid in seen and (parent := seen[pid].process.parent_pid) not in found:
        found.add(parent)
        pid = parent
    return found


def _belongs(process: PodProcess, seen: Mapping[int, Seen], ours: Collection[ProcessIdentity]) -> bool:
    passed = set[int]()
    now: PodProcess | None = process
    while now is not None and now.identity.pid not in passed:
        if now.identity in ours:
            return True
        passed.add(now.identity.pid)
        parent = seen.get(now.parent_pid)
        now = parent.process if parent is not None else None
    return False


def _below_another(pid: int, seen: Mapping[int, Seen], found: Mapping[int, Other]) -> bool:
    """Return whether a parent is in ``found``, too, with at least as strong a reason."""
    passed = {pid}
    parent = seen[pid].process.parent_pid
    while parent in seen and parent not in passed:
        if parent in found and (found[parent].writes or not found[pid].writes):
            return True
        passed.add(parent)
        parent = seen[parent].process.parent_pid
    return False


class Others:
    """Repeated looks; keeps the facts of processes that have been idle since."""

    def __init__(self, roles: Roles) -> None:
        self._roles = roles
        self._turn = 0
        self._known: dict[int, _Known] = {}
        self._kernel: frozenset[int] = frozenset()
        """Threads of the kernel: a machine without containers has dozens, and none of them opens a file."""
        self._before: dict[int, _Known] = {}
        self._asked: tuple[object, ...] = ()
        self._unsure: frozenset[ProcessIdentity] = frozenset()

    def knew(self, identity: ProcessIdentity) -> bool:
        """Return whether the look before the last one saw it."""
        known = self._before.get(identity.pid)
        return known is not None and known.seen.process.identity == identity

    def look(self, run: Run, start_id: str = "") -> tuple[Other, ...]:
        """Return the processes that may write there. Blocks. ``start_id``: a process with this marker in its
        environment is ours, wherever it is in the tree."""
        asked = (run.output_dir, run.roots, run.users, run.programs)
        kept = self._known if asked == self._asked else {}
        self._turn += 1
        young = (time.clock_gettime(time.CLOCK_BOOTTIME) - YOUNG_SECONDS) * TICKS_PER_SECOND
        ours = {identity.pid: identity.start_ticks for identity in run.ours | run.own}
        known: dict[int, _Known] = {}
        kernel = set[int]()
        for pid in procfs.all_pids():
            if pid in self._kernel and (pid + self._turn) % READ_EVERY:
                kernel.add(pid)
                continue
            line, before = procfs.stat_line(pid), kept.get(pid)
            if before is not None and (before.mark[0] >= young or not (pid + self._turn) % READ_EVERY):
                before = None  # it is read again
            if before is not None and before.line == line:
                known[pid] = before
                continue
            status = procfs.stat_of(line)
            if status is None or status.state in "ZXx":
                continue
            if procfs.KTHREADD in (pid, status.parent_pid):
                kernel.add(pid)
                continue
            mark = (status.start_ticks, status.cpu_ticks, status.parent_pid)
            if before is not None and before.mark == mark:
                known[pid] = replace(before, line=line)
            elif ours.get(pid) == status.start_ticks:  # known to be ours: its open files do not matter here
                bare = Seen(_bare(pid, status), -1)
                known[pid] = _Known(line, mark, bare, None)
            else:
                seen = _read(pid, status, run.output_dir, self._roles)
                known[pid] = _Known(line, mark, seen, look_of(seen, run))
        self._before, self._known, self._asked, self._kernel = self._known, known, asked, frozenset(kernel)
        found = judge({p: k.seen for p, k in known.items()}, run, {p: k.other for p, k in known.items()})
        others = tuple(other for other in found if not _marked(other, start_id))
        unsure, self._unsure = self._unsure, frozenset(o.identity for o in others if not o.sure)
        return tuple(
            o if o.sure or o.identity in unsure else Other(o.identity, o.argv, o.reason, writes=False) for o in others
        )


@dataclass(frozen=True, slots=True)
class _Known:
    """``line``: its stat line as read. ``mark``: start, CPU used and parent; while these stay the same, so does the
    rest."""

    line: bytes
    mark: tuple[int, int, int]
    seen: Seen
    other: Other | None


def _bare(pid: int, status: procfs.ProcStat) -> PodProcess:
    identity = _identity(pid, status)
    return PodProcess(identity, status.parent_pid, status.name, (), group=status.group, session=status.session)


def _identity(pid: int, status: procfs.ProcStat) -> ProcessIdentity:
    return ProcessIdentity(pid, status.start_ticks, boot_id(), pid_namespace())


def _marked(other: Other, start_id: str) -> bool:
    return bool(start_id) and procfs.environment_value(other.identity.pid, "PODWATCH_START_ID") == start_id


def _read(pid: int, status: procfs.ProcStat, output_dir: str, roles: Roles) -> Seen:
    links = procfs.open_files(pid)
    use = None if links is None else procfs.cuda_use_of(links.values())
    root = output_dir.rstrip("/") + "/"
    inside = {fd: target for fd, target in (links or {}).items() if target.startswith(root)}
    argv = procfs.command(pid)
    process = PodProcess(
        identity=_identity(pid, status),
        parent_pid=status.parent_pid,
        name=status.name,
        argv=argv,
        exe=procfs.executable(pid),
        cwd=procfs.working_directory(pid) or "",
        group=status.group,
        session=status.session,
        tty=status.tty,
        role=roles.classify(status.name, argv),
        cuda=None if use is None else use.context,
        gpus=frozenset() if use is None else use.gpus,
    )
    return Seen(process, _uid(pid), tuple(procfs.open_for_writing(pid, inside)) if inside else ())


def _uid(pid: int) -> int:
    """-1 when it is gone."""
    try:
        return os.stat(f"/proc/{pid}").st_uid  # noqa: PTH116
    except OSError:
        return -1
