"""What end-to-end tests ask a daemon for."""

import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import psutil

from tests.support.daemon import DaemonProcess
from tests.support.hurry import hurry
from tests.support.rig import Rig


def status(daemon: DaemonProcess) -> dict[str, Any]:
    document: dict[str, Any] = daemon.wait_for(daemon.status, 20, "an answer to /status")
    return document


def says(daemon: DaemonProcess, code: int) -> str:
    """What ``podwatch status`` prints once it ends with this code. (It gives podwatch three seconds to answer.)"""

    def asked() -> str:
        done = daemon.command("status")
        return str(done.stdout) if done.returncode == code else ""

    return str(daemon.wait_for(asked, 20, f"status ends with {code}"))


def reasons(daemon: DaemonProcess) -> dict[str, dict[str, Any]]:
    """The open reasons by their kind."""
    return {r["kind"]: r for r in status(daemon)["reasons"]}


def wait_reason(daemon: DaemonProcess, kind: str, seconds: float = 30) -> dict[str, Any]:
    found: dict[str, Any] = daemon.wait_for(lambda: reasons(daemon).get(kind), seconds, f"finding {kind}")
    return found


def looks(daemon: DaemonProcess, times: int = 10) -> None:
    """Wait until podwatch has looked at everything so many times more."""
    end = status(daemon)["counters"]["turns"] + times
    daemon.wait_for(lambda: status(daemon)["counters"]["turns"] >= end, 60, f"{times} turns")


def messages(daemon: DaemonProcess, name: str, after: int = 0) -> list[str]:
    return [str(e["event"]) for e in daemon.events()[after:] if e["podwatch_event"] == name]


def confirmed(daemon: DaemonProcess, after: int = 0) -> None:
    daemon.wait_event("trainer-confirmed", 30, after=after)


def running(daemon: DaemonProcess, rig: Rig, step: int = 0, after: int = 0) -> int:
    """Wait until training is confirmed and a checkpoint at or above ``step`` is complete; the trainer's pid."""
    confirmed(daemon, after)
    if step:
        daemon.wait_for(
            lambda: any(e["podwatch_event"] == "checkpoint-complete" and e["step"] >= step for e in daemon.events()),
            30, f"a complete checkpoint at step {step} or above",
        )  # fmt: skip
    pid = rig.trainer_pid
    assert pid, "the trainer that was confirmed lives"
    return pid


def published(daemon: DaemonProcess, seconds: float = 20, after: int = -1, **fields: Any) -> None:
    """Wait for an upload, of a step above ``after``: where saves come faster than uploads a step can be left out. What
    sends it gives way to everything else: here it gets its turn like the others."""

    def found() -> bool:
        assert daemon.process is not None
        hurry(daemon.process.pid)
        wanted = {"podwatch_event": "published", **fields}
        events = [e for e in daemon.events() if all(e.get(k) == v for k, v in wanted.items())]
        return any(e["step"] > after for e in events)

    daemon.wait_for(found, seconds, f"event published {fields or ''}")


def would_miss_the_engine(daemon: DaemonProcess) -> bool:
    """It looks by now, and knows GPU 0 with an engine on it, be it from an earlier podwatch."""
    document = status(daemon)
    told, sensors = document["daemon"], {s["name"]: s["state"] for s in document["sensors"]}
    knows = "silent-death:gpu0" in told["armed"] and "engine-process" in told["second_signals"]
    return knows and (sensors["gpus"], sensors["trainer"]) == ("ok", "ok")


def leaves_within(daemon: DaemonProcess, seconds: float, tell: Callable[[], Any]) -> Any:
    """``tell`` makes it leave; what that returned. Its time runs from its own first word of leaving until its process
    is gone, so that the start of a command on a busy machine is not counted; 5 s more are for the interpreter's end.
    """
    process, seen, gone = daemon.process, len(daemon.events()), []
    assert process is not None

    def wait() -> None:
        process.wait()
        gone.append(time.time())

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    said = tell()
    waiting.join(60)
    assert gone, f"it is still there\n{daemon.tail()}"
    first = daemon.wait_event("daemon-stopping", 5, after=seen)
    took = gone[0] - datetime.fromisoformat(first["timestamp"]).timestamp()
    assert took < seconds + 5, f"{took:.1f} s\n{daemon.tail()}"
    return said


LIVED = 7.0
"""Seconds between several looks of the process sensor, and more than four holds of any test's configuration."""


def lived(pid: int) -> int:
    """Wait until this engine has been there for a while: one that was seen for a moment only cannot be missed."""
    time.sleep(max(0.0, psutil.Process(pid).create_time() + LIVED - time.time()))
    return pid


def kill_engine(rig: Rig) -> None:
    """One that has been there for a while."""
    end = time.monotonic() + 60
    while not rig.engine_pid:
        assert time.monotonic() < end, "no engine"
        time.sleep(0.05)
    lived(rig.engine_pid)
    rig.kill("engine")


def guards_without_store(rig: Rig, daemon: DaemonProcess, words: str) -> None:
    """Training begins at a person's word, and everything but the backup works."""
    starts_without_store(daemon)
    running(daemon, rig, step=5)
    daemon.wait_event("detector-armed", 20, detector="silent-death:gpu0")
    lived(rig.engine_pid)
    died = time.monotonic()
    rig.kill("engine")
    assert daemon.wait_event("incident-closed", 30)["resumed_step"] >= 5
    assert time.monotonic() - died < 60, "a store out of reach does not hold a restart up"
    assert words in wait_reason(daemon, "store-unavailable", 120)["summary"]

    def nothing_stored() -> bool:
        """Several checkpoints wait by now and none is stored: that is critical, and the only thing that is."""
        critical = {r["kind"]: r["summary"] for r in status(daemon)["reasons"] if r["severity"] == "critical"}
        return (
            set(critical) == {"store-unavailable"} and "none of them is in the store" in critical["store-unavailable"]
        )

    daemon.wait_for(nothing_stored, 30, "the empty store is critical, and nothing else is")


def starts_without_store(daemon: DaemonProcess) -> None:
    started = daemon.command("start", "--fresh")
    assert started.returncode == 0, started.stderr
    confirmed(daemon)
