"""What users install: the source distribution builds the same wheel as the tree, and the wheel alone is podwatch. Each
way of docs/pods.md to install it, for real, from the wheel and from the source distribution."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


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


@pytest.fixture(scope="module")
def built(clean: Path) -> dict[str, Path]:
    """The wheel of the tree, and the source distribution."""
    run(clean / "venv/bin/pip", "install", "-q", "hatchling", cwd=clean)
    code = "import hatchling.build as b; print(b.build_sdist(__import__('sys').argv[1]))"
    name = run(clean / "venv/bin/python", "-c", code, clean, cwd=ROOT).strip().splitlines()[-1]
    return {"wheel": wheel(ROOT, clean / "tree", clean), "sdist": clean / name}


def test_both_distributions_and_an_installation(clean: Path, built: dict[str, Path], tmp_path: Path) -> None:
    from_tree = built["wheel"]
    with tarfile.open(built["sdist"]) as archive:
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


# -- the ways to install it


CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"


def of_home(home: Path, *first: Path) -> dict[str, str]:
    """The environment of a user with this home: nothing of the tests' own environment but the package index."""
    path = ":".join([*map(str, first), f"{home}/.local/bin", "/usr/bin", "/bin"])
    found = {"HOME": str(home), "PATH": path, "PIPX_HOME": f"{home}/.local/pipx", "VIRTUAL_ENV": ""}
    if Path(CERTIFICATES).is_file():
        found["SSL_CERT_FILE"] = CERTIFICATES  # uv has certificates of its own
    return found


@pytest.fixture(scope="module")
def tools(clean: Path) -> Path:
    """uv and pipx, as their users have them."""
    run(sys.executable, "-m", "venv", clean / "tools", cwd=clean)
    run(clean / "tools/bin/pip", "install", "-q", "uv", "pipx", cwd=clean)
    return clean / "tools/bin"


def works(podwatch: Path, home: Path, env: dict[str, str]) -> None:
    """The installed program is whole: it has its data files, and knows where it is."""
    assert run(podwatch, "--version", cwd=home, **env).startswith("podwatch 0.")
    with subprocess.Popen(["sleep", "600"], cwd=home, env=env) as trainer:  # not a trainer of another test
        try:
            run(podwatch, "config", "init", "--pid", str(trainer.pid), "-o", home / "podwatch.toml", cwd=home, **env)
        finally:
            trainer.kill()
    if os.geteuid() == 0:
        text = (home / "podwatch.toml").read_text().replace(str(home / "outputs"), str(home))
        (home / "podwatch.toml").write_text(text)
        shown = run(podwatch, "-c", home / "podwatch.toml", "install", "--dry-run", cwd=home, **env)
        assert "would write /etc/systemd/system/podwatch.service" in shown, shown
    listed = run(podwatch, "-c", home / "podwatch.toml", "uninstall", "--dry-run", cwd=home, **env)
    (program,) = [line for line in listed.splitlines() if line.startswith("  program ")]
    assert str(podwatch.resolve().parents[1]) in program


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
@pytest.mark.parametrize("how", ["uv", "pipx", "pip"])
def test_a_way_to_install_it(how: str, kind: str, built: dict[str, Path], tools: Path, tmp_path: Path) -> None:
    home, source = tmp_path / "home", built[kind]
    home.mkdir()
    env = of_home(home, tools, Path(sys.executable).resolve().parent)
    if how == "pip":
        run(sys.executable, "-m", "venv", home / "podwatch", cwd=home, **env)
        run(home / "podwatch/bin/pip", "install", "-q", source, cwd=home, **env)
        works(home / "podwatch/bin/podwatch", home, env)
        run(home / "podwatch/bin/pip", "install", "-q", "--upgrade", source, cwd=home, **env)
        return
    install = [tools / "uv", "tool", "install"] if how == "uv" else [tools / "pipx", "install"]
    run(*install, source, cwd=home, **env)
    works(home / ".local/bin/podwatch", home, env)
    run(*install, "--force", source, cwd=home, **env)
    assert run(home / ".local/bin/podwatch", "--version", cwd=home, **env).startswith("podwatch 0.")
    run(*([tools / "uv", "tool"] if how == "uv" else [tools / "pipx"]), "uninstall", "podwatch", cwd=home, **env)
    assert not (home / ".local/bin/podwatch").exists()


def old_python() -> Path | None:
    """A Python that podwatch does not run on."""
    versions = Path(sys.base_prefix).parent
    for name in ("python3.10", "python3.9", "python3.8"):
        for found in (shutil.which(name), *versions.glob(f"*/bin/{name}")):
            if found and subprocess.run([found, "-c", "import venv, ensurepip"]).returncode == 0:
                return Path(found)
    return None


def test_an_image_whose_python_is_too_old(built: dict[str, Path], tmp_path: Path) -> None:
    """pip refuses with the reason; uv, which that Python can install, uses a Python that fits beside it."""
    old = old_python()
    if old is None:
        pytest.skip("needs a Python older than 3.11 with venv")
    home = tmp_path / "home"
    home.mkdir()
    env = of_home(home)
    run(old, "-m", "venv", home / "old", cwd=home, **env)
    refused = subprocess.run(
        [home / "old/bin/pip", "install", "--no-deps", str(built["wheel"])], capture_output=True, text=True
    )
    assert refused.returncode != 0
    assert "requires a different Python" in refused.stderr
    run(home / "old/bin/pip", "install", "-q", "uv", cwd=home, **env)
    command = [str(home / "old/bin/uv"), "tool", "install", "--python", "3.12", str(built["wheel"])]
    own = {**env, "UV_PYTHON_PREFERENCE": "only-managed", "UV_HTTP_TIMEOUT": "30", "UV_HTTP_RETRIES": "0"}
    brought = subprocess.run(command, cwd=home, env=own, capture_output=True, text=True, timeout=500)
    if brought.returncode != 0:
        assert "ownload" in brought.stderr, brought.stderr
        fits = of_home(home, Path(sys.executable).resolve().parent)
        command[4] = f"{sys.version_info[0]}.{sys.version_info[1]}"
        run(*command, cwd=home, **fits)
    works(home / ".local/bin/podwatch", home, env)
    if brought.returncode != 0:
        pytest.skip("not tried here: the download of an interpreter by uv (no access to it); a local one was used")
