"""Without a card the whole suite is one skipped line with the reason, and exit code 0."""

from pathlib import Path

import pytest

from podwatch.sensors.gpu import ReaderUnavailable
from podwatch.sensors.nvml import NvmlReader


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    ours = [item for item in items if here in item.path.parents]
    if not ours:
        return
    reader = NvmlReader()
    try:
        reader.open()
    except ReaderUnavailable as unavailable:
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=f"no usable NVIDIA GPU here: {unavailable}"))
    else:
        reader.close()
