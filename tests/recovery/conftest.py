import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwatch.recovery import Phase, stale_files
from podwatch.recovery.context import RecoveryContext
from podwatch.recovery.state import may_follow
from tests.support.recovery_world import World
from tests.support.rig import end_all, naming
from tests.support.shadow import Shadow, wrapped
from tests.support.small_reserve import small_reserve  # noqa: F401 - a fixture


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


@pytest.fixture(autouse=True)
def phases_as_in_the_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each change of phase is one that ``may_follow`` allows."""
    wrong: list[str] = []
    show = RecoveryContext.show

    def checked(self: RecoveryContext, phase: Phase, detail: str = "") -> None:
        if not may_follow(self.phase, phase):
            wrong.append(f"{self.phase} -> {phase}: {detail}")
        show(self, phase, detail)

    monkeypatch.setattr(RecoveryContext, "show", checked)
    yield
    assert not wrong


@pytest.fixture(autouse=True)
def in_the_shadow(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """With PODWATCH_SHADOW=1, the table of decisions would do the same as today's operations. One test counts
    the searches of the pod, of which the shadow makes more."""
    if "PODWATCH_SHADOW" not in os.environ or request.node.name == "test_nothing_begins_once_podwatch_leaves":
        yield
        return
    shadow = Shadow()
    wrapped(shadow, monkeypatch)
    yield
    assert shadow.lines == []
