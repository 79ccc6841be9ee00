"""Which step a running command resumes from: by its flags, else by the TOML files that it names, unchanged since."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from podwatch.checkpoints.resume import Resumed, resumed
from tests.drivers.checkpoints import open_layout

RL = ("uv", "run", "rl", "@", "rl.toml", "--ckpt", "--ckpt.interval", "5")
TITAN = ("torchrun", "-m", "torchtitan.train", "--job.config_file=titan.toml")
LATER = 10.0
"""Seconds after now: files of this test were written before."""


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path


def asked(cwd: Path, command: tuple[str, ...], *, began: float | None = None, known: bool = True) -> Resumed | None:
    layout = open_layout("torchtitan" if command[0] == "torchrun" else "prime-rl", cwd / "out", command, cwd=cwd)
    wall = time.time() + LATER if began is None else began
    return resumed(layout, command, cwd=cwd if known else None, began_wall=wall)


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("[ckpt]\nresume_step = 100", 100),
        ("ckpt = { interval = 5, resume_step = 100 }", 100),
        ("[trainer.ckpt]\nresume_step = 100\n[orchestrator.ckpt]\nresume_step = 100", 100),
        ("[trainer.ckpt]\nresume_step = 100\n[orchestrator.ckpt]\nresume_step = 90", None),
        ("[resume]\nstep = 100", 100),
        ("[ckpt]\nresume_step = -1", None),
        ("[ckpt]\nresume_step = 0", None),
        ("[ckpt]\nresume_step = true", None),
        ('[ckpt]\nresume_step = "100"', None),
        ("[ckpt]\nresume_step = [100]", None),
        ("[ckpt]\ninterval = 5", None),
        ("ckpt = 7\nresume = 100", None),
        ("[ckpt\nresume_step = 100", None),
        ("x = " + "[" * 100_000, None),
    ],
)
def test_the_file_of_prime_rl(cwd: Path, text: str, step: int | None) -> None:
    (cwd / "rl.toml").write_text(text + "\n")
    found = asked(cwd, RL)
    assert found == (None if step is None else Resumed(step, "rl.toml, which its command names,"))


@pytest.mark.parametrize(
    ("flags", "step"),
    [
        (("--ckpt.resume-step", "90"), 90),
        (("--resume.step=110",), 110),
        (("--ckpt.resume-step", "-1"), None),
        (("--resume",), None),
    ],
)
def test_flags_override_the_file(cwd: Path, flags: tuple[str, ...], step: int | None) -> None:
    (cwd / "rl.toml").write_text("[ckpt]\nresume_step = 100\n")
    assert asked(cwd, (*RL, *flags)) == (None if step is None else Resumed(step, "its command"))


def test_a_later_file_overrides_an_earlier_one(cwd: Path) -> None:
    (cwd / "rl.toml").write_text("[ckpt]\nresume_step = 100\n")
    (cwd / "more.toml").write_text("[ckpt]\nresume_step = 95\n")
    assert asked(cwd, (*RL, "@", str(cwd / "more.toml"))) == Resumed(95, "more.toml, which its command names,")
    (cwd / "more.toml").write_text("[ckpt]\ninterval = 7\n")
    assert asked(cwd, (*RL, "@more.toml")) == Resumed(100, "rl.toml, which its command names,")
    (cwd / "more.toml").write_text("[ckpt]\nresume_step = -1\n")
    assert asked(cwd, (*RL, "@more.toml")) is None, "the newest one"


def too_large(path: Path) -> None:
    path.write_bytes(b"#" * (5 << 20))


@pytest.mark.parametrize(
    "make", [lambda path: None, os.mkfifo, Path.mkdir, too_large, lambda path: path.write_bytes(b"\xff\xfe")]
)
def test_a_file_that_cannot_be_read_proves_nothing(cwd: Path, make: Callable[[Path], object]) -> None:
    """It may override what another file says."""
    (cwd / "rl.toml").write_text("[ckpt]\nresume_step = 100\n")
    make(cwd / "more.toml")
    assert asked(cwd, (*RL, "@", "more.toml")) is None


def test_a_file_that_was_changed_since_proves_nothing(cwd: Path) -> None:
    """An operator writes the next start's step into it while this one trains. Its own time can be set to any value."""
    (cwd / "rl.toml").write_text("[ckpt]\nresume_step = 100\n")
    os.utime(cwd / "rl.toml", (1.0, 1.0))
    assert asked(cwd, RL, began=time.time() - LATER) is None
    changed = (cwd / "rl.toml").stat().st_ctime
    assert asked(cwd, RL, began=changed - 0.01) is not None, "a start's time is known by clock ticks only"


def test_without_its_working_directory_no_file_is_known(cwd: Path) -> None:
    (cwd / "rl.toml").write_text("[ckpt]\nresume_step = 100\n")
    assert asked(cwd, RL, known=False) is None
    assert asked(cwd, (*RL, "--ckpt.resume-step", "90"), known=False) == Resumed(90, "its command")


@pytest.mark.parametrize(
    ("text", "flags", "step"),
    [
        ("[checkpoint]\nenable = true\nload_step = 100", (), 100),
        ("[checkpoint]\nenable_checkpoint = true\nload_step = 100", (), 100),
        ("[checkpoint]\nload_step = 100", (), None),
        ("[checkpoint]\nload_step = 100", ("--checkpoint.enable",), 100),
        ("[checkpoint]\nenable = true\nload_step = -1", (), None),
        ("[checkpoint]\nenable = true\nload_step = 100", ("--checkpoint.load_step=-1",), None),
    ],
)
def test_the_file_of_torchtitan(cwd: Path, text: str, flags: tuple[str, ...], step: int | None) -> None:
    (cwd / "titan.toml").write_text(text + "\n")
    found = asked(cwd, (*TITAN, *flags))
    assert found == (None if step is None else Resumed(step, "titan.toml, which its command names,"))
