"""End-to-end: the real daemon as a process, with everything real around it but the GPU and the training."""

import os
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import long_scenarios
from tests.support.nvml import NoCompiler, build_nvml
from tests.support.rig import Rig


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "meanwhile(name): needs the result of a long scenario, started with the others")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each wait here has a limit that says what did not come; the one of the whole test must not be first."""
    for item in items:
        if item.nodeid.startswith("tests/e2e/") and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))


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


@pytest.fixture(scope="session", autouse=True)
def meanwhile(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, nvml_library: Path
) -> Iterator[Callable[[str], None]]:
    """Long scenarios that a collected test asks for by its ``meanwhile`` marker: started with the first test of this
    folder, so that the others run while they wait. Call it with the name to wait for the end.

    Of several pytest workers the first one runs a scenario; how it ended stands in a file that all of them can see."""
    wanted = {m.args[0] for item in request.session.items for m in item.iter_markers("meanwhile")}
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    rigs: dict[str, Rig] = {}
    running: list[threading.Thread] = []

    def run(name: str) -> None:
        work: Callable[[Rig], None] = getattr(long_scenarios, name)
        said = ""
        try:
            work(rigs[name])
        except BaseException:
            said = traceback.format_exc()
        finally:
            rigs[name].close()
        scratch = shared / f"meanwhile-{name}.tmp"
        scratch.write_text(said)
        scratch.rename(shared / f"meanwhile-{name}.end")

    for name in sorted(wanted):
        try:
            (shared / f"meanwhile-{name}.begun").touch(exist_ok=False)
        except FileExistsError:
            continue  # another worker runs it
        rigs[name] = Rig(tmp_path_factory.mktemp(name), nvml_library)
        running.append(threading.Thread(target=run, args=(name,), daemon=True))
        running[-1].start()

    def finish(name: str) -> None:
        end = shared / f"meanwhile-{name}.end"
        while not end.exists():
            time.sleep(0.1)
        if said := end.read_text():
            pytest.fail(said)

    yield finish
    for thread in running:
        thread.join()


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A place for a store on another filesystem than the checkpoints."""
    shm = Path("/dev/shm")
    if tmp_path.stat().st_dev == shm.stat().st_dev:
        pytest.skip("the store needs a filesystem of its own")
    directory = Path(tempfile.mkdtemp(dir=shm))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)
