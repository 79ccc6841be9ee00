"""Without a card the whole suite is one skipped line with the reason, and exit code 0."""

from pathlib import Path

import pytest

from podwatch.sensors.gpu import ReaderUnavailable, look_once


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    ours = [item for item in items if here in item.path.parents]
    if not ours:
        return
    try:
        look_once(30.0)
    except ReaderUnavailable as unavailable:
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=f"no usable NVIDIA GPU here: {unavailable}"))
