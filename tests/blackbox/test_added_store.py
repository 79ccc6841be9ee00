"""A store that an installed package adds, used by the daemon and by every child process that sends or fetches."""

import json
import os
from pathlib import Path

import pytest

from tests.support.asking import published, running
from tests.support.package import install
from tests.support.rig import Rig

pytestmark = pytest.mark.slow


def test_what_is_published_there_can_be_restored(rig: Rig, elsewhere: Path, tmp_path: Path) -> None:
    site = install(tmp_path / "site-packages")
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(site))))
    store = f"shelf://here{elsewhere}"
    daemon = rig.daemon({"PYTHONPATH": path}, sync__store=store).start()
    running(daemon, rig, step=5)
    published(daemon, 60)
    stored = [json.loads(file.read_text())["step"] for file in elsewhere.rglob("latest.json")]
    assert len(stored) == 1
    restored = daemon.command("restore", "--to", str(tmp_path / "there"), "--json")
    assert restored.returncode == 0, restored.stderr
    document = json.loads(restored.stdout)
    assert document["step"] >= stored[0]
    assert document["downloaded_bytes"] > 0
    assert any(file.is_file() for file in (tmp_path / "there").rglob("*"))
