"""The gate's second try of what failed: never for what looks for violations, always named, and no pass for a fault."""

import os
import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "second-try"

RACE = """
def test_race(request):
    seen = request.path.with_name("seen")
    first = not seen.exists()
    seen.touch()
    assert not first
"""
FAULT = """
def test_fault():
    assert False
"""


def run(directory: Path) -> tuple[int, str]:
    """The suite, then its second try."""
    (directory / "pytest.ini").write_text("[pytest]\n")
    (directory / "Makefile").write_text(f"suite:\n\t@{sys.executable} -m pytest -q -n 0 $(ARGS)\n")
    # Nothing of the make that runs these tests: it exports its flags, and each variable of its command line (ARGS).
    environ = {"PATH": os.environ["PATH"], "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist"}
    first = subprocess.run(["make", "suite"], cwd=directory, env=environ, capture_output=True, text=True)
    assert first.returncode != 0
    command = [sys.executable, str(SCRIPT), "suite"]
    done = subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True)
    return done.returncode, done.stdout


def test_what_passes_alone_passes_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(RACE)
    (tmp_path / "test_two.py").write_text("def test_well():\n    pass\n")
    code, said = run(tmp_path)
    assert code == 0
    assert said.splitlines()[1].strip() == "test_one.py::test_race"
    assert "1 passed" in said.splitlines()[-1]


def test_a_fault_fails_again(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(RACE + FAULT)
    code, said = run(tmp_path)
    assert code != 0
    assert "1 failed, 1 passed" in said


def test_a_suite_that_broke_without_a_failed_test_fails(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "test_one.py").write_text(FAULT)
    code, said = run(tmp_path)
    assert (code, "recorded no failed test" in said) == (1, True)


@pytest.mark.parametrize(
    ("failed", "why"),
    [
        (["a.py::one"], ""),
        (["a.py::one", "a.py::two"], ""),
        ([f"a.py::{n}" for n in range(3)], "3 tests failed"),
        (["sync/test_crash_rounds.py::test_it"], "one is enough"),
        (["a.py::one", "sync/test_two_pods.py::test_it"], "one is enough"),
        (["a.py::test_killed_twice[1]"], "one is enough"),
        ([], "recorded no failed test"),
    ],
)
def test_when_there_is_a_second_try(failed: list[str], why: str) -> None:
    said = run_path(str(SCRIPT))["refusal"](failed)
    assert (why in said) if why else not said
