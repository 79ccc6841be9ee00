"""Every family of deaths that the other tests do not have with real processes, a real server and the NVML stand-in.

One daemon in observe mode is struck again and again: it says what it would restart, and nothing is restarted, so that
each family costs seconds. A few more by the default settings, in real time: PODWATCH_REAL_TIME=1.
"""

import os
import signal
import time
from typing import Any

import pytest

from tests.support.asking import wait_reason
from tests.support.resuming import CUSTOM
from tests.support.rig import Rig, alive
from tests.support.served_pod import ENGINES, QUICK, ServedPod

pytestmark = pytest.mark.slow


def test_each_family_is_told_with_its_second_signal_and_over_when_it_is_over(rig: Rig) -> None:
    pod = ServedPod(rig, **QUICK)
    orders: tuple[dict[str, Any], ...] = ({"health": 503}, {"refuse": True})
    for order in orders:
        pod.server(**order)
        pod.engines(0)
        pod.found("silent-death", "health)")
        pod.engines(60)
        pod.server()
        pod.well()

    (pod.control / "hold").touch()
    pod.server(flat=True)
    pod.found("hang", "generation tokens")
    (pod.control / "hold").unlink()
    pod.server()
    pod.well()

    (pod.control / "hold").touch()
    pod.server(silent=True)
    pod.found("hang", "health")
    (pod.control / "hold").unlink()
    pod.server()
    pod.well()

    os.kill(pod.pid("engine2"), signal.SIGKILL)
    pod.memory(2, 0)
    pod.found("silent-death", "engine process")
    assert "GPU 2" in wait_reason(pod.daemon, "silent-death")["summary"], "one of four tensor-parallel ranks"


def test_an_engine_that_sleeps_is_not_dead_and_a_server_that_ends_with_code_0_is(rig: Rig) -> None:
    pod = ServedPod(rig, asleep=True, **QUICK)
    pod.engines(0)
    time.sleep(1.5)  # three times the hold
    assert not pod.critical(), "a warning at the most: its processes live and its server answers"

    server = pod.pid("server")
    pod.engines(60)
    pod.server(exit=True)
    pod.daemon.wait_for(lambda: not alive(server), 10, "the server ended")
    pod.found("silent-death", "is dead", 20)
    assert alive(pod.pid("engine0")), "the orphan holds the memory"


@pytest.mark.skipif(not os.environ.get("PODWATCH_REAL_TIME"), reason="minutes: set PODWATCH_REAL_TIME=1")
def test_in_real_time_by_default_settings(rig: Rig) -> None:
    """Memory gone to verdict within 15 s, the hold of 8 s included."""
    pod = ServedPod(rig, gpu__poll=None, gpu__hold=None, gpu__deadline=None)
    for index in range(ENGINES):
        os.kill(pod.pid(f"engine{index}"), signal.SIGKILL)
    pod.engines(0)
    pod.found("silent-death", "engine process", 15)


def test_an_engine_that_is_seen_to_end_is_told_before_hold_is_over_with_a_layout_of_the_operators_own(rig: Rig) -> None:
    """No process of it has a name that podwatch knows; the server answers 503 at once."""
    pod = ServedPod(rig, **(QUICK | CUSTOM | {"gpu__hold": "600s"}))
    time.sleep(35)  # a younger engine may be a fork that only bears its name
    pod.server(health=503)
    os.kill(pod.pid("engine2"), signal.SIGKILL)
    pod.memory(2, 0)
    pod.found("silent-death", "GPU 2", 5)
