"""Scenarios that mostly wait. The end-to-end suite runs them beside its other tests (see its conftest)."""

import contextlib
import os
import random
import signal
import socket
import time
import urllib.error
import urllib.request

from tests.support.asking import confirmed, guards_without_store, lived, status, wait_reason
from tests.support.b2server import KEY, KEY_ID
from tests.support.daemon import DaemonProcess
from tests.support.rig import Rig

ROUNDS = int(os.environ.get("PODWATCH_CRASH_ROUNDS", "8"))
SEED = int(os.environ.get("PODWATCH_CRASH_SEED", "2"))


def no_network(rig: Rig) -> None:
    with socket.socket() as closed:  # bound and never listening: refused, and nobody else can get the port meanwhile
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        environ = {"B2_APPLICATION_KEY_ID": KEY_ID, "B2_APPLICATION_KEY": KEY, "B2_ENVIRONMENT": url}
        daemon = rig.daemon(environ, sync__store="b2://test-bucket", gpu__poll="0.3s", gpu__hold="1s").start()
        daemon.wait_for(daemon.status, 20, "an answer")
        guards_without_store(rig, daemon, "store cannot be reached")


def frozen(rig: Rig) -> None:
    """podwatch is stopped for longer than a sensor may be silent: not live meanwhile, then said, and nothing killed."""
    daemon = rig.daemon(hang__floor="20s", hang__k=2.0, hang__agree="5s").start()
    confirmed(daemon)
    pid, process = rig.trainer_pid, daemon.process
    assert process is not None
    live = status(daemon)["daemon"]["http_url"] + "/livez"
    time.sleep(1.0)
    process.send_signal(signal.SIGSTOP)
    try:
        with contextlib.suppress(TimeoutError, urllib.error.URLError):
            urllib.request.urlopen(live, timeout=1)
            raise AssertionError("a loop that stands still says that it is live")
        time.sleep(32)
    finally:
        process.send_signal(signal.SIGCONT)
    told = wait_reason(daemon, "loop-stalled")
    assert "observed nothing for 3" in told["summary"], told
    with urllib.request.urlopen(live, timeout=30) as answer:
        assert answer.status == 200
    assert (rig.trainer_pid, len(rig.starts)) == (pid, 1)
    assert not any(e["podwatch_event"] == "incident-opened" for e in daemon.events())
    replayed = daemon.command("replay").stdout
    assert "loop-stalled: podwatch observed nothing for 3" in replayed, replayed
    assert "would have restarted 0 times" in replayed, replayed


def crash(rig: Rig) -> None:
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
