"""Which processes an operator sits at: shells of development environments, and trees of every shape."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.domain.process import ProcessIdentity, ProcessRole
from podwatch.trainer.operator_shells import (
    find_interactive,
    interactive,
    of_users,
    served,
    spared,
    starter,
)
from podwatch.trainer.process_tree import Process
from podwatch.trainer.rules import FoundTree, PodProcess, SoughtRun, TreeAnswer, classify_trees
from tests.support.known_trainers import ROLES

TTY = 34816
OUT = "/app/outputs"
SAVE = OUT + "/checkpoints/step_5/a"


def proc(pid: int, parent: int, line: str, **more: Any) -> Process:
    argv = tuple(line.split())
    name = str(more.pop("name", argv[0].rpartition("/")[2][:15]))
    facts: dict[str, Any] = {"session": pid, "group": pid, "users": (0, 0), **more}
    return Process(ProcessIdentity(pid, pid * 10), parent, name, argv, roles=ROLES, **facts)


ATTACH, ASK = TreeAnswer.ATTACH, TreeAnswer.ASK


def trees(processes: list[Process], users: frozenset[int], *answers: TreeAnswer) -> list[FoundTree]:
    """What podwatch would attach to, or asks about."""
    facts = [
        PodProcess(
            p.identity, p.parent_pid, p.name, p.argv, p.exe, p.cwd, p.users, p.group, p.session, p.tty,
            p.role if p.runs_what_it_says else ProcessRole.OTHER, p.cuda, p.gpus, p.writes, above_podwatch=p.above_us,
        )
        for p in processes
    ]  # fmt: skip
    return [tree for tree in classify_trees(facts, SoughtRun(OUT, users)) if tree.answer in answers]


AT_A_TERMINAL = """
bash
-bash
bash -l
bash -i
bash -il
bash --login
bash --norc
bash --noprofile --norc
bash --posix
bash -O extglob
bash +O extglob -i
bash -o vi
bash -x
bash --rcfile /root/.jetbrains/bash-integration.bash -i
bash --rcfile /dev/fd/63
bash --init-file /root/.vscode-server/bin/abc/out/vs/workbench/contrib/terminal/common/scripts/shellIntegration-bash.sh
bash --init-file /root/.cursor-server/bin/x/shellIntegration-bash.sh
bash --noediting -i
bash -s
bash -s -- argument
bash -
bash --
bash /dev/stdin
/bin/rbash -l
sh
sh -i
-sh
dash
ash -l
/bin/busybox sh
zsh
zsh -i
zsh -il
zsh -o extendedglob
-zsh
ksh -o vi
mksh -l
fish
fish -l
fish --init-command source\t/x/shellIntegration.fish
fish -C true
tcsh
csh -l
nu
nu --config /root/.config/nushell/config.nu
nu -e ls
xonsh
/usr/bin/python3 /usr/bin/xonsh
/usr/bin/python3 -u /usr/local/bin/xonsh --no-rc
elvish
pwsh
pwsh -NoLogo
pwsh -noexit -command try{.shellIntegration.ps1}catch{}
ion
osh
python
python3
python3.12 -q
python -i
python -i train.py
python -ic pass
python -W ignore
python -X dev
/usr/bin/python3 /usr/bin/ipython
/usr/bin/python3 /usr/bin/ipython --pylab
/usr/bin/python3 /usr/bin/ipython -i train.py
python -m IPython
python -m ptpython
bpython
python -m pdb train.py
python -m ipykernel_launcher -f /root/.local/share/jupyter/runtime/kernel-1.json
python -m colab_kernel_launcher -f x.json
node
julia
R
ghci
vim train.py
less /app/outputs/train.log
htop
watch nvidia-smi
gdb -p 1
an-unknown-shell
an-unknown-shell --rc /x
""".strip().splitlines()

NOT_INTERACTIVE = """
bash train.sh
bash -x train.sh
bash -l train.sh
bash --norc train.sh
bash -O extglob train.sh
bash -o pipefail train.sh
bash --rcfile /x train.sh
bash -c uv\trun\trl
bash -lc uv\trun\trl
bash -l -c uv\trun\trl
bash -ic uv\trun\trl
bash -euxo pipefail -c uv\trun\trl
bash --norc -c true
bash -- train.sh
bash /dev/fd/63
/bin/sh /app/train.sh
/bin/sh -c true
sh -e /start.sh
/bin/busybox sh -c true
zsh -c true
zsh train.zsh
fish train.fish
fish -c true
fish --command=true
nu train.nu
nu -c ls
xonsh train.xsh
/usr/bin/python3 /usr/bin/xonsh train.xsh
pwsh -File train.ps1
pwsh -Command ./train
elvish train.elv
python train.py
python -u train.py -i
python -c pass
python -m prime_rl.trainer.rl.train
python -W ignore train.py
python -X dev -m train
/usr/bin/python3 /usr/bin/ipython train.py
uv run rl @ c.toml
/app/.venv/bin/python /app/.venv/bin/rl @ c.toml
torchrun --nproc-per-node 2 train.py
mpirun -np 8 python train.py
nohup bash train.sh
node server.js
PRIME-RL::Launcher
VLLM::EngineCore
""".strip().splitlines()


def spaced(line: str, **more: Any) -> Process:
    """A tab in ``line`` stands for a blank inside an argument."""
    argv = tuple(word.replace("\t", " ") for word in line.split(" "))
    made = proc(20, 10, line, **more)
    return replace(made, argv=argv)


@pytest.mark.parametrize("line", AT_A_TERMINAL)
def test_at_a_terminal_these_are_interactive(line: str) -> None:
    for session in (20, 10):
        if line.startswith("an-unknown") and session == 10:
            return  # nothing tells: a shell that is not known, leads no session and manages no jobs yet
        process = spaced(line, tty=TTY, session=session, stdin="/dev/pts/3")
        assert interactive(process)
        assert starter(process)


@pytest.mark.parametrize("line", NOT_INTERACTIVE)
def test_scripts_commands_and_trainers_are_not(line: str) -> None:
    for session, tty in ((20, TTY), (10, TTY), (20, 0), (10, 0)):
        process = spaced(line, tty=tty, session=session, stdin="/dev/pts/3" if tty else "pipe:[1]")
        assert not interactive(process)
        if not line.startswith("node"):  # an editor's server, or some service: no tree is extended to it
            assert not starter(process)


@pytest.mark.parametrize(
    ("argv", "name", "exe"),
    [
        (("torchrun", "--norc"), "bash", "/usr/bin/bash"),
        (("torchrun",), "torchrun", "/usr/bin/bash"),
        (("rl",), "rl", "/usr/bin/zsh"),
        (("-torchrun",), "torchrun", "/usr/bin/fish"),
        (("sh",), "sh", "/usr/bin/busybox"),
        (("bash",), "bash", ""),
        (("whatever", "-l"), "zsh", ""),
    ],
)
def test_a_shell_by_another_name_is_a_shell(argv: tuple[str, ...], name: str, exe: str) -> None:
    shell = replace(proc(20, 10, "x"), argv=argv, name=name, exe=exe, tty=TTY, stdin="/dev/pts/1")
    assert interactive(shell)
    assert not shell.launcher_like


def test_a_shell_that_reads_commands_from_a_pipe_is_nobodys_terminal_and_yet_no_tree_is_extended_to_it() -> None:
    """``docker exec -i``, ``ssh host bash``, the shell of a coding agent; or a sandbox of the trainer."""
    for line in ("bash", "bash -s", "sh", "-bash"):
        for stdin in ("pipe:[5]", "socket:[7]", ""):
            process = proc(20, 10, line, tty=0, stdin=stdin)
            assert not interactive(process)
            assert starter(process)
    assert not starter(proc(20, 10, "bash", tty=0, stdin="/root/train.sh")), "bash < train.sh"
    assert not interactive(proc(20, 10, "bash", tty=TTY, stdin="/root/train.sh"))
    assert interactive(proc(20, 10, "bash -i", tty=TTY, stdin="/root/train.sh"))
    assert not interactive(proc(20, 10, "python -", tty=TTY, stdin="pipe:[5]")), "python - <<EOF"


def test_job_control_is_seen_in_the_process_groups() -> None:
    shell = proc(20, 10, "myshell --x", tty=TTY, session=10, foreground=30)
    job = proc(30, 20, "python train.py", tty=TTY, session=10, group=30)
    assert interactive(shell, [job]), "it gave its terminal to a child's group"
    idle = replace(shell, foreground=20)
    assert not interactive(idle, [job])
    assert interactive(idle, [job, proc(31, 20, "python eval.py", tty=TTY, session=10, group=31)]), "several jobs"
    workers = [proc(n, 20, "python train.py", session=n, group=n) for n in (40, 41)]
    assert not interactive(idle, workers), "setsid, as torchrun makes its workers: no jobs of a terminal"
    launcher = proc(20, 10, "torchrun train.py", tty=TTY, session=10, foreground=20)
    assert not interactive(launcher, [job, proc(31, 20, "python train.py", tty=TTY, session=10, group=31)])
    monitor = proc(20, 10, "bash train.sh", tty=TTY, session=10, foreground=20)
    assert interactive(monitor, [job, proc(31, 20, "vim", tty=TTY, session=10, group=31)])


ENVIRONMENTS = {
    "tmux": ["tmux: server|tmux new -s train", "bash --norc"],
    "screen": ["SCREEN|SCREEN -S train", "bash"],
    "zellij": ["zellij|/usr/bin/zellij --server /run/x", "zsh"],
    "ssh": ["sshd|sshd: root@pts/0", "-bash"],
    "ssh with a command of its own": ["sshd|sshd: root@pts/0", "bash -c /bin/menu", "bash /bin/menu", "bash"],
    "su - user": ["sshd|sshd: root@pts/0", "-bash", "su|su - trainer", "-bash"],
    "sudo -s": ["sshd|sshd: root@pts/0", "-bash", "sudo|sudo -s", "/bin/bash"],
    "docker exec -it": ["bash"],
    "docker exec by a desktop": ["/bin/sh -c eval\t$(getent\tpasswd)", "/bin/bash"],
    "kubectl exec": ["sh -c clear;\t(bash\t||\tsh)", "bash"],
    "VS Code": ["node|/root/.vscode-server/bin/x/node server-main.js", "node|node bootstrap-fork --type=ptyHost",
                "bash --init-file /root/.vscode-server/x/shellIntegration-bash.sh"],
    "Cursor": ["cursor-server|cursor-server", "node|node bootstrap-fork --type=ptyHost", "zsh -i"],
    "JetBrains": ["java|/opt/jbr/bin/java -jar ide.jar", "bash --rcfile /x/bash-integration.bash -i"],
    "Jupyter": ["python|/usr/bin/python3 /usr/bin/jupyter-lab --port 8888", "/bin/bash -l"],
    "ttyd": ["ttyd|ttyd -W bash", "bash"],
    "a terminal in a browser that is not known": ["python|python -m webterm", "bash"],
    "script": ["bash", "script|script -q /tmp/log", "bash -i"],
    "a script that ends in a shell": ["tmux: server|tmux", "bash -c setup.sh;\tbash", "bash"],
    "an agent": ["assistant|assistant", "bash -s"],
    "a coding agent": ["-bash", "assistant|assistant"],
    "a coding agent in Python": ["-bash", "aider|/usr/bin/python3 /usr/bin/aider"],
    "an agent without a terminal": ["openclaw|/opt/agent/bin/agent serve", "bash -s"],
    "a CI runner": ["Runner.Worker|/opt/runner/bin/Runner.Worker spawnclient"],
    "a web service": ["python|python -m uvicorn app:app"],
    "a test runner": ["bash", "pytest|/usr/bin/python3 /usr/bin/pytest -q"],
    "IPython": ["-bash", "python|/usr/bin/python3 /usr/bin/ipython"],
    "Python": ["-bash", "python3"],
    "nushell": ["tmux: server|tmux", "nu"],
    "PowerShell": ["tmux: server|tmux", "pwsh -NoLogo"],
}  # fmt: skip
TRAINERS = {
    "uv run rl @ c.toml": [("uv run rl @ c.toml", {}), ("python /app/.venv/bin/rl @ c.toml", {"name": "rl"})],
    "bash train.sh": [("bash train.sh", {}), ("torchrun train.py", {})],
    "bash -c": [("bash -c uv\trun\trl", {}), ("uv run rl @ c.toml", {})],
    "python train.py": [("python train.py", {})],
}


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_a_trainer_started_in_a_development_environment_is_a_tree_without_it(environment: str) -> None:
    for trainer in TRAINERS:
        for busy in (False, True):
            check_tree(environment, trainer, busy)


def check_tree(environment: str, trainer: str, busy: bool) -> None:
    processes = [proc(1, 0, "/sbin/init")]
    pid = 10
    for text in ENVIRONMENTS[environment]:
        name, bar, line = text.rpartition("|")
        served_here = not bar
        more = {"name": name[:15]} if bar else {}
        made = spaced(line, tty=TTY if served_here else 0, stdin="/dev/pts/0" if served_here else "pipe:[1]", **more)
        processes.append(
            replace(made, identity=ProcessIdentity(pid, pid), parent_pid=processes[-1].pid, session=pid, group=pid)
        )
        pid += 1
    shell = processes[-1]
    if environment == "an agent":
        processes[-1] = shell = replace(shell, tty=0, stdin="socket:[1]")
    top = pid
    for line, more in TRAINERS[trainer]:
        made = spaced(line, tty=shell.tty, **more)
        made = replace(made, session=shell.session, group=top, identity=ProcessIdentity(pid, pid))
        processes.append(replace(made, parent_pid=processes[-1].pid))
        pid += 1
    holder = replace(proc(pid, pid - 1, "python worker.py", cuda=True, session=pid), tty=0, writes=(SAVE,))
    processes.append(holder)
    if busy:
        processes.append(proc(90, shell.pid, "vim notes", tty=shell.tty, session=shell.session, group=90))
    unclear = environment in ("a coding agent in Python", "a web service", "a test runner")
    found = trees(processes, frozenset({0}), ASK if unclear else ATTACH)
    assert [tree.launcher.pid for tree in found] == [top]
    members = [p for p in processes if top <= p.pid <= pid]
    assert spared(members, frozenset({0})) == frozenset()


def test_a_shell_that_a_trainer_turned_into_is_no_trainer_any_more() -> None:
    """``bash -c 'uv run rl; exec bash'``, as people keep a tmux pane open."""
    before = spaced("bash -c uv\trun\trl;\texec\tbash", tty=TTY, session=20)
    known = (before.identity, before.argv)
    assert spared([before], None, known=known) == frozenset()
    after = replace(before, argv=("bash",), stdin="/dev/pts/1")
    assert spared([after, proc(30, 20, "vim notes", tty=TTY, session=20)], None, known=known) == {20, 30}


def test_under_a_supervisor_only_an_operators_terminal_is_spared() -> None:
    """A shell in a sandbox of the trainer is the trainer's, whatever it waits for; one in a tmux that the command
    started is an operator's, and so is what runs in it."""
    sandbox = [proc(20, 1, "uv run rl"), proc(21, 20, "python env.py"), proc(22, 21, "bash --norc", tty=TTY)]
    assert served(sandbox) == frozenset()
    inside = [
        proc(20, 1, "bash start.sh"),
        proc(21, 20, "tmux new -d", name="tmux: server"),
        proc(22, 21, "bash", tty=TTY),
        proc(23, 22, "vim", tty=TTY),
        proc(24, 21, "uv run rl", tty=TTY),
        proc(25, 20, "python train.py", cuda=True),
    ]
    assert served(inside) == {21, 22, 23}
    assert served([p for p in inside if p.pid not in (22, 23)]) == frozenset(), "nobody sits there: it ends as well"


# --- any tree ---------------------------------------------------------------------------------------------------------

USERS = frozenset({0, 1000})
_LINES = st.sampled_from(
    ["bash", "bash --norc", "-bash", "bash -s", "bash train.sh", "bash -c x", "zsh -i", "fish", "nu", "myshell",
     "tmux new", "screen", "sshd", "python", "python train.py", "python -i x.py", "python -m ipykernel_launcher -f k",
     "jupyter-lab", "uv run rl @ c.toml", "torchrun train.py", "torchrun eval.py", "sudo -s", "script -q log",
     "PRIME-RL::Launcher", "vim x", "sleep 60", "nohup python train.py", "podwatch run", "systemd", "env.py"]
)  # fmt: skip


@st.composite
def pods(draw: st.DrawFn) -> list[Process]:
    count = draw(st.integers(1, 14))
    made: list[Process] = [proc(1, 0, draw(st.sampled_from(["/sbin/init", "bash /start.sh", "torchrun train.py"])))]
    for pid in range(2, count + 2):
        parent = draw(st.sampled_from([0, *[p.pid for p in made]]))
        above = next((p for p in made if p.pid == parent), None)
        leads = above is None or draw(st.booleans())
        session = pid if leads or above is None else above.session
        group = pid if leads or above is None or draw(st.booleans()) else above.group
        tty = draw(st.sampled_from([0, TTY])) if leads or above is None else above.tty
        argv0 = draw(st.sampled_from(["", "", "", "torchrun", "rl"]))
        process = proc(
            pid,
            parent,
            draw(_LINES),
            session=session,
            group=group,
            tty=tty,
            foreground=draw(st.sampled_from([-1, group, pid, pid + 1])),
            users=draw(st.sampled_from([(0, 0), (0, 0), (1000, 1000), (1001, 1001), (1001, 0), ()])),
            stdin=draw(st.sampled_from(["/dev/pts/0", "pipe:[1]", "/root/train.sh", ""])),
            exe=draw(st.sampled_from(["", "", "/usr/bin/bash", "/usr/bin/python3.12", "/usr/bin/sleep"])),
            cuda=draw(st.sampled_from([False, False, True, None])),
            writes=draw(st.sampled_from([(), (), (OUT + "/checkpoints/step_5/a",), (OUT + "/log",)])),
            cwd=draw(st.sampled_from(["/", OUT])),
        )
        if argv0:
            process = replace(process, argv=(argv0, *process.argv[1:]))
        made.append(process)
    us = draw(st.sampled_from([0, *[p.pid for p in made]]))  # podwatch, and what it was started from
    while us := next((p.parent_pid for p in made if p.pid == us), 0):
        made = [replace(p, above_us=True) if p.pid == us else p for p in made]
    return made


def below(top: int, processes: list[Process]) -> list[Process]:
    found, queue = [], [top]
    while queue:
        pid = queue.pop()
        found += [p for p in processes if p.pid == pid]
        queue += [p.pid for p in processes if p.parent_pid == pid]
    return found


@given(pods())
def test_what_is_stopped_is_never_an_operators_nor_another_users(processes: list[Process]) -> None:
    persons = find_interactive(processes)
    by_pid = {p.pid: p for p in processes}
    for found in trees(processes, USERS, ATTACH):
        top = by_pid[found.launcher.pid]
        tree = below(top.pid, processes)
        stopped = {p.pid for p in tree} - spared(tree, USERS, known=(top.identity, top.argv))
        for pid in stopped:
            process = by_pid[pid]
            up = [pid]
            while up[-1] != top.pid:
                up.append(by_pid[up[-1]].parent_pid)
            assert not persons.intersection(up[:-1]), f"{pid} is an operator's"  # the top runs what was attached to
            assert of_users(process, USERS), f"{pid} is of another user"
            assert not process.above_us
