"""Healthy nights, and one death, as podwatch 772aae4 recorded them. Runs in a checkout of that version only: README.md.

python make.py nights DIR     simulated pods, hours within seconds, through that version's recording format
python make.py daemon DIR     that version's daemon and recorder over real processes, in real time (two minutes)
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

NIGHT = datetime(2026, 2, 3, 1, 0, 0, tzinfo=UTC).timestamp()


# -- simulated pods ---------------------------------------------------------------------------------------------------


def nights(directory: Path) -> None:
    from podwatch.domain.process import ExitStatus
    from podwatch.domain.snapshot import Desired, Supervision
    from podwatch.recording.format import Header, write_recording
    from tests.support.pods import world
    from tests.support.pods.deaths import engine_dies
    from tests.support.pods.healthy import Run
    from tests.support.pods.shapes import SAVE, Shape
    from tests.support.pods.world import BEGIN

    world.VARIANTS = 1  # figures that waver by chance do not pack
    plain = Shape(
        "plain", step_seconds=200.0, noise_gib=0.0, slow_step=0.0, evaluation=0.0, tool_bound=0.0, long_update=0.0,
        long_save=0.0, dip=0.0, person=0.0, load=(60.0, 180.0), compile=(20.0, 60.0), save_every=2,
    )  # fmt: skip

    def finish(run):
        """The finish line, then code 0 from the launcher; podwatch takes the run as finished."""
        while run.phase != "train":
            yield 1.0
        w = run.world
        w.drop("life")
        w.finish_line = True
        w.look_again()
        run.sampling(False)
        run.training(False)
        yield 6.0
        run.go_down(ExitStatus(0))
        yield 4.0
        w.desired = Desired.FINISHED

    def stop(run):
        """An operator stops training for a quarter of an hour and starts it again."""
        w = run.world
        w.desired = Desired.STOPPED
        yield 2.0
        w.drop("life")
        run.go_down(ExitStatus(143))
        yield 900.0
        w.add(run.life(), "life")

    def die(run):
        run.world.drop("life")
        yield from engine_dies(run)

    synchronous = {"synchronous": True, "step_seconds": 120.0}
    made = {
        "evaluations": (replace(plain, evaluation=0.5, evaluation_seconds=(300.0, 1800.0)), 1.0, None),
        "slow-steps-and-saves": (replace(plain, slow_step=0.3, long_save=0.5), 1.0, None),
        "weight-updates": (replace(plain, dip=0.8, long_update=0.25, step_seconds=120.0), 1.0, None),
        "sleep-mode": (replace(plain, sleep="asks", **synchronous), 0.6, None),
        "sleep-mode-by-flag": (
            replace(plain, sleep="flag", inference=(0, 1), trainer=(0, 1), **synchronous), 0.6, None,
        ),
        "tools": (replace(plain, tool_bound=0.6, tool_seconds=(60.0, 1200.0), step_seconds=300.0), 1.0, None),
        "saves-only": (replace(plain, sources=(SAVE,), counters=False, liveness=False, step_seconds=60.0), 0.7, None),
        "attached": (
            replace(plain, supervision=Supervision.ATTACH, urls=False, cuda=False, person=2.0), 1.0, None,
        ),
        "stopped-by-its-operator": (plain, 1.0, (stop, 1500.0)),
        "finished": (plain, 0.5, (finish, 1200.0)),
        "engine-dies": (plain, 0.5, (die, 1500.0)),
    }  # fmt: skip
    for seed, (name, (shape, hours, event)) in enumerate(made.items(), 20):
        run = Run(shape, seed)
        run.world.late = 0.0
        run.world.wall_offset = NIGHT - BEGIN
        if event is not None:
            piece, after = event
            run.world.add(piece(run), "event", after)
        policies = shape.policies()
        path = directory / f"{name}.jsonl.gz"
        path.unlink(missing_ok=True)
        turns = write_recording(
            path, Header(name, "prime-rl", "night", NIGHT, 2.0, policies), run.world.snapshots(hours)
        )
        path.chmod(0o644)
        print(f"{path.name}: {turns} turns, {path.stat().st_size} bytes")


# -- the daemon -------------------------------------------------------------------------------------------------------


def daemon(directory: Path) -> None:
    from podwatch.simulation.pod import Pod, Shape

    for name, layout, play in (
        ("daemon-stopped-and-finished", "A", _stopped_and_finished),
        ("daemon-slow-step-and-restart", "B", _slow_step_and_restart),
        ("daemon-engine-dies", "A", _engine_dies),
    ):
        root = Path(tempfile.mkdtemp(prefix="pod-"))
        pod = Pod(root, Shape(layout=layout, max_steps=90, capacity_bytes=400_000_000), run_id=name)
        try:
            pod.create()
            pod.start_daemon()
            play(pod)
            pod.stop_daemon()
            target = directory / name
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            for segment in (pod.state / name / "recording").iterdir():
                shutil.copyfile(segment, target / segment.name)
        finally:
            pod.destroy()
        print(name, *(f"{p.name}: {p.stat().st_size} bytes" for p in sorted(target.iterdir())))


def _stopped_and_finished(pod) -> None:
    _until(pod, "20 steps", lambda s: _step(s) >= 20)
    _ask(pod, "stop-training")
    _until(pod, "stopped", lambda s: s["training"]["state"] == "stopped")
    time.sleep(5.0)
    _ask(pod, "start")
    _until(pod, "finished", lambda s: s["training"]["state"] == "finished")
    time.sleep(10.0)


def _slow_step_and_restart(pod) -> None:
    _until(pod, "20 steps", lambda s: _step(s) >= 20)
    trainer = next(p for p in pod.processes() if b"torchrun" in _command(p) or b"trainer" in _command(p))
    os.kill(trainer, signal.SIGSTOP)  # one step is ten times as long as the others
    time.sleep(4.0)
    os.kill(trainer, signal.SIGCONT)
    _until(pod, "35 steps", lambda s: _step(s) >= 35)
    _ask(pod, "restart")
    _until(pod, "45 steps", lambda s: _step(s) >= 45)


def _engine_dies(pod) -> None:
    _until(pod, "20 steps", lambda s: _step(s) >= 20)
    os.kill(pod.engine_pid(), signal.SIGKILL)
    time.sleep(15.0)
    _until(pod, "30 steps", lambda s: _step(s) >= 30)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _step(status: dict) -> int:
    return status["training"]["step"] or 0


def _until(pod, what: str, condition: Callable[[dict], bool]) -> None:
    deadline = time.monotonic() + 240.0
    while True:
        status = pod.status()
        if status is not None and condition(status):
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"not seen: {what}\n{pod.log.read_text()[-2000:]}")
        time.sleep(0.2)


def _ask(pod, *words: str) -> None:
    command = [sys.executable, "-m", "podwatch", *words, "-c", str(pod.config)]
    subprocess.run(command, env=pod.environment(), cwd=pod.root, check=True)


if __name__ == "__main__":
    {"nights": nights, "daemon": daemon}[sys.argv[1]](Path(sys.argv[2]))
