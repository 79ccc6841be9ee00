"""What /proc shows of real processes is what the decision by ties needs."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwatch.domain.process import PodProcess, TreeAnswer
from podwatch.system.procfs import identify
from podwatch.trainer import find, names_of_run
from podwatch.trainer.find import PodReader, find_trees, read_pod
from podwatch.trainer.rules import SoughtRun
from tests.support.known_trainers import ROLES
from tests.support.pod import eventually

WAIT = "import sys, time\nkeep = [open(path, 'w') for path in sys.argv[1:] if path.endswith('.pt')]\ntime.sleep(987)\n"
USERS = frozenset({os.geteuid()})


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(WAIT)
    made = tmp_path / "outputs"
    (made / "checkpoint-5").mkdir(parents=True)
    return made


@contextlib.contextmanager
def adopted(out: Path, *command: str, user: tuple[str, ...] = (), **env: str) -> Iterator[int]:
    """A process that is not below this one: what started it has ended."""
    environ = {"PATH": os.environ["PATH"], **env}
    argv = ["sh", "-c", '"$@" > /dev/null 2>&1 & echo $!', "sh", *user, "setsid", *command]
    pid = int(subprocess.run(argv, cwd=out.parent, env=environ, capture_output=True, text=True, check=True).stdout)
    try:
        eventually(lambda: any(p.pid == pid and p.argv == command for p in read_pod(run(out), ROLES)))
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)


def script(out: Path, *argv: str, **env: str) -> contextlib.AbstractContextManager[int]:
    return adopted(out, sys.executable, "-S", "train.py", *argv, user=(), **env)


def run(out: Path, **more: object) -> SoughtRun:
    return SoughtRun(os.path.realpath(out), USERS, cwd=str(out.parent), **more)  # type: ignore[arg-type]


def seen(out: Path, pid: int) -> PodProcess:
    return next(p for p in read_pod(run(out), ROLES) if p.pid == pid)


def answers(out: Path, **more: object) -> dict[int, TreeAnswer]:
    return {tree.top.pid: tree.answer for tree in find_trees(run(out, **more), ROLES)}


def test_a_process_is_read_as_it_is(out: Path) -> None:
    save = str(out / "checkpoint-5" / "model.pt")
    with script(out, save, PODWATCH_START_ID="s7") as pid:
        eventually(lambda: seen(out, pid).writes)
        found = seen(out, pid)
        assert found.writes == (save,)
        assert (found.start_id, found.cwd, found.users) == ("s7", str(out.parent), (os.geteuid(), os.geteuid()))
        assert (found.session, found.group, found.tty, found.cuda) == (pid, pid, 0, False)
        assert (found.podwatch, found.above_podwatch, found.parent_pid) == (False, False, 1)
        assert Path(found.exe).samefile(sys.executable)
        assert answers(out, start_ids=frozenset({"s7"})) == {pid: TreeAnswer.OWN}


def test_podwatch_and_what_is_below_and_above_it_are_known(out: Path) -> None:
    argv = [sys.executable, "-S", "train.py", "--output_dir", str(out)]
    with subprocess.Popen(argv, cwd=out.parent) as child:
        eventually(lambda: seen(out, child.pid).argv == tuple(argv))
        assert seen(out, child.pid).podwatch
        assert seen(out, os.getpid()).podwatch
        assert seen(out, 1).above_podwatch
        assert answers(out) == {}
        child.kill()


@pytest.mark.parametrize("how", ["argument", "relative", "link", "file", "save", "nothing"])
def test_a_script_that_names_output_dir_is_waited_for(out: Path, how: str) -> None:
    (out.parent / "link").symlink_to(out)
    (out.parent / "c.toml").write_text(f'output_dir = "{out}"\n')
    argv = {
        "argument": ["--output_dir", str(out)],
        "relative": ["--output_dir=outputs"],
        "link": ["--output_dir", "link"],
        "file": ["c.toml"],
        "save": [str(out / "checkpoint-5" / "model.pt")],
        "nothing": ["--resume", str(out)],
    }[how]
    with script(out, *argv) as pid:
        expected = {} if how == "nothing" else {pid: TreeAnswer.WAIT}
        eventually(lambda: answers(out) == expected)


@pytest.mark.root
def test_another_users_process_has_no_tie(out: Path) -> None:
    user = ("setpriv", "--reuid", "4711", "--regid", "4711", "--clear-groups")
    with adopted(out, "sleep", "987", user=user, PODWATCH_START_ID="s7") as pid:
        assert (seen(out, pid).users, seen(out, pid).start_id) == ((4711, 4711), "s7")
        assert answers(out, start_ids=frozenset({"s7"})) == {}
    with adopted(out, "sleep", "987", PODWATCH_START_ID="s7") as pid:
        assert answers(out, start_ids=frozenset({"s7"})) == {pid: TreeAnswer.OWN}


def test_a_second_writer_is_found_while_it_writes_and_no_longer(out: Path) -> None:
    """Also where it used no CPU since the last reading."""
    reader, ours = PodReader(ROLES), identify(os.getpid())
    assert ours is not None

    def writing() -> list[int]:
        found = reader.find_writers(run(out, start_ids=frozenset({"s7"})), {ours})
        return [tree.top.pid for tree in found if tree.writes]

    assert writing() == []
    save = str(out / "checkpoint-5" / "model.pt")
    with script(out, save) as pid:
        eventually(lambda: writing() == [pid])
        assert writing() == [pid]
        assert reader.knew(identify(pid))  # type: ignore[arg-type]
    eventually(lambda: writing() == [])
    with script(out, save, PODWATCH_START_ID="s7") as pid:
        eventually(lambda: seen(out, pid).writes)
        assert writing() == []


def test_what_used_no_cpu_is_read_again_now_and_then(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real = find.read_process
    monkeypatch.setattr(find, "YOUNG_SECONDS", 0.0)
    monkeypatch.setattr(find, "read_process", lambda pid, *more: read.append(pid) or real(pid, *more))
    reader = PodReader(ROLES)
    with script(out) as pid:
        for _ in range(2 * find.READ_EVERY):
            assert any(p.pid == pid for p in reader.read(run(out)))
    assert 2 <= read.count(pid) <= 6


def test_a_mount_that_hangs_is_read_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many processes name files on it."""
    release = threading.Event()
    monkeypatch.setattr(names_of_run, "_CONFIG_SECONDS", 0.05)
    monkeypatch.setattr(names_of_run, "_mount_of", lambda path: "/".join(path.split("/")[:3]))
    monkeypatch.setattr(names_of_run.os.path, "realpath", lambda path: release.wait() and path)
    before = threading.active_count()
    try:
        assert [names_of_run.resolved(f"/mnt/dead/{n}") for n in range(20)] == [f"/mnt/dead/{n}" for n in range(20)]
        assert threading.active_count() == before + 1
    finally:
        release.set()
    eventually(lambda: threading.active_count() == before)
    assert names_of_run.resolved("/mnt/dead/9") == "/mnt/dead/9"


def test_the_mount_of_a_path_is_the_innermost() -> None:
    assert names_of_run._mount_of("/proc/self/stat") == "/proc"
    assert names_of_run._mount_of("/nowhere/at/all") == "/"
