"""A command of root's believes no runtime directory of another user. Needs root."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.strangers import UID, needs_root, public_directory

pytestmark = needs_root

ALL_IS_WELL = {"schema_version": 1, "kind": "podwatch-status", "running": True, "overall": "ok", "reasons": []}


@pytest.fixture
def theirs(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A runtime directory with a run, as another user could have made it."""
    with public_directory() as root:
        run = root / "runtime" / "run-7"
        run.mkdir(parents=True)
        pid = os.getpid()
        (run / "endpoint.json").write_text(
            json.dumps({"run_id": "run-7", "pid": pid, "http_url": "http://127.0.0.1:9"})
        )
        (run / "status.json").write_text(json.dumps({**ALL_IS_WELL, "run_id": "run-7"}))
        for path in (root / "runtime", run, *run.iterdir()):
            os.chown(path, UID, UID)
        yield root / "runtime"


def status(runtime: Path, home: Path) -> "subprocess.CompletedProcess[str]":
    environ = {"PATH": os.environ["PATH"], "HOME": str(home), "PODWATCH_RUNTIME_DIR": str(runtime)}
    return subprocess.run(
        [sys.executable, "-m", "podwatch", "status", "--json"],
        env=environ, cwd=home, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_it_is_not_read(theirs: Path, tmp_path: Path) -> None:
    found = json.loads(status(theirs, tmp_path).stdout)
    assert found["run_id"] != "run-7"
    assert [reason["kind"] for reason in found["reasons"]] == ["podwatch-not-found"]


def test_the_same_of_roots_own_is_read(theirs: Path, tmp_path: Path) -> None:
    for path in (theirs, *theirs.rglob("*")):
        os.chown(path, 0, 0)
    assert json.loads(status(theirs, tmp_path).stdout)["run_id"] == "run-7"


def test_a_run_of_another_user_in_a_directory_of_roots_is_not_read(theirs: Path, tmp_path: Path) -> None:
    os.chown(theirs, 0, 0)
    found = json.loads(status(theirs, tmp_path).stdout)
    assert [reason["kind"] for reason in found["reasons"]] == ["podwatch-not-found"]
