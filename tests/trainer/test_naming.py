"""How a process names the run: by its command, its configuration or its environment."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from podwatch.domain.process import TreeAnswer
from podwatch.system import procfs
from podwatch.trainer.find import find_trees
from podwatch.trainer.names_of_run import (
    Target,
    named_in_argv,
    named_in_files,
    named_in_text,
    repeats_command,
)
from podwatch.trainer.rules import SoughtRun
from tests.support.known_trainers import ROLES
from tests.support.pod import eventually

OUT = Target("/app/outputs")


@pytest.mark.parametrize(
    ("line", "cwd"),
    [
        ("python train.py --output_dir /app/outputs", "/"),
        ("python train.py --output-dir=/app/outputs/", "/"),
        ("python train.py --output_dir outputs", "/app"),
        ("python train.py --output_dir ./x/../outputs", "/app"),
        ("python train.py --output_dir .", "/app/outputs"),
        ("python train.py output_dir=outputs", "/app"),
        ("python train.py trainer.output_dir=/app/outputs", "/"),
        ("python train.py hydra.run.dir=/app/outputs", "/"),
        ("python train.py +training.save_dir='/app/outputs'", "/"),
        ("python main.py -o /app/outputs", "/"),
        ("python main.py --save-path /app/outputs", "/"),
        ("python main.py --ckpt.output_dir /app/outputs", "/"),
        ("python main.py --default_root_dir /app/outputs", "/"),
        ("uv run rl @ c.toml --output-dir /app --run.name outputs", "/"),
        ("uv run rl @ c.toml --output-dir . --run.name=outputs", "/app"),
        ("bash -c 'cd /app && python train.py --output_dir /app/outputs'", "/"),
    ],
)
def test_a_command_names_where_it_writes(line: str, cwd: str) -> None:
    assert named_in_argv(shlex.split(line), cwd, OUT).startswith("its command says ")


@pytest.mark.parametrize(
    "line",
    [
        "python train.py --output_dir /app/outputs-2",
        "python train.py --output_dir /app/outputs/another",
        "python train.py --output_dir /app",
        "python train.py --model /app/outputs",
        "python train.py --resume_from_checkpoint /app/outputs",
        "python train.py --load_dir=/app/outputs",
        "python train.py /app/outputs",
        "python train.py --output_dir",
        "uv run rl @ c.toml --output-dir /app --run.name other",
        "python x.py --init-output-dir /app/outputs",
    ],
)
def test_reading_it_or_naming_another_place_is_nothing(line: str) -> None:
    assert named_in_argv(shlex.split(line), "/", OUT) == ""


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('output_dir = "/app/outputs"\n', True),
        ('[trainer]\n  output_dir = "outputs"  # here\n', True),
        ("trainer:\n  output_dir: /app/outputs\n", True),
        ('{"output_dir": "/app/outputs", \n', True),
        ('{\n "save_dir": "outputs",\n}', True),
        ('model = "/app/outputs"\n', False),
        ('output_dir = "/app/other"\n', False),
        ("", False),
    ],
)
def test_a_configuration_names_it(text: str, named: bool) -> None:
    assert named_in_text(text, "/app", OUT) is named


def test_the_runs_own_command_is_known_with_and_without_resume_flags() -> None:
    command = ("uv", "run", "rl", "@", "c.toml", "--ckpt")
    for line, cwd, known in (
        ("uv run rl @ c.toml --ckpt", "/app", True),
        ("python /app/.venv/bin/rl @ c.toml --ckpt --ckpt.resume-step 40", "/app", True),
        ("uv run rl @ c.toml", "/app", True),
        ("uv run rl @ c.toml --ckpt", "/other", False),
        ("uv run rl @ d.toml --ckpt", "/app", False),
        ("uv run inference @ c.toml --ckpt", "/app", False),
        ("bash", "/app", False),
    ):
        assert repeats_command(line.split(), cwd, command, "/app") is known, line


WAIT = "import time; time.sleep(987)"


@pytest.mark.parametrize("how", ["argument", "relative", "link", "hydra", "file", "command", "nothing", "eval"])
def test_a_real_process_that_only_loads_yet_is_pending(tmp_path: Path, how: str) -> None:
    """``python train.py`` of our own user, without a CUDA context and without an open checkpoint."""
    output, work = tmp_path / "outputs", tmp_path / "work"
    output.mkdir()
    work.mkdir()
    (tmp_path / "link").symlink_to(output)
    (work / "c.yaml").write_text(f"training:\n  output_dir: {output}\n")
    script = work / ("eval.py" if how == "eval" else "train.py")
    script.write_text(WAIT)
    arguments = {
        "argument": ["--output_dir", str(output)],
        "eval": ["--output_dir", str(output)],
        "relative": ["--output_dir=../outputs"],
        "link": ["--output_dir", str(tmp_path / "link")],
        "hydra": ["output_dir=../outputs"],
        "file": ["--config", "c.yaml"],
        "command": ["--epochs", "3", "--resume"],
    }.get(how, [])
    environ = dict(os.environ)
    argv = [sys.executable, "-S", script.name, *arguments]
    run = SoughtRun(
        str(output), users=frozenset({os.geteuid()}), command=(sys.executable, "-S", "train.py", "--epochs", "3"),
        cwd=str(work) if how == "command" else "/elsewhere",
    )  # fmt: skip
    with (
        subprocess.Popen(argv, cwd=work, env=environ, start_new_session=True) as process,
        subprocess.Popen(["sleep", "987"], start_new_session=True) as observer,
    ):
        try:
            eventually(lambda: procfs.command(process.pid) == tuple(argv))
            found = find_trees(run, ROLES, own_pid=observer.pid)
            if how in ("nothing", "eval"):
                assert found == ()
            else:
                (one,) = found
                assert (one.launcher.pid, one.answer, one.attachable) == (process.pid, TreeAnswer.WAIT, True)
        finally:
            process.kill()
            observer.kill()


def test_a_configuration_that_cannot_be_read_is_nothing(tmp_path: Path) -> None:
    """A pipe would be waited for, a huge file read for ever."""
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "huge.yaml").write_bytes(b"x" * (1 << 20))
    (tmp_path / "dir.yaml").mkdir()
    for name in ("pipe.yaml", "huge.yaml", "dir.yaml", "missing.yaml"):
        assert named_in_files(["python", "train.py", name], str(tmp_path), OUT) == ""


def test_a_relative_directory_of_a_process_whose_directory_may_not_be_read_is_taken_for_it() -> None:
    assert named_in_argv(["python", "train.py", "--output_dir", "outputs"], "", OUT)
    assert not named_in_argv(["python", "train.py", "--output_dir", "puts"], "", OUT)


@pytest.mark.parametrize(
    ("text", "beside", "named"),
    [
        ('output_dir = "outputs"\n[run]\nname = "one"\n', (), True),
        ('output_dir = "outputs"\n', ("--run.name", "one"), True),
        ('output_dir = "outputs"\n[run]\nname = "two"\n', ("--run.name", "two"), False),
        ('[run]\nname = "one"\n', ("outputs",), False),
        ('output_dir = "/"\n', ("one",), False),
    ],
)
def test_a_run_directory_is_named_in_two_pieces(text: str, beside: tuple[str, ...], named: bool) -> None:
    """prime-rl since 2026-08: the directory is output_dir and run.name, each in the file or in the command."""
    assert named_in_text(text, "/app", Target("/app/outputs/one"), beside) is named
