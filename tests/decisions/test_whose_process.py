"""Whose process: process tables, and what podwatch does about each tree in them."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.domain.process import FoundTree, PodProcess, ProcessIdentity, ProcessRole, TreeAnswer
from podwatch.trainer.rules import (
    SEEN_LATE,
    TRAINING,
    SoughtRun,
    choose_trainer,
    classify_trees,
    is_operators,
    own_processes,
    to_signal,
    writers_beside,
)
from tests.support.known_trainers import ROLES

OUT = "/app/outputs"
SAVE = f"{OUT}/checkpoints/step_5/trainer/__0_0.distcp"
TTY = 34816
COMMAND = ("uv", "run", "rl", "@", "c.toml", "--ckpt")
RUN = SoughtRun(OUT, frozenset({0}), gpus=frozenset({0, 1}), command=COMMAND, cwd="/app", start_ids=frozenset({"s7"}))
GPU: dict[str, Any] = {"cuda": True, "gpus": frozenset({0})}


def proc(pid: int, parent: int, line: str, **more: Any) -> PodProcess:
    """A tab in ``line`` stands for a space within a word."""
    argv = tuple(word.replace("\t", " ") for word in line.split(" "))
    name = str(more.pop("name", argv[0].rpartition("/")[2][:15]))
    role = ROLES.classify(name, argv)
    if not ROLES.runs_program(more.get("exe", ""), argv):
        role = ProcessRole.OTHER
    facts: dict[str, Any] = {"group": pid, "session": pid, "users": (0, 0), "cwd": "/app", "role": role, **more}
    return PodProcess(ProcessIdentity(pid, pid * 100), parent, name, argv, **facts)


INIT = proc(1, 0, "/sbin/init")
SHELL = proc(10, 1, "-bash", name="bash", tty=TTY)


@dataclass(frozen=True)
class Case:
    """``answers``: pid of the top of a tree -> attach, wait, ask or own; what is not named is ignored."""

    what: str
    processes: tuple[PodProcess, ...]
    answers: dict[int, str] = field(default_factory=dict)
    run: SoughtRun = RUN


def case(what: str, *processes: PodProcess, run: SoughtRun = RUN, **answers: str) -> Case:
    return Case(what, processes, {int(pid[1:]): answer for pid, answer in answers.items()}, run)


TRAIN = "python train.py --output_dir /app/outputs"
CASES = [
    # -- what is attached to
    case("a script with a context that names output_dir", proc(20, 10, TRAIN, **GPU), _20="attach"),
    case("the same without a terminal or a parent (docker exec)", proc(20, 0, TRAIN, **GPU), _20="attach"),
    case(
        "torchrun, whose workers have the contexts in sessions of their own",
        proc(20, 10, "torchrun train.py --output_dir /app/outputs"),
        proc(21, 20, "python -u train.py --output_dir /app/outputs", **GPU),
        proc(22, 20, "python -u train.py --output_dir /app/outputs", **GPU),
        _20="attach",
    ),
    case(
        "torchrun in a tmux pane, typed",
        proc(12, 1, "tmux new", name="tmux: server"),
        proc(13, 12, "bash", tty=TTY),
        proc(20, 13, "torchrun train.py --output_dir outputs", tty=TTY, session=13),
        proc(21, 20, "python -u train.py --output_dir outputs", **GPU),
        _20="attach",
    ),
    case(
        "the command of a tmux pane",
        proc(12, 1, "tmux new -d", name="tmux: server"),
        proc(20, 12, "bash -c uv\trun\trl\t@\tc.toml", tty=TTY),
        proc(21, 20, "uv run rl @ c.toml", tty=TTY, session=20, group=20),
        proc(22, 21, "VLLM::EngineCore", **GPU),
        _20="attach",
    ),
    case(
        "a script that runs it, with nohup",
        proc(20, 10, "bash train.sh", session=10),
        proc(21, 20, "nohup torchrun train.py --output_dir /app/outputs", session=10, group=20),
        proc(22, 21, "python -u train.py --output_dir /app/outputs", **GPU),
        _20="attach",
    ),
    case(
        "our command with our configuration",
        proc(20, 10, "uv run rl @ c.toml"),
        proc(21, 20, "python /app/.venv/bin/rl @ c.toml", name="rl", group=20, session=20),
        proc(22, 21, "VLLM::EngineCore", **GPU),
        _20="attach",
    ),
    case("our configuration, and a launcher's role while it loads", proc(20, 10, "uv run rl @ c.toml"), _20="attach"),
    case("our configuration by its full path, from elsewhere", proc(20, 10, "uv run rl @ /app/c.toml", cwd="/"),
         _20="attach"),
    case("a launcher that saves a checkpoint", proc(20, 10, "uv run rl @ d.toml", writes=(SAVE,)), _20="attach"),
    case("whatever its name, it holds a GPU and saves", proc(20, 10, "/opt/x", writes=(SAVE,), **GPU), _20="attach"),
    case("an evaluation by its name that saves checkpoints on a GPU",
         proc(20, 10, "torchrun eval.py", writes=(SAVE,), **GPU), _20="attach"),
    case("output_dir in two parts", proc(20, 10, "uv run rl @ d.toml --output-dir /app --run.name outputs"),
         _20="attach"),
    case("within a shell's -c", proc(20, 10, f"bash -c cd\t/app\t&&\texec\t{TRAIN.replace(' ', chr(9))}"),
         proc(21, 20, TRAIN, group=20, session=20, **GPU), _20="attach"),
    case("hydra", proc(20, 10, "python main.py hydra.run.dir=/app/outputs", **GPU), _20="attach"),
    case("a wrapper that is not known", proc(20, 10, f"anything --x 10h {TRAIN}"), proc(21, 20, TRAIN, **GPU),
         _20="attach"),
    case("a trainer that is the container's first process", proc(2, 1, TRAIN, **GPU), _2="attach"),
    case("a configuration that names output_dir", proc(20, 10, "python t.py x.toml", names_output="x.toml", **GPU),
         _20="attach"),
    case("checkpoints elsewhere", proc(20, 10, "python t.py", writes=("/ckpt/any",), **GPU),
         run=replace(RUN, checkpoint_dir="/ckpt"), _20="attach"),
    case("the trainer of trainer.user", proc(20, 10, TRAIN, users=(1000, 1000), **GPU),
         run=replace(RUN, users=frozenset({0, 1000})), _20="attach"),
    case("on a GPU whose number cannot be read", proc(20, 10, TRAIN, cuda=True), _20="attach"),
    case("one that an operator named", proc(20, 10, "python experiment.py", **GPU),
         run=replace(RUN, attach=ProcessIdentity(20, 2000)), _20="attach"),
    case("two of them", proc(20, 10, TRAIN, **GPU), proc(30, 10, TRAIN, **GPU), _20="attach", _30="attach"),
    case("with an operator's shell that it opened", proc(20, 10, TRAIN, **GPU), proc(21, 20, "bash", tty=TTY),
         proc(22, 21, "vim x", tty=TTY), _20="attach"),
    case("in a notebook's terminal", proc(12, 1, "python /usr/bin/jupyter-lab --port 8888"),
         proc(13, 12, "/bin/bash -l", tty=TTY), proc(20, 13, TRAIN, tty=TTY, session=13, **GPU), _20="attach"),
    case("by a notebook's kernel", proc(13, 1, "python -m ipykernel_launcher -f k.json"),
         proc(20, 13, TRAIN, **GPU), _20="attach"),
    case("a wrapper that is not known, of a script that saves", proc(20, 10, "anything 10h python t.py"),
         proc(21, 20, "python t.py", writes=(SAVE,), **GPU), _20="attach"),
    case("a script that says that it trains, above what saves", proc(20, 10, "python train.py"),
         proc(21, 20, "python worker.py", writes=(SAVE,), **GPU), _20="attach"),
    case("a script with job control, which is used like a shell", proc(15, 10, "bash menu.sh", tty=TTY),
         proc(20, 15, TRAIN, session=15, tty=TTY, **GPU), _20="attach"),
    case("a title that says that it trains, below a script named like an evaluation",
         proc(20, 10, f"torchrun eval.py --output_dir {OUT}"), proc(21, 20, "PRIME-RL::Trainer", **GPU), _20="attach"),
    # -- what is waited for
    case("a script on another GPU that names output_dir", proc(20, 10, TRAIN, cuda=True, gpus=frozenset({5})),
         _20="wait"),
    case("a script that loads", proc(20, 10, TRAIN, cuda=False), _20="wait"),
    case("a script of which nothing can be seen", proc(20, 10, TRAIN), _20="wait"),
    case("our command typed by hand, with our script, while it loads",
         proc(20, 10, "python train.py", cuda=False), run=replace(RUN, command=("python", "train.py")), _20="wait"),
    case("a launcher that works in output_dir", proc(20, 10, "torchrun own.py", cwd=OUT, cuda=False), _20="wait"),
    case("a script that saves a checkpoint", proc(20, 10, "python own.py", writes=(SAVE,), cuda=False), _20="wait"),
    case("a relative output_dir of a process whose directory cannot be read",
         proc(20, 10, "python train.py --output_dir outputs", cwd=""), _20="wait"),
    # -- what is asked about
    case("an evaluation on a GPU that writes its results there",
         proc(20, 10, "torchrun eval.py --output_dir /app/outputs", **GPU), _20="ask"),
    case("an option of the script makes it an evaluation", proc(20, 10, f"{TRAIN} --eval_only", **GPU), _20="ask"),
    case("our command, on a GPU, without a tie", proc(20, 10, "python train.py", **GPU),
         run=replace(RUN, command=("python", "train.py")), _20="ask"),
    case("another configuration in our directory, on our GPUs", proc(20, 10, "uv run rl @ d.toml", **GPU), _20="ask"),
    case("a title that hides the command, in our directory", proc(20, 10, "PRIME-RL::Launcher", **GPU), _20="ask"),
    case("a title on a terminal", proc(20, 10, "PRIME-RL::Launcher", tty=TTY, exe="/usr/bin/python3.12", **GPU),
         _20="ask"),
    case("a known launcher whose output goes there",
         proc(20, 10, "uv run rl @ d.toml", cwd="/", writes=(f"{OUT}/log",), **GPU), _20="ask"),
    case("below a Python program that is not known", proc(15, 10, "python -m uvicorn app:app"),
         proc(20, 15, TRAIN, group=15, session=15, **GPU), _20="ask"),
    case("below a coding agent in Python", proc(15, 10, "/usr/bin/python3 /usr/bin/aider", tty=TTY),
         proc(20, 15, TRAIN, group=15, session=15, tty=TTY, **GPU), _20="ask"),
    case("a notebook that saves checkpoints", proc(20, 1, "python -m ipykernel_launcher -f k.json", writes=(SAVE,)),
         _20="ask"),
    case("another podwatch's trainer of our output_dir", proc(20, 1, TRAIN, start_id="other", **GPU), _20="ask"),
    # -- what the supervisor started
    case("a survivor of our start", proc(20, 1, "python worker.py", start_id="s7"), _20="own"),
    case("survivors without their launcher", proc(20, 1, "python worker.py", start_id="s7", **GPU),
         proc(30, 1, "VLLM::EngineCore", start_id="s7", **GPU), _20="own", _30="own"),
    case("a survivor whose start has a recorded end", proc(20, 1, "python worker.py", start_id="s6")),
    case("another user's process with our start id", proc(20, 1, "sleep 987", start_id="s7", users=(1001, 1001))),
    case("a script that an operator gave the trainer's environment",
         proc(20, 10, "python debug.py", start_id="s7", tty=TTY)),
    case("a command executed into the container with it", proc(20, 0, "python debug.py", start_id="s7")),
    # -- what is left alone
    case("an operator's vllm serve on our GPU", proc(20, 10, "vllm serve Qwen/Qwen3-8B"),
         proc(21, 20, "VLLM::EngineCore", **GPU)),
    case("the same of our weights", proc(20, 10, f"vllm serve {OUT}/step_80/weights", cwd=OUT, **GPU)),
    case("the same below our configuration's name",
         proc(20, 10, "python -m vllm.entrypoints.openai.api_server --config c.toml", **GPU)),
    case("an engine without its server", proc(20, 1, "VLLM::EngineCore", **GPU)),
    case("an evaluation of one checkpoint", proc(20, 10, f"python eval.py --ckpt {OUT}/step_80", **GPU)),
    case("an evaluation of one checkpoint by torchrun", proc(20, 10, f"torchrun main.py --ckpt {OUT}/step_80",
         cwd="/eval", **GPU)),
    case("lm_eval", proc(20, 10, f"python -m lm_eval --model hf --output_path {OUT}/eval", **GPU)),
    case("an evaluation that loads", proc(20, 10, f"torchrun eval.py --output_dir {OUT}")),
    case("tensorboard", proc(20, 10, f"tensorboard --logdir {OUT}")),
    case("tensorboard as a module", proc(20, 10, f"python -m tensorboard.main --logdir {OUT}")),
    case("wandb", proc(20, 10, f"python /opt/bin/wandb sync --output_dir {OUT}")),
    case("a tool with a context", proc(20, 10, f"python /opt/bin/wandb agent --output_dir {OUT}", **GPU)),
    case("rsync into it", proc(20, 10, f"rsync -a /b/ {OUT}", writes=(SAVE,))),
    case("a copy of a checkpoint", proc(20, 10, f"cp -r /b {OUT}", writes=(SAVE,))),
    case("tail", proc(20, 10, f"tail -F {OUT}/logs/rl.log", cwd=OUT)),
    case("vim of our configuration", proc(20, 10, "vim c.toml", tty=TTY)),
    case("bash > OUT/log", proc(20, 10, "bash", tty=TTY, writes=(f"{OUT}/log",))),
    case("a script whose output goes there", proc(20, 10, "python own.py", writes=(f"{OUT}/log",), **GPU)),
    case("a shell script whose output goes there", proc(20, 10, "bash x.sh", writes=(f"{OUT}/log",)),
         proc(21, 20, "sleep 300", group=20, session=20)),
    case("the same configuration with another --run.name",
         proc(20, 10, "uv run rl @ c.toml --run.name other"), proc(21, 20, "VLLM::EngineCore", **GPU)),
    case("the same configuration with another output_dir", proc(20, 10, "uv run rl @ c.toml --output-dir /other",
         **GPU)),
    case("our script with another output_dir", proc(20, 10, "python train.py --output_dir /app/other", **GPU),
         run=replace(RUN, command=("python", "train.py"))),
    case("a queue that starts the next experiment", proc(20, 10, "bash queue.sh", cwd="/exp"),
         proc(21, 20, "torchrun sft.py --output_dir /exp/2", cwd="/exp", group=20, session=20),
         proc(22, 21, "python -u sft.py --output_dir /exp/2", cwd="/exp", **GPU)),
    case("three lines of Python on /dev/nvidia1",
         proc(20, 10, "python x.py", cuda=True, gpus=frozenset({1}), cwd="/tmp/x")),
    case("a script on another GPU", proc(20, 10, "python x.py", cuda=True, gpus=frozenset({5}))),
    case("a notebook on our GPU", proc(20, 1, "python -m ipykernel_launcher -f k.json", **GPU)),
    case("Python at a terminal", proc(20, 10, "python3", tty=TTY, **GPU)),
    case("ipython with output_dir in its words", proc(20, 10, f"ipython -- --output_dir {OUT}", tty=TTY, **GPU)),
    case("a shell that calls itself torchrun",
         proc(20, 10, f"torchrun --output_dir {OUT}", exe="/usr/bin/bash", name="bash", tty=TTY)),
    case("a sleep that calls itself torchrun", proc(20, 10, f"torchrun --output_dir {OUT}", exe="/usr/bin/sleep")),
    case("another user's process with our argv, cwd and title",
         proc(20, 10, "PRIME-RL::Launcher", cwd=OUT, users=(1001, 1001), writes=(SAVE,), **GPU)),
    case("one with our user's effective id only", proc(20, 10, TRAIN, users=(1001, 0), **GPU)),
    case("one of an unknown user", proc(20, 10, TRAIN, users=(), **GPU)),
    case("our output_dir as what it reads",
         proc(20, 10, f"python train.py --resume_from_checkpoint {OUT} --output_dir /other", **GPU)),
    case("our output_dir as its model", proc(20, 10, f"python chat.py --model {OUT}", cwd="/x", **GPU)),
    case("a directory with a similar name", proc(20, 10, f"torchrun train.py --output_dir {OUT}-2", cwd="/x", **GPU)),
    case("a directory below it", proc(20, 10, f"python train.py --output_dir {OUT}/ablation", cwd="/x", **GPU)),
    case("the second run on the pod", proc(20, 1, "uv run rl @ e.toml", start_id="t1", cwd="/two", **GPU)),
    case("podwatch's own children", proc(20, 1, "podwatch run", podwatch=True), proc(21, 20, TRAIN, **GPU)),
    case("the script that started podwatch", proc(20, 1, f"bash job.sh --output_dir {OUT}", above_podwatch=True),
         proc(21, 20, "podwatch run", podwatch=True, group=20, session=20)),
    case("a merge of checkpoints", proc(20, 10, f"python merge.py --output_dir {OUT}", writes=(SAVE,))),
]  # fmt: skip


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.what.replace(" ", "-"))
def test_each_tree_gets_its_answer(one: Case) -> None:
    found = classify_trees([INIT, SHELL, *one.processes], one.run)
    assert {tree.top.pid: str(tree.answer) for tree in found} == one.answers
    assert all(tree.reason for tree in found)
    turned = classify_trees([*reversed(one.processes), SHELL, INIT], one.run)
    assert turned == found, "the order in which processes are read changes nothing"


def test_the_container_s_first_process_is_a_trainer_only_if_it_trains() -> None:
    for line, top in (("torchrun train.py --output_dir /app/outputs", 1), ("bash /start.sh", 20), ("/sbin/init", 20)):
        worker = proc(20, 1, TRAIN, group=1, session=1, **GPU)
        assert [tree.top.pid for tree in classify_trees([proc(1, 0, line), worker], RUN)] == [top]


def test_what_podwatch_was_started_from_is_never_part_of_a_tree() -> None:
    script = proc(20, 10, "bash job.sh", above_podwatch=True)
    trainer = proc(21, 20, TRAIN, group=20, session=20, **GPU)
    assert [tree.top.pid for tree in classify_trees([INIT, SHELL, script, trainer], RUN)] == [21]
    above = replace(trainer, above_podwatch=True)
    assert classify_trees([INIT, SHELL, script, above], RUN) == (), "a stop would end podwatch, too"


# -- where a tree ends -------------------------------------------------------------------------------------------------

ABOVE = {
    "tmux": ["tmux: server|tmux new -s train", "bash --norc"],
    "screen": ["SCREEN|SCREEN -S train", "bash"],
    "ssh": ["sshd|sshd: root@pts/0", "-bash"],
    "ssh with a menu": ["sshd|sshd: root@pts/0", "bash -c /bin/menu", "bash /bin/menu", "bash"],
    "sudo -s": ["sshd|sshd: root@pts/0", "-bash", "sudo|sudo -s", "/bin/bash"],
    "docker exec": ["/bin/sh -c eval\t$(getent\tpasswd)", "/bin/bash"],
    "VS Code": ["node|/root/.vscode-server/bin/node server-main.js", "bash --init-file /root/x/shellIntegration.sh"],
    "Jupyter": ["python|/usr/bin/python3 /usr/bin/jupyter-lab --port 8888", "/bin/bash -l"],
    "a terminal in a browser": ["python|python -m webterm", "bash"],
    "a script that ends in a shell": ["tmux: server|tmux", "bash -c setup.sh;\tbash", "bash"],
    "an agent's shell": ["assistant|assistant", "bash -s"],
    "a CI runner": ["Runner.Worker|/opt/runner/bin/Runner.Worker spawnclient"],
    "a shell that is not known": ["sshd|sshd: root@pts/0", "myshell"],
    "fish": ["fish -C true"],
    "a Python prompt": ["-bash", "python3"],
    "cron": ["cron|/usr/sbin/cron -f", "sh -c :"],
}
JOBS = {
    "uv run rl": ["uv run rl @ c.toml", "python /app/.venv/bin/rl @ c.toml"],
    "bash train.sh": ["bash train.sh", "torchrun train.py --output_dir /app/outputs"],
    "python train.py": [TRAIN],
    "timeout": [f"timeout 10h {TRAIN}", TRAIN],
}


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("above", ABOVE)
def test_a_tree_ends_below_what_an_operator_or_a_service_uses(above: str, job: str) -> None:
    processes = [INIT]
    for pid, text in enumerate(ABOVE[above], 10):
        name, bar, line = text.rpartition("|")
        more: dict[str, Any] = {"name": name[:15]} if bar else {"tty": TTY}
        processes.append(proc(pid, processes[-1].pid, line, **more))
    shell, typed = processes[-1], processes[-1].tty != 0 and above != "cron"
    for pid, line in enumerate(JOBS[job], 40):
        more = {"session": shell.session, "group": 40, "tty": shell.tty} if typed else {"session": 40, "group": 40}
        processes.append(proc(pid, processes[-1].pid, line, **more))
    processes.append(proc(60, processes[-1].pid, "python worker.py", **GPU))
    if above == "cron":  # sh -c runs the job in its own group and ends with it: it is part of the job
        processes = [replace(p, group=11, session=11) if p.pid in (40, 41) else p for p in processes]
    found = classify_trees(processes, RUN)
    top = 11 if above == "cron" else 40
    assert [(tree.top.pid, tree.answer) for tree in found] == [(top, TreeAnswer.ATTACH)]
    members = below(found[0].top.pid, processes)
    assert to_signal(members, RUN.users) == {p.pid for p in processes if p.pid >= top}


def below(top: int, processes: list[PodProcess]) -> list[PodProcess]:
    """The tree as podwatch reads it: this process and everything below it."""
    found = [p for p in processes if p.pid == top]
    for one in found:  # it grows
        found += [p for p in processes if p.parent_pid == one.pid and p not in found]
    return found


# -- what a stop signals -----------------------------------------------------------------------------------------------

PROMPTS = """
bash;-bash;bash -l;bash -i;bash -il;bash --norc;bash -O extglob;bash +O extglob -i;bash -o vi;bash -x
bash --rcfile /root/x.bash -i;bash --init-file /root/x/shellIntegration-bash.sh;bash --noediting -i;bash -s
bash -s -- argument;bash -;bash --;bash /dev/stdin;/bin/rbash -l;sh;-sh;dash;ash -l;/bin/busybox sh;zsh;-zsh;zsh -il
zsh -o extendedglob;ksh -o vi;fish;fish -l;fish -C true;tcsh;csh -l;nu
python;python3;python3.12 -q;python -i;python -i train.py;python -u -i train.py;python -ic pass;python -W ignore
python -X dev;/usr/bin/python3 /usr/bin/ipython;/usr/bin/python3 /usr/bin/ipython -i train.py;python -m IPython
python -m ptpython;bpython;python -m pdb train.py;python -m ipykernel_launcher -f kernel-1.json;gdb -p 1
"""
SCRIPTS = """
bash train.sh;bash -x train.sh;bash -l train.sh;bash -O extglob train.sh;bash -o pipefail train.sh
bash --rcfile /x train.sh;bash -c uv\trun\trl;bash -lc uv\trun\trl;bash -ic uv\trun\trl;bash -- train.sh
bash -euxo pipefail -c uv\trun\trl;bash --norc -c true;bash - train.sh;/bin/sh /app/train.sh;sh -e /start.sh
/bin/busybox sh -c true;zsh train.zsh;fish -c true;fish --command=true
python train.py;python -u train.py -i;python -O train.py;python -s train.py;python -Es train.py;python -c pass
python -m prime_rl.trainer.rl.train;python -W ignore train.py;python -X dev -m train;python -Ximporttime train.py
/usr/bin/python3 /usr/bin/ipython train.py;uv run rl @ c.toml;torchrun --nproc-per-node 2 train.py
mpirun -np 8 python train.py;nohup bash train.sh;script -q -c bash\ttrain.sh;sudo -u ml torchrun train.py
PRIME-RL::Launcher;VLLM::EngineCore;wandb-core --port-filename /x
"""


def lines(text: str) -> list[str]:
    return text.strip().replace("\n", ";").split(";")


@pytest.mark.parametrize("line", lines(PROMPTS))
def test_where_an_operator_types_on_a_terminal_nothing_is_signalled(line: str) -> None:
    tree = [proc(20, 10, TRAIN, **GPU), proc(21, 20, line, tty=TTY), proc(22, 21, "python x.py", tty=TTY, **GPU)]
    assert to_signal(tree, RUN.users) == {20}
    assert [t.top.pid for t in classify_trees([*tree[1:], replace(tree[0], parent_pid=21)], RUN)] == [20]


@pytest.mark.parametrize("line", lines(SCRIPTS))
def test_a_script_on_a_terminal_ends_with_its_tree(line: str) -> None:
    tree = [proc(20, 10, line, tty=TTY), proc(21, 20, "python x.py", tty=TTY, **GPU)]
    assert to_signal(tree, RUN.users) == {20, 21}


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ("torchrun --norc", {"exe": "/usr/bin/bash"}),
        ("-torchrun", {"exe": "/usr/bin/fish"}),
        ("sh", {"exe": "/usr/bin/busybox"}),
        ("myshell", {"exe": "/opt/bin/myshell"}),
        ("-myshell", {"exe": "/opt/bin/myshell"}),
        ("julia", {"exe": "/usr/bin/julia", "cuda": True}),
        ("nvtop", {"exe": "/usr/bin/nvtop", "gpus": frozenset({0})}),
    ],
)
def test_a_prompt_by_another_name_is_left_alone(line: str, facts: dict[str, Any]) -> None:
    tree = [proc(20, 10, TRAIN, **GPU), proc(21, 20, line, tty=TTY, **facts)]
    assert to_signal(tree, RUN.users) == {20}


def test_a_shell_without_a_terminal_is_a_sandbox() -> None:
    for line in ("bash", "bash -s", "sh", "-bash"):
        assert to_signal([proc(20, 10, TRAIN, **GPU), proc(21, 20, line)], RUN.users) == {20, 21}


def test_what_gives_an_operators_shell_its_terminal_is_left_with_it() -> None:
    """``script``, ``sudo`` with a terminal of its own: the shell would end with it. Not the trainer itself."""
    for line in ("script -q log", "sudo -s"):
        tree = [proc(20, 10, "bash train.sh"), proc(21, 20, line, tty=TTY), proc(22, 21, "bash -i", tty=TTY + 1)]
        assert to_signal(tree, RUN.users) == {20}
    assert to_signal([proc(20, 10, TRAIN, **GPU), proc(21, 20, "bash -i", tty=TTY + 1)], RUN.users) == {20}


def test_a_stop_leaves_an_operators_shell_and_other_users_alone() -> None:
    tree = [
        proc(20, 10, "bash start.sh"),
        proc(21, 20, "tmux new -d", name="tmux: server"),
        proc(22, 21, "bash", tty=TTY),
        proc(23, 22, "vim", tty=TTY),
        proc(24, 21, "uv run rl", tty=TTY),
        proc(25, 20, TRAIN, **GPU),
        proc(26, 25, "bash --norc", tty=TTY),
        proc(27, 25, "bash -s"),
        proc(28, 25, "sleep 9", users=(1001, 1001)),
        proc(29, 25, "python -m ipykernel_launcher -f k"),
    ]
    assert to_signal(tree, RUN.users) == {20, 25, 27}
    assert to_signal(tree, RUN.users, started=True) == {20, 24, 25, 26, 27, 28, 29}, (
        "what our own trainer opened is ours: its sandbox, and what it runs as another user"
    )
    alone = [p for p in tree if p.pid not in (22, 23)]
    assert to_signal(alone, started=True) == {p.pid for p in alone}, "nobody sits there: the server ends as well"


def test_a_notebook_server_that_the_command_started_stays_with_everything_below() -> None:
    tree = [
        proc(20, 10, "bash start.sh"),
        proc(21, 20, "python /usr/bin/jupyter-lab --port 8888"),
        proc(22, 21, "python -m ipykernel_launcher -f k"),
        proc(23, 22, "python worker.py"),
        proc(24, 20, TRAIN, **GPU),
    ]
    assert to_signal(tree, started=True) == {20, 24}
    assert to_signal(tree[:2], started=True) == {20}


def test_a_shell_that_a_trainer_turned_into_is_no_trainer_any_more() -> None:
    """``bash -c 'uv run rl; exec bash'``, as people keep a pane open."""
    before = proc(20, 10, "bash -c uv\trun\trl;\texec\tbash", tty=TTY)
    assert to_signal([before], RUN.users) == {20}
    after = proc(20, 10, "bash", tty=TTY)
    assert to_signal([after, proc(30, 20, "vim notes", tty=TTY)], RUN.users) == frozenset()


def test_who_gave_a_process_the_trainers_environment() -> None:
    """The topmost process that has it decides, and what is above that."""
    pod = [
        INIT,
        SHELL,
        proc(20, 1, "python worker.py"),  # an orphan
        proc(21, 20, "bash", tty=TTY),  # its sandbox
        proc(30, 10, "bash --norc", tty=TTY),
        proc(31, 30, "python debug.py"),  # started away from that shell's terminal
        proc(40, 10, "python debug.py"),
        proc(50, 0, "python debug.py"),  # executed into the container
        proc(60, 1, "python -m ipykernel_launcher -f k"),
        proc(61, 60, "python debug.py"),
        proc(70, 1, "slurmstepd"),
        proc(71, 70, "python task.py"),
        proc(80, 10, "python /s/supervise.py keep /s s7"),
        proc(81, 80, "python worker.py"),
        proc(90, 10, "python /s/supervise.py init --job -- podwatch run"),  # typed at a shell
        proc(91, 90, "python worker.py"),  # its supervisor was killed
    ]
    marked = {20, 21, 30, 31, 40, 50, 61, 71, 81, 91}
    own = [replace(p, start_id="s7") if p.pid in marked else p for p in pod]
    answers = {t.top.pid for t in classify_trees(own, RUN) if t.answer is TreeAnswer.OWN}
    assert answers == {20, 71, 81, 91}
    assert {p.pid for p in own_processes(own, RUN)} == {20, 21, 71, 81, 91}


# -- second writers ----------------------------------------------------------------------------------------------------

OURS = proc(11, 10, "python train.py", group=11, session=11, start_id="s7", **GPU)
BESIDE = replace(RUN, gpus=frozenset(), command=("python", "train.py"))


def writers(*processes: PodProcess, above: tuple[int, ...] = ()) -> dict[int, bool]:
    """pid of the top of a tree -> whether it is a second writer; without entry it is nothing."""
    found = writers_beside([INIT, SHELL, *processes], BESIDE, {11}, {1, 10, *above})
    return {tree.top.pid: tree.writes for tree in found}


@pytest.mark.parametrize(
    "process",
    [
        proc(20, 1, "python own.py", writes=(SAVE,)),
        proc(20, 1, "/opt/x", writes=(SAVE,), **GPU),
        proc(20, 1, "python own.py", writes=(SAVE,), users=(999, 999)),
        proc(20, 1, "python -m ipykernel_launcher -f k.json", writes=(SAVE,)),
        proc(20, 1, TRAIN, **GPU),
        proc(20, 1, TRAIN, cuda=True, gpus=frozenset({5})),
        proc(20, 1, "torchrun x.py --output_dir outputs"),
        proc(20, 1, TRAIN, age=3.0),
        proc(20, 1, TRAIN, start_id="other", **GPU),
        proc(20, 1, f"{TRAIN} --do_train --do_eval", **GPU),
        proc(20, 1, f"{TRAIN} --do_eval", writes=(SAVE,), **GPU),
    ],
    ids=lambda one: " ".join(one.argv),
)
def test_a_second_writer_saves_trains_or_runs_our_script(process: PodProcess) -> None:
    assert writers(process) == {20: True}


@pytest.mark.parametrize(
    "process",
    [
        proc(20, 1, TRAIN, age=1.0),
        proc(20, 1, f"python prepare.py --output_dir {OUT}", age=60.0),
        proc(20, 1, "PRIME-RL::Launcher", writes=(f"{OUT}/log",), cwd=OUT),
    ],
    ids=lambda one: " ".join(one.argv),
)
def test_one_that_may_write_is_no_second_writer_yet(process: PodProcess) -> None:
    assert writers(process) == {20: False}


@pytest.mark.parametrize(
    "process",
    [
        proc(20, 1, f"tail -f {OUT}/logs/rl.log"),
        proc(20, 1, f"rsync -a /backup/ {OUT}/checkpoints", writes=(SAVE,)),
        proc(20, 1, f"rsync -a /backup/ {OUT}/checkpoints", writes=(SAVE,), users=(999, 999)),
        proc(20, 1, f"python -m tensorboard.main --logdir {OUT}"),
        proc(20, 1, "bash", writes=(f"{OUT}/logs/rl.log",)),
        proc(20, 1, f"vllm serve {OUT}", **GPU),
        proc(20, 1, "python train.py --output_dir /work/another", cwd="/work", writes=("/work/another/x",), **GPU),
        proc(20, 1, f"python train.py --resume {OUT}/checkpoints/step_40", cwd="/work", **GPU),
        proc(20, 1, f"torchrun eval.py --output_dir {OUT}", **GPU),
        proc(20, 1, f"{TRAIN} --do_eval", **GPU),
        proc(20, 1, f"{TRAIN} --do_predict --output_dir {OUT}", **GPU),
        proc(20, 1, f"{TRAIN} --test-only=1", **GPU),
        proc(20, 1, f"{TRAIN} --help", age=3.0),
        proc(20, 1, TRAIN, users=(1000, 1000), **GPU),
    ],
    ids=lambda one: " ".join(one.argv),
)
def test_readers_tools_and_strangers_are_no_writers(process: PodProcess) -> None:
    assert writers(process) == {}


@pytest.mark.parametrize("path", ["100.orbax-checkpoint-tmp-17/state/x", "000100/pytorch_model.bin"])
def test_a_step_that_is_only_a_number_counts_below_the_roots_of_checkpoints(path: str) -> None:
    writer = proc(20, 1, "/opt/x", writes=(f"{OUT}/ckpts/{path}",), **GPU)
    assert writers(writer) == {}
    found = writers_beside([INIT, SHELL, writer], replace(BESIDE, roots=(f"{OUT}/ckpts",)), {11}, {1, 10})
    assert [tree.writes for tree in found] == [True]


def test_our_script_with_an_inference_server_of_its_own_is_a_second_writer() -> None:
    server = proc(21, 20, "VLLM::EngineCore", **GPU)
    assert writers(proc(20, 1, TRAIN, age=3.0), server) == {20: True}
    assert writers(proc(20, 1, "python own.py", writes=(SAVE,)), server) == {20: True}
    assert writers(proc(20, 1, "vllm serve --config c.toml", **GPU), server) == {}


def test_an_engine_that_outlives_a_second_trainer_is_no_second_writer() -> None:
    """A forked one has its trainer's command."""
    left = proc(20, 1, TRAIN, name="VLLM::EngineCor", age=60.0, **GPU)
    assert writers(left) == {}
    assert writers(replace(left, writes=(SAVE,))) == {20: True}


def test_nothing_of_our_trainer_and_what_started_it_is_a_second_writer() -> None:
    rank = proc(21, 11, TRAIN, writes=(SAVE,), **GPU)
    worker = proc(22, 21, TRAIN, **GPU)
    orphan = proc(23, 1, TRAIN, writes=(SAVE,), session=11, **GPU)
    piped = proc(24, 1, TRAIN, group=11, **GPU)
    marked = proc(25, 1, TRAIN, start_id="s7", **GPU)
    wrapper = proc(9, 1, f"timeout 10h {TRAIN}", **GPU)
    assert writers(rank, worker, orphan, piped, marked, wrapper, above=(9,)) == {}


@given(st.lists(st.integers(0, 30), min_size=31, max_size=31), st.sets(st.integers(0, 30), max_size=8))
def test_below_our_trainer_nothing_is_a_second_writer_in_any_tree(parent: list[int], writing: set[int]) -> None:
    """Also where parents form a loop: pids are read one after another and may be given anew."""
    above = {100 + n: 11 if parent[n] == 0 else 100 + parent[n] for n in range(31)}
    below = {11}
    for _ in above:
        below |= {pid for pid, up in above.items() if up in below}
    tree = [proc(pid, up, TRAIN, cuda=pid - 100 in writing) for pid, up in above.items()]
    assert not below & writers(*tree).keys()


# -- which one ---------------------------------------------------------------------------------------------------------


def tree(pid: int, answer: str, started: float, *, trains: bool = True) -> FoundTree:
    top = PodProcess(ProcessIdentity(pid, int(started * 100)), 1, "x", ("x",), age=1000.0 - started)
    return FoundTree(top, TreeAnswer(answer), "because", trains)


@pytest.mark.parametrize(
    ("trees", "attach", "waits"),
    [
        ([], None, []),
        ([tree(1, "attach", 1000)], 1, []),
        ([tree(1, "attach", 1000), tree(2, "wait", 1000)], 1, []),
        ([tree(1, "attach", 1000), tree(2, "attach", 1000)], None, [1, 2]),
        ([tree(1, "attach", 100)], None, [1]),
        ([tree(1, "attach", 900 - SEEN_LATE + 1)], 1, []),
        ([tree(1, "attach", 900 - SEEN_LATE)], None, [1]),
        ([tree(1, "attach", 1000), tree(2, "attach", 100)], None, [1, 2]),
        ([tree(1, "ask", 1000, trains=False)], None, [1]),
        ([tree(1, "ask", 100, trains=False)], None, []),
        ([tree(1, "wait", 100, trains=False)], None, []),
        ([tree(1, "wait", 1000, trains=False)], None, [1]),
        ([tree(1, "ask", 100)], None, [1]),
        ([tree(1, "own", 1000)], None, []),
        ([tree(9, "attach", 1000)], None, []),
    ],
)
def test_podwatch_attaches_to_one_that_is_newer_than_its_last_end(
    trees: list[FoundTree], attach: int | None, waits: list[int]
) -> None:
    chosen = choose_trainer(trees, ended_ago=100.0, ignored=["attach-9-100000"])
    assert (chosen.attach and chosen.attach.top.pid) == attach
    assert [t.top.pid for t in chosen.waits_for] == waits


def test_without_a_trainer_before_it_none_is_too_old() -> None:
    chosen = choose_trainer([tree(1, "attach", 5)], ended_ago=None)
    assert chosen.attach is not None


# -- any pod -----------------------------------------------------------------------------------------------------------

_LINES = st.sampled_from(
    ["bash", "bash --norc", "-bash", "bash -s", "bash train.sh", "bash -c x", "zsh -i", "fish", "myshell", "tmux new",
     "sshd", "python", TRAIN, "python train.py", "python -i x.py", "python -m ipykernel_launcher -f k", "jupyter-lab",
     "uv run rl @ c.toml", "torchrun train.py", "torchrun eval.py", "sudo -s", "PRIME-RL::Launcher", "vim x",
     "sleep 60", "podwatch run", "vllm serve x", "VLLM::EngineCore", f"timeout 9 {TRAIN}", "systemd"]
)  # fmt: skip


@st.composite
def pods(draw: st.DrawFn) -> list[PodProcess]:
    made = [proc(1, 0, draw(st.sampled_from(["/sbin/init", "bash /start.sh", "torchrun train.py"])))]
    for pid in range(2, draw(st.integers(1, 14)) + 2):
        above = draw(st.sampled_from([None, *made]))
        leads = above is None or draw(st.booleans())
        made.append(
            proc(
                pid,
                0 if above is None else above.pid,
                draw(_LINES),
                session=pid if leads or above is None else above.session,
                group=pid if leads or above is None or draw(st.booleans()) else above.group,
                tty=draw(st.sampled_from([0, TTY])) if leads or above is None else above.tty,
                users=draw(st.sampled_from([(0, 0), (0, 0), (1001, 1001), (1001, 0), ()])),
                exe=draw(st.sampled_from(["", "", "/usr/bin/bash", "/usr/bin/python3.12", "/usr/bin/sleep"])),
                cuda=draw(st.sampled_from([False, True, None])),
                writes=draw(st.sampled_from([(), (), (SAVE,), (f"{OUT}/log",)])),
                start_id=draw(st.sampled_from(["", "", "", "s7", "other"])),
                podwatch=draw(st.integers(0, 19)) == 0,
            )
        )
    return made


@given(pods())
def test_nothing_of_another_user_or_at_an_operators_prompt_is_ever_signalled(processes: list[PodProcess]) -> None:
    by_pid = {p.pid: p for p in processes}
    for found in classify_trees(processes, RUN):
        for pid in to_signal(below(found.top.pid, processes), RUN.users):
            process = by_pid[pid]
            assert process.users == (0, 0)
            prompt = process.argv[0].lstrip("-") in ("bash", "fish") and process.argv[1:] in ((), ("--norc",))
            assert not (prompt and process.tty and process.exe in ("", "/usr/bin/bash")), process
            assert "ipykernel_launcher" not in process.argv


def above(process: PodProcess, processes: list[PodProcess]) -> list[PodProcess]:
    by_pid = {p.pid: p for p in processes}
    found = []
    while process.parent_pid in by_pid:
        process = by_pid[process.parent_pid]
        found.append(process)
    return found


@given(pods())
def test_a_tree_is_attached_to_only_with_a_tie_and_a_role_or_a_context(processes: list[PodProcess]) -> None:
    found = classify_trees(processes, RUN)
    assert len({t.top.pid for t in found}) == len(found)
    for one in found:
        if one.answer is TreeAnswer.ATTACH:
            assert one.trains
            roles = {p.role for p in one.members}
            assert roles & {ProcessRole.LAUNCHER, ProcessRole.TRAINER} or any(p.cuda for p in one.members)
            given = one.top.tty or not one.top.parent_pid or any(map(is_operators, above(one.top, processes)))
            assert one.top.start_id != "s7" or given
            # What gives an operator's shell its terminal is left alone, whatever it does besides.
            left = {p.parent_pid for p in processes if is_operators(p)}
            signalled = to_signal(below(one.top.pid, processes), RUN.users) | left
            assert any(p.pid in signalled for p in one.members if p.cuda or p.writes or p.role in TRAINING)
        if one.answer is TreeAnswer.OWN:
            assert any(p.start_id == "s7" for p in one.members)
