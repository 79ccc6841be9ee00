"""``podwatch config init`` beside a process of another user, whose command, directory and PATH are that user's choice.

Needs root.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.strangers import UID, needs_root, public_directory

pytestmark = [pytest.mark.slow, needs_root]


@pytest.fixture
def theirs() -> Iterator[Path]:
    """A directory of theirs, which everybody can reach."""
    with public_directory() as directory:
        yield directory


def trainer_of(uid: int, cwd: Path) -> "subprocess.Popen[bytes]":
    """``exec -a torchrun``: it looks like a training launcher."""
    os.chown(cwd, uid, uid)
    return subprocess.Popen(
        ["torchrun", "987"], executable=shutil.which("sleep"), cwd=cwd, user=uid, group=uid, extra_groups=[],
        env={"PATH": f"{cwd}/bin:/usr/bin:/bin", "OMP_NUM_THREADS": "7"},
    )  # fmt: skip


def init(directory: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "podwatch", "config", "init", *words],
        cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
        env={"PATH": os.environ["PATH"], "HOME": str(directory)},
    )  # fmt: skip


def written(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads(path.read_text())["trainer"]
    return found


def test_it_copies_nothing_of_another_users_process_by_itself(tmp_path: Path, theirs: Path) -> None:
    with trainer_of(UID, theirs) as process:
        try:
            done = init(tmp_path)
        finally:
            process.kill()
    assert done.returncode == 0, done.stderr
    trainer = written(tmp_path / "podwatch.toml")
    assert not trainer.get("command")
    assert trainer["cwd"] == str(tmp_path)
    assert str(theirs) not in (tmp_path / "podwatch.toml").read_text() + (tmp_path / "podwatch.env").read_text()
    assert "--pid PID" in done.stdout, "it says how"


def test_of_several_only_the_callers_own_counts(tmp_path: Path, theirs: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    with trainer_of(UID, theirs) as process, trainer_of(0, mine) as own:
        try:
            done = init(tmp_path)
        finally:
            process.kill()
            own.kill()
    assert done.returncode == 0, done.stderr
    trainer = written(tmp_path / "podwatch.toml")
    assert (trainer["command"], trainer["cwd"], "user" in trainer) == (["torchrun", "987"], str(mine), False)


@pytest.mark.parametrize("file", [True, False])
def test_a_process_that_is_named_runs_as_its_own_user(tmp_path: Path, theirs: Path, file: bool) -> None:
    with trainer_of(65534, theirs) as process:
        try:
            words = ["--pid", str(process.pid), *(["-o", "podwatch.toml"] if file else [])]
            done = init(tmp_path, *words)
        finally:
            process.kill()
    assert done.returncode == 0, done.stderr
    trainer = written(tmp_path / "podwatch.toml") if file else tomllib.loads(done.stdout)["trainer"]
    assert (trainer["user"], trainer["command"], trainer["cwd"]) == ("nobody", ["torchrun", "987"], str(theirs))


def test_a_user_without_a_name_is_refused(tmp_path: Path, theirs: Path) -> None:
    with trainer_of(UID, theirs) as process:
        try:
            done = init(tmp_path, "--pid", str(process.pid))
        finally:
            process.kill()
    assert done.returncode == 69, done.stdout
    assert str(UID) in done.stderr
    assert not done.stdout
