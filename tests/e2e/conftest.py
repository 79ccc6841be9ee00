"""End-to-end: the real daemon as a process, with everything real around it but the GPU and the training."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import long_scenarios
from tests.support.long_scenarios import Background
from tests.support.nvml import NoCompiler, build_nvml
from tests.support.rig import Rig


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "meanwhile(name): needs the result of a long scenario, started with the others")


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
    folder, so that the others run while they wait. Call it with the name to wait for the end."""
    wanted = {m.args[0] for item in request.session.items for m in item.iter_markers("meanwhile")}
    rigs = {name: Rig(tmp_path_factory.mktemp(name), nvml_library) for name in sorted(wanted)}

    def start(name: str) -> Background:
        work: Callable[[Rig], None] = getattr(long_scenarios, name)
        return Background(lambda: work(rigs[name]))

    started = {name: start(name) for name in rigs}

    def finish(name: str) -> None:
        started[name].result()
        rigs[name].close()
        del rigs[name]

    yield finish
    for rig in rigs.values():
        rig.close()
