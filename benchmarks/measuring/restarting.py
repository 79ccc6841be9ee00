"""One process tree (a trainer and its engine), and those who start it again when its main process is killed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.measuring import ROOT, until
from podwatch.system import procfs
from tests.support.rig import Rig, alive

TRAINER = ROOT / "tests" / "support" / "fake_trainer.py"
PARTS = ("evidence", "stop", "wait for GPUs and ports", "prepare", "start")
DEADLINE = 90.0


@dataclass
class Peer:
    """What one restarter did: seconds from the kill of the main process to its successor, and what stayed behind."""

    seconds: list[float] = field(default_factory=list)
    left: int = 0
    """Restarts after which the old engine still lived beside the new one."""


@dataclass(frozen=True)
class Recovery:
    """Seconds. ``after_verdict``: from the verdict until the command was executed; ``parts`` sum up to it.
    ``after_death``: from the kill to the new trainer's own first act, its interpreter's start included."""

    after_death: float
    after_verdict: float
    parts: dict[str, float]


def at(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["timestamp"]).timestamp()


def podwatch_recoveries(directory: Path, library: Path, count: int, say: Callable[[str], None]) -> list[Recovery]:
    """Default rhythms (GPU poll 2 s, rescan 10 s, settle 5 s), but no backoff: it is a policy, and not what is
    measured. The main process is killed; its engine lives on, as vLLM's does, and has to be stopped."""
    rig = Rig(directory, library)
    rig.trainer_flags = ["--step-seconds", "0.2"]
    defaults: dict[str, Any] = {
        "gpu__poll": None, "gpu__hold": None, "gpu__deadline": None, "checkpoints__rescan": None,
        "checkpoints__settle": None, "trainer__stop_grace": None, "trainer__save_grace": None,
    }  # fmt: skip
    daemon = rig.daemon(recovery__backoff_min="0s", recovery__backoff_max="0s", **defaults)
    found: list[Recovery] = []
    try:
        daemon.start()
        daemon.wait_event("checkpoint-complete", DEADLINE)
        seen = 0
        for number in range(count):
            daemon.wait_event("trainer-confirmed", DEADLINE, after=seen)
            seen, old = len(daemon.events()), rig.trainer_pid
            killed = time.time()
            os.kill(old, signal.SIGKILL)
            daemon.wait_event("trainer-started", DEADLINE, after=seen)
            until(lambda old=old: rig.trainer_pid not in (0, old), DEADLINE, "a new trainer")  # type: ignore[misc]
            began = (rig.control / "trainer.pid").stat().st_mtime
            found.append(taken_apart(daemon.events()[seen:], killed, began))
            if number % 20 == 19:
                say(f"{number + 1} recoveries done")
        rig.never_two()
    finally:
        rig.close()
    return found


def taken_apart(events: list[dict[str, Any]], killed: float, began: float) -> Recovery:
    """``began``: the new trainer's own first act."""

    def first(name: str, **fields: Any) -> dict[str, Any]:
        return next(e for e in events if e["podwatch_event"] == name and all(k in e for k in fields))

    verdict, stopping, stopped = (at(first(n)) for n in ("incident-opened", "trainer-stopping", "trainer-stopped"))
    starting, started = first("trainer-starting", waited_seconds=0), at(first("trainer-started"))
    waited = float(starting["waited_seconds"])
    parts = (stopping - verdict, stopped - stopping, waited, at(starting) - stopped - waited, started - at(starting))
    return Recovery(began - killed, started - verdict, dict(zip(PARTS, parts, strict=True)))


def tree_command(python: str, control: str, output: str) -> list[str]:
    return [python, "-S", str(TRAINER), "--output-dir", output, "--control", control, "--step-seconds", "0.2"]


def supervisord_restarts(directory: Path, count: int) -> Peer:
    """``autorestart=true``: its process is noticed when it exits, whatever it leaves behind."""
    control, output = directory / "control", directory / "outputs"
    control.mkdir(parents=True)
    command = " ".join(tree_command(sys.executable, str(control), str(output)))
    user = "user=root\n" if os.geteuid() == 0 else ""
    (directory / "supervisord.conf").write_text(
        f"[supervisord]\nnodaemon=true\nlogfile={directory}/supervisord.log\npidfile={directory}/supervisord.pid\n{user}"
        f"[program:training]\ncommand={command}\nautorestart=true\nstartsecs=0\nredirect_stderr=true\n"
        f"stdout_logfile={directory}/training.log\n"
    )
    program = ROOT / ".venv-peers" / "bin" / "supervisord"
    process = subprocess.Popen([program, "-c", directory / "supervisord.conf"], stdout=subprocess.DEVNULL, stderr=-3)
    peer = Peer()
    try:
        for _ in range(count):
            until(lambda: _living(control, "trainer") and _living(control, "engine"), DEADLINE, "the tree")
            time.sleep(1.2)  # it takes a process that lived a second for started
            old, engine = _living(control, "trainer"), _living(control, "engine")
            killed = time.time()
            os.kill(old, signal.SIGKILL)
            until(lambda old=old: _living(control, "trainer") not in (0, old), DEADLINE, "a new trainer")  # type: ignore[misc]
            peer.seconds.append((control / "trainer.pid").stat().st_mtime - killed)
            peer.left += alive(engine)
    finally:
        process.terminate()
        process.wait()
        for pid in procfs.all_pids():  # the engines that nobody ended
            if str(control) in procfs.command(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return peer


def _living(control: Path, what: str) -> int:
    try:
        pid = int((control / f"{what}.pid").read_text())
    except (OSError, ValueError):
        return 0
    return pid if alive(pid) else 0


def systemd_restarts(count: int) -> Peer:
    """A real systemd in a container; ``Restart=always`` with its default pause of 100 ms."""
    from tests.suites.systemd.machine import booted

    home = "/var/tmp/training"
    peer = Peer()
    with booted() as machine:
        command = " ".join(tree_command(sys.executable, f"{home}/control", f"{home}/outputs"))
        machine.run("mkdir", "-p", f"{home}/control")
        machine.write(
            "/etc/systemd/system/training.service",
            "[Unit]\nStartLimitIntervalSec=0\n"
            f"[Service]\nExecStart={command}\nRestart=always\nEnvironment=PYTHONDONTWRITEBYTECODE=1\n",
        )
        machine.run("systemctl", "daemon-reload")
        machine.run("systemctl", "start", "training")
        # Killed and measured inside: its process ids are its own.
        script = (
            f"cd {home}/control; old=$(cat trainer.pid); engine=$(cat engine.pid); date +%s.%N; kill -9 $old;"
            ' while [ "$(cat trainer.pid)" = $old ]; do sleep 0.01; done; stat -c %.Y trainer.pid;'
            " if kill -0 $engine 2>/dev/null; then echo left; else echo gone; fi"
        )
        for _ in range(count):
            ready = f"{home}/control/engine.pid"
            machine.wait(lambda ready=ready: machine.run("ls", ready, check=False) == f"{ready}\n", 30, "the tree")  # type: ignore[misc]
            time.sleep(1.2)
            killed, began, engine = machine.run("sh", "-c", script).split()
            peer.seconds.append(float(began) - float(killed))
            peer.left += engine == "left"
    return peer
