from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.recovery_world import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    made.output.mkdir()
    (made.output.parent / "cfg.toml").write_text("x = 1")
    yield made
    made.close()
