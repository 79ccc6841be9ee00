"""The lock files of the image against pyproject.toml, and what needs rich. No network: that the wheels exist is the
business of tests/suites/container."""

import ast
import importlib.metadata
import os
import pty
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MACHINES = [(python, machine) for python in ("3.11", "3.12", "3.13") for machine in ("x86_64", "aarch64")]


@dataclass
class Locked:
    requirement: Requirement
    hashes: list[str] = field(default_factory=list)

    @property
    def version(self) -> str:
        (pin,) = self.requirement.specifier
        assert pin.operator == "=="
        return pin.version


def locked(name: str) -> list[Locked]:
    found: list[Locked] = []
    for line in (ROOT / "config" / name).read_text().splitlines():
        text = line.strip().removesuffix("\\").strip()
        if text.startswith("--hash=sha256:"):
            found[-1].hashes.append(text.removeprefix("--hash=sha256:"))
        elif text and not text.startswith("#"):
            found.append(Locked(Requirement(text)))
    return found


def environment(python: str, machine: str) -> dict[str, str]:
    here: dict[str, str] = {name: str(value) for name, value in default_environment().items()}
    return here | {
        "python_version": python, "python_full_version": f"{python}.7", "platform_machine": machine,
        "sys_platform": "linux", "platform_system": "Linux", "os_name": "posix",
        "implementation_name": "cpython", "platform_python_implementation": "CPython", "extra": "",
    }  # fmt: skip


def chosen(name: str, python: str, machine: str) -> dict[str, Locked]:
    """What pip takes from the lock on that machine, by name."""
    found: dict[str, Locked] = {}
    for entry in locked(name):
        marker = entry.requirement.marker
        if marker is None or marker.evaluate(environment(python, machine)):
            key = canonicalize_name(entry.requirement.name)
            assert key not in found, f"{key} is there twice"
            found[key] = entry
    return found


@pytest.mark.parametrize(("python", "machine"), MACHINES)
@pytest.mark.parametrize(
    ("lock", "wanted"),
    [
        ("requirements.lock", PROJECT["project"]["dependencies"]),
        ("build.lock", PROJECT["build-system"]["requires"]),
    ],
)
def test_the_lock_satisfies_what_the_project_asks_for(lock: str, wanted: list[str], python: str, machine: str) -> None:
    there = chosen(lock, python, machine)
    asked = [Requirement(text) for text in wanted]
    for requirement in asked:
        entry = there.get(canonicalize_name(requirement.name))
        assert entry is not None, f"{requirement.name} is not in {lock}: run `make lock`"
        assert requirement.specifier.contains(entry.version), f"{requirement} against {entry.version}: run `make lock`"
    # What those ask for in turn, as far as the versions installed here are the locked ones.
    while asked:
        requirement = asked.pop()
        entry = there[canonicalize_name(requirement.name)]
        for text in needs(requirement.name, entry.version):
            needed = Requirement(text)
            extras = requirement.extras or {""}
            if needed.marker and not any(
                needed.marker.evaluate(environment(python, machine) | {"extra": extra}) for extra in extras
            ):
                continue
            below = there.get(canonicalize_name(needed.name))
            assert below is not None, f"{requirement.name} needs {needed.name}: run `make lock`"
            assert needed.specifier.contains(below.version), f"{needed} against {below.version}"
            asked.append(needed)


def needs(name: str, version: str) -> list[str]:
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return []
    return list(found.requires or ()) if found.version == version else []


@pytest.mark.parametrize("lock", ["requirements.lock", "build.lock"])
def test_every_package_has_one_version_and_its_hashes(lock: str) -> None:
    entries = locked(lock)
    assert entries
    for entry in entries:
        assert entry.version
        assert entry.hashes
        assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in entry.hashes)


def test_the_supported_pythons_are_those_of_the_lock() -> None:
    supported = {c.rpartition(" ")[2] for c in PROJECT["project"]["classifiers"] if "Python :: 3." in c}
    assert supported == {python for python, _ in MACHINES}
    assert SpecifierSet(PROJECT["project"]["requires-python"]).contains("3.11")


def test_the_image_installs_nothing_without_a_hash() -> None:
    text = (ROOT / "Dockerfile").read_text()
    steps = re.findall(r"^ +(?:install \S+|\S*pip wheel) (.*?); \\$", text, re.MULTILINE)
    assert len(steps) == 4
    assert all("--require-hashes" in step or "--no-index" in step for step in steps), steps


# -- rich is for the demo's colours alone


def test_nothing_but_the_demo_imports_rich() -> None:
    importing = set()
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "rich" in text else ():
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.partition(".")[0] == "rich" for name in names):
                importing.add(path.relative_to(ROOT / "src/podwatch").as_posix())
    assert importing == {"simulation/verify.py"}
    assert not [text for text in PROJECT["project"]["dependencies"] if text.startswith("rich")]
    assert not [entry for entry in locked("requirements.lock") if entry.requirement.name == "rich"]


SCREEN = """
import sys
if sys.argv[1] == "without":
    sys.modules["rich"] = None
from podwatch.simulation.verify import Screen
Screen().say("demo", "a fault", "fault")
"""


@pytest.mark.parametrize("rich", ["with", "without"])
def test_the_demo_prints_its_lines_without_rich_too(rich: str) -> None:
    ours, theirs = pty.openpty()
    environ = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm-256color"}
    subprocess.run([sys.executable, "-c", SCREEN, rich], stdout=theirs, check=True, env=environ)
    os.close(theirs)
    said = os.read(ours, 4096).decode()
    os.close(ours)
    assert "a fault" in said
    assert ("\x1b[" in said) is (rich == "with")
