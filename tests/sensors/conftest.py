"""The NVML stand-in, compiled once per session and loaded by the real pynvml in the sensor's child process."""

from pathlib import Path

import pytest

from tests.support.nvml import NoCompiler, NvmlWorld, build_nvml


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build_nvml(tmp_path_factory.mktemp("nvml"))
    except NoCompiler as error:
        pytest.skip(str(error))


@pytest.fixture
def world(nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NvmlWorld:
    """Two healthy devices that child processes see through the real pynvml."""
    world = NvmlWorld(tmp_path / "world", devices=2)
    for name, value in world.environment(nvml_library).items():
        monkeypatch.setenv(name, value)
    return world
