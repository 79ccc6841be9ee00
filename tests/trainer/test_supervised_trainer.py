"""The supervisor with real processes: start, adopt, exit status, orphans, leaks, logs."""

import asyncio
import json
import os
import pwd
import re
import signal
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest

from podwatch.domain.errors import Busy, PodwatchError
from podwatch.domain.process import ExitStatus
from podwatch.domain.snapshot import Supervision
from podwatch.system import procfs
from podwatch.system.procfs import is_alive
from podwatch.trainer.start_and_adopt import CannotExecute, MayNotExecute
from tests.support.pod import Pod, eventually

NEVER = {"grace": 20.0, "save_grace": 20.0, "saving": lambda: False}


async def test_start_look_stop_release(pod: Pod) -> None:
    launcher = pod.launcher()
    assert (await launcher.look()).handle is None
    handle = await launcher.start(pod.script("echo hello; exec sleep 300"))
    assert handle.supervision is Supervision.SUPERVISED
    assert await handle.exit_status() is None
    tree = await handle.tree()
    assert tree.value is not None
    assert tree.value[0].identity == handle.launcher
    assert abs(handle.started_wall - time.time()) < 30

    other = pod.launcher()  # the next podwatch
    found = (await other.look()).handle
    assert found is not None
    told = (found.start_id, found.launcher, found.supervision)
    assert told == (pod.start_id(), handle.launcher, Supervision.SUPERVISED)
    with pytest.raises(Busy, match="is supervised by process"):
        await other.start(pod.script("exec sleep 300", start_id="s2"))

    eventually(lambda: Path(launcher.log_path()).read_text() == "hello\n")  # before it is told to stop
    report = await found.stop(**NEVER)  # type: ignore[arg-type]
    assert (report.killed, report.survivors) == (0, ())
    assert report.exit is not None
    assert report.exit.signal == signal.SIGTERM
    assert (await found.stop(**NEVER)).killed == 0  # type: ignore[arg-type]
    again = (await pod.launcher().look()).handle
    assert again is not None  # ended, not yet released
    await found.release()
    await found.release()
    assert (await launcher.look()).handle is None
    assert not is_alive(handle.record.supervisor)
    assert Path(launcher.log_path()).read_text() == "hello\n"
    third = await launcher.start(pod.script("exit 0", start_id="s3"))
    assert await _ended(third) == ExitStatus(code=0, at_wall=(await _ended(third)).at_wall)


async def _ended(handle: object) -> ExitStatus:
    deadline = time.monotonic() + 60
    while (status := await handle.exit_status()) is None:  # type: ignore[attr-defined]
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    return status  # type: ignore[no-any-return]


@pytest.mark.parametrize(("script", "code", "number"), [("exit 7", 7, None), ("kill -9 $$", None, 9)])
async def test_exit_while_no_podwatch_is_alive(pod: Pod, script: str, code: int | None, number: int | None) -> None:
    gate = pod.root / "gate"
    os.mkfifo(gate)
    first = pod.launcher(linger=0.2)
    handle = await first.start(pod.script(f"cat {gate}; {script}"))
    await first.close()
    gate.write_text("go")  # nobody of podwatch is there now
    eventually(lambda: not is_alive(handle.record.supervisor))  # and the supervisor had its time as well
    found = (await pod.launcher().look()).handle
    assert found is not None
    status = await found.exit_status()
    assert status is not None
    assert (status.code, status.signal) == (code, number)
    assert found.supervision is Supervision.SUPERVISED
    assert (await found.tree()).value == ()
    await found.release()
    assert (await pod.launcher().look()).handle is None


async def test_orphans_and_double_forks_are_found_and_ended(pod: Pod) -> None:
    pids = pod.root / "pids"
    script = (
        f"(setsid sh -c 'trap \"\" TERM; echo $$ >> {pids}; while :; do sleep 0.05; done' &) ;"  # ignores SIGTERM
        f"(setsid sh -c 'echo $$ >> {pids}; exec sleep 300' & ) ; "
        f"until [ $(wc -l < {pids}) -ge 2 ]; do sleep 0.01; done; exit 5"
    )
    handle = await pod.launcher().start(pod.script(script))
    assert (await _ended(handle)).code == 5
    tree = (await handle.tree()).value
    assert tree is not None
    orphans = {int(line) for line in pids.read_text().split()}
    assert orphans <= {process.identity.pid for process in tree}
    assert {p.parent_pid for p in tree if p.identity.pid in orphans} == {handle.record.supervisor.pid}
    with pytest.raises(Busy):
        await handle.release()
    report = await handle.stop(grace=0.3, save_grace=0.3, saving=lambda: False)
    assert report.killed >= 1
    assert report.survivors == ()
    assert report.exit is not None
    assert report.exit.code == 5
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in orphans))  # the supervisor reaps them


async def test_the_grace_is_longer_while_a_save_is_in_flight(pod: Pod) -> None:
    ready = pod.root / "ready"
    handle = await pod.launcher().start(
        pod.script(f"trap 'sleep 1; exit 9' TERM; touch {ready}; while :; do sleep 0.05; done")
    )
    eventually(ready.exists)
    report = await handle.stop(grace=0.1, save_grace=30, saving=lambda: True)
    assert report.killed == 0
    assert report.exit is not None
    assert report.exit.code == 9
    assert report.seconds >= 0.9


async def test_nothing_leaks_into_training(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("B2_APPLICATION_KEY", "NOTIFY_SOCKET", "PODWATCH_CONFIG", "LEAKED"):
        monkeypatch.setenv(name, "secret")
    env = {"B2_APPLICATION_KEY": "s", "PODWATCH_SYNC__STORE": "x", "PODWATCH_STEP": "80", "TOKEN": "t'$ \n\""}
    os.umask(0o022)
    handle = await pod.launcher().start(
        pod.script("ls -l /proc/$$/fd; grep -E 'Sig(Ign|Blk|Cgt)|Umask' /proc/$$/status; exec sleep 300", env=env)
    )
    environ = Path(f"/proc/{handle.launcher.pid}/environ")
    mark = f"PODWATCH_START_ID={pod.start_id()}\0".encode()
    deadline = time.monotonic() + 60
    while mark not in (raw := environ.read_bytes()):  # in the middle of an exec it shows none
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    values = dict(item.decode().split("=", 1) for item in raw.rstrip(b"\0").split(b"\0"))
    values = {k: v for k, v in values.items() if k not in ("PWD", "OLDPWD", "SHLVL", "_")}
    assert values == {
        "PATH": os.environ["PATH"],
        "HOME": "/root",
        "PODWATCH_STEP": "80",
        "PODWATCH_START_ID": pod.start_id(),
        "PODWATCH_RUN": pod.run_id,
        "TOKEN": "t'$ \n\"",
    }
    log = pod.launcher().log_path()
    expected = {0: "/dev/null", 1: log, 2: log}
    # the loader of the new program has a library open for a moment
    eventually(lambda: procfs.open_files(handle.launcher.pid) == expected)
    eventually(lambda: "Umask" in Path(log).read_text())
    said = Path(log).read_text()
    assert "Umask:\t0022" in said
    # 32 and 33 are glibc's own: its posix_spawn (make uses it) leaves them ignored, and sigaction() refuses them
    ignored = int(re.search(r"SigIgn:\t([0-9a-f]+)", said)[1], 16)  # type: ignore[index]
    assert ignored & ~(0b11 << 31) == 0
    # asked of the process itself: a shell that is just forking blocks everything for a moment
    own = Path(f"/proc/{handle.launcher.pid}/status")
    eventually(lambda: "SigBlk:\t0000000000000000" in own.read_text())
    status = procfs.read_stat(handle.launcher.pid)
    assert status is not None
    assert status.session == handle.launcher.pid
    assert Path(f"/proc/{handle.launcher.pid}/oom_score_adj").read_text().strip() == "0"
    assert not list(pod.directory.glob("start-*"))
    assert b"secret" not in Path(f"/proc/{handle.record.supervisor.pid}/environ").read_bytes()
    assert "TOKEN" not in " ".join(procfs.command(handle.record.supervisor.pid))
    assert stat.S_IMODE(pod.directory.stat().st_mode) == 0o700
    rss = next(
        line
        for line in Path(f"/proc/{handle.record.supervisor.pid}/status").read_text().splitlines()
        if "VmRSS" in line
    )
    assert int(rss.split()[1]) <= 16 * 1024, rss  # 11.3 MiB under 3.11, 12.0 under 3.12


async def test_nofile_is_set_or_the_clamp_is_reported(pod: Pod) -> None:
    handle = await pod.launcher().start(pod.plan("sleep", "300", nofile=2048))
    limits = Path(f"/proc/{handle.launcher.pid}/limits").read_text()
    assert next(line.split()[3] for line in limits.splitlines() if "open files" in line) == "2048"
    assert handle.warnings == ()
    await handle.stop(**NEVER)  # type: ignore[arg-type]
    await handle.release()
    handle = await pod.launcher().start(pod.plan("sleep", "300", nofile=1 << 40, start_id="s2"))
    assert len(handle.warnings) == 1
    assert "open-file limit" in handle.warnings[0]


@pytest.mark.root
async def test_runs_as_another_user(pod: Pod) -> None:
    entry = pwd.getpwnam("nobody")
    pod.root.chmod(0o755)
    for parent in list(pod.root.parents)[:-2]:
        parent.chmod(parent.stat().st_mode | 0o011)
    handle = await pod.launcher().start(pod.script("id; echo via > /dev/stdout; exec sleep 300", user="nobody"))
    status = Path(f"/proc/{handle.launcher.pid}/status").read_text()
    assert f"Uid:\t{entry.pw_uid}\t{entry.pw_uid}" in status
    eventually(lambda: "via" in Path(pod.launcher().log_path()).read_text())
    assert (await handle.stop(**NEVER)).survivors == ()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("argv", "changes", "kind", "text"),
    [
        (["no-such-command-xyz"], {}, CannotExecute, "the command no-such-command-xyz does not exist in PATH="),
        (["/no/such/file"], {}, CannotExecute, "the command /no/such/file does not exist"),
        (["./plain"], {}, MayNotExecute, "cannot execute ./plain"),
        (["./noshebang"], {}, CannotExecute, "neither a program nor a script"),
        (["./badshebang"], {}, CannotExecute, "the interpreter in the first line"),
        (["true"], {"cwd": "/no/such/dir"}, CannotExecute, "/no/such/dir"),
        (["true"], {"user": "no-such-user"}, CannotExecute, "user 'no-such-user' not found"),
    ],
)
async def test_a_start_that_cannot_work_says_why(
    pod: Pod, argv: list[str], changes: dict[str, str], kind: type[PodwatchError], text: str
) -> None:
    work = pod.output.parent
    (work / "plain").write_text("x")
    for name, content in (("noshebang", "\0\0not elf"), ("badshebang", "#!/no/such/interpreter\n")):
        (work / name).write_text(content)
        (work / name).chmod(0o755)
    plan = replace(pod.plan(*argv), **changes)  # type: ignore[arg-type]
    with pytest.raises(kind) as caught:
        await pod.launcher().start(plan)
    assert type(caught.value) is kind
    assert text in str(caught.value)
    assert caught.value.fix
    assert (await pod.launcher().look()).handle is None
    good = await pod.launcher().start(pod.script("exec sleep 300", start_id="s2"))  # nothing is left locked
    assert is_alive(good.launcher)


async def test_a_killed_supervisor_leads_to_attach_and_no_second_trainer(pod: Pod) -> None:
    pids = pod.root / "pids"
    handle = await pod.launcher().start(
        pod.script(f"(setsid sh -c 'echo $$ >> {pids}; exec sleep 300' &); exec sleep 300")
    )
    eventually(lambda: pids.exists() and pids.read_text().strip())
    orphan = int(pids.read_text())
    os.kill(handle.record.supervisor.pid, signal.SIGKILL)
    eventually(lambda: not is_alive(handle.record.supervisor))
    assert await handle.exit_status() is None
    assert handle.supervision is Supervision.ATTACH
    found = (await pod.launcher().look()).handle
    assert found is not None
    assert (found.start_id, found.supervision) == (pod.start_id(), Supervision.ATTACH)
    tree = (await found.tree()).value
    assert tree is not None
    assert {handle.launcher.pid, orphan} <= {p.identity.pid for p in tree}
    with pytest.raises(Busy, match="still running"):
        await pod.launcher().start(pod.script("exec sleep 300", start_id="s2"))
    with pytest.raises(Busy, match="still running"):  # another podwatch, another state directory, the same output
        await pod.launcher(state=pod.root / "state2").start(pod.script("exec sleep 300", start_id="s3"))
    os.kill(handle.launcher.pid, signal.SIGKILL)
    status = await _ended(found)
    assert not status.known
    with pytest.raises(Busy, match="earlier start"):  # its orphan is still there
        await pod.launcher().start(pod.script("exec sleep 300", start_id="s4"))
    report = await found.stop(**NEVER)  # type: ignore[arg-type]
    assert report.survivors == ()
    left = procfs.read_stat(orphan)
    assert left is None or left.state == "Z"
    await found.release()
    assert is_alive((await pod.launcher().start(pod.script("exec sleep 300", start_id="s5"))).launcher)


@pytest.mark.parametrize(
    "gone",
    [
        ("state/{run}/supervisor/record.json",),
        ("state/{run}/supervisor/record.json", "beside/lock"),
        ("state",),
        ("state", "beside"),
    ],
    ids=" ".join,
)
async def test_a_trainer_whose_records_are_gone_is_watched_by_the_next_podwatch(
    pod: Pod, gone: tuple[str, ...]
) -> None:
    started = await pod.launcher().start(pod.script("exec sleep 300"))
    for name in gone:
        path = pod.root / name.format(run=pod.run_id)
        path.rename(path.with_name(f"{path.name}-away"))
    found = (await pod.launcher().look()).handle
    assert found is not None
    assert (found.start_id, found.launcher) == (started.start_id, started.launcher)
    assert found.supervision is Supervision.SUPERVISED
    assert await found.exit_status() is None
    await found.stop(grace=5.0, save_grace=5.0, saving=lambda: False)
    assert not is_alive(started.launcher)


async def test_without_supervisor_and_record_the_lock_shows_the_trainer(pod: Pod) -> None:
    started = await pod.launcher().start(pod.script("exec sleep 300"))
    assert started.record is not None
    os.kill(started.record.supervisor.pid, signal.SIGKILL)
    eventually(lambda: not started.supervisor_lives())
    (pod.directory / "record.json").unlink()
    found = (await pod.launcher().look()).handle
    assert found is not None
    assert (found.launcher, found.supervision) == (started.launcher, Supervision.ATTACH)
    await found.stop(grace=5.0, save_grace=5.0, saving=lambda: False)
    assert (await pod.launcher().look()).handle is None


async def test_two_state_directories_meet_at_the_run_lock(pod: Pod) -> None:
    await pod.launcher().start(pod.script(f"mkdir -p {pod.output}; exec sleep 300"))
    eventually(pod.output.exists)
    other = pod.launcher(state=pod.root / "state2")
    with pytest.raises(Busy, match="is supervised by process"):
        await other.start(pod.script("exec sleep 300", start_id="x"))


async def test_sigterm_to_the_supervisor_ends_training_and_sighup_does_not(pod: Pod) -> None:
    ready = pod.root / "ready"
    launcher = pod.launcher(grace=0.3)
    handle = await launcher.start(pod.script(f"trap '' TERM; touch {ready}; while :; do sleep 0.05; done"))
    eventually(ready.exists)
    os.kill(handle.record.supervisor.pid, signal.SIGHUP)
    os.kill(handle.record.supervisor.pid, signal.SIGINT)
    os.kill(handle.record.supervisor.pid, signal.SIGTERM)
    eventually(lambda: not is_alive(handle.record.supervisor))
    assert pod.members() == []
    assert (await _ended(handle)).signal == signal.SIGKILL


async def test_the_log_is_rotated_and_bounded(pod: Pod) -> None:
    launcher = pod.launcher(log_limit=20_000, log_count=2)
    done = pod.root / "done"
    log = Path(launcher.log_path())
    rotated = f"until [ $(stat -c %s {log}) -lt 20000 ]; do sleep 0.05; done"
    script = f"for i in 1 2 3; do yes line-$i | head -n 4000; {rotated}; done; touch {done}; exec sleep 300"
    await launcher.start(pod.script(script))
    eventually(done.exists)
    eventually(lambda: log.stat().st_size < 20_000)
    assert sorted(p.name for p in log.parent.iterdir()) == ["train.log", "train.log.1", "train.log.2"]
    assert "line-3" in Path(f"{log}.1").read_text()
    assert "line-2" in Path(f"{log}.2").read_text()


async def test_a_stopped_supervisor_does_not_hide_the_tree(pod: Pod) -> None:
    launcher = pod.launcher()
    handle = await launcher.start(pod.script("exec sleep 300"))
    os.kill(handle.record.supervisor.pid, signal.SIGSTOP)
    tree = (await handle.tree()).value
    assert tree is not None
    assert [p.identity for p in tree] == [handle.launcher]
    os.kill(handle.record.supervisor.pid, signal.SIGCONT)


async def test_a_withdrawn_start_never_happens(pod: Pod) -> None:
    launcher = pod.launcher()
    argv = launcher._prepare(pod.script("exec sleep 300"), [])
    (pod.directory / "wanted").write_text("a-newer-one")
    process = await asyncio.create_subprocess_exec(*argv)
    assert await process.wait() == 75
    assert pod.members() == []
    assert json.loads((pod.directory / f"result-{pod.start_id()}.json").read_text())["kind"] == "superseded"
