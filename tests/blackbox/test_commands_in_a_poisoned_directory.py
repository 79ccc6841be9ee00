"""Commands typed in another user's directory, in which every import by name would be that user's code."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.contract import contract
from tests.support.poison import INSTALLED, STANDARD, Poison

SCRIPT = Path(sys.prefix, "bin", "podwatch")
COMMANDS = [words for words in contract().commands if re.fullmatch("[a-z -]+", words) and " -" not in words]
"""Of the table, without options and arguments."""
CONFIG = 'run_id = "r"\nstate_dir = "state"\n[trainer]\noutput_dir = "out"\n'


def typed(directory: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PODWATCH_", "PYTHON"))}
    kept |= {"PODWATCH_RUNTIME_DIR": str(directory / "runtime"), "HOME": str(directory)}
    return subprocess.run(
        arguments,
        cwd=directory,
        env=kept | environ,
        capture_output=True,
        text=True,
        timeout=150,
        stdin=subprocess.DEVNULL,
    )


def configured(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "podwatch.toml").write_text(CONFIG)
    (directory / "podwatch.toml").chmod(0o600)
    return directory


@pytest.mark.skipif(not SCRIPT.exists(), reason="podwatch is not installed as a script here")
@pytest.mark.parametrize("arguments", [["status"], ["config", "show"], ["checkpoints"], ["clean", "--dry-run"]])
def test_a_command_imports_nothing_from_it(tmp_path: Path, arguments: list[str]) -> None:
    poison = Poison(configured(tmp_path / "x"), [*STANDARD, *INSTALLED]).with_podwatch()
    done = typed(tmp_path / "x", str(SCRIPT), *arguments)
    assert poison.imported == []
    assert "imported from" not in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("path", [":", ".", "", ":/nonexistent", "here/.."])
def test_an_empty_or_relative_entry_of_pythonpath_is_not_followed(tmp_path: Path, path: str) -> None:
    """As far as podwatch can have a say: the interpreter's own start is before it."""
    poison = Poison(configured(tmp_path / "x"), sorted({"click", "json", "tomllib", "structlog", "pydantic", "psutil"}))
    (tmp_path / "x" / "here").mkdir()
    done = typed(tmp_path / "x", str(SCRIPT), "config", "show", PYTHONPATH=path)
    assert poison.imported == []
    assert done.returncode == 0, done.stderr


def test_an_absolute_entry_is_the_callers_choice(tmp_path: Path) -> None:
    poison = Poison(configured(tmp_path / "x"), ["click"])
    typed(tmp_path / "x", str(SCRIPT), "status", PYTHONPATH=str(tmp_path / "x"))
    assert poison.imported == ["click"]


def test_run_as_a_module_it_drops_the_directory_before_it_imports_more(tmp_path: Path) -> None:
    poison = Poison(configured(tmp_path / "x"), sorted({"click", "json", "tomllib", "structlog", "pydantic", "psutil"}))
    done = typed(tmp_path / "x", sys.executable, "-m", "podwatch", "config", "show")
    assert poison.imported == []
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({words.split()[0] for words in COMMANDS} - {"podwatch"}))
def test_every_command_imports_nothing_from_it(tmp_path: Path, name: str) -> None:
    if name in ("demo", "run"):
        pytest.skip("real ones are in tests/blackbox/test_poisoned_directory.py")
    poison = Poison(configured(tmp_path / "x"), [*STANDARD, *INSTALLED]).with_podwatch()
    for command in (words.split() for words in COMMANDS if words.split()[0] == name):
        done = typed(tmp_path / "x", str(SCRIPT), "-c", "podwatch.toml", *command)
        assert "Traceback" not in done.stderr, done.stderr
    assert poison.imported == []


def test_relative_paths_mean_the_directory_in_which_the_command_was_typed(tmp_path: Path) -> None:
    done = typed(configured(tmp_path), str(SCRIPT), "config", "show", "--json", "-c", "podwatch.toml")
    for key, name in (("state_dir", "state"), ("output_dir", "out")):
        assert str(tmp_path / name) in done.stdout, (key, done.stdout, done.stderr)
