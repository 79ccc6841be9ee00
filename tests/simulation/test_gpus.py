import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from podwatch.domain.snapshot import GpuState
from podwatch.simulation.run_files import GIB, SimulatedGpus, held, hold, start_ticks


def sleeper() -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])


def test_memory_is_the_sum_over_living_processes(tmp_path: Path) -> None:
    other = sleeper()
    try:
        hold(tmp_path, 0, os.getpid(), 3 * GIB, 20.0)
        hold(tmp_path, 0, other.pid, 5 * GIB, 90.0)
        hold(tmp_path, 1, other.pid, GIB)
        gpus = SimulatedGpus(tmp_path)
        first, second = gpus.read()
        assert (first.memory_used_bytes, first.utilization_percent) == (8 * GIB, 100.0)
        assert (second.memory_used_bytes, second.utilization_percent) == (GIB, 0.0)
        assert first.memory_total_bytes == 80 * GIB
    finally:
        other.kill()
        other.wait()
    assert [gpu.memory_used_bytes for gpu in gpus.read()] == [3 * GIB, 0]
    gpus.close()


def test_a_zombie_holds_nothing(tmp_path: Path) -> None:
    child = sleeper()
    hold(tmp_path, 0, child.pid, GIB)
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{child.pid}").exists()
    assert held(tmp_path, 0) == ()
    child.wait()


def test_a_pid_used_again_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / str(os.getpid())).write_text(f"{GIB} 0.0 {(start_ticks(os.getpid()) or 0) + 1}\n")
    assert held(tmp_path, 0) == ()


@pytest.mark.parametrize("junk", ["", "half", "1 2 x"])
def test_junk_is_not_memory(tmp_path: Path, junk: str) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / str(os.getpid())).write_text(junk)
    assert SimulatedGpus(tmp_path, count=1).read()[0].memory_used_bytes == 0


def test_a_lost_device_says_so_and_the_other_goes_on(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "lost").touch()
    first, second = SimulatedGpus(tmp_path).read()
    assert first.state is GpuState.LOST
    assert first.memory_used_bytes is None
    assert second.state is GpuState.OK
