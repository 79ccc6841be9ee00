"""A store that an installed package adds, used by the daemon and by every child process that sends or fetches."""

import json
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.support.asking import published, running
from tests.support.package import install
from tests.support.rig import Rig
from tests.support.store_layout import newest_pointer

pytestmark = pytest.mark.slow


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """podwatch's own environment with the package in it: its children run isolated, and read no PYTHONPATH."""
    home = tmp_path / "environment"
    venv.create(home, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    install(site)
    (site / "podwatch.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    monkeypatch.setattr(sys, "executable", str(home / "bin" / "python"))
    return home


@pytest.mark.usefixtures("environment")
def test_what_is_published_there_can_be_restored(rig: Rig, elsewhere: Path, tmp_path: Path) -> None:
    daemon = rig.daemon(sync__store=f"shelf://here{elsewhere}").start()
    running(daemon, rig, step=5)
    published(daemon, 60)
    stored = newest_pointer(elsewhere)["step"]
    command = [sys.executable, "-m", "podwatch", "-c", str(daemon.config), "restore", "--json"]
    restored = subprocess.run(
        [*command, "--to", str(tmp_path / "there")], env=daemon.environ, capture_output=True, text=True, timeout=180
    )
    assert restored.returncode == 0, restored.stderr
    document = json.loads(restored.stdout)
    assert document["step"] >= stored
    assert document["downloaded_bytes"] > 0
    assert any(file.is_file() for file in (tmp_path / "there").rglob("*"))
