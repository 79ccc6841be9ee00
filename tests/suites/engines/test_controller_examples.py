"""The ways to run `podwatch controller`: their files by an independent reader, and their command lines by podwatch."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from podwatch.domain.replacement import parse_rules

yaml = pytest.importorskip("yaml", reason="needs the validators: make test-engines")
ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "controller"
SCHEMAS = {"github-actions.yml": "vendor.github-workflows", "compose.yaml": "vendor.compose-spec"}


def accepted(words: list[str]) -> None:
    """By podwatch's own parser: --help shows that everything before it is known."""
    assert words[:2] == ["podwatch", "controller"]
    done = subprocess.run([sys.executable, "-m", *words, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def provider(words: list[str]) -> list[str]:
    """The program of --provider, which must be one of the examples."""
    name, _, command = words[words.index("--provider") + 1].partition("=")
    assert (ROOT / "examples/providers" / f"{name}.py").is_file()
    program = shlex.split(command)
    assert program[1].endswith(f"/{name}.py")
    return program


@pytest.mark.parametrize(("name", "schema"), SCHEMAS.items())
def test_the_files_have_their_form(name: str, schema: str) -> None:
    tool = Path(sys.executable).with_name("check-jsonschema")
    done = subprocess.run([str(tool), "--builtin-schema", schema, str(EXAMPLES / name)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose() -> None:
    service = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())["services"]["controller"]
    words = [*service["entrypoint"], *service["command"]]
    accepted(words)
    provider(words)
    assert "--loop" in words
    assert service["restart"].startswith("on-failure")


class Workflow:
    def __init__(self) -> None:
        self.document = yaml.safe_load((EXAMPLES / "github-actions.yml").read_text())
        self.job = self.document["jobs"]["look"]
        self.steps = {step.get("name", ""): step for step in self.job["steps"]}

    def run(self, name: str, directory: Path, stubs: dict[str, str], **variables: str) -> int:
        """A step's script, with programs of ours, as GitHub runs it."""
        directory.mkdir(exist_ok=True)
        for program, text in stubs.items():
            (directory / program).write_text(f"#!/bin/sh\n{text}\n")
            (directory / program).chmod(0o755)
        environment = {"PATH": f"{directory}:{os.environ['PATH']}", "STORE": "b2://bucket/pre/fix", "RUN": "run1"}
        return subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", self.steps[name]["run"]], cwd=directory,
            env=environment | variables, timeout=60,
        ).returncode  # fmt: skip


def test_workflow() -> None:
    found = Workflow()
    (cron,) = (entry["cron"] for entry in found.document[True]["schedule"])  # `on` is a boolean of YAML 1.1
    minutes = [int(minute) for minute in cron.split()[0].split(",")]
    assert all(minute % 2 for minute in minutes)
    assert max(b - a for a, b in pairwise(minutes)) <= 10
    assert found.document["concurrency"] == {"group": "podwatch-controller", "cancel-in-progress": False}
    assert found.document["permissions"] == {"contents": "read"}
    inputs = found.document[True]["workflow_dispatch"]["inputs"]
    assert {"max_price_per_hour", "max_spend_per_day", "max_spend_total"} < inputs.keys()
    for step in found.job["steps"]:
        assert "${{" not in step.get("run", ""), "an input in a script can run commands: it comes by a variable"


def test_workflow_looks(tmp_path: Path) -> None:
    found = Workflow()
    stub = 'printf "%s\\n" podwatch "$@" > words; exit $END'
    for end, want in ((0, 0), (69, 0), (75, 0), (1, 1), (65, 65), (78, 78)):
        for mode in ("--once", "--dry-run"):
            assert found.run("Look", tmp_path / "x", {"podwatch": stub}, END=str(end), MODE=mode) == want
            words = (tmp_path / "x" / "words").read_text().splitlines()
            assert words[2:5] == ["b2://bucket/pre/fix", "run1", mode]
            accepted(words)
            assert provider(words) == ["python3", "podwatch/vast.py"]


@pytest.mark.parametrize("store", ["b2://bucket", "b2://bucket/pre/fix"])
def test_workflow_writes_the_caps(tmp_path: Path, store: str) -> None:
    found = Workflow()
    stub = 'printf "%s\\n" "$@" > words'
    caps = {"PRICE": "2.5", "DAY": "40", "TOTAL": "300"}
    assert found.run("Write the caps", tmp_path, {"b2": stub}, STORE=store, **caps) == 0
    *_, bucket, file, key = (tmp_path / "words").read_text().splitlines()
    assert (bucket, file) == ("bucket", "caps.json")
    assert key == ("pre/fix/" if "pre" in store else "") + "run1/podwatch/controller.json"
    rules = parse_rules((tmp_path / "caps.json").read_bytes())
    assert (rules.max_price_per_hour, rules.max_spend_per_day, rules.max_spend_total) == (2.5, 40, 300)
    (tmp_path / "words").unlink()
    assert found.run("Write the caps", tmp_path, {"b2": stub}, STORE=store, **(caps | {"DAY": ""})) != 0
    assert not (tmp_path / "words").exists()


def test_units(tmp_path: Path) -> None:
    text = (EXAMPLES / "podwatch-controller@.service").read_text()
    (line,) = re.findall(r"^ExecStart=/usr/local/bin/(.*)$", text, flags=re.MULTILINE)
    words = shlex.split(line.replace("${PODWATCH_STORE}", "b2://bucket").replace("%i", "run1"))
    accepted(words)
    provider(words)
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
