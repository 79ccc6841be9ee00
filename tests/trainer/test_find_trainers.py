"""Candidates: what counts as someone's training, judged on made-up pods and found on the real one."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from podwatch.domain.process import ProcessIdentity, ProcessRole
from podwatch.domain.secrets import MASK, scrub
from podwatch.domain.snapshot import Supervision
from podwatch.system import procfs
from podwatch.trainer import find_trainers
from podwatch.trainer.base import Candidate
from podwatch.trainer.find_trainers import Judged, Process, Run, judge
from podwatch.trainer.process_roles import program
from tests.support.known_trainers import ROLES
from tests.support.pod import Pod, eventually

OUT = "/app/outputs"


TIE = "its command says --output_dir /app/outputs"


def proc(pid: int, parent: int, line: str, **more: object) -> Process:
    """With a tie to this run if it has a CUDA context, unless the test says otherwise."""
    argv = tuple(line.split())
    more.setdefault("names_run", TIE if more.get("cuda") else "")
    name = str(more.pop("name", Path(argv[0]).name[:15]))
    return Process(ProcessIdentity(pid, pid * 10), parent, name, argv, roles=ROLES, **more)  # type: ignore[arg-type]


INIT = proc(1, 0, "/sbin/init")
SHELL = proc(10, 1, "-bash", name="bash", tty=34816, session=10, group=10)


def judged(*processes: Process, **run: Any) -> Judged:
    return judge([INIT, SHELL, *processes], Run(OUT, **run))


def pids(*processes: Process, **run: Any) -> list[int]:
    return [c.launcher.pid for c in judged(*processes, **run).candidates]


def pending(*processes: Process, **run: Any) -> list[int]:
    return [c.launcher.pid for c in judged(*processes, **run).pending]


def alone(*processes: Process) -> tuple[Candidate, ...]:
    return judge(processes, Run(OUT)).candidates


def test_a_cuda_context_anywhere_in_the_tree_names_its_top() -> None:
    tree = (
        proc(20, 10, "uv run rl @ x.toml", cwd="/app"),
        proc(21, 20, "/app/.venv/bin/python /app/.venv/bin/rl @ x.toml", name="rl", cwd="/app"),
        proc(22, 21, "VLLM::EngineCore", cuda=True, gpus=frozenset({0})),
        proc(23, 21, "torchrun -m prime_rl.trainer.rl.train", cuda=True, gpus=frozenset({1})),
    )
    assert pids(*tree) == [20]
    assert pids(*tree, gpus=frozenset({0, 1})) == [20]
    assert pids(*tree, gpus=frozenset({5})) == []
    candidate = judged(*tree).candidates[0]
    assert candidate.command == "uv run rl @ x.toml"
    assert "CUDA context on /dev/nvidia0" in candidate.reason


def test_two_trees_are_two_candidates_and_interactive_shells_are_not_training() -> None:
    assert pids(proc(20, 10, "python a.py", cuda=True), proc(30, 10, "python b.py", cuda=True)) == [20, 30]
    assert pids(proc(19, 10, "bash train.sh"), proc(20, 19, "python a.py", cuda=True)) == [19]


def test_a_trainer_without_a_parent_here_is_found() -> None:
    """``docker exec`` starts processes whose parent is 0, and an image's entry point can be the trainer."""
    assert pids(proc(20, 0, "python a.py", cuda=True)) == [20]
    assert pids(proc(20, 0, "sh -c train"), proc(21, 20, "python a.py", cuda=True)) == [20]
    assert pids(proc(20, 0, "bash", name="bash"), proc(21, 20, "python a.py", cuda=True)) == [21]
    found = alone(proc(1, 0, "python a.py", cuda=True))
    assert [c.launcher.pid for c in found] == [1]
    workers = (proc(7, 1, "python a.py", cuda=True), proc(8, 1, "python a.py", cuda=True))
    found = alone(proc(1, 0, "torchrun a.py", name="torchrun"), *workers)
    assert [(c.launcher.pid, c.holds_gpu) for c in found] == [(1, True)]
    for entry in ("/sbin/init", "bash /start.sh", "sleep infinity"):
        assert alone(proc(1, 0, entry)) == ()


@pytest.mark.parametrize("cuda", [None, False])
def test_a_gpu_device_without_a_context_is_nothing(cuda: bool | None) -> None:
    assert pids(proc(20, 10, "python a.py", cuda=cuda, gpus=frozenset({0}))) == []


@pytest.mark.parametrize(
    "line",
    [
        "tail -F /app/outputs/logs/rl.log",
        "tensorboard --logdir /app/outputs",
        "python -m tensorboard.main --logdir /app/outputs",
        "rsync -a /app/outputs x:",
        "python /opt/bin/wandb sync /app/outputs",
        "nvidia-smi dmon",
        "podwatch run",
        "/opt/venv/bin/python /opt/venv/bin/podwatch run",
        "python -m podwatch run",
        "vim /app/outputs/rl.toml",
        "bash sync.sh /app/outputs",
        "python -m http.server --directory /app/outputs",
    ],
)
def test_readers_and_tools_never_count(line: str) -> None:
    assert pids(proc(20, 10, line, cwd=OUT, writes=(OUT + "/x",))) == []
    if not line.startswith("bash"):
        assert pids(proc(20, 10, line, cuda=True)) == []


SAVE = OUT + "/checkpoints/step_5/trainer/__0_0.distcp"


@pytest.mark.parametrize(
    ("line", "more"),
    [
        ("torchrun train.py --output-dir /app/outputs", {"cwd": OUT}),
        ("accelerate launch train.py", {"cwd": OUT, "writes": (OUT + "/logs/train.log",)}),
        ("uv run rl @ c.toml", {"cwd": OUT, "writes": (OUT + "/logs/rl.log",)}),
        ("python train.py --output_dir /app/outputs", {"names_run": "its command says so"}),
    ],
)
def test_names_arguments_directory_and_logs_make_a_reason_to_wait_and_no_trainer(
    line: str, more: dict[str, object]
) -> None:
    process = proc(20, 10, line, cuda=False, **more)
    assert pids(process) == []
    assert pending(process) == [20]
    (found,) = judged(process).pending
    assert found.awaits == "a CUDA context or an open checkpoint"
    (unseen,) = judged(replace(process, cuda=None)).pending
    assert "neither can be seen here" in unseen.awaits, "could not observe is said, and is no evidence"
    assert pids(replace(process, cuda=True)) == [20]
    assert pids(replace(process, writes=(SAVE,))) == [20], "it has a checkpoint open for writing"
    assert pending(replace(process, cuda=True)) == []


@pytest.mark.parametrize(
    ("line", "more"),
    [
        ("torchrun train.py --output-dir /app/outputs-2", {"cwd": "/app"}),
        ("uv run rl @ c.toml", {"cwd": "/app"}),
        ("torchrun eval.py", {"cwd": OUT}),
        ("python copy.py", {"writes": (OUT + "/x",)}),
        ("python merge.py", {"writes": (SAVE,)}),
        ("torchrun sleep", {"cwd": OUT, "exe": "/usr/bin/sleep", "name": "sleep"}),
        ("torchrun sleep", {"cwd": OUT, "exe": "/usr/bin/bash", "name": "bash"}),
        ("rsync -a /app/outputs x:", {"cwd": OUT, "writes": (SAVE,)}),
    ],
)
def test_what_is_neither(line: str, more: dict[str, object]) -> None:
    process = proc(20, 10, line, **more)
    assert judged(process) == Judged()


def test_another_users_process_is_nothing_whatever_it_holds() -> None:
    users = frozenset({0, 1000})
    strong: dict[str, Any] = {"cuda": True, "writes": (SAVE,), "cwd": OUT, "names_run": "its command is this run's"}
    for theirs in ((1001, 1001), (1001, 0), (0, 1001), ()):
        assert judged(proc(20, 10, "torchrun train.py", users=theirs, **strong), users=users) == Judged()
    for ours in ((0, 0), (1000, 1000), (0, 1000)):
        assert pids(proc(20, 10, "torchrun train.py", users=ours, **strong), users=users) == [20]


def test_an_evaluation_that_holds_a_gpu_is_asked_about_and_never_attached_to() -> None:
    for tree in (
        (proc(20, 10, "torchrun eval.py", cwd=OUT), proc(21, 20, "python -u eval.py", cuda=True)),
        (proc(20, 10, "python -m lm_eval --model hf"), proc(21, 20, "python -m lm_eval", cuda=True)),
        (proc(20, 10, "bash run_benchmark.sh"), proc(21, 20, "python a.py", cuda=True)),
    ):
        assert (pids(*tree), pending(*tree)) == ([], [20])
        (found,) = judged(*tree).pending
        assert found.awaits == "its end"
        assert "looks like an evaluation" in found.reason
    for line in ("python train_and_eval.py", "python sft.py", "python main.py"):
        assert pids(proc(20, 10, line, cuda=True)) == [20]
    assert pids(proc(20, 10, "torchrun eval.py", writes=(SAVE,))) == [20], "what writes checkpoints is no evaluation"


def test_nothing_interactive_is_a_trainer_but_one_that_writes_checkpoints_is_asked_about() -> None:
    kernel = proc(20, 10, "python -m ipykernel_launcher -f k.json", cuda=True, cwd=OUT)
    assert judged(kernel) == Judged()
    writing = replace(kernel, writes=(SAVE,))
    assert (pids(writing), pending(writing)) == ([], [20])
    assert not judged(writing).pending[0].attachable
    below = proc(21, 20, "python train.py", cuda=True)
    assert pids(kernel, below) == [21], "the trainer that was started in it is a tree of its own"


def test_a_child_of_a_launcher_that_writes_counts_and_our_own_tree_does_not() -> None:
    rl = proc(20, 10, "rl @ c.toml", cwd="/app")
    worker = proc(21, 20, "python worker.py", writes=(OUT + "/logs/x",))
    assert (pids(rl, worker), pending(rl, worker)) == ([], [20])
    assert pids(rl, replace(worker, writes=(SAVE,))) == [20]
    ours = proc(20, 10, "rl @ c.toml", cwd=OUT, ours=True)
    assert judged(ours, proc(21, 20, "python worker.py", cuda=True)) == Judged()


def test_podwatchs_own_ancestors_are_never_part_of_a_tree() -> None:
    script = proc(20, 10, "bash job.sh", above_us=True)
    trainer = proc(21, 20, "torchrun train.py", cuda=True)
    assert pids(script, trainer) == [21]


def test_only_what_works_in_output_dir_is_said_to_be_of_the_run() -> None:
    def found(*processes: Process) -> list[tuple[int, bool, bool]]:
        return [(c.launcher.pid, c.holds_gpu, c.of_run) for c in judged(*processes).candidates]

    trainer = (
        proc(20, 10, "bash train.sh"),
        proc(21, 20, "torchrun own.py", writes=(OUT + "/log",)),
        proc(22, 20, "python own.py", cuda=True),
    )
    assert found(*trainer) == [(20, True, True)]
    assert found(*reversed(trainer)) == [(20, True, True)]
    other = proc(20, 10, "python own.py", cuda=True, writes=(OUT + "/own.log",), names_run="")
    assert (found(other), pending(other)) == ([], [20]), "its output was sent to a file there: no tie"
    assert found(proc(20, 10, "uv run rl @ c.toml", cwd=OUT, cuda=True)) == [(20, True, True)]


@pytest.mark.parametrize(
    "tree",
    [
        (proc(20, 10, "python experiment.py", cuda=True, names_run=""),),
        (proc(20, 10, "torchrun train.py --output_dir /elsewhere", cuda=True, names_run=""),),
        (
            proc(20, 10, "bash queue.sh"),
            proc(21, 20, "torchrun sft.py"),
            proc(22, 21, "python -u sft.py", cuda=True, names_run=""),
        ),
        (proc(20, 10, "uv run rl @ other.toml"), proc(21, 20, "VLLM::EngineCore", cuda=True, names_run="")),
    ],
)
def test_a_context_without_a_tie_to_this_run_is_asked_about_and_never_attached_to(tree: tuple[Process, ...]) -> None:
    assert (pids(*tree), pending(*tree)) == ([], [20])
    (found,) = judged(*tree).pending
    assert (found.awaits, found.holds_gpu, found.of_run, found.attachable) == ("its end", True, False, True)
    assert "nothing ties it to this run" in found.reason
    tied = (*tree[:-1], replace(tree[-1], names_run=TIE))
    assert pids(*tied) == [20]
    saving = (*tree[:-1], replace(tree[-1], writes=(SAVE,)))
    assert pids(*saving) == ([20] if any(p.launcher_like for p in tree) else []), "an open checkpoint is a tie"


@pytest.mark.parametrize(
    "tree",
    [
        (
            proc(20, 10, "vllm serve /app/outputs/step_40/weights", cwd=OUT),
            proc(21, 20, "VLLM::EngineCore", cuda=True, gpus=frozenset({0})),
        ),
        (
            proc(20, 10, "uv run vllm serve Qwen/Qwen3-8B", names_run=TIE),
            proc(21, 20, "python -c multiprocessing"),
            proc(22, 20, "VLLM::EngineCore", cuda=True),
        ),
        (proc(20, 10, "python -m vllm.entrypoints.openai.api_server", cuda=True),),
        (proc(20, 10, "VLLM::EngineCore", cuda=True),),
    ],
)
def test_an_inference_server_is_never_a_trainer(tree: tuple[Process, ...]) -> None:
    """Not even asked about: the start waits only if it holds the memory that training needs."""
    assert judged(*tree) == Judged()
    trains = proc(30, 20, "torchrun -m prime_rl.trainer.rl.train", cuda=True)
    assert pids(*tree, trains) + pending(*tree, trains) == [20], "training below it is training"


def test_a_checkpoint_directory_elsewhere_counts() -> None:
    process = proc(20, 10, "torchrun train.py", writes=("/ckpt/some/file",))
    assert pids(process) == []
    assert pids(process, checkpoint_dir="/ckpt") == [20]


def test_who_holds_a_gpu_is_named_our_own_trees_too() -> None:
    processes = [
        proc(20, 1, "VLLM::EngineCore", cuda=True, gpus=frozenset({0}), ours=True),
        proc(30, 10, "python other.py", cuda=True, gpus=frozenset({3})),
        proc(40, 10, "python free.py"),
    ]
    assert find_trainers.holders(processes, gpus=frozenset({0, 1}), own_pid=1) == (
        "pid 20 (VLLM::EngineCor) has a context on /dev/nvidia0",
    )


@pytest.mark.parametrize(
    ("name", "line", "role"),
    [
        ("PRIME-RL::Launc", "PRIME-RL::Launcher", ProcessRole.LAUNCHER),
        ("PRIME-RL::Train", "PRIME-RL::Trainer", ProcessRole.TRAINER),
        ("PRIME-RL::Orche", "", ProcessRole.ORCHESTRATOR),
        ("PRIME-RL::Infer", "", ProcessRole.INFERENCE),
        ("PRIME-RL::EnvSe", "PRIME-RL::EnvServer", ProcessRole.OTHER),
        ("VLLM::EngineCor", "VLLM::EngineCore", ProcessRole.ENGINE),
        ("VLLM::EngineCor", "VLLM::EngineCore_DP1", ProcessRole.ENGINE),
        ("VLLM::Worker_TP", "VLLM::Worker_TP0", ProcessRole.ENGINE),
        ("VLLM::APIServer", "VLLM::APIServer_0", ProcessRole.INFERENCE),
        ("uv", "uv run inference @ .pydantic_config/temp_1.toml", ProcessRole.INFERENCE),
        ("uv", "uv run --no-sync rl @ c.toml", ProcessRole.LAUNCHER),
        ("rl", "/app/.venv/bin/python3 /app/.venv/bin/rl @ c.toml", ProcessRole.LAUNCHER),
        ("python", "python -u -m prime_rl.trainer.rl.train @ x", ProcessRole.TRAINER),
        ("torchrun", "", ProcessRole.TRAINER),
        ("vllm", "/x/python /x/vllm serve Qwen/Qwen3-8B", ProcessRole.INFERENCE),
        ("vllm", "vllm bench latency", ProcessRole.OTHER),
        ("uv", "uv run orchestrator @ x.toml", ProcessRole.ORCHESTRATOR),
        ("env", "env CUDA_VISIBLE_DEVICES=0 A=b uv run inference", ProcessRole.INFERENCE),
        ("bash", "bash -c rl", ProcessRole.OTHER),
        ("sleep", "sleep 60", ProcessRole.OTHER),
        ("", "", ProcessRole.OTHER),
    ],
)
def test_roles(name: str, line: str, role: ProcessRole) -> None:
    assert ROLES.classify(name, line.split()) is role
    assert ROLES.classify(name, line) is role


def test_program_takes_wrappers_off() -> None:
    assert program(["nohup", "nice", "-n", "5", "uv", "run", "--extra", "gpu", "rl", "@", "x"]) == ("rl", ("@", "x"))
    assert program(["uv", "run"] * 20) == ("", ())


async def test_a_real_launcher_is_found_attached_and_stopped(pod: Pod) -> None:
    """A script named ``rl`` that a person started, with a file of a checkpoint open for writing."""
    (pod.output / "checkpoints" / "step_5").mkdir(parents=True)
    save = pod.output / "checkpoints" / "step_5" / "rl.bin"
    script = pod.root / "rl"
    script.write_text(
        f"#!{sys.executable} -S\nimport subprocess, time\nlog = open({str(save)!r}, 'w')\n"
        "subprocess.Popen(['sleep', '88'])\nprint('up', file=log, flush=True)\ntime.sleep(88)\n"
    )
    script.chmod(0o755)
    launcher = pod.launcher()
    with (
        subprocess.Popen(
            ["setsid", str(script), "--api-key", "x1y2z3a4"], cwd="/", env={**os.environ, "HF_TOKEN": "p5q6r7s8"}
        ) as person,
        subprocess.Popen(["tail", "-f", str(save)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as tail,
    ):
        try:
            eventually(lambda: save.exists() and save.read_text() == "up\n")
            # "up" is said once the child is there; it has its own name and command a moment later
            eventually(lambda: [procfs.command(p)[:1] for p in procfs.children(person.pid)] == [("sleep",)])
            # This test is podwatch here, and its children are never candidates: look as another process would.
            run = Run(str(pod.output))
            found = find_trainers.judge(find_trainers.gather(run, ROLES, own_pid=tail.pid), run)
            mine = [c for c in found.candidates if "writes" in c.reason]
            assert len(mine) == 1, found
            assert (await launcher.look()).candidates == ()
            assert mine[0].launcher.pid == person.pid, "the test above it is no part of the tree"
            assert "x1y2z3a4" in scrub("refused: x1y2z3a4")
            handle = await launcher.attach(mine[0])
            assert scrub("refused: x1y2z3a4, p5q6r7s8") == f"refused: {MASK}, {MASK}", "it prints its own secrets"
            assert handle.supervision is Supervision.ATTACH
            assert handle.start_id == f"attach-{person.pid}-{mine[0].launcher.start_ticks}"
            assert await handle.exit_status() is None
            tree = (await handle.tree()).value
            assert tree is not None
            assert sorted(p.name for p in tree) == ["rl", "sleep"]
            report = await handle.stop(grace=10, save_grace=10, saving=lambda: False)
            assert report.survivors == ()
            assert report.exit is not None
            assert not report.exit.known
            await handle.release()
        finally:
            tail.kill()
            person.kill()


def test_what_runs_below_the_worker_of_a_hook_is_no_candidate(tmp_path: Path) -> None:
    """Also of one whose podwatch was killed: it saves like a trainer until its worker has ended it."""
    out = tmp_path / "outputs"
    (out / "step_5").mkdir(parents=True)
    script, saved, place = tmp_path / "rl", out / "step_5" / "model.pt", tmp_path / "pid"
    script.write_text(
        f"#!{sys.executable} -S\nimport os, time\nlog = open({str(saved)!r}, 'w')\n"
        f"open({str(place)!r}, 'w').write(f'{{os.getpid()}}\\n')\ntime.sleep(300)\n"
    )
    script.chmod(0o755)
    order = {
        "argv": ["setsid", str(script)], "cwd": str(tmp_path), "env": {"PATH": os.environ["PATH"]}, "timeout": 300,
        "document": "", "title": "", "log": "", "lock": "", "uid": None, "gid": None, "groups": [], "grace": 0.1,
        "keep_free": {},
    }  # fmt: skip
    with (
        subprocess.Popen(["sleep", "300"]) as other,
        subprocess.Popen([sys.executable, "-m", "podwatch.hooks.child_main"], stdin=subprocess.PIPE) as worker,
    ):
        assert worker.stdin is not None
        worker.stdin.write(json.dumps(order).encode() + b"\n")
        worker.stdin.flush()
        try:
            eventually(lambda: place.exists() and place.read_text().endswith("\n"))
            run = Run(str(out))
            seen = find_trainers.gather(run, ROLES, own_pid=other.pid)
            assert any(str(saved) in p.writes for p in seen if p.pid == int(place.read_text()))
            found = judge(seen, run)
            assert (found.candidates, found.pending) == ((), ())
        finally:
            other.kill()
            worker.stdin.close()
