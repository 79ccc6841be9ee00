"""The files for people who join: their commands exist, and the Python versions are the same everywhere. Whether GitHub
can read the YAML files: tests/suites/engines/test_repository_files.py."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def versions(text: str) -> set[str]:
    """The Python versions that a text names in quotes, as "3.11"."""
    return set(re.findall(r'"(3\.\d+)"', text))


def made(text: str) -> set[str]:
    """The targets of each ``make`` that is a whole line, or a step of a workflow."""
    lines = re.findall(r"^(?: {4}|.*- run: )make ([a-z0-9 -]+?)(?: *#.*)?$", text, re.MULTILINE)
    return {target for line in lines for target in line.split()}


@pytest.mark.parametrize("path", [*WORKFLOWS, ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name)
def test_each_target_exists(path: Path) -> None:
    assert made(path.read_text())
    assert made(path.read_text()) <= TARGETS


def test_the_workflow_tests_every_supported_python() -> None:
    supported = {str(c).rpartition(" ")[2] for c in PROJECT["classifiers"] if ":: Python :: 3." in c}
    (matrix,) = re.findall(r"python: (\[.*\])", (ROOT / ".github/workflows/ci.yml").read_text())
    assert versions(matrix) == supported
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert all(versions(path.read_text()) - versions(matrix) <= {oldest} for path in WORKFLOWS)
    assert oldest in supported


def test_the_hooks_are_tools_of_the_lint_extra() -> None:
    programs = re.findall(r"entry: \.venv/bin/([\w-]+)", (ROOT / ".pre-commit-config.yaml").read_text())
    needed = set(re.findall(r"^[\w-]+", "\n".join(PROJECT["optional-dependencies"]["lint"]), re.MULTILINE))
    assert set(programs) == {"ruff", "mypy"} <= needed


def test_a_bug_report_asks_for_commands_that_exist() -> None:
    """tests/cli/test_docs_commands.py types the commands of pages; these are in a form."""
    text = (ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text()
    asked = set(re.findall(r"podwatch (?:--)?([a-z]+)", text.split("id: version")[1]))
    assert {"version", "check", "status", "events", "incidents"} <= asked
