"""The supervisor of a trainer, with real processes: its files and signals are all that these tests use."""

import contextlib
import json
import os
import pwd
import random
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podwatch.domain.errors import Busy
from podwatch.system.clock import SystemClock
from podwatch.trainer import supervise
from podwatch.trainer.start_and_adopt import SupervisorLauncher, SupervisorOptions
from tests.support import processes
from tests.support.known_trainers import ROLES
from tests.support.mounts import small_mount
from tests.support.pod import eventually
from tests.trainer.test_supervisor_program import PAGE, fill

PROGRAM = [sys.executable, "-I", "-S", "-E", supervise.__file__, "keep"]


class Run:
    """One run: its directory, the directory of the second lock, and what was started."""

    def __init__(self, root: Path, directory: Path | None = None) -> None:
        self.root = root
        self.directory = directory or root / "state"
        self.also = root / "also"
        self.work = root / "work"
        for path in (self.directory, self.also, self.work):
            path.mkdir(exist_ok=True)
        self.log = self.directory / "logs" / "train.log"
        self.started: list[subprocess.Popen[bytes]] = []

    def request(self, *argv: str, start_id: str = "s1", **changes: Any) -> None:
        base: dict[str, Any] = {
            "run_id": "r1", "argv": list(argv), "cwd": str(self.work), "env": {"PATH": os.environ["PATH"]}, "user": "",
            "nofile": 1024, "step": 40, "before": [], "before_deadline": 30.0, "output_dir": str(self.work / "out"),
            "output_shared": False, "searched": [],
            "log": str(self.log), "log_limit": 1 << 20, "log_count": 2, "lock_also": [str(self.also)], "grace": 20.0,
            "linger": 1.0, "job": None, "expires": time.clock_gettime(time.CLOCK_BOOTTIME) + 60.0,
        }  # fmt: skip
        request = base | changes
        request["env"] = request["env"] | {"PODWATCH_START_ID": start_id}
        (self.directory / "wanted").write_text(start_id)
        (self.directory / f"start-{start_id}.json").write_text(json.dumps(request))

    def spawn(self, start_id: str = "s1", **more: Any) -> "subprocess.Popen[bytes]":
        with (self.root / "supervisor.log").open("ab") as log:
            made = subprocess.Popen([*PROGRAM, str(self.directory), start_id], stdout=log, stderr=log, **more)
        self.started.append(made)
        return made

    def start(self, *argv: str, start_id: str = "s1", **changes: Any) -> "subprocess.Popen[bytes]":
        """Start and wait until the command runs."""
        self.request(*argv, start_id=start_id, **changes)
        made = self.spawn(start_id, pass_fds=[changes["job"]["pipe"]] if changes.get("job") else [])
        assert self.result(start_id)["ok"] is True, self.result(start_id)
        return made

    def script(self, text: str, **changes: Any) -> "subprocess.Popen[bytes]":
        return self.start("sh", "-c", text, **changes)

    def refused(self, *argv: str, start_id: str = "s1", **changes: Any) -> dict[str, Any]:
        self.request(*argv, start_id=start_id, **changes)
        assert self.spawn(start_id).wait(60) in (1, 75)
        result = self.result(start_id)
        assert result["ok"] is False
        return result

    def result(self, start_id: str = "s1") -> dict[str, Any]:
        return self.json(f"result-{start_id}.json")

    def exit(self, start_id: str = "s1") -> dict[str, Any]:
        return self.json(f"exit-{start_id}.json")

    def json(self, name: str) -> dict[str, Any]:
        path = self.directory / name
        eventually(path.exists)
        value: dict[str, Any] = json.loads(path.read_text())
        return value

    def has(self, name: str) -> bool:
        return (self.directory / name).exists()

    @property
    def trainer(self) -> int:
        return int(self.json("record.json")["pid"])


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def ends(process: "subprocess.Popen[bytes]") -> bool:
    return process.wait(60) == 0


# -- one life ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "code", "number"), [("exit 7", 7, None), ("kill -9 $$", None, 9), ("true", 0, None)]
)
def test_the_end_is_recorded_and_the_supervisor_ends(
    run: Run, script: str, code: int | None, number: int | None
) -> None:
    supervisor = run.script(f"echo said; {script}")
    assert ends(supervisor)
    record, ended = run.json("record.json"), run.exit()
    assert (ended["code"], ended["signal"], ended["stopped"]) == (code, number, False)
    assert abs(ended["at_wall"] - time.time()) < 60
    assert {run.json(f"{name}-s1.json")["version"] for name in ("exit", "result")} | {record["version"]} == {1}
    assert (record["run_id"], record["start_id"], record["step"]) == ("r1", "s1", 40)
    assert (record["supervisor"], record["boot_id"]) == (supervisor.pid, supervise.boot_id())
    assert run.has("executed-s1")
    assert run.has("ended-s1")
    assert run.log.read_text() == "said\n"
    assert not list(run.directory.glob(".*"))
    assert stat.S_IMODE((run.directory / "record.json").stat().st_mode) == 0o600


def test_nothing_leaks_into_training(run: Run) -> None:
    env = {"PATH": os.environ["PATH"], "TOKEN": "t'$ \n\""}
    os.umask(0o022)
    supervisor = run.script("exec sleep 300", env=env)
    pid = run.trainer
    eventually(lambda: processes.environment_value(pid, "TOKEN") == env["TOKEN"])
    assert not list(run.directory.glob("start-*")), "the request has secrets"
    assert b"TOKEN" not in Path(f"/proc/{supervisor.pid}/environ").read_bytes()
    eventually(lambda: processes.command(pid) == ["sleep", "300"])
    eventually(
        lambda: (
            {fd.name: str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()}
            == {"0": "/dev/null", "1": str(run.log), "2": str(run.log)}
        )
    )
    text = Path(f"/proc/{pid}/status").read_text()
    assert "Umask:\t0022" in text
    assert "SigBlk:\t0000000000000000" in text
    # 32 and 33 are glibc's own
    assert int(re.search(r"SigIgn:\t([0-9a-f]+)", text)[1], 16) & ~(0b11 << 31) == 0  # type: ignore[index]
    found = processes.read_stat(pid)
    assert found is not None
    assert (found.session, found.parent_pid) == (pid, supervisor.pid)
    status = Path(f"/proc/{supervisor.pid}/status").read_text()
    assert int(re.search(r"VmRSS:\s+(\d+)", status)[1]) <= 16 * 1024  # type: ignore[index]


@pytest.mark.root
def test_it_runs_as_another_user(run: Run) -> None:
    for path in (run.root, *list(run.root.parents)[:-2]):
        path.chmod(path.stat().st_mode | 0o011)
    run.script("echo via > /dev/stdout; exec sleep 300", user="nobody")
    uid = pwd.getpwnam("nobody").pw_uid
    assert f"Uid:\t{uid}\t{uid}" in Path(f"/proc/{run.trainer}/status").read_text()
    eventually(lambda: "via" in run.log.read_text())


# -- signals -----------------------------------------------------------------------------------------------------------


def test_sigterm_ends_the_whole_tree_and_kills_what_ignores_it(run: Run) -> None:
    pids = run.root / "pids"
    deaf = f'trap "" TERM; echo $$ >> {pids}; while :; do sleep 0.05; done'
    supervisor = run.script(
        f"(setsid sh -c '{deaf}' &); (setsid sh -c 'echo $$ >> {pids}; kill -STOP $$' &); exec sleep 300", grace=0.5
    )
    eventually(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    supervisor.terminate()
    assert ends(supervisor)
    assert run.exit()["signal"] == signal.SIGTERM
    assert run.exit()["stopped"] is True
    assert not any(processes.alive(int(pid)) for pid in pids.read_text().split())


def test_it_waits_for_the_grace_and_no_longer(run: Run) -> None:
    supervisor = run.script(f"trap 'sleep 0.5; exit 9' TERM; touch {run.root}/armed; while :; do sleep 0.05; done")
    eventually((run.root / "armed").exists)
    supervisor.terminate()
    assert ends(supervisor)
    assert run.exit()["code"] == 9


def test_other_signals_change_nothing(run: Run) -> None:
    supervisor = run.script("exec sleep 300")
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGPIPE, signal.SIGTSTP):
        supervisor.send_signal(number)
    time.sleep(0.3)
    assert (supervisor.poll(), processes.alive(run.trainer)) == (None, True)


def test_orphans_are_part_of_the_tree_and_their_ends_are_shown(run: Run) -> None:
    gate, pids = run.root / "gate", run.root / "pids"
    os.mkfifo(gate)
    supervisor = run.script(f"(setsid sh -c 'echo $$ > {pids}; read x < {gate}; exit 3' &); sleep 0.2; exit 5")
    assert run.exit()["code"] == 5
    orphan = int(pids.read_text())
    found = processes.read_stat(orphan)
    assert found is not None
    assert found.parent_pid == supervisor.pid
    assert (supervisor.poll(), run.has("ended-s1")) == (None, False), "training is not over while one of it lives"
    gate.write_text("go\n")
    assert ends(supervisor)
    assert run.has("ended-s1")
    shown = {end["pid"]: (end["code"], end["signal"]) for end in run.json("state-s1.json")["ends"]}
    assert shown[orphan] == (3, None)


def test_no_zombie_stays_among_200_processes(run: Run) -> None:
    lines = "for i in $(seq 200); do (sleep 300 &); done; for i in $(seq 200); do (true &); done; exec sleep 300"
    supervisor = run.script(lines, grace=5.0)

    def states() -> list[str]:
        lines = [processes.read_stat(pid) for pid in processes.descendants(supervisor.pid)]
        return [line.state for line in lines if line is not None]

    eventually(lambda: len(states()) == 201 and "Z" not in states())
    before = time.process_time()
    began = time.monotonic()
    supervisor.terminate()
    assert ends(supervisor)
    assert time.monotonic() - began < 5.0, "without SIGKILL"
    assert time.process_time() - before < 5.0
    assert run.exit()["signal"] == signal.SIGTERM
    assert len(run.json("state-s1.json")["ends"]) == 128, "the last ones"


def test_an_operators_terminal_is_left_alone_and_does_not_keep_the_tree(run: Run) -> None:
    """``screen`` that the command started: the shell at which an operator types, and what runs in it."""
    server = run.root / "screen"
    server.write_bytes(Path(sys.executable).resolve().read_bytes())
    server.chmod(0o755)
    code = (
        "import os, pty, sys, time\n"
        "for argv in (['bash', '--norc', '-i'], ['sh', '-c', 'sleep 301; true']):\n"
        "    pid, fd = pty.fork()\n"
        "    if pid == 0: os.execvp(argv[0], argv)\n"
        "    open(sys.argv[1], 'a').write(f'{pid}\\n')\n"
        "time.sleep(300)\n"
    )
    pids = run.root / "pids"
    supervisor = run.start(
        "sh", "-c", f'{server} -c "$CODE" {pids} & exec sleep 300', grace=0.3, env={"CODE": code, **os.environ}
    )
    eventually(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    shell, window = map(int, pids.read_text().split())
    eventually(lambda: processes.children(window) and Path(f"/proc/{shell}/comm").read_text() == "bash\n")  # after exec
    supervisor.terminate()
    assert ends(supervisor)
    assert processes.alive(shell)
    assert not processes.alive(window), "a window that runs a script is training"
    assert run.has("ended-s1")
    run.script("exec sleep 300", start_id="s2")


# -- never two ---------------------------------------------------------------------------------------------------------


def test_a_second_start_is_refused_in_the_same_and_in_another_state_directory(run: Run) -> None:
    run.script("exec sleep 300")
    refusal = run.refused("true", start_id="s2")
    assert (refusal["kind"], "(run r1)" in refusal["text"]) == ("busy", True)
    (run.root / "other").mkdir()
    other = Run(run.root, run.root / "other")
    assert other.refused("true", start_id="s3")["kind"] == "busy"
    assert processes.alive(run.trainer)


def test_after_a_killed_supervisor_nothing_starts_until_its_processes_were_searched_for(run: Run) -> None:
    supervisor = run.script("exec sleep 300")
    trainer = run.trainer
    supervisor.kill()
    supervisor.wait()
    assert run.refused("true", start_id="s2")["kind"] == "busy"
    (run.root / "other").mkdir()
    other = Run(run.root, run.root / "other")
    assert other.refused("true", start_id="s3")["kind"] == "busy", "the lock beside output_dir names it"
    os.kill(trainer, signal.SIGKILL)
    eventually(lambda: not processes.alive(trainer))
    assert run.refused("true", start_id="s4", searched=["s3"])["kind"] == "busy"
    assert ends(run.script("true", start_id="s5", searched=["s1"]))
    assert ends(run.script("true", start_id="s6"))


def test_a_record_of_another_boot_or_container_refuses_nothing(run: Run) -> None:
    record: dict[str, Any] = {"pid": 2, "ticks": 3, "start_id": "s0"}
    record |= {"boot_id": supervise.boot_id(), "pid_namespace": supervise.pid_namespace()}
    (run.directory / "record.json").write_text(json.dumps(record))
    assert run.refused("true", start_id="s1")["kind"] == "busy"
    for n, (key, other) in enumerate((("boot_id", "other"), ("pid_namespace", 1))):
        (run.directory / "record.json").write_text(json.dumps(record | {key: other}))
        assert ends(run.script("true", start_id=f"s{n + 2}"))


@pytest.mark.parametrize("when", ["before the record", "before the go", "after"])
def test_killed_between_fork_and_exec_it_leaves_no_trainer_without_a_record(run: Run, when: str) -> None:
    """The supervisor kills itself at that point."""
    points = {"before the record": "write_record", "before the go": "write", "after": "fill"}
    code = (
        "import importlib.util, os, sys\n"
        f"spec = importlib.util.spec_from_file_location('supervise', {supervise.__file__!r})\n"
        "m = importlib.util.module_from_spec(spec); spec.loader.exec_module(m)\n"
        "def die(*a): os.kill(os.getpid(), 9)\n"
        f"point = {points[when]!r}\n"
        "if point == 'write_record': m.TrainerSupervisor.write_record = die\n"
        "if point == 'write':\n"
        "    plain = m.TrainerSupervisor.write_record\n"
        "    m.TrainerSupervisor.write_record = lambda self: (plain(self), die())\n"
        "if point == 'fill': m.TrainerSupervisor.kill_if_unwanted = die\n"
        "m.main(['x', 'keep', *sys.argv[1:]])\n"
    )
    run.request("sh", "-c", f"touch {run.root}/ran; exec sleep 300")
    process = subprocess.run([sys.executable, "-c", code, str(run.directory), "s1"], timeout=60)
    assert process.returncode == -signal.SIGKILL
    if when == "after":
        eventually((run.root / "ran").exists)
        assert processes.alive(run.trainer)
        assert run.refused("true", start_id="s2")["kind"] == "busy"
    else:
        time.sleep(0.3)
        assert not (run.root / "ran").exists()
        assert run.has("record.json") is (when == "before the go")
        assert ends(run.script("true", start_id="s2", searched=["s1"]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_whoever_is_killed_when_there_is_one_trainer_and_an_end_that_was_recorded_is_true(
    tmp_path: Path, seed: int
) -> None:
    """Rounds: start, kill a random one of supervisor, launcher and worker at a random time, start again."""
    chance = random.Random(seed)
    directory = tmp_path / "state" / "r1" / "supervisor"
    directory.mkdir(parents=True)
    run = Run(tmp_path, directory)
    options = SupervisorOptions(beside=run.also)
    podwatch = SupervisorLauncher(
        "r1", run.work / "out", tmp_path / "state", SystemClock(), roles=ROLES, options=options
    )
    started = 0
    alive = run.root / "alive"
    alive.mkdir()
    body = f"sleep 300 & echo $! > {alive}/$$; wait; exit 7"
    for n in range(12):
        start_id = f"s{n}-{os.getpid()}-{seed}"
        try:
            searched = podwatch._search_earlier_starts()
        except Busy:
            searched = []
        run.request("sh", "-c", body, start_id=start_id, searched=searched)
        supervisor = run.spawn(start_id)
        if chance.random() < 0.5:  # else at any time before that
            eventually(lambda: run.has(f"executed-{start_id}") or supervisor.poll() is not None)  # noqa: B023
        time.sleep(chance.random() * 0.25)
        victims = [supervisor.pid]
        with contextlib.suppress(OSError, ValueError, KeyError):
            record = json.loads((run.directory / "record.json").read_text())
            if record["start_id"] == start_id:
                victims += [record["pid"], *processes.children(record["pid"])]
        for victim in chance.sample(victims, chance.randint(1, len(victims))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        time.sleep(chance.random() * 0.2)
        trainers = [pid for pid in processes.all_pids() if body in processes.command(pid) and processes.alive(pid)]
        top = [pid for pid in trainers if (line := processes.read_stat(pid)) and line.parent_pid not in trainers]
        assert len(top) <= 1, f"two trainers in round {n}"
        started += run.has(f"executed-{start_id}")
        if run.has(f"exit-{start_id}.json"):
            end = run.exit(start_id)
            assert (end["code"], end["signal"]) in ((7, None), (None, 9), (137, None), (143, None))
            assert not [pid for pid in top if pid == json.loads((run.directory / "record.json").read_text())["pid"]]
        if chance.random() < 0.5:
            for pid in trainers:
                for one in (*processes.children(pid), pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(one, signal.SIGKILL)
        if supervisor.poll() is None and chance.random() < 0.5:
            supervisor.terminate()
            supervisor.wait(60)
    assert started, "else this proves nothing"


# -- starts that cannot work -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "changes", "kind", "number"),
    [
        (["no-such-command-xyz"], {}, "exec", 2),
        (["./plain"], {}, "exec", 13),
        (["true"], {"cwd": "/no/such/dir"}, "cwd", 2),
        (["true"], {"user": "no-such-user"}, "user", 0),
        (["true"], {"before": [["false"]]}, "before", 0),
        (["true"], {"before": [["sh", "-c", "setsid sleep 300 & exit 1"]]}, "before", 0),
        (["true"], {"before": [["sleep", "300"]], "before_deadline": 0.2}, "before", 110),
        (["true"], {"expires": 1.0}, "superseded", 0),
    ],
)
def test_a_start_that_cannot_work_says_why_and_leaves_nothing(
    run: Run, argv: list[str], changes: dict[str, Any], kind: str, number: int
) -> None:
    (run.work / "plain").write_text("x")
    refusal = run.refused(*argv, **changes)
    assert (refusal["kind"], refusal["errno"]) == (kind, number)
    assert not run.has("record.json")
    assert not run.has("executed-s1")
    assert not [p for p in processes.all_pids() if processes.environment_value(p, "PODWATCH_START_ID") == "s1"]
    assert ends(run.script("true", start_id="s2"))


def test_what_the_commands_before_leave_running_belongs_to_the_start(run: Run) -> None:
    supervisor = run.script("exit 4", before=[["sh", "-c", "sleep 300 & echo $! > before"]])
    assert run.exit()["code"] == 4
    left = int((run.work / "before").read_text())
    assert processes.alive(left)
    supervisor.terminate()
    assert ends(supervisor)
    assert not processes.alive(left)


def test_a_withdrawn_start_and_a_newer_one_do_not_start(run: Run) -> None:
    assert run.spawn("s1").wait(60) == 75
    run.request("true", start_id="s1")
    (run.directory / "wanted").write_text("s2")
    assert run.spawn("s1").wait(60) == 75
    assert run.result()["kind"] == "superseded"
    assert not run.has("record.json")


def test_a_lock_that_another_user_could_have_made_is_not_taken(run: Run) -> None:
    target = run.root / "target"
    target.write_text("precious")
    (run.also / "lock").symlink_to(target)
    supervisor = run.script("exec sleep 300")
    assert any("cannot lock" in text for text in run.result()["warnings"])
    supervisor.terminate()
    assert ends(supervisor)
    assert target.read_text() == "precious"
    (run.directory / "lock").unlink()
    (run.directory / "lock").hardlink_to(target)
    assert run.refused("true", start_id="s2")["kind"] == "permission"
    assert target.read_text() == "precious"


def test_the_open_file_limit_that_could_not_be_raised_is_shown(run: Run) -> None:
    run.script("exec sleep 300", nofile=1 << 40)
    assert any("open-file limit" in text for text in run.result()["warnings"])


# -- full disks --------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with small_mount(tmp_path / "small", 1 << 20) as mounted:
        if not mounted:
            pytest.skip("mounting a tmpfs is not allowed here")
        yield tmp_path / "small"


def test_a_disk_that_fills_up_loses_no_end_and_fails_no_print(tmp_path: Path, small: Path) -> None:
    run = Run(tmp_path, small)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    supervisor = run.script(f"read x < {gate}; echo last words || exit 9; exit 6", log_limit=65_536)
    fill(small, 0)
    gate.write_text("go\n")
    assert ends(supervisor)
    assert run.exit()["code"] == 6
    assert run.has("ended-s1")
    assert "last words" in run.log.read_text()


def test_at_every_fill_of_the_disk_a_start_happens_whole_or_not(tmp_path: Path, small: Path) -> None:
    run = Run(tmp_path, small)
    outcomes = set()
    for n, pages in enumerate(range(24)):
        for path in small.iterdir():
            if path.is_file() and path.name != "filler":
                path.unlink()
        fill(small, 0)
        (small / "filler").unlink()
        run.request("true", start_id=f"s{n}", log_limit=PAGE, searched=[f"s{k}" for k in range(n)])
        fill(small, pages * PAGE)
        code = run.spawn(f"s{n}").wait(60)
        outcomes.add(code)
        if code == 0:
            assert run.exit(f"s{n}")["code"] == 0
            assert run.has(f"ended-s{n}")
        else:
            assert not run.has(f"executed-s{n}")
    assert outcomes == {0, 1}


def test_the_log_is_rotated(run: Run) -> None:
    supervisor = run.script("for i in $(seq 400); do echo $i; done; sleep 2.5; echo end", log_limit=1000)
    assert ends(supervisor)
    assert run.log.with_name("train.log.1").read_text().startswith("1\n2\n")
    assert run.log.read_text() == "end\n"


# -- jobs, and an init above -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["training", "before the command"])
def test_the_end_of_the_job_ends_the_tree(run: Run, when: str) -> None:
    read, write = os.pipe()
    job = {"pipe": read, "grace": 0.5, "owner": 1, "owner_ticks": 2}
    if when == "training":
        supervisor = run.script("trap '' TERM; while :; do sleep 0.05; done", job=job)
        assert run.json("record.json")["job"] == {"owner": 1, "owner_ticks": 2}
    else:
        run.request("sleep", "300", job=job, before=[["sleep", "299"]])
        supervisor = run.spawn(pass_fds=[read])
        eventually(lambda: run.has("record.json"))
    os.close(read)
    os.close(write)
    assert supervisor.wait(60) in (0, 1)
    assert not [p for p in processes.all_pids() if processes.environment_value(p, "PODWATCH_START_ID") == "s1"]
    assert not any(processes.alive(p) for p in [int(run.json("record.json")["pid"])] if run.has("record.json"))
