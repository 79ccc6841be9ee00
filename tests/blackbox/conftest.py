"""End-to-end: the real daemon as a process, with everything real around it but the GPU and the training."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.daemon import PATIENCE
from tests.support.nvml import NoCompiler, build_nvml
from tests.support.rig import Rig


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each wait here has a limit that says what did not come; the one of the whole test must not be first."""
    for item in items:
        if item.nodeid.startswith("tests/blackbox/") and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(200 * PATIENCE))


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build_nvml(tmp_path_factory.mktemp("nvml"))
    except NoCompiler as missing:
        pytest.skip(str(missing))


@pytest.fixture
def make_rig(tmp_path: Path, nvml_library: Path) -> Iterator[Callable[[], Rig]]:
    made: list[Rig] = []

    def make() -> Rig:
        made.append(Rig(tmp_path / f"pod{len(made)}", nvml_library))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@pytest.fixture
def rig(make_rig: Callable[[], Rig]) -> Rig:
    return make_rig()


@pytest.fixture
def attaching(monkeypatch: pytest.MonkeyPatch) -> None:
    """podwatch attaches to training that it finds, which it does not do in other tests."""
    monkeypatch.setattr(Rig, "supervise", "auto")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A place for a store on another filesystem than the checkpoints."""
    shm = Path("/dev/shm")
    if tmp_path.stat().st_dev == shm.stat().st_dev:
        pytest.skip("the store needs a filesystem of its own")
    directory = Path(tempfile.mkdtemp(dir=shm))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)
