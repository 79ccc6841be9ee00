"""`podwatch run --job` without a file: what is assumed, and what is given."""

import os
from pathlib import Path

import pytest

from podwatch.cli import detect_machine
from podwatch.cli.common import Where
from podwatch.cli.job_assumptions import assume, overrides_of
from podwatch.config.loading import load_settings
from podwatch.domain.errors import UsageError
from podwatch.domain.snapshot import GpuSample

GPUS = (GpuSample(0, "GPU-a", "H100"), GpuSample(1, "GPU-b", "H100"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(detect_machine, "find_gpus", lambda: (GPUS, ""))
    return tmp_path


def environ(**values: str) -> dict[str, str]:
    return {"HOME": os.environ.get("HOME", "/root"), **values}


def test_a_command_alone_makes_settings_that_load(here: Path) -> None:
    command = ["python", "train.py", "--output_dir", "out/run7"]
    given = {"sync.store": "file:///backup", "trainer.command": command}
    assumed = assume(Where(), given, environ())
    settings = load_settings(None, environ=environ(), overrides=assumed.overrides, search=False).settings
    assert settings.trainer.command == tuple(command)
    assert settings.trainer.output_dir == here / "out" / "run7"
    assert settings.trainer.cwd == here
    assert settings.sync.store == "file:///backup"
    assert (settings.gpu.inference, settings.gpu.trainer) == ((0,), (1,))
    assert settings.run_id == "out-run7"
    said = "\n".join(assumed.lines)
    for key in ("run_id", "trainer.output_dir", "trainer.cwd", "gpu.inference", "gpu.trainer", "state_dir"):
        assert f"assumed {key} = " in said
    assert "sync.store" not in said, "it was given"
    assert "from --output_dir in the command" in said


def test_nothing_given_is_assumed(here: Path) -> None:
    (here / "podwatch.toml").write_text(f'run_id = "a"\n[trainer]\noutput_dir = "{here}/out"\n[gpu]\ninference = [1]\n')
    (here / "podwatch.toml").chmod(0o600)
    named = {"run_id": "b", "state_dir": str(here / "state"), "trainer.command": ["python", "train.py"]}
    given = overrides_of(["trainer.cwd=/srv"], named)
    assumed = assume(Where(), given, environ())
    assert assumed.lines == ()
    settings = load_settings(None, environ=environ(), overrides=assumed.overrides).settings
    assert (settings.run_id, str(settings.trainer.cwd)) == ("b", "/srv")
    assert settings.gpu.inference == (1,)


def test_the_environment_counts_as_given(here: Path) -> None:
    given = {"trainer.command": ["python", "train.py"]}
    said = assume(Where(), given, environ(PODWATCH_RUN_ID="c", PODWATCH_STATE_DIR=str(here))).lines
    assert not any("run_id" in line or "state_dir" in line for line in said)


def test_visible_gpus_count(here: Path) -> None:
    overrides = assume(Where(), {"trainer.command": ["python", "t.py"]}, environ(CUDA_VISIBLE_DEVICES="1")).overrides
    assert overrides["gpu.trainer"] == [1]


def test_prime_rl_gets_a_name_for_its_run_directory(here: Path) -> None:
    command = ("uv", "run", "rl", "@", "config.toml", "--ckpt", "--resume")
    (here / "config.toml").write_text('output_dir = "outputs"\n[wandb]\nname = "night"\n')
    overrides = assume(Where(), {"trainer.command": list(command)}, environ()).overrides
    assert overrides["trainer.output_dir"] == str(here / "outputs" / "night")
    assert overrides["trainer.command"] == [*command, "--run.name", "night"]


def test_a_setting_without_a_key_is_refused() -> None:
    with pytest.raises(UsageError, match="not a valid setting"):
        overrides_of(["nonsense"], {})
