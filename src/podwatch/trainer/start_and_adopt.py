"""Start trainers under supervisors, find them, and attach to others."""

import contextlib
import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, TypeVar

from podwatch.domain.errors import Busy, HostError, PermissionDenied, PodwatchError
from podwatch.domain.process import FoundTree, PodProcess, ProcessIdentity, TreeAnswer
from podwatch.domain.secrets import register_argv, register_named
from podwatch.system import procfs
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import Clock
from podwatch.system.environment_without_secrets import scrubbed_environment
from podwatch.system.files import atomic_write, read_small
from podwatch.system.pinned_directories import HIDDEN
from podwatch.system.procfs import command, environment_items, from_here, is_alive, patiently
from podwatch.trainer import process_tree, supervisor_files
from podwatch.trainer.environment import for_training
from podwatch.trainer.find import read_pod, users_of
from podwatch.trainer.process_roles import Roles
from podwatch.trainer.rules import (
    SoughtRun,
    classify_trees,
    gpu_holders,
    may_belong,
    own_processes,
    supervised_start,
    to_signal,
)
from podwatch.trainer.supervisor_files import (
    SupervisorRecord,
    lock_holder,
    open_starts,
    read_exit,
    read_record,
    read_result,
    record_in_lock,
)
from podwatch.trainer.trainer_handle import TrainerHandle

T = TypeVar("T")


class CannotExecute(HostError):  # noqa: N818
    """The command cannot run as it is written (no such program, directory or user): a retry changes
    nothing."""


class MayNotExecute(PermissionDenied, CannotExecute):
    """The command cannot run because a permission is missing."""


@dataclass(frozen=True, slots=True)
class StartPlan:
    """One start, decided in full before anything happens. ``env`` may hold secrets: never logged, never in argv.
    ``before`` are commands that run first, one after another; processes that they leave running belong to this
    start."""

    start_id: str
    argv: tuple[str, ...]
    cwd: str
    env: Mapping[str, str] = field(repr=False)
    user: str = ""
    nofile: int = 65_536
    step: int | None = None
    before: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Look:
    """What runs on this pod now. ``handle`` is the supervised trainer of this run, living or ended. ``trees`` may train
    this run, and podwatch did not start them. ``holders`` are all processes with a CUDA context on the run's GPUs, as
    text. An interrupted stop of one of ``stoppable`` can be finished even if it no longer looks like training.
    ``kept``: who holds the run lock while no trainer is seen (in another container, or of another run in this
    output_dir); empty if nobody does."""

    handle: TrainerHandle | None = None
    trees: tuple[FoundTree, ...] = ()
    holders: tuple[str, ...] = ()
    stoppable: frozenset[ProcessIdentity] = frozenset()
    kept: str = ""


_CALL_DEADLINE = 30.0
_ENDING_SECONDS = 1.0
_START_DEADLINE = 30.0
"""Lock, record, fork and exec take milliseconds; a disk that cannot fsync for this long cannot run training either."""
_BEFORE_DEADLINE = 300.0
"""Seconds for one command of ``trainer.start_before``: starting a cluster's head takes ten, on a busy disk minutes."""

_REFUSED_ENDS = 5.0


@dataclass(frozen=True, slots=True)
class SupervisorJob:
    """Job mode: the supervisor ends with its owner (docs/jobs.md). ``pipe``: the read end of a pipe whose other end
    only ``owner``, podwatch's init, holds. ``grace``: seconds from its end of file to SIGKILL for the tree."""

    pipe: int
    grace: float
    owner: ProcessIdentity

    def to_dict(self) -> dict[str, object]:
        owner = {"owner": self.owner.pid, "owner_ticks": self.owner.start_ticks}
        return {"pipe": self.pipe, "grace": self.grace, **owner}


@dataclass(frozen=True, slots=True)
class SupervisorOptions:
    """Options of a supervisor.

    ``beside``: podwatch's directory beside output_dir, for the lock that other podwatches meet; None: none.
    ``several_nodes``: others train in output_dir, too, each with such a directory of its own.
    ``grace``: seconds from a SIGTERM to the supervisor (its unit is stopped) to SIGKILL for the tree. ``linger``:
    seconds that it tries to record the end of the tree where the disk refuses. ``job``: None unless podwatch runs in
    job mode."""

    beside: Path | None = None
    several_nodes: bool = False
    grace: float = 30.0
    linger: float = 10.0
    log_limit: int = 64 << 20
    log_count: int = 3
    job: SupervisorJob | None = None


def runs_as_service(environ: Mapping[str, str]) -> bool:
    """Return whether podwatch is a root service under systemd: the supervisor then gets a transient service of its own,
    outside our sandbox and cgroup."""
    return "INVOCATION_ID" in environ and Path("/run/systemd/system").is_dir() and os.geteuid() == 0


def own_unit(cgroups: str) -> str:
    """Return the service that this process runs in, from the text of ``/proc/self/cgroup``: ``podwatch@NAME.service``
    for an instance. Training is ordered before it, so that at power-off podwatch leaves first."""
    for line in cgroups.splitlines():
        for segment in reversed(line.rpartition(":")[2].split("/")):
            if segment.endswith(".service"):
                return segment
    return "podwatch.service"


def systemd_argv(
    run_id: str,
    directory: Path,
    supervisor: list[str],
    options: SupervisorOptions,
    nofile: int,
    unit: str = "podwatch.service",
) -> list[str]:
    """Return the ``systemd-run`` command for a transient *service* (a scope would inherit the sandbox). The fixed name
    is a lock of its own. OOMPolicy: one child killed by the kernel must not end the unit. KillMode=mixed: SIGTERM goes
    only to the supervisor, which passes it on to the tree."""
    properties = {
        "Description": f"training of run {run_id}, supervised for podwatch",
        "Before": unit,
        "WorkingDirectory": str(directory),
        "LimitNOFILE": str(max(nofile, 65_536)),
        "OOMScoreAdjust": "0",
        "OOMPolicy": "continue",
        "TasksMax": "infinity",
        "KillMode": "mixed",
        "TimeoutStopSec": str(int(options.grace) + 15),
        "StandardOutput": f"append:{directory}/supervisor.log",
        "StandardError": f"append:{directory}/supervisor.log",
        "UMask": "0077",
    }
    argv = ["systemd-run", f"--unit=podwatch-train-{run_id}", "--collect", "--no-ask-password", "--quiet"]
    return [*argv, *(f"--property={name}={value}" for name, value in properties.items()), "--", *supervisor]


class SupervisorLauncher:
    """Starts and finds trainers of one run. ``run`` returns, for each look, how to recognise its trainer; by default
    any process of our user counts.

    ``python`` defaults to the base interpreter behind our virtual environment, so that removing the environment
    (an upgrade) does not touch a running supervisor.
    """

    def __init__(
        self,
        run_id: str,
        output_dir: Path,
        state_dir: Path,
        clock: Clock,
        *,
        roles: Roles,
        run: Callable[[], SoughtRun] | None = None,
        use_systemd: bool | None = None,
        python: str | None = None,
        options: SupervisorOptions = SupervisorOptions(),
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._run_id = run_id
        self._output_dir = Path(os.path.realpath(output_dir))
        self._linked = self._output_dir != output_dir
        self._directory = state_dir / run_id / supervisor_files.DIRECTORY
        self._log = state_dir / run_id / "logs" / "train.log"
        self._clock = clock
        default = SoughtRun(str(self._output_dir), users=users_of(""))
        self._roles = roles
        self._run = run or (lambda: default)
        if use_systemd is None:  # a job's tree stays in the job's cgroup, whatever its engine is a service of
            use_systemd = options.job is None and runs_as_service(environ)
        self._systemd = use_systemd
        self._python = python or getattr(sys, "_base_executable", "") or sys.executable
        self._program_note = ""
        self._options = options
        self._worker = Worker("trainer")

    # -- looking

    async def look(self) -> Look:
        """Return the supervised trainer of this run if there is one, else what else may train it. Never starts
        anything."""
        try:
            record = await self._call(read_record, self._directory)
        except TimeoutError:
            raise
        except OSError:  # a running trainer is found without it; only a start needs this directory
            record = None
        if record is not None and from_here(record.launcher):
            handle = await self._adopt(record)
            if handle is not None:
                return Look(handle=handle)
        record = await self._call(self._record_in_locks)
        if record is None:
            kept = await patiently(self._worker, self._kept, timeout=_CALL_DEADLINE)
            found, record = await patiently(self._worker, self._survey, timeout=_CALL_DEADLINE)
            if record is None:
                return replace(found, kept=kept)
        await patiently(self._worker, _learn_secrets, record.launcher.pid, timeout=_CALL_DEADLINE)
        return Look(handle=self._supervised(record))

    def _record_in_locks(self) -> SupervisorRecord | None:
        """Return the copy that the supervisor of this state directory wrote into its locks of a record that cannot be
        read, if the trainer in it runs. Blocks."""
        for directory in (self._directory, *self._lock_also()):
            record = record_in_lock(directory)
            if record is None or record.directory != self._directory:
                continue
            with contextlib.suppress(OSError):
                # One that was not executed: its start failed, and the supervisor is about to end.
                if is_alive(record.launcher) or (is_alive(record.supervisor) and record.executed):
                    return record
        return None

    def _record_by_processes(self, processes: Sequence[PodProcess]) -> SupervisorRecord | None:
        """Return what the living supervisor of this state directory shows of its record, where that and the locks are
        gone: training is to be watched all the same."""
        mine = str(self._directory)
        for process in processes:
            start_id = supervised_start(process, mine)
            below = [p for p in processes if p.parent_pid == process.pid and not supervised_start(p, mine)]
            if start_id and below and set(process.users) == {os.geteuid()}:
                launcher = min(below, key=lambda p: p.identity.start_ticks)  # orphans of the tree are younger
                return SupervisorRecord(self._directory, self._run_id, start_id, process.identity, launcher.identity)
        return None

    def _kept(self) -> str:
        """Return who holds a lock of this run or its output directory, although no trainer of it is seen."""
        return lock_holder((self._directory, *self._lock_also()), self._output_dir, shared=self._options.several_nodes)

    def _lock_also(self) -> tuple[Path, ...]:
        """Return podwatch's directories beside output_dir: by its configured name, and beside what a link leads to."""
        beside = self._options.beside
        if beside is None:
            return ()
        return (beside, self._output_dir.parent / HIDDEN / self._output_dir.name) if self._linked else (beside,)

    def _supervised(self, record: SupervisorRecord) -> TrainerHandle:
        return self._handle(record.launcher, record)

    def _handle(self, launcher: ProcessIdentity, record: SupervisorRecord | None = None) -> TrainerHandle:
        users = self._run().users
        return TrainerHandle(
            launcher, record=record, roles=self._roles, worker=self._worker, clock=self._clock, users=users
        )

    async def _adopt(self, record: SupervisorRecord) -> TrainerHandle | None:
        """Return a handle for the trainer in the record; None if it never ran."""
        handle = self._supervised(record)
        if is_alive(record.launcher):
            await patiently(self._worker, _learn_secrets, record.launcher.pid, timeout=_CALL_DEADLINE)
        if is_alive(record.supervisor):
            await self._wait_until_started(record)
            # Was it released, or did it fail, in the meantime?
            again = await self._call(read_record, self._directory)
            if again is None or again.start_id != record.start_id:
                return None if again is None else await self._adopt(again)
            if is_alive(record.supervisor):
                return handle
        if await self._call(read_exit, self._directory, record.start_id) is not None or is_alive(record.launcher):
            handle.supervisor_lives()
            return handle
        survivors = await patiently(self._worker, self._survivors, [record], timeout=_CALL_DEADLINE)
        if record.executed or survivors:
            handle.supervisor_lives()
            return handle
        return None  # its supervisor was killed before the command was executed, and the waiting child went with it

    async def _wait_until_started(self, record: SupervisorRecord) -> None:
        """Wait until a supervisor in the middle of a start has answered. Returns without an answer if it is stuck, or
        if a command before the start takes long."""
        deadline = self._clock.monotonic() + 5.0
        while is_alive(record.supervisor) and self._clock.monotonic() < deadline:
            if await self._call(read_result, self._directory, record.start_id) is not None:
                return
            await self._clock.sleep(0.05)

    def _survey(self) -> tuple[Look, SupervisorRecord | None]:
        """Return what may train, and what is left of a record. Blocks: reads every process of the pod."""
        run = self._run()
        processes = read_pod(run, self._roles)
        found = Look(
            trees=tuple(tree for tree in classify_trees(processes, run) if tree.answer is not TreeAnswer.OWN),
            holders=gpu_holders([p for p in processes if p.pid != os.getpid()], run),
            stoppable=may_belong(processes, run),
        )
        return found, self._record_by_processes(processes)

    async def attach(self, launcher: ProcessIdentity) -> TrainerHandle:
        """Take over a trainer that podwatch did not start; its exit status stays unknown. Raises Busy when it has ended
        in the meantime."""
        if not is_alive(launcher):
            raise Busy(f"process {launcher.pid} has ended", fix="nothing: podwatch checks the pod again")
        await patiently(self._worker, _learn_secrets, launcher.pid, timeout=_CALL_DEADLINE)
        return self._handle(launcher)

    # -- starting

    async def start(self, plan: StartPlan) -> TrainerHandle:
        """Start under a new supervisor. Raises Busy when another one holds the run lock, or a process of an earlier
        start lives, CannotExecute when the command does not exist or its directory is missing, HostError for any other
        obstacle. Returns once the launcher has been executed."""
        if not plan.start_id or not all(c.isalnum() or c in "-_" for c in plan.start_id):
            raise ValueError(f"not a start id: {plan.start_id!r}")
        if not plan.argv:
            raise HostError("there is no command to start", where="trainer.command", fix="set it in the configuration")
        searched = await self._nothing_left()
        argv = await self._call(self._prepare, plan, searched)
        process = await self._call(self._spawn, argv, plan.nofile)
        result = await self._result(plan, process)
        if result.get("ok") is not True:
            await self._ended(process)
            raise _start_error(plan, result)
        record = await self._call(read_record, self._directory)
        if record is None or record.start_id != plan.start_id:
            raise HostError("the trainer ended and was released while it was being started", where=str(self._directory))
        handle = self._supervised(record)
        with contextlib.suppress(OSError, TimeoutError):
            await handle.read_state()
        return handle

    async def _nothing_left(self) -> list[str]:
        """As ``_search_earlier_starts``, with a moment for what was just killed, and for a short command of a shell
        that was."""
        until = self._clock.monotonic() + _ENDING_SECONDS
        alone = True  # one search can miss what executes another program just then: after a process was seen, two agree
        while True:
            try:
                found = await patiently(self._worker, self._search_earlier_starts, timeout=_CALL_DEADLINE)
                if alone:
                    return found
                alone = True
            except Busy:
                if self._clock.monotonic() >= until:
                    raise
                alone = False
            await self._clock.sleep(0.1)

    def _search_earlier_starts(self) -> list[str]:
        """Return the ids of earlier starts whose supervisor was killed, and of which no process lives. Raises Busy if
        one does, or may. Blocks."""
        earlier = open_starts((self._directory, *self._lock_also()))
        if found := self._survivors(earlier):
            pids = ", ".join(map(str, sorted(found)))
            raise Busy(f"processes of an earlier start are still running: {pids}", fix="stop them first")
        return [record.start_id for record in earlier]

    def _survivors(self, starts: Sequence[SupervisorRecord]) -> set[int]:
        """Return the pids of what lives of these starts, their supervisors left out: by the start id, in the session of
        the launcher, or stuck in the kernel and not older, which cannot be asked. Blocks: reads all of /proc."""
        if not starts:
            return set()
        ids = frozenset(record.start_id for record in starts)
        run = SoughtRun("", self._run().users, start_ids=ids)
        processes = read_pod(run, self._roles)
        sessions = {i.pid for record in starts for i in process_tree.in_session(record.launcher)}
        tree = {p.pid: p for p in own_processes(processes, run)} | {p.pid: p for p in processes if p.pid in sessions}
        found = set(to_signal(tree.values(), started=True))  # an operator's terminal in it stays
        unread = sessions - {p.pid for p in processes}
        found |= {pid for pid in unread if (line := procfs.read_stat(pid)) is not None and line.state not in "ZXx"}
        for identity in may_belong(processes, run):
            oldest = min(record.launcher.start_ticks for record in starts)
            if procfs.hangs(identity.pid) and identity.start_ticks >= oldest:
                found.add(identity.pid)
        return found - {record.supervisor.pid for record in starts}

    def _prepare(self, plan: StartPlan, searched: list[str]) -> list[str]:
        """Write the supervisor's files; return its argv. The environment travels in a file that only it and we can
        read."""
        request = {
            "run_id": self._run_id,
            "argv": list(plan.argv),
            "cwd": plan.cwd,
            "env": for_training(plan.env) | {"PODWATCH_START_ID": plan.start_id, "PODWATCH_RUN": self._run_id},
            "user": plan.user,
            "nofile": plan.nofile,
            "step": plan.step,
            "before": [list(command) for command in plan.before],
            "before_deadline": _BEFORE_DEADLINE,
            "output_dir": str(self._output_dir),
            "log": str(self._log),
            "log_limit": self._options.log_limit,
            "log_count": self._options.log_count,
            "output_shared": self._options.several_nodes,
            "searched": searched,
            "lock_also": [str(directory) for directory in self._lock_also()],
            "grace": self._options.grace,
            "linger": self._options.linger,
            "job": self._options.job.to_dict() if self._options.job is not None else None,
            "expires": self._clock.boottime() + 2 * _START_DEADLINE,
        }
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._directory.chmod(0o700)
            for directory in self._lock_also()[1:]:
                with contextlib.suppress(OSError):  # the supervisor warns that it cannot lock there
                    directory.mkdir(parents=True, exist_ok=True)
            supervisor_files.remove_unfinished(self._directory)
            program, self._program_note = supervisor_files.place(self._directory)
            for stale in self._directory.glob("start-*.json"):
                stale.unlink(missing_ok=True)  # of a start that an earlier podwatch requested
            atomic_write(self._directory / "wanted", plan.start_id)
            atomic_write(self._directory / f"start-{plan.start_id}.json", json.dumps(request))
        except OSError as error:
            raise HostError(
                f"cannot write the supervisor's files: {error.strerror}",
                where=str(self._directory),
                fix="free disk space, or correct the owner of this directory",
            ) from error
        return [self._python, "-I", "-S", "-E", str(program), "keep", str(self._directory), plan.start_id]

    def _spawn(self, supervisor: list[str], nofile: int) -> "subprocess.Popen[bytes]":
        environment = scrubbed_environment(os.environ, keep_python=False)
        with _supervisor_log(self._directory / "supervisor.log") as log:
            if self._program_note:
                with contextlib.suppress(OSError):
                    log.write(f"podwatch: {self._program_note}\n".encode())
            if self._systemd:
                unit = own_unit(_cgroups())
                argv = systemd_argv(self._run_id, self._directory, supervisor, self._options, nofile, unit)
            else:
                keep = ("PATH", "LANG", "LC_ALL", "TZ")
                environment = {name: value for name, value in environment.items() if name in keep}
                argv = supervisor
            try:
                process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    cwd=self._directory,
                    start_new_session=True,
                    pass_fds=(self._options.job.pipe,) if self._options.job is not None else (),
                )
            except OSError as error:
                raise HostError(f"cannot run {argv[0]}: {error.strerror}", where=argv[0]) from error
        # Reaps the process when it ends, so that it never stays a zombie.
        threading.Thread(target=process.wait, name="podwatch-supervisor-reaper", daemon=True).start()
        return process

    async def _result(self, plan: StartPlan, process: "subprocess.Popen[bytes]") -> dict[str, object]:
        deadline = self._clock.monotonic() + _START_DEADLINE + _BEFORE_DEADLINE * len(plan.before)
        ended = False
        while True:
            # The order matters: a supervisor that ends after this read has written its result by the next read.
            result = await self._call(read_result, self._directory, plan.start_id)
            if result is not None:
                return result
            if (self._directory / f"executed-{plan.start_id}").exists() and ended:
                return {"ok": True}
            if ended or self._clock.monotonic() >= deadline:
                said = await self._call(_last_line, self._directory / "supervisor.log")
                if ended and self._systemd and "already loaded" in said:
                    raise Busy(
                        f"training of run {self._run_id} already runs under a systemd unit: {said}", fix="stop it first"
                    )
                what = "the supervisor ended without an answer" if ended else "the supervisor did not answer in time"
                raise HostError(f"{what}: {said}" if said else what, where=str(self._directory))
            ended = process.returncode is not None and (not self._systemd or process.returncode != 0)
            await self._clock.sleep(0.01)

    async def _ended(self, process: "subprocess.Popen[bytes]") -> None:
        """Wait until a supervisor that refused has ended: until then its locks would block the next start."""
        deadline = self._clock.monotonic() + _REFUSED_ENDS
        while process.returncode is None and self._clock.monotonic() < deadline:
            await self._clock.sleep(0.01)

    def log_path(self) -> str:
        """Return the file that the trainer's stdout and stderr go to (survives restarts; rotated)."""
        return str(self._log)

    async def close(self) -> None:
        """End the thread. Never touches training."""
        self._worker.close()

    async def _call(self, fn: Callable[..., T], *args: object) -> T:
        return await self._worker.call(fn, *args, timeout=_CALL_DEADLINE)


def _learn_secrets(pid: int) -> None:
    """Register the secrets in the command and the environment of a trainer that another configuration or an operator
    started: it prints them, too. Blocks."""
    register_argv(command(pid))
    register_named(dict(environment_items(pid)))


def _start_error(plan: StartPlan, result: Mapping[str, object]) -> PodwatchError:
    """Return the supervisor's refusal as an error with a fix."""
    kind, text = result.get("kind"), str(result.get("text", ""))
    code, where = result.get("errno"), str(result.get("where", ""))
    if kind in ("busy", "superseded"):
        return Busy(text, where=where, fix="stop it first, or wait until it has ended")
    if kind == "exec":
        return _exec_error(plan, code, text)
    if kind == "before":
        return HostError(
            f"a command of trainer.start_before {text}: {where}",
            where="trainer.start_before",
            fix="see the end of `podwatch logs`; run the command yourself as the user that training runs as",
        )
    if kind == "cwd":
        kind_of = MayNotExecute if code == errno.EACCES else CannotExecute
        return kind_of(
            f"cannot start in the working directory: {text}", where=plan.cwd, fix="correct trainer.cwd or create it"
        )
    if kind == "user":
        denied = MayNotExecute if code == errno.EPERM else CannotExecute
        return denied(
            f"cannot start as user {plan.user!r}: {text}",
            where="trainer.user",
            fix="run podwatch as root, or correct trainer.user",
        )
    if kind == "permission" or code in (errno.EACCES, errno.EPERM):
        return PermissionDenied(text, where=where, fix="run podwatch as the owner of this path")
    return HostError(f"cannot start training: {text}", where=where, fix="free space or correct the path")


def _exec_error(plan: StartPlan, code: object, text: str) -> PodwatchError:
    program = plan.argv[0]
    if code == errno.EACCES:
        return MayNotExecute(
            f"Permission denied: cannot execute {program}", where="trainer.command", fix=f"chmod +x {program}"
        )
    if code == errno.ENOENT:
        path = Path(plan.cwd, program)
        if "/" in program and path.exists():
            return CannotExecute(
                f"the interpreter in the first line of {program} does not exist",
                where="trainer.command",
                fix="correct its first line or install the interpreter",
            )
        looked = "" if "/" in program else f" in PATH={plan.env.get('PATH', '')}"
        return CannotExecute(
            f"the command {program} does not exist{looked}",
            where="trainer.command",
            fix="install it, or give its full path",
        )
    if code == errno.ENOEXEC:
        return CannotExecute(
            f"{program} is neither a program nor a script with a first line",
            where="trainer.command",
            fix='start it with its interpreter: ["bash", "script.sh"]',
        )
    return HostError(f"cannot execute {program}: {text}", where="trainer.command", fix="correct trainer.command")


def _last_line(path: Path) -> str:
    try:
        lines = read_small(path, 1 << 22).decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1][:300] if lines else ""


def _supervisor_log(path: Path) -> BinaryIO:
    """Open the file for the supervisor's own output; /dev/null if the disk cannot hold even its name."""
    try:
        return path.open("ab", buffering=0)
    except OSError:
        return Path(os.devnull).open("ab", buffering=0)


def _cgroups() -> str:
    try:
        return read_small(Path("/proc/self/cgroup")).decode(errors="replace")
    except OSError:
        return ""
