"""What users install: the source distribution builds the same wheel as the tree, and the wheel alone is podwatch."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=300,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | env,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with nothing but pip."""
    root = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", root / "venv", cwd=root)
    return root


def wheel(source: Path, into: Path, clean: Path) -> Path:
    run(clean / "venv/bin/pip", "wheel", "-q", "--no-deps", "--wheel-dir", into, source, cwd=clean)
    (built,) = into.glob("podwatch-*.whl")
    return built


def test_both_distributions_and_an_installation(clean: Path, tmp_path: Path) -> None:
    from_tree = wheel(ROOT, tmp_path / "tree", clean)
    run(clean / "venv/bin/pip", "install", "-q", "hatchling", cwd=clean)
    code = "import hatchling.build as b; print(b.build_sdist(__import__('sys').argv[1]))"
    name = run(clean / "venv/bin/python", "-c", code, tmp_path, cwd=ROOT).strip().splitlines()[-1]
    with tarfile.open(tmp_path / name) as archive:
        archive.extractall(tmp_path / "sdist", filter="data")
    (unpacked,) = (tmp_path / "sdist").iterdir()
    from_sdist = wheel(unpacked, tmp_path / "from-sdist", clean)

    def contents(path: Path) -> dict[str, int]:
        with zipfile.ZipFile(path) as archive:
            return {i.filename: i.CRC for i in archive.infolist() if not i.filename.endswith("/RECORD")}

    assert contents(from_tree) == contents(from_sdist)
    shipped = {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src" / "podwatch").rglob("*.py")}
    assert shipped <= contents(from_tree).keys()
    assert not [n for n in contents(from_tree) if "test" in n.split("/") or n.startswith("benchmarks")]

    run(sys.executable, "-m", "venv", clean / "user", cwd=clean)
    run(clean / "user/bin/pip", "install", "-q", from_tree, cwd=clean)
    podwatch, empty = clean / "user/bin/podwatch", tmp_path / "empty"
    empty.mkdir()
    home = {"HOME": str(empty), "PATH": "/usr/bin:/bin"}
    assert run(podwatch, "--version", cwd=empty, **home).startswith("podwatch 0.")
    shown = run(podwatch, "demo", cwd=empty, **home)
    assert "FAILED" not in shown, shown
    code = "import importlib.resources as r; print((r.files('podwatch') / '_systemd/podwatch.service').read_text())"
    assert "ExecStart=" in run(clean / "user/bin/python", "-c", code, cwd=empty, **home)
    assert not [p for p in empty.iterdir() if p.name == "podwatch.toml"]
