"""kill -9 of podwatch at random moments of a recovery: make crash N=1000 tries more of them."""

import os
import random
import signal
import time

import pytest

from tests.support.asking import confirmed, lived
from tests.support.daemon import PATIENCE, DaemonProcess
from tests.support.rig import Rig

pytestmark = pytest.mark.slow

ROUNDS = int(os.environ.get("PODWATCH_CRASH_ROUNDS", "8"))
SEED = int(os.environ.get("PODWATCH_CRASH_SEED", "2"))


@pytest.mark.timeout((40 + 7 * ROUNDS) * PATIENCE)
def test_crash_at_random_points_of_a_recovery(rig: Rig) -> None:
    """kill -9 of podwatch anywhere in a recovery: never two trainers, and the run ends healed (promises 4 and 10).

    The fake trainer and its engine each hold a lock for their whole life and tell if they find it taken, so that no
    moment with two of them can be missed.
    """
    chance = random.Random(SEED)
    rig.trainer_flags += ["--step-seconds", "0.1"]
    daemon = rig.daemon(gpu__hold="0.3s").start()
    confirmed(daemon)
    daemon.wait_event("checkpoint-complete", 30)
    daemon.wait_event("detector-armed", 30, detector="silent-death:gpu0")
    for number in range(ROUNDS):
        trainer, engine = rig.trainer_pid, rig.engine_pid
        name = chance.choice(("trainer", "engine"))
        if name == "engine":  # one that lived for a moment only is none that can be missed (and loads for minutes)
            lived(engine)
        plan = [chance.uniform(0.0, 1.5) for _ in range(chance.randint(1, 2))]
        told = f"seed {SEED}, round {number}: {name} killed, podwatch after {plan}"
        rig.kill(name)
        for pause in plan:
            time.sleep(pause)
            daemon.stop(signal.SIGKILL)
            daemon.start()
        daemon.wait_for(lambda t=trainer, e=engine: _healed(rig, daemon, t, e), 60, f"healed; {told}")
        rig.never_two()
    wrong = [e for e in daemon.events() if e["podwatch_event"] in ("gave-up", "recovery-blocked")]
    assert not wrong, wrong


def _healed(rig: Rig, daemon: DaemonProcess, trainer: int, engine: int) -> bool:
    """Both processes are new and live, and podwatch is content and can miss the engine."""
    if rig.trainer_pid in (0, trainer) or rig.engine_pid in (0, engine):
        return False
    status = daemon.status()
    if status is None or status["training"]["state"] != "running" or status["overall"] == "critical":
        return False
    told = status["daemon"]
    return "silent-death:gpu0" in told["armed"] and "engine-process" in told["second_signals"]
