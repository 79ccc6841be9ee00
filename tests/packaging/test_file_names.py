"""Texts name podwatch's own files by the paths that they have now."""

import re
import subprocess
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from podwatch.config.setting_names import known_keys

ROOT = Path(__file__).parents[2]
PATH = re.compile(r"(?<![\w./*{}-])((?:[\w.-]+/)+[\w*-]+\.py)\b")
"""``folder/name.py``, and ``folder/test_*.py``. A bare ``name.py`` can belong to any program."""
NAME = re.compile(r"`([\w-]+\.py)`")


def texts() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def missing(text: str, tails: set[str], folders: set[str]) -> list[str]:
    """The paths of podwatch's folders in ``text`` that no file has."""
    paths = {match.removeprefix("src/podwatch/") for match in PATH.findall(text)} - tails
    return sorted(p for p in paths if p.split("/")[0] in folders and not any(fnmatchcase(tail, p) for tail in tails))


def tails_of(paths: set[str]) -> set[str]:
    """Each path, also without its first folders."""
    split = [path.split("/") for path in paths]
    return {"/".join(parts[start:]) for parts in split for start in range(len(parts))}


def test_every_path_in_a_text_exists() -> None:
    files = texts()
    ours = tails_of({str(path.relative_to(ROOT)) for path in files if path.suffix == ".py"})
    folders = {path.name for path in (ROOT / "src" / "podwatch").iterdir() if path.is_dir()} | {"tests", "benchmarks"}
    read = [path for path in files if path.suffix in {".py", ".md", ".toml"} or path.name == "Makefile"]
    wrong = {
        str(path.relative_to(ROOT)): gone
        for path in read
        if path != Path(__file__) and path.name not in ("CHANGELOG.md", "FATES.md")  # they name what is gone
        if (gone := missing(path.read_text(), ours, folders))
    }
    assert not wrong


DOTTED = re.compile(r"``([a-z_]+)((?:\.[A-Za-z_]\w*)+)(?:\(\))?``")
KEYS = known_keys()


def stale(text: str) -> list[str]:
    """The ``folder.module.Name`` in ``text`` that podwatch does not have. Keys of settings look alike; below
    ``trainer.`` trainers have keys of their own."""
    found = []
    for folder, rest in DOTTED.findall(text):
        name, home = folder + rest, ROOT / "src" / "podwatch" / folder
        if folder == "trainer" or not home.is_dir() or any(f"{name}.".startswith(f"{key}.") for key in KEYS):
            continue
        module, *more = rest.strip(".").split(".")
        if (home / module).is_dir():
            continue
        file = home / f"{module}.py"
        inside, word = (file, (more or [""])[0]) if file.exists() else (home / "__init__.py", module)
        if not re.search(rf"\b{word}\b", inside.read_text()):
            found.append(name)
    return found


def test_every_name_in_a_docstring_exists() -> None:
    source = ROOT / "src"
    code = [path for path in texts() if path.suffix == ".py" and path.is_relative_to(source)]
    assert not {str(path.relative_to(source)): gone for path in code if (gone := stale(path.read_text()))}
    said = "``policy.restart.after_failure`` ``policy.restart`` ``policy.gone`` ``policy.restart.Gone`` ``sync.store``"
    assert stale(said) == ["policy.gone", "policy.restart.Gone"]


def test_every_file_of_the_architecture_page_exists() -> None:
    names = {path.name for path in texts()}
    assert set(NAME.findall((ROOT / "docs" / "architecture.md").read_text())) <= names


def test_a_moved_file_is_found() -> None:
    ours, folders = tails_of({"src/podwatch/sync/workers.py"}), {"sync"}
    assert missing("as in sync/workers.py, src/podwatch/sync/workers.py and torch/lanes.py", ours, folders) == []
    assert missing("(sync/lanes.py)", ours, folders) == ["sync/lanes.py"]
