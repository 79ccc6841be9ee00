import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwatch.recovery import stale_files
from tests.support.recovery_world import World
from tests.support.rig import end_all, naming


@pytest.fixture(autouse=True)
def not_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's clock says nothing about what lies in this machine's /dev/shm and /tmp."""
    monkeypatch.setattr(stale_files, "PLACES", [])


@pytest.fixture
def quick_dir() -> Iterator[Path]:
    """In memory where there is such a place: hundreds of fsyncs are not what is tested."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as name:
        yield Path(name)
        end_all(lambda: naming(Path(name)))  # a supervisor writes the end of its trainer into what is removed here


@pytest.fixture
def world(quick_dir: Path) -> Iterator[World]:
    made = World(quick_dir)
    made.output.mkdir()
    (made.output.parent / "cfg.toml").write_text("x = 1")
    yield made
    made.close()
