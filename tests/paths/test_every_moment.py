"""As test_attacks.py, before every system call of every operation: some ten thousand attacks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drivers.paths import OPERATIONS
from tests.paths.hostile import FLIPS, Flip, as_root, calls, in_memory, play

pytestmark = [pytest.mark.slow, as_root]


@pytest.fixture
def memory() -> Iterator[Path]:
    with in_memory() as found:
        yield found


@pytest.mark.parametrize("flip", FLIPS, ids=lambda f: f.name)
@pytest.mark.parametrize("name", OPERATIONS)
def test_between_any_two_calls(memory: Path, name: str, flip: Flip) -> None:
    operation = OPERATIONS[name]
    count = calls(operation, memory)
    play(memory, operation, flip, range(1, count + 1))
