"""A process that has just been told to exec shows no environment for milliseconds, and is a survivor all the same."""

import os
import subprocess
import uuid
from collections.abc import Callable

import pytest

from podwatch.system import procfs
from podwatch.trainer import supervise

ROUNDS = 40


def by_the_supervisor(start_id: str, pid: int) -> bool:
    return supervise.with_start_id([pid], {start_id}) == ([pid], [])


def by_procfs(start_id: str, pid: int) -> bool:
    return procfs.environment_value(pid, "PODWATCH_START_ID") == start_id


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine an exec may take much longer than the milliseconds that it works for."""
    monkeypatch.setattr(procfs, "EXEC_LOOKS", 500)
    monkeypatch.setattr(supervise, "EXEC_READS", 500)
    monkeypatch.setattr(supervise, "READ_SECONDS", 10.0)


@pytest.mark.parametrize("seen", [by_the_supervisor, by_procfs])
def test_a_process_in_the_middle_of_an_exec_is_known_by_its_mark(seen: Callable[[str, int], bool]) -> None:
    start_id = uuid.uuid4().hex
    for _ in range(ROUNDS):
        with subprocess.Popen(["sleep", "60"], env={**os.environ, "PODWATCH_START_ID": start_id}) as process:
            try:
                assert seen(start_id, process.pid)
            finally:
                process.kill()
