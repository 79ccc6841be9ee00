"""A checkout, an interpreter and a run below directories named by a commit: the names are shown and taken for no
secret."""

import json
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.asking import running, status
from tests.support.rig import Rig

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAMES = (COMMIT, f"podwatch-{COMMIT}", "run-00123456789abcdef01234567", "hf_qwen3_8b_rl_run_0012")


def interpreter_in(directory: Path) -> Path:
    python = directory / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    return python


def init(directory: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    environ = {"PATH": f"{directory}/bin:/usr/bin:/bin", "HOME": str(directory), "NO_COLOR": "1"}
    return warm.podwatch("config", "init", *words, env=environ, cwd=directory)


@pytest.mark.parametrize("name", NAMES)
def test_init_writes_a_command_from_such_a_directory_whole(tmp_path: Path, name: str) -> None:
    directory = tmp_path / name
    command = [str(interpreter_in(directory)), f"{directory}/train.py", f"--config={directory}/run.toml"]
    made = init(directory, "--", *command)
    assert made.returncode == 0, made.stderr
    (directory / "podwatch.toml").write_text(
        (directory / "podwatch.toml").read_text().replace(f'run_id = "{name}-outputs"', 'run_id = "r1"')
    )  # podwatch names the run after the directory; a name alone is no path
    written = tomllib.loads((directory / "podwatch.toml").read_text())
    assert written["trainer"]["command"] == command
    assert written["trainer"]["env"]["PATH"] == f"{directory}/bin:/usr/bin:/bin"
    assert "[removed]" not in made.stdout + made.stderr
    shown = warm.podwatch("config", "show", env={"PATH": "/usr/bin:/bin", "HOME": str(directory)}, cwd=directory)
    assert str(command[0]) in shown.stdout
    assert "***" not in shown.stdout


def test_init_copies_a_trainer_that_runs_from_such_a_directory(tmp_path: Path) -> None:
    directory = tmp_path / NAMES[1]
    python = interpreter_in(directory)
    program = directory / "rl"
    program.write_text("import time\nprint('up', flush=True)\ntime.sleep(120)\n")
    command = [str(python), str(program), "@", "rl.toml"]
    (directory / "rl.toml").write_text('output_dir = "out"\n')
    with subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE) as trainer:
        try:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == b"up\n"
            made = init(directory, "-o", "podwatch.toml", "--pid", str(trainer.pid))
        finally:
            trainer.kill()
    assert made.returncode == 0, made.stderr
    written = tomllib.loads((directory / "podwatch.toml").read_text())["trainer"]
    assert written["command"] == command
    assert written["output_dir"] == f"{directory}/out"


def test_a_secret_beside_such_a_directory_is_still_refused(tmp_path: Path) -> None:
    directory = tmp_path / NAMES[0]
    made = init(directory.parent, "--", str(interpreter_in(directory)), f"{directory}/train.py", COMMIT)
    assert made.returncode != 0
    assert "looks like a secret" in made.stderr
    assert not (directory.parent / "podwatch.toml").exists()


@pytest.fixture
def rig(tmp_path: Path, nvml_library: Path) -> Iterator[Rig]:
    """A pod below such a directory."""
    made = Rig(tmp_path / NAMES[1], nvml_library)
    yield made
    made.close()


@pytest.mark.slow
def test_a_run_below_such_a_directory_is_shown_with_its_paths(rig: Rig) -> None:
    python = interpreter_in(rig.root / "venv")
    daemon = rig.daemon(trainer__command=[str(python), *rig.command()[1:]]).start()
    running(daemon, rig)
    rig.order(exit=3, once=True)
    daemon.wait_event("incident-closed", 60)
    plan = ("restart", "--dry-run")
    planned = daemon.wait_for(lambda: "--output-dir" in (text := daemon.command(*plan).stdout) and text, 30, "a plan")
    texts = {
        "restart --dry-run": planned,
        "status": json.dumps(status(daemon)),
        "log": daemon.log.read_text(),
        **{
            words: (answer := daemon.command(*shlex.split(words))).stdout + answer.stderr
            for words in ("status", "status --json", "check", "checkpoints", "config show")
        },
    }
    assert {name for name, text in texts.items() if "[removed]" in text} == set()
    assert str(python) in texts["restart --dry-run"]
    assert str(python) in texts["check"] + texts["config show"]
    assert str(rig.output) in texts["status --json"]
