"""The machine is taken away: said in the store, told to training, and over within the grace."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support import contract, processes
from tests.support.asking import confirmed, leaves_within, messages, published, running
from tests.support.rig import Rig, alive
from tests.support.store_layout import newest_pointer

PID1 = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@pytest.mark.slow
def test_preempt_says_goodbye_ends_training_and_leaves_and_the_next_one_goes_on(rig: Rig, elsewhere: Path) -> None:
    daemon = rig.daemon(sync__store=f"file://{elsewhere}", recovery__preempt_grace="15s").start()
    trainer = running(daemon, rig, step=5)
    published(daemon)
    engine = rig.engine_pid
    done = leaves_within(daemon, 15, lambda: daemon.command("preempt"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "podwatch sent training SIGTERM and stopped" in done.stdout
    assert daemon.process is not None
    assert daemon.process.returncode == 0
    assert messages(daemon, "daemon-stopping")[-1].endswith("requests training to end")
    daemon.wait_for(lambda: not alive(trainer) and not alive(engine), 10, "training ends")
    (path,) = elsewhere.rglob("heartbeat.json")
    heartbeat = json.loads(path.read_text())
    contract.check("heartbeat", heartbeat)
    assert heartbeat["state"] == "preempted"
    assert len(rig.starts) == 1

    seen = len(daemon.events())
    daemon.start()  # the machine was not taken away after all
    daemon.wait_event("trainer-confirmed", 30, after=seen)
    assert rig.starts[1]["step"] >= 5
    assert not messages(daemon, "incident-opened"), "what was told to end has not failed"


@pytest.mark.slow
def test_what_training_saves_at_sigterm_is_stored_before_the_container_ends(rig: Rig, elsewhere: Path) -> None:
    """The supervisor, too, leaves it more time than ``trainer.stop_grace``."""
    if subprocess.run([*PID1, "true"], capture_output=True).returncode != 0:
        pytest.skip("a pid namespace of its own needs root")
    rig.trainer_flags = ["--ckpt.interval", "4", "--save-at-sigterm", "4"]
    changes = {"recovery__preempt_grace": "60s", "checkpoints__settle": "5s", "sync__upload_gap": "1h"}
    daemon = rig.daemon(sync__store=f"file://{elsewhere}", **changes)
    daemon.wrapper = PID1
    daemon.start()
    confirmed(daemon)
    published(daemon)
    rig.order(wait=True)
    daemon.wait_for((rig.control / "waits").exists, 20, "the trainer stands between two steps")
    assert daemon.process is not None
    (init,) = processes.children(daemon.process.pid)
    os.kill(init, signal.SIGTERM)
    assert daemon.process.wait(180) == 0, daemon.tail()
    saved = max(int(path.name.removeprefix("step_")) for path in (rig.output / "checkpoints").iterdir())
    assert newest_pointer(elsewhere)["step"] == saved, daemon.tail()


def test_a_shutdown_of_the_machine_is_told_from_a_stop_of_podwatch(rig: Rig) -> None:
    """Under PID 1 by its own word. (A real systemd that powers off has a suite of its own.)"""
    daemon = rig.daemon({"PODWATCH_UNDER_INIT": "pid1"}).start()
    trainer = running(daemon, rig)
    began = time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - began < 10, "the seconds of a preemption, not the half minute of a stop"
    daemon.wait_for(lambda: not alive(trainer), 10, "training ends")
    assert "the container is being stopped" in messages(daemon, "daemon-stopping")[-1]


def test_a_store_that_hangs_does_not_keep_training_from_being_told(rig: Rig) -> None:
    """Nobody answers at that address; the grace is over all the same."""
    daemon = rig.daemon(
        {"B2_ENVIRONMENT": "http://10.255.255.1:9", "B2_APPLICATION_KEY_ID": "k", "B2_APPLICATION_KEY": "s"},
        sync__store="b2://bucket",
        recovery__preempt_grace="6s",
    ).start()
    assert daemon.wait_for(daemon.status, 30, "it answers")
    assert daemon.wait_for(lambda: daemon.command("start", "--fresh").returncode == 0, 10, "start by hand")
    daemon.wait_for(lambda: rig.trainer_pid, 20, "training")
    trainer = rig.trainer_pid
    leaves_within(daemon, 6, lambda: daemon.command("preempt"))
    assert daemon.process is not None
    assert daemon.process.returncode == 0
    daemon.wait_for(lambda: not alive(trainer), 10, "training ends")
