"""The ways to run `podwatch controller`: their files by an independent reader, and their command lines by podwatch."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="needs the validators: make test-engines")
ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "controller"
SCHEMAS = {"compose.yaml": "vendor.compose-spec"}


def accepted(words: list[str]) -> None:
    """By podwatch's own parser: --help shows that everything before it is known."""
    assert words[0] == "podwatch"
    assert "controller" in words
    assert words[words.index("-c") + 1].endswith(".toml"), "a configuration of its own"
    done = subprocess.run([sys.executable, "-m", *words, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("name", "schema"), SCHEMAS.items())
def test_the_files_have_their_form(name: str, schema: str) -> None:
    tool = Path(sys.executable).with_name("check-jsonschema")
    done = subprocess.run([str(tool), "--builtin-schema", schema, str(EXAMPLES / name)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose() -> None:
    service = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())["services"]["controller"]
    words = [*service["entrypoint"], *service["command"]]
    accepted(words)
    assert "--loop" in words
    assert service["restart"].startswith("on-failure")


def test_units(tmp_path: Path) -> None:
    text = (EXAMPLES / "podwatch-controller@.service").read_text()
    (line,) = re.findall(r"^ExecStart=/usr/local/bin/(.*)$", text, flags=re.MULTILINE)
    words = shlex.split(line.replace("%i", "run1"))
    accepted(words)
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed: the units are not verified")
    for unit in EXAMPLES.glob("*.service"), EXAMPLES.glob("*.timer"):
        for file in unit:
            own = file.read_text().replace("/usr/local/bin/podwatch", sys.executable)
            (tmp_path / file.name).write_text(own)
    names: list[Any] = [tmp_path / f"podwatch-controller@run1.{kind}" for kind in ("service", "timer")]
    done = subprocess.run(["systemd-analyze", "verify", *map(str, names)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["status", "--refresh", "--output", "json"],
        [
            "launch",
            "--yes",
            "--async",
            "--detach-run",
            "--cluster",
            "podwatch-run1-7",
            "--env=A=b",
            "--secret=C",
            "t.yaml",
        ],
        ["down", "--yes", "podwatch-run1-7"],
    ],
    ids=lambda words: str(words[0]),
)
def test_sky_accepts_what_the_provider_command_passes(tmp_path: Path, words: list[str]) -> None:
    sky = ROOT / ".venv-engines-sky" / "bin" / "sky"
    if not sky.exists():
        pytest.skip("needs SkyPilot: make test-engines")
    text = (ROOT / "examples/providers/skypilot.py").read_text()
    assert all(f'"{word}"' in text for word in words if "=" not in word and "-run1-" not in word and "." not in word)
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "C": "secret"}
    done = subprocess.run([str(sky), *words, "--help"], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
