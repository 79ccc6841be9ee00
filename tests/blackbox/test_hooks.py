"""Hooks of a real daemon: killed in the middle of one, and beside hooks that misbehave in every way."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.asking import kill_engine, reasons, running, status
from tests.support.daemon import DaemonProcess
from tests.support.rig import Rig, alive

pytestmark = pytest.mark.slow

RECORD = "import json,sys; d=json.load(sys.stdin); open(sys.argv[1],'a').write(json.dumps(d)+chr(10))"


def hook(name: str, on: list[str], command: list[str], **more: Any) -> dict[str, Any]:
    return {"name": name, "on": on, "command": command, "cwd": "/", "timeout": "600s", **more}


def daemon(rig: Rig, *hooks: dict[str, Any], environ: dict[str, str] | None = None, **changes: Any) -> DaemonProcess:
    made = rig.daemon(environ, **changes)
    tables = ["[[hooks]]\n" + "\n".join(f"{k} = {json.dumps(v)}" for k, v in one.items()) + "\n" for one in hooks]
    made.config.write_text(made.config.read_text() + "\n" + "\n".join(tables))
    return made


def documents(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def test_a_kill_of_the_daemon_in_the_middle_of_a_hook(rig: Rig, tmp_path: Path) -> None:
    seen, own, gate = tmp_path / "seen", tmp_path / "own", tmp_path / "gate"
    script = f"cat >> {seen}; echo $$ > {own}.new; mv {own}.new {own}; while [ ! -e {gate} ]; do sleep 0.1; done"
    moment = tmp_path / "moment"
    rig.trainer_flags = ["--ckpt.interval", "1000000"]
    pod = daemon(
        rig,
        hook("safe", ["started"], [sys.executable, "-c", RECORD, str(moment)]),
        hook("eval", ["checkpoint"], ["/bin/sh", "-c", script]),
        hook("once", ["started"], ["/bin/sh", "-c", f"cat >> {moment}.once; echo $$ > {moment}.pid; sleep 600"]),
    )
    rig.trainer_flags = ["--ckpt.interval", "5"]
    pod.config.write_text(pod.config.read_text().replace('"--ckpt.interval", "1000000"', '"--ckpt.interval", "5"'))
    pod.start()
    running(pod, rig, step=5)
    pod.wait_for(lambda: number(own), 30, "the hook runs")
    pod.wait_for(lambda: number(Path(f"{moment}.pid")), 30, "the other one runs")
    pids = [number(own), number(Path(f"{moment}.pid"))]
    first = documents(seen)[0]
    assert first["id"] == f"checkpoint:{first['step']}:{first['save_id']}"
    assert Path(first["checkpoint"]).is_dir()
    trainer = rig.trainer_pid
    assert pod.process is not None
    own.unlink()
    pod.process.send_signal(signal.SIGKILL)
    pod.process.wait()
    pod.wait_for(lambda: not any(alive(pid) for pid in pids), 30, "both ended with podwatch")
    assert rig.trainer_pid == trainer, "training was not touched"
    gate.touch()
    pod.start()
    pod.wait_event("trainer-adopted", 30)
    pod.wait_event("hook-done", 30, hook="eval")
    later = documents(seen)[1]
    assert later["step"] >= first["step"], (
        "it ran again: for the same checkpoint, or for the newer one that replaced it"
    )
    failed = pod.wait_event("hook-failed", 30, hook="once")
    assert "not run again" in failed["event"]
    assert len(documents(Path(f"{moment}.once"))) == 1, "at most once"
    assert rig.trainer_pid == trainer
    assert pod.stop() == 0


def test_finished_at_least_once(rig: Rig, tmp_path: Path) -> None:
    seen, own, gate = tmp_path / "seen", tmp_path / "own", tmp_path / "gate"
    script = f"cat >> {seen}; echo $$ > {own}; while [ ! -e {gate} ]; do sleep 0.1; done"
    rig.trainer_flags = ["--max-steps", "12", "--ckpt.interval", "4"]
    pod = daemon(rig, hook("end", ["finished"], ["/bin/sh", "-c", script])).start()
    pod.wait_event("trainer-finished", 60)
    pod.wait_for(lambda: number(own), 30, "the hook runs")
    assert pod.process is not None
    pod.process.send_signal(signal.SIGKILL)
    pod.process.wait()
    gate.touch()
    pod.start()
    pod.wait_event("hook-done", 60, hook="end")
    first, again = documents(seen)
    assert first["id"] == again["id"], "so that the command can see that it ran before"


HANG = "trap '' TERM; while :; do sleep 1; done"
FLOOD = "while :; do head -c 1000000 /dev/zero | tr '\\0' x; done"
FILL = "a = []\nwhile len(a) < 400: a.append(bytearray(b'x') * 1_000_000)\nimport time; time.sleep(600)"


def test_hooks_that_hang_flood_and_fill_memory_change_no_detection(rig: Rig, tmp_path: Path) -> None:
    """The engine's death is seen and healed as without them, and the daemon ends in time."""
    pod = daemon(
        rig,
        hook("hangs", ["checkpoint"], ["/bin/sh", "-c", HANG]),
        hook("floods", ["checkpoint"], ["/bin/sh", "-c", FLOOD]),
        hook("fills", ["checkpoint"], [sys.executable, "-c", FILL]),
        hook("limit", ["checkpoint"], ["/bin/sh", "-c", HANG], timeout="1s"),
        hook("missing", ["checkpoint"], ["/no/such/program"]),
        environ={"B2_APPLICATION_KEY": "the-store-key-4711"},
    ).start()
    running(pod, rig, step=5)
    pod.wait_event("hook-failed", 60, hook="limit", timed_out=True)
    pod.wait_event("hook-failed", 60, hook="missing")
    assert set(reasons(pod)) <= {"not-backed-up", "hook-failing"}
    before = len(pod.events())
    kill_engine(rig)
    opened = pod.wait_event("incident-opened", 30, after=before)
    assert opened["kind"] in ("required-child-exited", "silent-death")
    pod.wait_event("incident-closed", 60, after=before)
    pod.wait_for(lambda: "hook-failing" in reasons(pod), 60, "a hook that keeps failing is a finding")
    assert status(pod)["overall"] == "warning"
    assert pod.process is not None
    rss = int(Path(f"/proc/{pod.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    assert rss < 150 << 20, f"nothing of the flood is in podwatch: {rss}"
    (log,) = (rig.root / "state").rglob("hooks/missing.log")
    assert "No such file" in log.read_text()
    assert pod.stop() == 0
    assert rig.trainer_pid, "training goes on"
