"""What a killed worker left is ended, and nothing else: no other run's, no other user's, nothing of an operator."""

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from podwatch.domain.process import ProcessIdentity
from podwatch.system import procfs
from podwatch.trainer import find_trainers, leftover_hook_processes
from podwatch.trainer.find_trainers import Run, gather, judge
from podwatch.trainer.leftover_hook_processes import NAME, Record, left, read_record
from podwatch.trainer.process_tree import Process
from tests.support.known_trainers import ROLES
from tests.support.other_users import E, as_root
from tests.support.pod import eventually
from tests.support.ptys import terminal

TOKEN = "0123456789abcdef0123456789abcdef"
US = frozenset({1000})


def proc(pid: int, parent: int, line: str = "python evaluate.py", **more: object) -> Process:
    argv = tuple(line.split())
    given = {"users": (1000, 1000), "name": Path(argv[0]).name[:15], **more}
    name = str(given.pop("name"))
    return Process(ProcessIdentity(pid, pid * 10), parent, name, argv, roles=ROLES, **given)  # type: ignore[arg-type]


INIT = proc(1, 0, "/sbin/init", users=(0, 0))
RECORD = Record(TOKEN, ProcessIdentity(5, 50), ProcessIdentity(20, 200), ProcessIdentity(21, 210), US)


def own(*processes: Process, marked: tuple[int, ...] = (), record: Record = RECORD) -> list[int]:
    everything = [INIT, *processes] if all(p.pid != 1 for p in processes) else list(processes)
    marks = {pid: pid * 10 for pid in marked or [p.pid for p in processes]}
    return [one.pid for one in left(everything, record, marks).own]


def test_marked_orphans_and_what_runs_below_them() -> None:
    assert own(proc(30, 1), proc(31, 30, "VLLM::EngineCore"), proc(40, 1), marked=(30,)) == [30, 31]


def test_other_users_and_older_processes_are_never_part_of_it() -> None:
    assert own(proc(30, 1, users=(1001, 1001))) == []
    assert own(proc(30, 1, users=(1000, 0))) == [], "setuid"
    assert own(proc(30, 1, users=())) == [], "unknown"
    assert own(proc(15, 1)) == [], "older than the worker"
    assert own(proc(30, 1), proc(31, 30, users=(0, 0)), marked=(30,)) == [30]


def test_a_pid_that_was_given_to_another_process_since_the_look() -> None:
    assert left([INIT, proc(30, 1)], RECORD, {30: 299}).own == ()


def test_what_an_operator_runs_with_the_same_environment() -> None:
    shell = proc(50, 1, "-bash", name="bash", tty=34816, session=50, group=50)
    assert own(shell, proc(51, 50, tty=34816, session=50, group=51)) == [], "typed at a shell"
    assert own(shell, proc(51, 50, "setsid python e.py"), proc(52, 51)) == [], "below a shell, without its terminal"
    assert own(proc(51, 1, tty=34816)) == [], "on a terminal whose shell has ended"
    tmux = proc(60, 1, "tmux new -d", name="tmux: server")
    assert own(tmux, proc(61, 60, "-bash", name="bash", tty=34817), proc(62, 61)) == []
    assert own(proc(70, 1, "python -m ipykernel_launcher -f k.json"), proc(71, 70)) == [], "a notebook"
    assert own(proc(30, 1), shell, proc(51, 50, tty=34816)) == [30], "and only that is spared"


def test_pid_1_and_podwatchs_own_shell_adopt_orphans() -> None:
    one = proc(1, 0, "bash", name="bash", tty=34816, session=1, group=1)
    assert own(one, proc(30, 1), marked=(30,)) == [30]
    assert own(one, proc(30, 1), marked=(1, 30)) == [30], "never PID 1 itself"
    above = proc(25, 1, "-bash", name="bash", tty=34816, above_us=True)
    assert own(above, proc(30, 25), marked=(25, 30)) == [30]


def test_a_keepers_tree_below_a_marked_process_is_training() -> None:
    assert own(proc(30, 1), proc(31, 30, "keeper", ours=True), proc(32, 31, ours=True), marked=(30,)) == [30]


def test_the_runs_own_worker_decides_whatever_is_above_it() -> None:
    shell = proc(15, 1, "-bash", name="bash", tty=34816)
    daemon = proc(16, 15, "podwatch run", tty=34816)
    worker = proc(20, 16, "python -m podwatch.hooks.child_main")
    assert own(shell, daemon, worker, proc(21, 20), marked=(21,)) == [21]


def test_a_record_that_proves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.lock"
    assert read_record(path) is None
    good = record_of(os.getpid())
    path.write_text(json.dumps(good))
    assert read_record(path) is not None
    wrong = (
        {}, [], {**good, "token": "short"}, {**good, "token": 4}, {**good, "worker": [1]}, {**good, "worker": None},
        {**good, "owner": ["1", 2]}, {**good, "users": "1"}, {**good, "users": ["x"]}, {**good, "boot_id": "another"},
        {**good, "pid_namespace": 4711}, {**good, "boot_id": None},
    )  # fmt: skip
    for one in wrong:
        path.write_text(json.dumps(one))
        assert read_record(path) is None, one
    path.write_text("no JSON")
    assert read_record(path) is None
    path.unlink()
    target = tmp_path / "elsewhere"
    target.write_text(json.dumps(good))
    path.symlink_to(target)
    assert read_record(path) is None, "a link"
    path.unlink()
    os.mkfifo(path)
    assert read_record(path) is None, "a pipe; and it does not block"


# -- real processes ----------------------------------------------------------------------------------------------------


def record_of(worker: int, token: str = TOKEN, users: tuple[int, ...] = ()) -> dict[str, object]:
    ticks = procfs.start_ticks(worker)
    gone = [2**22 - 3, 1]
    return {
        "token": token, "boot_id": procfs.boot_id(), "pid_namespace": procfs.pid_namespace(), "owner": gone,
        "worker": [worker, ticks], "users": [os.geteuid(), *users],
    }  # fmt: skip


def lock(tmp_path: Path, name: str = "state") -> Path:
    """The lock file of an evaluation whose worker was killed; this process counts as the worker for the start time.
    Each has its own token, as in reality: with the same one, a test ends the processes of one that runs beside it."""
    path = tmp_path / name / "evaluation.lock"
    path.parent.mkdir()
    text = record_of(os.getpid(), secrets.token_hex(16))
    text["worker"] = [2**22 - 2, procfs.start_ticks(os.getpid())]
    path.write_text(json.dumps(text))
    path.chmod(0o600)
    return path


def environment(path: Path, token: str = "") -> dict[str, str]:
    """That of a process of the run whose lock file this is; or, with a token, of an older run of the same command."""
    token = token or json.loads(path.read_text())["token"]
    return {"PATH": os.environ["PATH"], NAME: f"{token}:{path}"}


@contextmanager
def orphan(environ: dict[str, str], script: str = "sleep 600", user: int | None = None) -> Iterator[int]:
    """A process whose parent has ended, in a session of its own."""
    started = f"['sh', '-c', {script!r}], start_new_session=True, stdout=2, user={user}"
    program = f"import subprocess as s; print(s.Popen({started}).pid)"
    argv = [sys.executable, "-S", "-c", program]
    done = subprocess.run(argv, env=environ, stdout=subprocess.PIPE, check=True, text=True)
    pid = int(done.stdout)
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


@pytest.fixture
def observer() -> Iterator[subprocess.Popen[bytes]]:
    """This test is podwatch here, and its children are never candidates: look as this process would."""
    with subprocess.Popen(["sleep", "600"]) as made:
        yield made
        made.kill()


def lives(pid: int) -> bool:
    status = procfs.read_stat(pid)
    return status is not None and status.state not in "ZX"


def test_the_next_podwatch_ends_exactly_what_was_left(tmp_path: Path) -> None:
    path, other = lock(tmp_path), lock(tmp_path, "other")
    with (
        orphan(environment(path), f"env -i sh -c 'echo $$ > {tmp_path}/below; sleep 600'; true") as mine,
        orphan(environment(other)) as another_run,
        orphan(environment(path, "e" * 32)) as stale,
        orphan({"PATH": os.environ["PATH"], "PODWATCH_OUTPUT": str(tmp_path)}) as nobodys,
        terminal(["/bin/sh", "-c", "sleep 600"], environ=environment(path)) as shell,
    ):
        eventually(lambda: (tmp_path / "below").exists() and (tmp_path / "below").read_text().strip())
        below = int((tmp_path / "below").read_text())
        eventually(lambda: all(procfs.environment_value(pid, NAME) for pid in (another_run, stale, shell.pid)))
        text = " ".join(leftover_hook_processes.end_interrupted(path.parent))
        assert [lives(pid) for pid in (mine, below)] == [False, False]
        assert [lives(pid) for pid in (another_run, stale, nobodys, shell.pid)] == [True] * 4
        assert str(mine) in text
        assert "left terminals" in text
        assert read_record(path) is None, "settled"
        assert leftover_hook_processes.end_interrupted(path.parent) == []


def test_a_run_whose_podwatch_lives_is_left_alone(tmp_path: Path) -> None:
    path = lock(tmp_path)
    own = procfs.identify(os.getpid())
    assert own is not None
    path.write_text(json.dumps({**json.loads(path.read_text()), "owner": [own.pid, own.start_ticks]}))
    with orphan(environment(path)) as running:
        assert leftover_hook_processes.end_interrupted(path.parent) == []
        assert lives(running)


@as_root
def test_the_same_token_of_another_user(tmp_path: Path) -> None:
    path = lock(tmp_path)
    with orphan(environment(path), user=E) as foreign:
        leftover_hook_processes.end_interrupted(path.parent)
        assert lives(foreign)


def test_an_engine_that_wrote_its_title_over_its_environment(tmp_path: Path) -> None:
    """Found by the command's session, as long as that is the same session."""
    path = lock(tmp_path)
    with orphan({"PATH": os.environ["PATH"]}, "sleep 600 & exec env -i sleep 600") as leader:
        eventually(lambda: procfs.command(leader)[:1] == ("sleep",) and procfs.children(leader))
        (child,) = procfs.children(leader)
        eventually(lambda: procfs.command(child)[:1] == ("sleep",))
        ticks, said = procfs.start_ticks(leader) or 0, json.loads(path.read_text())
        path.write_text(json.dumps({**said, "command": [leader, ticks - 1]}))
        assert leftover_hook_processes.end_interrupted(path.parent) == [], (
            "the leader's number was given to another process"
        )
        assert lives(leader)
        path.write_text(json.dumps({**said, "command": [leader, ticks]}))
        leftover_hook_processes.end_interrupted(path.parent)
        assert not lives(leader)
        assert not lives(child), "below it"


def test_what_is_left_is_no_candidate_and_an_operators_process_with_the_same_environment_is(
    tmp_path: Path, observer: subprocess.Popen[bytes]
) -> None:
    path, output = lock(tmp_path), tmp_path / "outputs"
    output.mkdir()
    (tmp_path / "rl").write_text(f"import time; f=open({str(output / 'step_5.pt')!r}, 'w'); time.sleep(600)\n")
    argv = [sys.executable, "-S", str(tmp_path / "rl")]
    run = Run(str(output), state=path.parent)

    def found(environ: dict[str, str]) -> tuple[list[int], list[int], int]:
        with orphan(environ, "exec " + " ".join(argv)) as pid:
            eventually(lambda: procfs.open_files(pid) and str(output) in str(procfs.open_files(pid)))
            processes = gather(run, ROLES, own_pid=observer.pid)
            judged = judge(processes, run)
            ours = [p.pid for p in processes if p.ours]
            return [c.launcher.pid for c in (*judged.candidates, *judged.pending)], ours, pid

    seen, ours, pid = found(environment(path))
    assert (pid in seen, pid in ours) == (False, True)
    seen, ours, pid = found(environment(path, "e" * 32))
    assert (pid in seen, pid in ours) == (True, False), "a token without a record proves nothing"
    run = find_trainers.replace(run, state=tmp_path / "another-run")
    seen, ours, pid = found(environment(path))
    assert (pid in seen, pid in ours) == (False, True), "another run's evaluation is no trainer of this run"
    with terminal(argv, environ=environment(path)) as person:
        eventually(lambda: str(output) in str(procfs.open_files(person.pid)))
        processes = gather(run, ROLES, own_pid=observer.pid)
        assert person.pid not in [p.pid for p in processes if p.ours], "on a terminal: an operator's"


@pytest.mark.parametrize("value", ["", ":", TOKEN, f"{TOKEN}:relative", f":{TOKEN}"])
def test_a_mark_that_is_none(value: str) -> None:
    assert leftover_hook_processes.parse(value) == ("", "")
