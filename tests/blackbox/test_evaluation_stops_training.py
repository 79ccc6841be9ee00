"""`[evaluation] gpus = "stop-training"` of a real daemon: stop, evaluate the saved checkpoint, resume; and an
evaluation that hangs, crashes, leaves GPU memory behind, or is killed with podwatch."""

import json
import sys
from typing import Any

import pytest

from tests.support.daemon import DaemonProcess
from tests.support.rig import Rig, alive

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("attaching")]

HEAD = """
import json, os, sys, time
step, output, checkpoint, control = sys.argv[1:]
def alive(what):
    try:
        with open(f"/proc/{int(open(f'{control}/{what}.pid').read())}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
open(f"{control}/evaluation.pid.new", "w").write(str(os.getpid()))
os.rename(f"{control}/evaluation.pid.new", f"{control}/evaluation.pid")
with open(f"{control}/evaluated", "a") as out:
    seen = {"step": int(step), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "files": len(os.listdir(checkpoint))}
    out.write(json.dumps(seen | {"training": [what for what in ("trainer", "engine") if alive(what)]}) + chr(10))
"""
ACCURACY = "json.dump({'acc': 1 / float(step)}, open(output + '/results.json', 'w'))\n"
GATE = "while not os.path.exists(f'{control}/gate'): time.sleep(0.05)\n"


def daemon(rig: Rig, body: str, environ: dict[str, str] | None = None, **evaluation: Any) -> DaemonProcess:
    script = rig.root / "evaluate.py"
    script.write_text(HEAD + body)
    command = [sys.executable, "-S", str(script), "{step}", "{output}", "{checkpoint}", str(rig.control)]
    known = {"command": command, "cwd": "/", "reserve": "1MB", "metric": "acc", "gpus": "stop-training", **evaluation}
    sections = {name if "__" in name else f"evaluation__{name}": value for name, value in known.items()}
    return rig.daemon(environ, **sections)


def evaluated(rig: Rig) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in (rig.control / "evaluated").read_text().splitlines()]
    except OSError:
        return []


def evaluating(rig: Rig, pod: DaemonProcess, after: int = 0) -> int:
    """The pid of the evaluation that runs; training is stopped for it."""
    pod.wait_for(lambda: len(evaluated(rig)) > after, 60, "an evaluation runs")
    return int((rig.control / "evaluation.pid").read_text())


def trains_again(rig: Rig, pod: DaemonProcess, starts: int, after: int = 0) -> None:
    pod.wait_for(lambda: len(rig.starts) == starts and rig.trainer_pid, 90, "training runs again")
    pod.wait_event("trainer-confirmed", 60, after=after)


def nothing_failed(pod: DaemonProcess) -> None:
    names = {event["podwatch_event"] for event in pod.events()}
    assert not names & {"incident-opened", "gave-up", "recovery-backoff"}, names
    raised = [
        e for e in pod.events() if e["podwatch_event"] == "finding-raised" and e["level"] in ("error", "critical")
    ]
    assert raised == []


def test_stop_evaluate_resume(rig: Rig) -> None:
    rig.trainer_flags = ["--ckpt.interval", "20"]
    pod = daemon(rig, GATE + ACCURACY, {"CUDA_VISIBLE_DEVICES": "0,1"}, every_saves=2, cost__per_hour=3600.0).start()
    evaluating(rig, pod)
    (first,) = evaluated(rig)
    assert (first["step"], first["gpus"], first["training"]) == (40, "0,1", [])
    assert first["files"] > 0

    def seen() -> bool:
        status = pod.status() or {}
        return status.get("training", {}).get("state") == "evaluating" and status["recovery"]["phase"] == "evaluating"

    pod.wait_for(seen, 30, "the status shows it")
    status = pod.status() or {}
    assert status["overall"] == "warning", "it is not backed up"
    assert all(reason["severity"] != "critical" for reason in status["reasons"])
    screen = pod.command("status").stdout
    assert "TRAINING IS STOPPED to evaluate step 40; podwatch then starts it again from step 40" in " ".join(
        screen.split()
    )
    assert rig.trainer_pid == rig.engine_pid == 0
    (rig.control / "gate").touch()
    trains_again(rig, pod, 2)
    pod.wait_event("evaluation-done", 30, step=40)
    pod.wait_for(lambda: len(evaluated(rig)) >= 2, 90, "the second cycle")
    trains_again(rig, pod, 3)
    resumed = [start["step"] for start in rig.starts[1:3]]
    assert resumed[0] == 40
    assert resumed[1] == evaluated(rig)[1]["step"]
    assert [one["step"] for one in evaluated(rig)[:2]] == [40, 80], "the resume from step 40 is no save"
    assert "best evaluation: acc 0.025" in pod.command("checkpoints", "--json").stdout, "of step 40"
    nothing_failed(pod)
    stopping = [e for e in pod.events() if e["podwatch_event"] == "trainer-stopping"]
    assert all(e["evaluation"] for e in stopping)
    assert (pod.status() or {})["account"]["failures"] == 0
    assert pod.stop() == 0


LEAVES = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(f"{control}/evaluation.pid.new", "w").write(str(os.getpid()))
        os.rename(f"{control}/evaluation.pid.new", f"{control}/evaluation.pid")
        time.sleep(600)
    os._exit(0)
time.sleep(0.5)
"""


@pytest.mark.parametrize(
    ("body", "timeout", "why"),
    [
        (LEAVES + "time.sleep(600)", 2, "no end within 2 s"),
        (LEAVES + "os.abort()", 60, "SIGABRT"),
    ],
    ids=["hangs and holds memory", "crashes and leaves memory"],
)
def test_one_that_fails_costs_no_training(rig: Rig, body: str, timeout: int, why: str) -> None:
    """What an evaluation started ends with it, so that its memory is free when training starts."""
    rig.trainer_flags = ["--ckpt.interval", "20"]
    pod = daemon(rig, body, every_steps=1000, timeout=f"{timeout}s").start()
    pod.wait_event("checkpoint-complete", 60)
    assert pod.command("eval", "--steps", "20").returncode == 0
    pid = evaluating(rig, pod)
    failed = pod.wait_event("evaluation-failed", 60, step=20)
    assert why in failed["message" if "message" in failed else "event"]
    trains_again(rig, pod, 2)
    assert not alive(int((rig.control / "evaluation.pid").read_text()))
    assert not alive(pid)
    nothing_failed(pod)
    assert pod.stop() == 0


def test_killed_with_podwatch_training_starts_and_the_evaluation_is_repeated(rig: Rig) -> None:
    rig.trainer_flags = ["--ckpt.interval", "20"]
    pod = daemon(rig, GATE + ACCURACY, every_steps=1000).start()
    pod.wait_event("checkpoint-complete", 60)
    assert pod.command("eval", "--steps", "20").returncode == 0
    pid = evaluating(rig, pod)
    assert pod.process is not None
    pod.process.kill()
    pod.process.wait()
    seen = len(pod.events())
    pod.start()
    trains_again(rig, pod, 2, after=seen)
    assert not alive(pid)
    evaluating(rig, pod, after=1)
    (rig.control / "gate").touch()
    pod.wait_event("evaluation-done", 60, step=20)
    trains_again(rig, pod, 3, after=seen)
    nothing_failed(pod)
    assert [one["step"] for one in evaluated(rig)] == [20, 20]
    assert pod.stop() == 0


@pytest.mark.parametrize("request_", ["stop-training", "restart"])
def test_an_operators_request_ends_it(rig: Rig, request_: str) -> None:
    rig.trainer_flags = ["--ckpt.interval", "20"]
    pod = daemon(rig, GATE + ACCURACY, every_steps=40).start()
    pid = evaluating(rig, pod)
    assert pod.command(request_).returncode == 0
    pod.wait_for(lambda: not alive(pid), 60, "the evaluation ends")
    if request_ == "stop-training":
        pod.wait_for(lambda: (pod.status() or {}).get("daemon", {}).get("desired") == "stopped", 30, "it is recorded")
        pod.wait_for(lambda: ((pod.status() or {}).get("recovery") or {}).get("phase") == "stopped", 30, "stopped")
        assert rig.trainer_pid == 0
        assert len(rig.starts) == 1
    else:
        trains_again(rig, pod, 2)
    nothing_failed(pod)
    assert pod.stop() == 0


def test_podwatch_that_leaves_ends_it_and_says_so(rig: Rig) -> None:
    rig.trainer_flags = ["--ckpt.interval", "20"]
    pod = daemon(rig, GATE + ACCURACY, every_steps=40).start()
    pid = evaluating(rig, pod)
    assert pod.stop() == 0
    assert not alive(pid)
    assert "ends the evaluation that training is stopped for" in pod.tail(5)
    seen = len(pod.events())
    pod.start()
    trains_again(rig, pod, 2, after=seen)
    nothing_failed(pod)
    assert pod.stop() == 0


def test_what_is_evaluated_at_the_end_and_in_a_stopped_run_needs_no_stop(rig: Rig) -> None:
    rig.trainer_flags = ["--ckpt.interval", "10", "--max-steps", "30"]
    pod = daemon(rig, ACCURACY, at_end=True).start()
    pod.wait_event("trainer-finished", 90)
    pod.wait_event("evaluation-done", 60, step=30)
    assert pod.command("eval", "--steps", "10").returncode == 0
    pod.wait_event("evaluation-done", 60, step=10)
    assert len(rig.starts) == 1
    nothing_failed(pod)
    assert pod.stop() == 0


def test_a_trainer_that_podwatch_did_not_start_is_not_stopped(rig: Rig) -> None:
    rig.start_by_hand()
    pod = daemon(rig, ACCURACY, every_steps=1000).start()
    pod.wait_event("trainer-attached", 60)
    pod.wait_event("checkpoint-complete", 60)
    step = pod.wait_for(lambda: rig.saved, 60, "a save")[0]
    pid = rig.trainer_pid
    asked = pod.command("eval", "--steps", str(step))
    assert f"podwatch did not start the trainer (pid {pid})" in asked.stdout
    pod.wait_event("checkpoint-complete", 60, after=len(pod.events()))
    assert alive(pid)
    assert evaluated(rig) == []
    assert pod.stop() == 0
