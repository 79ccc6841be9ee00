"""The `config` commands, against a real process that looks like prime-rl's launcher."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result

from podwatch.cli.config import config
from podwatch.cli.detect_machine import gpu_split, layout_of, read_trainer, run_id_of, visible_gpus, without_resume
from podwatch.cli.split_environment import split_environment
from podwatch.config.env_files import read_env_file
from podwatch.config.loading import load_settings
from podwatch.domain.errors import ConfigurationError, HostError, UsageError
from podwatch.domain.snapshot import GpuSample
from tests.support.ptys import terminal

MINIMAL = 'run_id = "r1"\n[trainer]\noutput_dir = "/data/out"\n'


def run(*arguments: str) -> Result:
    return CliRunner().invoke(config, list(arguments))


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """`python .../rl @ train.toml --ckpt --resume.step 40` in a directory of its own."""
    cwd = tmp_path / "app"
    cwd.mkdir()
    (cwd / "train.toml").write_text('output_dir = "runs/one"\n[wandb]\nname = "My Run!"\n')
    program = tmp_path / "rl"
    program.write_text("import sys, time\nprint('up', flush=True)\ntime.sleep(120)\n")
    process = subprocess.Popen(
        [sys.executable, str(program), "@", "train.toml", "--ckpt", "--resume.step", "40", "--max-steps", "99"],
        cwd=cwd,
        stdout=subprocess.PIPE,
        env={
            "PATH": os.environ["PATH"],
            "WANDB_MODE": "offline",
            "WANDB_API_KEY": "hush-1",
            "HF_TOKEN": 'hush "2"',
            "B2_APPLICATION_KEY": "hush-3",
            "EDITOR": "vi",
            "SSH_AUTH_TOKEN": "hush-4",
        },
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_init_copies_a_running_trainer(trainer: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    target = tmp_path / "etc.toml"
    result = run("init", "-o", str(target), "--pid", str(trainer.pid))
    assert result.exit_code == 0, result.output
    settings = load_settings(target, environ={}).settings
    assert settings.run_id == "My-Run"
    assert settings.trainer.layout == "prime-rl"
    assert settings.trainer.output_dir == tmp_path / "app" / "runs" / "one"
    assert settings.trainer.cwd == tmp_path / "app"
    assert settings.trainer.command[2:] == ("@", "train.toml", "--ckpt", "--max-steps", "99")
    assert settings.trainer.env == {"PATH": os.environ["PATH"], "WANDB_MODE": "offline"}
    env_file = tmp_path / "etc.env"
    assert settings.trainer.env_file == env_file
    assert env_file.stat().st_mode & 0o777 == 0o600
    lines = env_file.read_text().splitlines()
    assert "WANDB_API_KEY=hush-1" in lines
    assert 'HF_TOKEN="hush \\"2\\""' in lines
    assert "B2_APPLICATION_KEY=hush-3" in lines
    assert "hush" not in target.read_text() + result.output
    assert "hush-4" not in env_file.read_text()
    assert "removed from the command: --resume.step 40" in result.output
    assert run("validate", "-c", str(target)).exit_code == 0


def test_init_never_overwrites_without_force(tmp_path: Path) -> None:
    target = tmp_path / "p.toml"
    target.write_text("mine")
    result = run("init", "-o", str(target), "--pid", str(os.getpid()))
    assert isinstance(result.exception, UsageError)
    assert target.read_text() == "mine"
    assert run("init", "-o", str(target), "--pid", str(os.getpid()), "--force").exit_code == 0
    assert target.read_text() != "mine"
    assert sorted(path.suffix for path in tmp_path.iterdir()) in ([".toml"], [".env", ".toml"])


def test_init_without_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podwatch.cli.detect_machine.find_trainers", lambda **_: ())
    monkeypatch.chdir(tmp_path)
    result = run("init")
    assert result.exit_code == 0, result.output
    assert "no running trainer of yours found" in result.output
    assert load_settings(tmp_path / "podwatch.toml", environ={}).settings.trainer.output_dir == tmp_path / "outputs"


def test_init_with_the_command_of_a_trainer_that_does_not_run_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", "/volume/hf")
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    (tmp_path / "rl.toml").write_text('output_dir = "runs/a"\n[ckpt]\ninterval = 5\n')
    words = ("uv", "run", "rl", "@", "rl.toml", "--ckpt.resume-step", "40")
    result = run("init", "--", *words)
    assert result.exit_code == 0, result.output
    assert "removed from the command: --ckpt.resume-step 40" in result.output
    trainer = load_settings(tmp_path / "podwatch.toml", environ={}).settings.trainer
    assert (trainer.layout, trainer.command, trainer.cwd) == ("prime-rl", words[:5], tmp_path)
    assert trainer.output_dir == tmp_path / "runs" / "a"
    assert trainer.env["HF_HOME"] == "/volume/hf"
    text = (tmp_path / "podwatch.toml").read_text()
    assert "kkkk" not in text + result.output
    assert "kkkk" in (tmp_path / "podwatch.env").read_text()
    refused = run("init", "--force", "--pid", "1", "--", "true")
    assert refused.exit_code == 2


@pytest.mark.parametrize(
    "words", [("rl", "--wandb.api_key=abcdef0123456789"), ("python", "t.py", "--hf-token", "hf_" + "a" * 34)]
)
def test_a_secret_in_the_command_is_refused_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = run("init", "--", *words)
    assert isinstance(refused.exception, ConfigurationError)
    assert "looks like a secret" in str(refused.exception)
    assert words[-1][-16:] not in str(refused.exception) + refused.output
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_of_the_trainer_that_is_a_pipe_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("rl.toml")
    assert run("init", "--", "uv", "run", "rl", "@", "rl.toml").exit_code == 0


def test_bytes_that_are_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused = run("init", "--", "rl", os.fsdecode(b"caf\xe9.toml"))
    assert isinstance(refused.exception, UsageError)
    assert "no UTF-8 ('caf\\udce9.toml')" in str(refused.exception)
    assert list(tmp_path.iterdir()) == []
    assert split_environment({"HF_HOME": os.fsdecode(b"/\xff"), "HF_HUB_CACHE": "/c"}) == ({"HF_HUB_CACHE": "/c"}, {})


def test_a_variable_whose_value_has_the_form_of_a_key_is_a_secret(tmp_path: Path) -> None:
    key = "hf_" + "b" * 34
    assert split_environment({"HF_EXTRA": key, "HF_HOME": "/h"}) == ({"HF_HOME": "/h"}, {"HF_EXTRA": key})


def test_the_file_of_the_secrets_is_not_the_configuration(tmp_path: Path) -> None:
    refused = run("init", "-o", str(tmp_path / "x.env"), "--", "rl")
    assert isinstance(refused.exception, UsageError)
    assert list(tmp_path.iterdir()) == []


def test_the_search_sees_the_process_and_only_its_top(trainer: "subprocess.Popen[bytes]") -> None:
    from podwatch.cli.detect_machine import find_trainers

    deadline = time.monotonic() + 60
    while trainer.pid not in dict(find_trainers()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert os.getpid() not in dict(find_trainers())


def test_a_process_that_is_gone_is_named() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    with pytest.raises(HostError, match=f"pid {process.pid}"):
        read_trainer(process.pid)


@pytest.mark.parametrize(
    ("argv", "layout"),
    [
        (["uv", "run", "rl", "@", "x.toml"], "prime-rl"),
        (["/usr/bin/uv", "run", "--env-file", ".env", "rl", "--ckpt"], "prime-rl"),
        (["/v/bin/python3.12", "/v/bin/rl", "@", "x.toml"], "prime-rl"),
        (["python", "-u", "-m", "prime_rl.entrypoints.rl"], "prime-rl"),
        (["torchrun", "--nproc", "2", "train.py"], "auto"),
        (["torchrun", "-m", "prime_rl.trainer.rl.train"], "prime-rl"),
        (["/v/bin/python", "/v/bin/accelerate", "launch", "t.py"], "auto"),
        (["python", "-m", "torch.distributed.run", "t.py"], "auto"),
        (["python", "-m", "verl.trainer.main_ppo", "data.train_files=x"], "verl"),
        (["axolotl", "train", "c.yml"], "hf"),
        (["bash", "-c", "python -m verl.trainer.main_ppo"], ""),
        (["vim", "rl.toml"], ""),
        (["tail", "-f", "rl"], ""),
        (["rl"], ""),
        (["python", "serve.py", "--name", "torchrun"], ""),
        ([], ""),
    ],
)
def test_what_is_a_trainer(argv: list[str], layout: str) -> None:
    assert layout_of(argv) == layout


def test_resume_flags_are_taken_out() -> None:
    assert without_resume(["rl", "--resume", "--ckpt", "--ckpt.resume-step=5"], None) == (
        ("rl", "--ckpt"),
        ("--resume", "--ckpt.resume-step=5"),
    )
    assert without_resume(["rl", "--ckpt.resume-step", "-1", "x"], None) == (
        ("rl", "x"),
        ("--ckpt.resume-step", "-1"),
    )


def test_only_relevant_environment_is_kept() -> None:
    env, secrets = split_environment(
        {"HF_HOME": "/h", "LS_COLORS": "x", "WANDB_BASE_URL": "https://a:b@c", "A_KEY": "k"}
    )
    assert env == {"HF_HOME": "/h"}
    assert secrets == {"WANDB_BASE_URL": "https://a:b@c", "A_KEY": "k"}


@pytest.mark.parametrize(
    "name",
    [
        "NCCL_DEBUG",
        "VLLM_USE_V1",
        "PRIME_API_BASE",
        "PRL_RUN_ID",
        "RAY_ADDRESS",
        "TRITON_CACHE_DIR",
        "GLOO_SOCKET_IFNAME",
        "UV_CACHE_DIR",
        "PYTORCH_CUDA_ALLOC_CONF",
        "VIRTUAL_ENV",
    ],
)
def test_what_changes_how_training_runs_is_kept(name: str) -> None:
    assert split_environment({name: "1"}) == ({name: "1"}, {})


def test_a_run_id_is_always_valid() -> None:
    assert run_id_of([], Path("/"), {"WANDB_NAME": "//"}, Path("/app/outputs")) == "app-outputs"
    assert run_id_of(["--run.name=a b"], Path("/"), {}, Path("/o")) == "a-b"


def test_validate_lists_problems_and_ends_with_78(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text(MINIMAL + "colour = 1\n[gpu]\nhold = 'x'\n")
    file.chmod(0o644)
    result = run("validate", "-c", str(file))
    assert isinstance(result.exception, ConfigurationError)
    assert int(result.exception.exit_code) == 78
    result = run("validate", "-c", str(file), "--json")
    assert result.exit_code == 78
    assert len(json.loads(result.output)["problems"]) == 2


def test_validate_looks_at_the_env_file(tmp_path: Path) -> None:
    env_file = tmp_path / "x.env"
    env_file.write_text("A=1\n")
    env_file.chmod(0o644)
    file = tmp_path / "p.toml"
    file.write_text(MINIMAL + f'env_file = "{env_file}"\n')
    file.chmod(0o644)
    assert f"chmod 600 {env_file}" in run("validate", "-c", str(file)).output


def test_show(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text(MINIMAL)
    file.chmod(0o644)
    assert 'run_id = "r1"' in run("show", "-c", str(file)).output
    shown = json.loads(run("show", "-c", str(file), "--json").output)
    assert shown["settings"]["run_id"] == {
        "value": "r1",
        "source": "file",
        "description": shown["settings"]["run_id"]["description"],
    }


RUN_DIRECTORY = """
import pathlib, sys, time
logs = pathlib.Path("outputs", sys.argv[-1], "logs", "attempt_1")
logs.mkdir(parents=True)
file = open(logs / "trainer.log", "w")
print("up", flush=True)
time.sleep(120)
"""


def test_init_writes_the_directory_of_a_run_that_has_no_name(tmp_path: Path) -> None:
    """prime-rl since 2026-08 makes up a name; other runs are beside it, one of them newer."""
    program = tmp_path / "rl"
    program.write_text(RUN_DIRECTORY)
    command = [sys.executable, str(program), "@", "x.toml", "--ckpt", "--ckpt.interval", "5", "wordle--qwen3--a1b2"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, env={}) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            (tmp_path / "outputs" / "other--run" / "logs" / "attempt_1").mkdir(parents=True)
            target = tmp_path / "p.toml"
            result = run("init", "-o", str(target), "--pid", str(process.pid))
            assert result.exit_code == 0, result.output
        finally:
            process.kill()
    trainer = load_settings(target, environ={}).settings.trainer
    assert trainer.output_dir == tmp_path / "outputs" / "wordle--qwen3--a1b2"
    assert trainer.command[-2:] == ("--run.name", "wordle--qwen3--a1b2")
    assert "run.name" not in run("validate", "-c", str(target)).output
    target.write_text(target.read_text().replace(', "--run.name", "wordle--qwen3--a1b2"', ""))
    assert "run.name" in run("validate", "-c", str(target)).output


def gpus(count: int) -> tuple[GpuSample, ...]:
    return tuple(GpuSample(n, f"GPU-{n}aaa-bbbb", "NVIDIA H100", memory_total_bytes=80 << 30) for n in range(count))


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("2,3", [2, 3]),
        ("3, 1", [3, 1]),
        ("GPU-2aaa,GPU-0aaa-bbbb", [2, 0]),
        ("1,9,2", [1]),
        ("1,1", [1]),
        ("", []),
        ("-1", []),
        ("MIG-5c89", [0, 1, 2, 3]),
    ],
)
def test_only_gpus_that_the_trainer_sees(value: str | None, indices: list[int]) -> None:
    seen, why = visible_gpus(gpus(4), {} if value is None else {"CUDA_VISIBLE_DEVICES": value})
    assert [gpu.index for gpu in seen] == indices
    assert bool(why) is (not indices or (value or "").startswith("MIG-"))


@pytest.mark.parametrize(
    ("config", "inference", "trainer"),
    [
        ({}, (4,), (6,)),
        ({"inference_gpu_ids": [0], "trainer_gpu_ids": [1]}, (4,), (6,)),
        ({"inference_gpu_ids": [6], "trainer_gpu_ids": [4]}, (6,), (4,)),
        ({"deployment": {"num_infer_gpus": 1}}, (4,), (6,)),
    ],
)
def test_their_split_counts_the_visible_ones(
    config: dict[str, object], inference: tuple[int, ...], trainer: tuple[int, ...]
) -> None:
    seen, _ = visible_gpus(gpus(8), {"CUDA_VISIBLE_DEVICES": "4,6"})
    assert gpu_split(seen, config)[:2] == (inference, trainer)


def test_no_more_trainer_gpus_than_the_deployment_has() -> None:
    deployment = {"deployment": {"num_infer_gpus": 2, "num_train_gpus": 1}}
    assert gpu_split(gpus(4), deployment)[:2] == ((0, 1), (2,))


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    environment = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "1,2", "HF_TOKEN": "hush"}
    process = subprocess.Popen(["sleep", "987654"], cwd=tmp_path, env=environment)
    # In the middle of its exec it has its new name already, and neither arguments nor environment.
    started = psutil.Process(process.pid)
    while started.cmdline()[:1] != ["sleep"] or started.environ().get("HF_TOKEN") != "hush":
        time.sleep(0.01)
    yield process
    process.kill()
    process.wait()


def test_init_writes_what_matters(
    sleeper: "subprocess.Popen[bytes]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("podwatch.cli.detect_machine.find_gpus", lambda: (gpus(4), ""))
    brief = tmp_path / "brief.toml"
    assert run("init", "-o", str(brief), "--pid", str(sleeper.pid)).exit_code == 0
    short = load_settings(brief, environ={}).settings
    assert (short.gpu.inference, short.gpu.trainer) == ((1,), (2,))
    lines = [line for line in brief.read_text().splitlines() if line]
    assert len(lines) <= 16
    assert '# store = "b2://my-bucket"' in brief.read_text()
    assert "podwatch config show" in lines[0]


def test_the_env_file_has_a_line_for_the_store_key_and_keeps_what_was_filled_in(
    sleeper: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    target, env_file = tmp_path / "p.toml", tmp_path / "p.env"
    assert run("init", "-o", str(target), "--pid", str(sleeper.pid)).exit_code == 0
    assert "# B2_APPLICATION_KEY_ID=\n# B2_APPLICATION_KEY=\n" in env_file.read_text()
    assert read_env_file(env_file) == {"HF_TOKEN": "hush"}
    text = env_file.read_text()
    env_file.write_text(text.replace("# B2", "B2").replace("KEY_ID=", "KEY_ID=id").replace("KEY=\n", "KEY=mine\n"))
    assert run("init", "-o", str(target), "--pid", str(sleeper.pid), "--force").exit_code == 0
    filled = {"HF_TOKEN": "hush", "B2_APPLICATION_KEY_ID": "id", "B2_APPLICATION_KEY": "mine"}
    assert read_env_file(env_file) == filled
    assert "# B2" not in env_file.read_text()
    assert env_file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("name", "store", "expected"),
    [("", "", ("app-outputs", "")), ("bs4", "b2://my-bucket", ("bs4", "b2://my-bucket"))],
)
def test_init_asks_on_a_terminal_and_enter_skips(
    sleeper: "subprocess.Popen[bytes]", tmp_path: Path, name: str, store: str, expected: tuple[str, str]
) -> None:
    target = tmp_path / "p.toml"
    argv = [sys.executable, "-m", "podwatch", "config", "init", "-o", str(target), "--pid", str(sleeper.pid)]
    run_id = expected[0] if name else f"{tmp_path.name}-outputs"
    with terminal(argv) as asked:
        asked.expect("name of the run [")
        if name:
            asked.type("not a name!")
            asked.expect("use letters")
        asked.type(name)
        asked.expect("store, such as b2://my-bucket (Enter for none")
        if store:
            asked.type("my-bucket")
            asked.expect("start with b2://")
        asked.type(store)
        if store:
            asked.expect("put the store's key into")
        asked.expect("next: read the file" + ("" if store else ", set [sync] store"))
    settings = load_settings(target, environ={}).settings
    assert (settings.run_id, settings.sync.store) == (run_id, expected[1])


def test_init_never_asks_without_a_terminal(sleeper: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    """What waits for an answer in a script waits for ever."""
    target = tmp_path / "p.toml"
    argv = [sys.executable, "-m", "podwatch", "config", "init", "-o", str(target), "--pid", str(sleeper.pid)]
    reading, writing = os.pipe()  # open and silent: a question would not be answered by an end of file
    try:
        done = subprocess.run(argv, stdin=reading, capture_output=True, text=True, timeout=120, check=True)
    finally:
        os.close(reading)
        os.close(writing)
    assert "name of the run" not in done.stdout + done.stderr
    assert target.exists()
