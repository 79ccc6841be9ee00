"""Two podwatches that know one output directory by two names never train at once, whoever is first by how little."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import PATIENCE
from tests.support.rig import alive, naming

pytestmark = pytest.mark.slow

SECONDS = 30.0 * PATIENCE


class Podwatch:
    """`podwatch run` with a state directory of its own; its trainer says when it begins."""

    def __init__(self, root: Path, name: str, output: Path) -> None:
        self.place = root / name
        self.place.mkdir()
        self.config = self.place / "podwatch.toml"
        self.config.write_text(f"""
run_id = "two-names-{name}"
state_dir = "{self.place}/state"
[trainer]
layout = "custom"
output_dir = "{output}"
cwd = "{root}"
command = ["sh", "-c", "echo $$ >> starts; exec sleep 987"]
[checkpoints.custom]
parts = "step_{{step}}"
[http]
port = 0
""")
        self.environ = {
            "PATH": os.environ["PATH"], "HOME": str(self.place), "PODWATCH_RUNTIME_DIR": f"{self.place}/run",
        }  # fmt: skip

    def start(self) -> None:
        with (self.place / "log").open("wb") as log:
            self.process = subprocess.Popen(self._argv("run"), env=self.environ, stdout=log, stderr=log)

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._argv(*words), env=self.environ, capture_output=True, text=True, timeout=SECONDS, check=False
        )

    def _argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "podwatch", "-c", str(self.config), *words]

    @property
    def events(self) -> list[str]:
        lines = (self.place / "log").read_text().splitlines()
        return [json.loads(line).get("podwatch_event", "") for line in lines if line.startswith("{")]

    @property
    def trains(self) -> bool:
        return "trainer-started" in self.events

    @property
    def reasons(self) -> dict[str, Any]:
        shown = self.command("status", "--json").stdout
        return {one["kind"]: one for one in (json.loads(shown)["reasons"] if shown else ())}

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(SECONDS)


def until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.2)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for pid in naming(tmp_path):
        os.kill(pid, 9)


@pytest.fixture(params=["link", "dangling link", "bind mount"])
def names(root: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Path, Path]]:
    """The output directory, and its other name in another directory."""
    output, alias = root / "work" / "outputs", root / "alias" / "outputs"
    (output if request.param != "dangling link" else output.parent).mkdir(parents=True)
    alias.parent.mkdir()
    if request.param != "bind mount":
        alias.symlink_to(output)
        yield output, alias
        return
    alias.mkdir()
    mount = ["mount", "--bind", str(output), str(alias)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(mount, check=False).returncode != 0:
        pytest.skip("mounting is not allowed here")
    yield output, alias
    subprocess.run(["umount", "-l", str(alias)], check=True)


def living(root: Path) -> list[int]:
    starts = root / "starts"
    return [pid for pid in map(int, starts.read_text().split() if starts.exists() else ()) if alive(pid)]


def test_only_one_of_them_trains(root: Path, names: tuple[Path, Path]) -> None:
    one, other = Podwatch(root, "one", names[0]), Podwatch(root, "other", names[1])
    one.start()
    other.start()
    try:
        until(lambda: one.trains or other.trains, "training starts")
        first, second = (one, other) if one.trains else (other, one)
        until(lambda: "blocked" in second.reasons, "the other one says why it starts nothing")
        assert second.reasons["blocked"]["severity"] == "critical"
        until(lambda: second.events.count("recovery-blocked") == 1, "it says so")
        assert not second.trains
        (trainer,) = living(root)
        began = second.events.count("trainer-starting")
        assert began <= 1, "it tried once at most: if both asked before either had the lock"
        assert first.command("stop-training", "--wait").returncode == 0
        assert not alive(trainer), "training ended, and its lock with it"
        until(lambda: second.trains, "the other one starts once the lock is free")
        assert (second.events.count("recovery-blocked"), second.events.count("trainer-starting")) == (1, began + 1)
        assert len(living(root)) == 1
    finally:
        one.end()
        other.end()
