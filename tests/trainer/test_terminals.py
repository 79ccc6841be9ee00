"""Trainers that an operator started in a real terminal: they are found and stopped, and the terminal is not touched."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from podwatch.domain.process import FoundTree, TreeAnswer
from podwatch.system import procfs
from podwatch.trainer.find import find_trees, read_pod, read_process, users_of
from podwatch.trainer.rules import SoughtRun
from tests.support.known_trainers import ROLES
from tests.support.pod import Pod, eventually
from tests.support.ptys import terminal

pytestmark = pytest.mark.slow

LAUNCHER = """#!{python} -S
import os, subprocess, sys, time
held = open({save!r}, "w")
subprocess.Popen(["sleep", "987"], start_new_session=True)
open({up!r}, "a").write(f"{{os.getpid()}}\\n")
while True:
    time.sleep(1)
"""


class Desk:
    """A pod with a launcher named ``rl`` that holds a checkpoint open, and a look at it from another process."""

    def __init__(self, pod: Pod) -> None:
        self.pod = pod
        self.save = pod.output / "checkpoints" / "step_5" / "shard.distcp"
        self.save.parent.mkdir(parents=True)
        self.up = pod.root / "up"
        self.rl = pod.root / "rl"
        self.rl.write_text(LAUNCHER.format(python=sys.executable, save=str(self.save), up=str(self.up)))
        self.rl.chmod(0o755)
        self.run = SoughtRun(str(pod.output), users=users_of(""))
        # This test is above the terminal, as podwatch is not: look as a process beside it would.
        self.observer = subprocess.Popen(["sleep", "987"], start_new_session=True)

    def script(self, text: str) -> str:
        path = self.pod.root / "train.sh"
        path.write_text(text)
        return str(path)

    def started(self, count: int = 1) -> list[int]:
        eventually(lambda: self.up.exists() and self.up.read_text().count("\n") >= count)
        pids = [int(line) for line in self.up.read_text().split()]
        # "up" is written once its child is there, which has its own name a moment later.
        eventually(lambda: all(any(procfs.command(c)[:1] == ("sleep",) for c in procfs.children(p)) for p in pids))
        return pids

    def look(self) -> tuple[FoundTree, ...]:
        return find_trees(self.run, ROLES, own_pid=self.observer.pid)

    def candidate(self) -> FoundTree:
        (found,) = self.look()
        assert found.answer is TreeAnswer.ATTACH, found
        return found

    async def stop(self, tree: FoundTree) -> list[str]:
        """What was stopped, by name."""
        handle = await self.pod.launcher().attach(tree.launcher)
        names = [p.name for p in (await handle.tree()).value or ()]
        report = await handle.stop(grace=0.2, save_grace=0.2, saving=lambda: False)
        assert report.survivors == ()
        return sorted(names)

    def none_left(self) -> bool:
        return not any(process.writes for process in read_pod(self.run, ROLES, own_pid=self.observer.pid))


@pytest.fixture
def desk(pod: Pod) -> Iterator[Desk]:
    made = Desk(pod)
    yield made
    for pid in map(int, made.up.read_text().split() if made.up.exists() else ()):
        for member in (*procfs.descendants(pid), pid):
            if procfs.command(member)[:1] == ("sleep",) or str(made.rl) in procfs.command(member):
                os.kill(member, signal.SIGKILL)
    made.observer.kill()
    made.observer.wait()


SHELLS = [
    ["bash", "--norc"],
    ["bash", "--noprofile", "--norc", "-i"],
    ["bash", "--rcfile", "/dev/null"],
    ["bash", "--init-file", "/dev/null"],
    ["bash", "--posix", "--norc", "-O", "extglob"],
    ["-bash", "--norc"],
    ["sh"],
    ["torchrun", "--norc"],
    ["zsh", "-f"],
    ["fish", "--no-config"],
    ["ksh"],
]


HOWS = ["{rl}", "{rl} &", "sleep 986 & {rl} & sleep 985 &", "sh {script}", "(sh {script} &)"]
CASES = [(argv, "{rl}") for argv in SHELLS] + [(["bash", "--norc"], how) for how in HOWS[1:]]


@pytest.mark.parametrize(("argv", "how"), CASES, ids=lambda case: case if isinstance(case, str) else " ".join(case))
async def test_the_trainer_is_stopped_and_the_shell_lives(desk: Desk, argv: list[str], how: str) -> None:
    program = {"-bash": "bash", "torchrun": "bash"}.get(argv[0], argv[0])
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    script = desk.script(f"{desk.rl}\n: and more\n")
    shell = ["bash", "-c", f'exec -a {argv[0]} bash "$@"', "x", *argv[1:]] if program != argv[0] else argv
    with terminal(shell, str(desk.pod.output)) as tty:
        tty.type(how.format(rl=desk.rl, script=script))
        (trainer,) = desk.started()
        candidate = desk.candidate()
        assert candidate.launcher.pid != tty.pid
        assert candidate.launcher.pid == (trainer if "script" not in how else procfs.read_stat(trainer).parent_pid)  # type: ignore[union-attr]
        names = await desk.stop(candidate)
        assert names == (["rl", "sh", "sleep"] if "script" in how else ["rl", "sleep"])
        assert desk.none_left()
        assert tty.answers()


async def test_a_job_left_by_a_shell_that_is_gone_is_a_tree_of_its_own(desk: Desk) -> None:
    script = desk.script(f"{desk.rl}\n: and more\n")
    with terminal(["bash", "--norc"]) as tty:
        tty.type(f"nohup bash {script} > /dev/null 2>&1 & disown; exit")
        (trainer,) = desk.started()
        eventually(lambda: procfs.read_stat(tty.pid).state == "Z")  # type: ignore[union-attr]
        assert desk.candidate().launcher.pid == procfs.read_stat(trainer).parent_pid  # type: ignore[union-attr]
        assert await desk.stop(desk.candidate()) == ["bash", "rl", "sleep"]


async def test_a_trainer_that_took_the_place_of_the_shell_is_the_trainer(desk: Desk) -> None:
    """``exec uv run rl``."""
    with terminal(["bash", "--norc"]) as tty:
        tty.type(f"exec {desk.rl}")
        assert desk.started() == [tty.pid]
        assert desk.candidate().launcher.pid == tty.pid
        assert await desk.stop(desk.candidate()) == ["rl", "sleep"]


async def test_a_command_that_ends_in_a_shell_keeps_the_shell(desk: Desk) -> None:
    """``bash -c 'rl; exec bash'``: the same process is the trainer's launcher first and an operator's shell later."""
    with terminal(["bash", "-c", f"{desk.rl}; exec bash --norc"]) as tty:
        (trainer,) = desk.started()
        candidate = desk.candidate()
        assert candidate.launcher.pid == tty.pid
        handle = await desk.pod.launcher().attach(candidate.launcher)
        assert {p.identity.pid for p in (await handle.tree()).value or ()} >= {tty.pid, trainer}
        assert await handle.exit_status() is None
        os.kill(trainer, signal.SIGKILL)
        eventually(lambda: procfs.command(tty.pid)[-1:] == ("--norc",))
        assert [p.name for p in (await handle.tree()).value or ()] == ["sleep"]
        assert await handle.exit_status() is not None, "training has ended, though its process lives"
        report = await handle.stop(grace=0.2, save_grace=0.2, saving=lambda: False)
        assert report.survivors == ()
        assert tty.answers()


async def test_an_interactive_shell_in_the_middle_parts_the_trees(desk: Desk) -> None:
    """A script that ends in a menu, a shell, and a trainer in it."""
    menu = desk.script("echo menu\nbash --norc\n")
    with terminal(["bash", menu]) as tty:
        tty.expect("menu")
        tty.type(f"sh -c '{desk.rl}; true'")
        (trainer,) = desk.started()
        assert desk.candidate().launcher.pid == procfs.read_stat(trainer).parent_pid  # type: ignore[union-attr]
        assert await desk.stop(desk.candidate()) == ["rl", "sh", "sleep"]
        assert tty.answers()


@contextmanager
def tmux(pod: Pod, command: str) -> Iterator[str]:
    """A server of its own; yields its socket."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed (apt-get install tmux)")
    socket = str(pod.root / "tmux")
    words = ["tmux", "-S", socket, "-f", "/dev/null"]
    subprocess.run([*words, "new-session", "-d", "-s", "x", command], check=True)
    try:
        yield socket
    finally:
        subprocess.run([*words, "kill-server"], check=False, capture_output=True)


def panes(socket: str) -> list[tuple[int, str]]:
    words = ["tmux", "-S", socket, "list-panes", "-a", "-F", "#{pane_pid} #{pane_dead}"]
    done = subprocess.run(words, check=False, capture_output=True, text=True)  # its socket is there before it listens
    return [(int(line.split()[0]), line.split()[1]) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("shell", ["bash --norc", "bash --noprofile", "sh", "bash --init-file /dev/null"])
async def test_a_tmux_pane_stays_with_its_shell(desk: Desk, shell: str) -> None:
    with tmux(desk.pod, shell) as socket:
        ((pane, _),) = panes(socket)
        subprocess.run(["tmux", "-S", socket, "send-keys", "-t", "x", f"sh -c '{desk.rl}; true'", "Enter"], check=True)
        desk.started()
        candidate = desk.candidate()
        assert candidate.launcher.pid != pane
        assert await desk.stop(candidate) == ["rl", "sh", "sleep"]
        assert panes(socket) == [(pane, "0")]


async def test_a_trainer_that_is_the_panes_own_command_is_stopped_and_the_server_lives(desk: Desk) -> None:
    with tmux(desk.pod, f"exec {desk.rl}") as socket:
        subprocess.run(["tmux", "-S", socket, "new-window", "-d", "-t", "x", "sh"], check=True)
        (trainer,) = desk.started()
        assert desk.candidate().launcher.pid == trainer
        assert await desk.stop(desk.candidate()) == ["rl", "sleep"]
        eventually(lambda: len(panes(socket)) == 1)


async def test_under_script_the_recorded_shell_lives(desk: Desk) -> None:
    if shutil.which("script") is None:
        pytest.skip("script is not installed (util-linux)")
    with terminal(["script", "-q", "-c", "bash --norc", "/dev/null"]) as tty:
        assert tty.answers()
        tty.type(f"{desk.rl} &")
        desk.started()
        assert await desk.stop(desk.candidate()) == ["rl", "sleep"]
        assert tty.answers()
    desk.up.unlink()
    with terminal(["script", "-q", "-c", f"sh -c '{desk.rl}; true'; true", "/dev/null"]):
        desk.started()
        names = await desk.stop(desk.candidate())
        assert {"rl", "sh", "sleep"} <= set(names), "what script runs is the trainer's"
        assert "script" not in names


async def test_a_shell_that_opens_below_an_attached_trainer_is_left_alone(desk: Desk) -> None:
    """A debugger's ``!bash``: it was not there when podwatch attached."""
    shell = desk.pod.root / "in"
    desk.rl.write_text(desk.rl.read_text().replace("while True:", f"while not os.path.exists({str(shell)!r}):") + (
        "os.setpgrp() if os.getpgrp() != os.getpid() and os.getsid(0) != os.getpid() else None\n"
        "subprocess.Popen(['bash', '--norc'])\nwhile True:\n    time.sleep(1)\n"
    ))  # fmt: skip
    with terminal([str(desk.rl)]) as tty:
        desk.started()
        handle = await desk.pod.launcher().attach(desk.candidate().launcher)
        assert len((await handle.tree()).value or ()) == 2
        shell.touch()
        assert tty.answers()
        assert sorted(p.name for p in (await handle.tree()).value or ()) == ["rl", "sleep"]
        (below,) = [p for p in procfs.children(tty.pid) if procfs.command(p)[:1] == ("bash",)]
        pidfd = os.pidfd_open(below)
        try:
            handle._local.signal([p.identity for p in (await handle.tree()).value or ()], signal.SIGSTOP)
            assert procfs.read_stat(below).state not in "Tt", "not even when it is named"  # type: ignore[union-attr]
        finally:
            os.close(pidfd)
        handle._local.signal([p.identity for p in (await handle.tree()).value or ()], signal.SIGCONT)
        report = await handle.stop(grace=0.2, save_grace=0.2, saving=lambda: False)
        assert report.survivors == ()


# --- other users ------------------------------------------------------------------------------------------------------

needs_root = pytest.mark.root
STRANGER, TRAINER = 47_113, 47_114


@needs_root
@pytest.mark.parametrize("argv", [["torchrun", "987"], ["rl", "987"], ["python", "987"]])
def test_another_users_process_is_never_a_candidate(desk: Desk, argv: list[str]) -> None:
    """``exec -a torchrun sleep`` in output_dir, with a checkpoint open and the run's own command."""
    with desk.save.open("w") as held, subprocess.Popen(
        argv, executable=shutil.which("sleep"), cwd=desk.save.parent, stdout=held, user=STRANGER, group=STRANGER
    ) as process:  # fmt: skip
        try:
            eventually(lambda: procfs.command(process.pid) == tuple(argv))
            run = SoughtRun(
                str(desk.pod.output), users=frozenset({0, TRAINER}), command=tuple(argv), cwd=str(desk.save.parent)
            )
            assert find_trees(run, ROLES, own_pid=desk.observer.pid) == ()
            seen = next(p for p in read_pod(run, ROLES, own_pid=desk.observer.pid) if p.pid == process.pid)
            assert seen.writes == (str(desk.save),)
            assert seen.users == (STRANGER, STRANGER)
        finally:
            process.kill()


@needs_root
@pytest.mark.skipif(not os.access("/usr/bin/python3", os.X_OK), reason="needs a Python that every user may run")
def test_the_user_that_training_runs_as_is_one_of_ours(desk: Desk) -> None:
    with desk.save.open("w") as held, subprocess.Popen(
        ["/usr/bin/python3", "-S", "-c", "import time; time.sleep(987)", f"--output_dir={desk.pod.output}"],
        cwd="/", stdout=held, user=TRAINER, group=TRAINER,
    ) as process:  # fmt: skip
        try:
            eventually(lambda: "python" in procfs.executable(process.pid))
            for users, expected in ((frozenset({0, TRAINER}), [process.pid]), (frozenset({0}), [])):
                run = SoughtRun(str(desk.pod.output), users=users)
                assert [tree.launcher.pid for tree in find_trees(run, ROLES, own_pid=desk.observer.pid)] == expected
        finally:
            process.kill()


def test_terminals_are_read_as_they_are() -> None:
    """The facts that the judgement needs, of a real shell with a job."""
    with terminal(["bash", "--norc"]) as tty:
        assert tty.answers()
        tty.type("sleep 984 & sleep 983")
        eventually(lambda: len(procfs.children(tty.pid)) == 2)
        eventually(lambda: all(procfs.command(p)[:1] == ("sleep",) for p in procfs.children(tty.pid)))
        shell, *jobs = (read_process(pid, ROLES) for pid in (tty.pid, *procfs.children(tty.pid)))
        assert shell is not None
        assert (shell.session, shell.tty != 0) == (tty.pid, True)
        assert len({job.group for job in jobs if job is not None} | {shell.group}) == 3
        assert shell.exe.endswith("bash")
        assert shell.users == (os.geteuid(), os.geteuid())


# --- under a supervisor -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["stop", "supervisor is told", "supervisor was killed"])
async def test_a_terminal_that_the_training_command_opened_stays_with_its_operator(pod: Pod, how: str) -> None:
    """``start.sh`` starts tmux, and an operator works in it when training is restarted."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed (apt-get install tmux)")
    socket = pod.root / "tmux"
    words = f"tmux -S {socket} -f /dev/null"
    opened = f"{words} new-session -d -s x 'bash --norc'"
    window = f"{words} new-window -d -t x \"sh -c 'sleep 982; true'\""
    text = f"{opened}; {window}; sleep 981; true"
    launcher = pod.launcher()
    try:
        handle = await launcher.start(pod.script(text))
        eventually(lambda: socket.exists() and len(panes(str(socket))) == 2)
        shell = min(pid for pid, _ in panes(str(socket)))
        eventually(lambda: procfs.command(shell)[:1] == ("bash",))
        eventually(lambda: len(commands(pod, "sleep")) == 2)
        assert shell not in [p.identity.pid for p in (await handle.tree()).value or ()]
        if how == "supervisor is told":
            os.kill(handle.record.supervisor.pid, signal.SIGTERM)
            eventually(lambda: not handle.supervisor_lives())
        else:
            if how == "supervisor was killed":
                os.kill(handle.record.supervisor.pid, signal.SIGKILL)
                eventually(lambda: not handle.supervisor_lives())
            report = await handle.stop(grace=0.2, save_grace=0.2, saving=lambda: False)
            assert report.survivors == ()
            await handle.release()
        eventually(lambda: commands(pod, "sleep") == [])
        assert [pid for pid, _ in panes(str(socket))] == [shell]
        again = await pod.launcher().start(pod.script("sleep 980", start_id="s2"))
        assert await again.exit_status() is None, "the terminal that was left does not hold the next start up"
        await again.stop(grace=0.2, save_grace=0.2, saving=lambda: False)
        await again.release()
        assert [pid for pid, _ in panes(str(socket))] == [shell]
    finally:
        subprocess.run([*words.split(), "kill-server"], check=False, capture_output=True)


def commands(pod: Pod, name: str) -> list[int]:
    return [pid for pid in pod.members() if procfs.command(pid)[:1] == (name,)]


async def test_a_trainer_started_by_hand_with_a_copied_environment_is_found(desk: Desk) -> None:
    """A shell that has the variables of an earlier start is no reason to start a second trainer beside this one."""
    environ = {**os.environ, "PODWATCH_START_ID": "of-an-earlier-start", "PODWATCH_RUN": "r"}
    with terminal(["bash", "--norc"], environ=environ) as shell:
        shell.type(str(desk.rl))
        [rl] = desk.started()
        assert desk.candidate().launcher.pid == rl
        assert await desk.stop(desk.candidate()) == ["rl", "sleep"]
        assert shell.answers()
