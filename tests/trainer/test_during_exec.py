"""A process that has just been told to exec shows no environment for milliseconds, and is a survivor all the same."""

import os
import subprocess
import uuid

import pytest

from podwatch.system import procfs

ROUNDS = 40


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine an exec may take much longer than the milliseconds that it works for."""
    monkeypatch.setattr(procfs, "EXEC_LOOKS", 500)


def test_a_process_in_the_middle_of_an_exec_is_known_by_its_mark() -> None:
    start_id = uuid.uuid4().hex
    for _ in range(ROUNDS):
        with subprocess.Popen(["sleep", "60"], env={**os.environ, "PODWATCH_START_ID": start_id}) as process:
            try:
                assert procfs.environment_value(process.pid, "PODWATCH_START_ID") == start_id
            finally:
                process.kill()
