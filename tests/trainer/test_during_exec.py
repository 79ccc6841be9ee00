"""A process that has just been told to exec shows no environment for milliseconds, and is a survivor all the same."""

import os
import subprocess
import uuid
from collections.abc import Callable

import pytest

from podwatch.system import procfs
from podwatch.trainer import keeper

ROUNDS = 40


def by_the_keeper(start_id: str, pid: int) -> bool:
    return pid in keeper.marked([start_id])[0]


def by_procfs(start_id: str, pid: int) -> bool:
    return procfs.environment_value(pid, "PODWATCH_START_ID") == start_id


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine an exec may take much longer than the milliseconds that it works for."""
    for module in (keeper, procfs):
        monkeypatch.setattr(module, "EXEC_LOOKS", 500)
    monkeypatch.setattr(keeper, "READ_PATIENCE", 10.0)
    monkeypatch.setattr(keeper, "READ_DEADLINE", 20.0)


@pytest.mark.parametrize("seen", [by_the_keeper, by_procfs])
def test_a_process_in_the_middle_of_an_exec_is_known_by_its_mark(seen: Callable[[str, int], bool]) -> None:
    start_id = uuid.uuid4().hex
    for _ in range(ROUNDS):
        with subprocess.Popen(["sleep", "60"], env={**os.environ, "PODWATCH_START_ID": start_id}) as process:
            try:
                assert seen(start_id, process.pid)
            finally:
                process.kill()
