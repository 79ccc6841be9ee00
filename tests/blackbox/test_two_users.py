"""Two users of one machine guard the same output directory: only the first one's podwatch starts training.

Needs root.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import PATIENCE
from tests.support.strangers import needs_root, public_directory

pytestmark = [pytest.mark.slow, needs_root]

NOBODY = 65534
SECONDS = 10.0 * PATIENCE


def as_user(uid: int) -> list[str]:
    """The beginning of a command line. With the right to read everything, as this Python can lie in /root."""
    capability = "+dac_read_search"
    rights = ["--inh-caps", capability, "--ambient-caps", capability] if uid else []
    return ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups", *rights]


class Podwatch:
    """`podwatch run` of one user, with a state directory of its own; training runs as nobody."""

    def __init__(self, root: Path, name: str, uid: int) -> None:
        self.place = root / name
        self.place.mkdir()
        config = self.place / "podwatch.toml"
        config.write_text(f"""
run_id = "r"
state_dir = "{self.place}/state"
[trainer]
layout = "custom"
output_dir = "{root}/pod/out"
cwd = "{root}/pod"
command = ["sh", "-c", "echo {name} >> starts; exec sleep 987"]
{'user = "nobody"' if uid == 0 else ""}
[checkpoints.custom]
parts = "step_{{step}}"
[http]
port = 0
""")
        for path in (self.place, config):
            os.chown(path, uid, uid)
        environ = {"PATH": os.environ["PATH"], "HOME": str(self.place), "PODWATCH_RUNTIME_DIR": f"{self.place}/run"}
        with (self.place / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [*as_user(uid), sys.executable, "-m", "podwatch", "-c", str(config), "run"],
                cwd=self.place, env=environ, stdout=log, stderr=log,
            )  # fmt: skip

    def events(self) -> list[dict[str, Any]]:
        lines = (self.place / "log").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def until(self, name: str) -> None:
        end = time.monotonic() + SECONDS
        while not any(event.get("podwatch_event") == name for event in self.events()):
            assert time.monotonic() < end, (self.place / "log").read_text()[-3000:]
            time.sleep(0.1)

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(SECONDS)


@pytest.fixture
def root() -> Iterator[Path]:
    with public_directory() as directory:
        (directory / "pod").mkdir()
        os.chown(directory / "pod", NOBODY, NOBODY)
        yield directory


@pytest.mark.parametrize("first", [0, NOBODY])
def test_the_second_one_starts_none(root: Path, first: int) -> None:
    one = Podwatch(root, "first", first)
    one.until("trainer-started")
    other = Podwatch(root, "second", NOBODY if first == 0 else 0)
    try:
        other.until("finding-raised")
        time.sleep(3)  # longer than a start takes
        assert (root / "pod" / "starts").read_text().split() == ["first"]
        assert not [e for e in other.events() if e.get("podwatch_event") in ("trainer-started", "trainer-attached")]
    finally:
        other.end()
        one.end()
