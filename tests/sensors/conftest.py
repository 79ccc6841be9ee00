"""The NVML stand-in, compiled once per session and loaded into this process by the real pynvml."""

from pathlib import Path

import pytest

from tests.support.nvml import NoCompiler, NvmlWorld, build_nvml, load_here


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build_nvml(tmp_path_factory.mktemp("nvml"))
    except NoCompiler as error:
        pytest.skip(str(error))


@pytest.fixture
def world(nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NvmlWorld:
    """Two healthy devices that this process sees through the real pynvml."""
    world = NvmlWorld(tmp_path / "world", devices=2)
    monkeypatch.setenv("NVML_STANDIN", str(world.path))
    load_here(nvml_library)
    return world
