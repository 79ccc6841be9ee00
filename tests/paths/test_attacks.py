"""What the training user can do to podwatch's paths, and that nothing of root's moves, changes or becomes readable.

Static links and forgeries, and the same put in place between two system calls of an operation (promise 9). Some moments
of each operation; test_every_moment.py tries all of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drivers.paths import OPERATIONS
from tests.paths.hostile import FLIPS, as_root, calls, exchange, fresh, in_memory, play, run

pytestmark = as_root


@pytest.fixture
def memory() -> Iterator[Path]:
    with in_memory() as found:
        yield found


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_was_put_there_before(memory: Path, name: str) -> None:
    operation, feasible = OPERATIONS[name], 0
    for flip in FLIPS:
        with fresh(memory) as one:
            operation.before(one.guard)
            one.guard.forget()  # a podwatch that starts now has pinned nothing yet
            feasible += exchange(*flip.prepare(one))
            run(operation, one)
            one.unharmed()
    assert feasible > len(FLIPS) / 2


@pytest.mark.parametrize("later", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one moment", "half later"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_put_there_between_judging_and_acting(memory: Path, name: str, later: bool) -> None:
    operation = OPERATIONS[name]
    count = calls(operation, memory)
    done = sum(
        play(memory, operation, flip, [1 + (n * 7919 + later * (count // 2)) % count]) for n, flip in enumerate(FLIPS)
    )
    assert done > len(FLIPS) / 4, "the attacks happened"


SEEN = {
    "restore deep": "out/run -> above",
    "quarantine": "out/rollouts -> above",
    "trackers": "out/latest -> above",
}
"""What was seen to work on an earlier podwatch: tried before every system call."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "flip"), SEEN.items())
def test_at_every_moment(memory: Path, name: str, flip: str) -> None:
    operation = OPERATIONS[name]
    count = calls(operation, memory)
    (chosen,) = (f for f in FLIPS if f.name == flip)
    assert play(memory, operation, chosen, range(1, count + 1)) > count / 2
