"""What runs against what is configured: attached trainers, a changed configuration, changed files; no secret in it."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.checkpoints.trainers import make_layout
from podwatch.config.loading import load_text
from podwatch.config.settings import Settings
from podwatch.domain.process import ProcessIdentity
from podwatch.domain.run import StartRecord
from podwatch.domain.secrets import scrub
from podwatch.domain.snapshot import Supervision
from podwatch.recovery.command_changed import Difference, RunningCommand, renamed
from podwatch.recovery.command_diff import differences, grouped
from podwatch.system.procfs import identify

words = st.sampled_from(
    ["--a", "--b", "1", "2", "x.toml", "@", "-v", "--c=3", "run", "--wandb.api-key", "s3cr3t-s3cr3t"]
)


@given(st.lists(words, max_size=8), st.lists(words, max_size=8))
def test_a_difference_is_empty_exactly_when_there_is_none(one: list[str], other: list[str]) -> None:
    found = differences(one, other, lambda text: text)
    assert (found == ()) is (grouped(one) == grouped(other))
    kept = [f"- {word}" for word in grouped(one)]
    assert all(line in kept for line in found if line.startswith("- "))
    assert "s3cr3t-s3cr3t" not in " ".join(line for line in differences(one, other, scrub) if "--wandb.api-key" in line)


def test_flags_are_shown_with_their_values() -> None:
    running = ["rl", "@", "x.toml", "--max-steps", "99", "--ckpt", "--lr=1"]
    configured = ["rl", "@", "y.toml", "--max-steps", "100", "--ckpt", "--lr=1"]
    assert differences(running, configured, scrub) == (
        "- x.toml", "- --max-steps 99", "+ y.toml", "+ --max-steps 100",
    )  # fmt: skip


class Handle:
    """As far as a comparison asks."""

    def __init__(self, pid: int, supervision: Supervision = Supervision.ATTACH, start_id: str = "attach-1-1") -> None:
        found = identify(pid)
        assert found is not None
        self.launcher: ProcessIdentity = found
        self.supervision, self.start_id = supervision, start_id


Make = Callable[..., Settings]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    (tmp_path / "app").mkdir()

    def settings(*command: str) -> Settings:
        quoted = ", ".join(f'"{word}"' for word in command)
        text = (
            f'run_id = "r1"\n[trainer]\noutput_dir = "{tmp_path}/out"\nlayout = "prime-rl"\ncwd = "{tmp_path}/app"\n'
            f"command = [{quoted}]\n"
        )
        return load_text(text, tmp_path / "podwatch.toml", environ={}).settings

    return settings


@pytest.fixture
def attached(tmp_path: Path, make: Make) -> Iterator[Handle]:
    (tmp_path / "app" / "train.toml").write_text("a = 1\n")
    program = tmp_path / "rl"
    program.write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    argv = [sys.executable, str(program), "@", "train.toml", "--max-steps", "99", "--ckpt.resume-step", "40"]
    process = subprocess.Popen(argv, cwd=tmp_path / "app", stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    yield Handle(process.pid)
    process.kill()
    process.wait()
    process.stdout.close()


def look(running: RunningCommand, handle: Handle, settings: Settings, record: StartRecord | None = None) -> Difference:
    return running.difference(handle, record, settings, make_layout(settings))  # type: ignore[arg-type]


def test_an_attached_trainer_is_compared_as_it_runs(attached: Handle, make: Make, tmp_path: Path) -> None:
    running = RunningCommand()
    same = make("uv", "run", "rl", "@", "train.toml", "--max-steps", "99")
    assert not look(running, attached, same), "started in another way, and resumed: the same training"
    other = look(running, attached, make("uv", "run", "rl", "@", "train.toml", "--max-steps", "50"))
    assert other.lines == ("- --max-steps 99", "+ --max-steps 50")
    assert "--max-steps 99" in other.summary()
    (tmp_path / "app" / "train.toml").write_text("a = 2\n")
    changed = look(running, attached, same)
    assert [Path(name).name for name in changed.files] == ["train.toml"]
    assert "changed since the start" in changed.summary()


def test_resume_arguments_of_the_operator_are_no_difference(attached: Handle, make: Make) -> None:
    settings = make("rl", "@", "train.toml")
    assert look(RunningCommand(), attached, settings).lines == ("- --max-steps 99",)
    own = settings.trainer.model_copy(update={"resume_args": ("--max-steps", "{step}")})
    assert not look(RunningCommand(), attached, settings.model_copy(update={"trainer": own}))


def test_another_directory_is_a_difference(attached: Handle, make: Make, tmp_path: Path) -> None:
    settings = make("rl", "@", "train.toml", "--max-steps", "99")
    moved = settings.model_copy(update={"trainer": settings.trainer.model_copy(update={"cwd": tmp_path})})
    assert look(RunningCommand(), attached, moved).lines == (f"- in {tmp_path}/app", f"+ in {tmp_path}")


def test_one_of_ours_is_compared_with_what_it_was_started_from(make: Make, tmp_path: Path) -> None:
    handle = Handle(os.getpid(), Supervision.SUPERVISED, "s1")
    record = StartRecord(
        "s1", 0.0, ("rl",), f"{tmp_path}/app", command=("rl", "--max-steps 99", "--wandb.api-key [removed]")
    )
    same = make("rl", "--max-steps", "99", "--wandb.api-key", "s3cr3t-s3cr3t")
    assert not look(RunningCommand(), handle, same, record)
    found = look(RunningCommand(), handle, make("rl", "--max-steps", "100"), record)
    assert found.lines == ("- --max-steps 99", "- --wandb.api-key [removed]", "+ --max-steps 100")
    assert not look(RunningCommand(), handle, same, None)


def test_what_cannot_be_compared_differs_in_nothing(make: Make) -> None:
    assert renamed(("PRIME-RL::Launcher",))
    assert not renamed(("rl",))
    process = subprocess.Popen(["PRIME-RL::Launcher"], executable="/bin/cat", stdin=subprocess.PIPE)
    try:
        assert not look(RunningCommand(), Handle(process.pid), make("rl", "--max-steps", "1"))
    finally:
        process.communicate()
