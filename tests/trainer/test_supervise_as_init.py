"""The supervisor of the daemon does what podwatch's init does: the same tests, with the other program."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from podwatch.system import procfs
from podwatch.trainer import supervise
from tests.daemon import test_init, test_init_job
from tests.support import forking

pytestmark = pytest.mark.slow
PROGRAM = (supervise.__file__, "init")


def of(module: object) -> dict[str, Callable[..., None]]:
    return {name: value for name, value in vars(module).items() if name.startswith("test_")}


class OtherBox(test_init_job.JobBox):
    program = PROGRAM

    def file(self) -> Path:
        shim = self.root / "shim.py"
        argv = [sys.executable, "-I", "-S", "-E", *PROGRAM]
        shim.write_text(f"import os, sys\nos.execv({sys.executable!r}, {argv!r} + sys.argv[1:])\n")
        return shim


@pytest.fixture
def box(tmp_path: Path) -> Iterator[OtherBox]:
    made = OtherBox(tmp_path)
    yield made
    for process in made.processes:
        process.kill()
        process.wait()
    for pid in procfs.all_pids():
        if str(tmp_path) in " ".join(procfs.command(pid)):
            forking.kill(pid)


globals().update(of(test_init) | of(test_init_job))
