"""Each kind of end, of trouble and of change that a daemon lives through, with real processes."""

import signal
import time

import pytest

from tests.support.asking import kill_engine, messages, running, says, status
from tests.support.rig import Rig

pytestmark = pytest.mark.slow


def test_an_exit_is_judged_by_what_was_still_to_do(rig: Rig) -> None:
    rig.trainer_flags += ["--max-steps", "40", "--step-seconds", "0.4"]  # far from its end while it is struck
    daemon = rig.daemon(recovery__backoff_min="6s", recovery__backoff_max="6s").start()
    running(daemon, rig, step=5)
    rig.order(exit=1, once=True)
    failed = daemon.wait_event("incident-opened", 20)
    assert failed["kind"] == "trainer-exited"
    assert "exit code 1" in failed["event"]
    assert daemon.wait_event("incident-closed", 30)["resumed_step"] >= 5

    seen = len(daemon.events())
    rig.order(exit=0, once=True)
    clean = daemon.wait_event("incident-opened", 20, after=seen)
    assert "code 0" in clean["event"]
    assert "below its target of 40" in clean["event"]
    daemon.wait_event("recovery-backoff", 20, after=seen)
    daemon.wait_event("trainer-confirmed", 30, after=seen)

    rig.order(step_seconds=0.02)
    daemon.wait_event("trainer-finished", 30, after=seen)
    daemon.wait_for(lambda: not rig.engine_pid, 20, "nothing lingers on the GPUs")
    assert status(daemon)["daemon"]["desired"] == "finished"
    daemon.stop()
    seen = len(daemon.events())
    daemon.start()
    assert "has finished" in daemon.wait_event("daemon-started", 20, after=seen)["event"]
    time.sleep(0.5)
    assert len(rig.starts) == 3, "what is finished is not started again"


def test_a_command_line_that_cannot_work_is_given_up_at_once_and_shown(rig: Rig) -> None:
    rig.trainer_flags += ["--no-such-flag"]
    daemon = rig.daemon().start()
    gave_up = daemon.wait_event("gave-up", 30)
    assert gave_up["level"] == "critical"
    assert len(rig.starts) == 0

    def shown() -> bool:
        return any("unrecognized arguments: --no-such-flag" in r["suggestion"] for r in status(daemon)["reasons"])

    daemon.wait_for(shown, 10, "the trainer's last lines are shown")
    says(daemon, 2)


def test_a_hang_is_healed_once_a_second_signal_agrees(rig: Rig) -> None:
    daemon = rig.daemon(hang__floor="1.5s", hang__k=2.0).start()
    running(daemon, rig, step=5)
    for index in (0, 1):  # busy once: a device that always says 0 % proves nothing
        rig.world.set_load(index, utilization=80)
    daemon.wait_for(lambda: [g["utilization_percent"] for g in status(daemon)["gpus"]] == [80, 80], 20, "seen busy")
    daemon.wait_for(lambda: len(rig.saved) >= 3, 20, "a few steps to learn from")
    rig.order(hang=True, once=True)
    for index in (0, 1):
        rig.world.set_load(index, utilization=0)
    opened = daemon.wait_event("incident-opened", 30)
    assert opened["kind"] == "hang"
    assert "confirmed by gpu utilisation" in opened["event"]
    daemon.wait_event("incident-closed", 30)
    assert rig.starts[1]["step"] >= 15


def test_a_driver_that_hangs_makes_podwatch_blind_and_nothing_is_killed(rig: Rig) -> None:
    daemon = rig.daemon().start()
    pid = running(daemon, rig, step=5)
    seen = len(daemon.events())
    rig.world.hang_all()
    daemon.wait_event("sensor-changed", 20, after=seen, sensor="gpus", state="blind")

    def said() -> bool:
        return any(s["name"] == "gpus" and "no answer within" in s["detail"] for s in status(daemon)["sensors"])

    daemon.wait_for(said, 20, "why it is blind")
    time.sleep(1.5)
    assert not messages(daemon, "incident-opened")
    assert rig.trainer_pid == pid
    document = status(daemon)
    assert document["overall"] != "ok"
    assert next(s for s in document["sensors"] if s["name"] == "gpus")["state"] == "blind"
    began = time.monotonic()
    assert daemon.stop() == 0, "a hung driver call does not hold podwatch"
    assert time.monotonic() - began < 10
    rig.world.hang_all(False)


def test_reload_takes_what_may_change_and_refuses_the_rest_and_observe_only_reports(rig: Rig) -> None:
    daemon = rig.daemon(gpu__hold="1h").start()
    pid = running(daemon, rig, step=5)
    daemon.wait_event("detector-armed", 20, detector="silent-death:gpu0")
    assert daemon.process is not None

    daemon.config.write_text(rig.config(gpu__hold="0.5s") + "[gpu]\n")
    daemon.process.send_signal(signal.SIGHUP)
    broken = daemon.wait_event("config-refused", 20)
    assert "the old one stays in force" in broken["event"]
    assert str(daemon.config) in broken["event"]
    daemon.wait_for(lambda: any(r["kind"] == "config-stale" for r in status(daemon)["reasons"]), 10, "shown in status")

    seen = len(daemon.events())
    daemon.config.write_text(rig.config(gpu__hold="0.5s", trainer__output_dir=str(rig.root / "elsewhere")))
    daemon.process.send_signal(signal.SIGHUP)
    refused = daemon.wait_event("config-refused", 20, after=seen)
    assert "trainer.output_dir" in refused["event"]
    assert "cannot change while podwatch runs" in refused["event"]

    kill_engine(rig)
    time.sleep(1.0)
    assert not messages(daemon, "incident-opened"), "the old threshold is still in force"
    seen = len(daemon.events())
    daemon.config.write_text(rig.config(gpu__hold="0.5s", mode="observe"))
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait_event("config-reloaded", 20, after=seen)
    daemon.wait_for(
        lambda: [m for m in messages(daemon, "finding-raised", seen) if m.startswith("mode observe: would restart")],
        20, "the new mode is in force in recovery, too",
    )  # fmt: skip
    time.sleep(0.3)
    assert (rig.trainer_pid, len(rig.starts)) == (pid, 1)
    assert not messages(daemon, "incident-opened")
    says(daemon, 2)
    daemon.config.write_text(rig.config(gpu__hold="0.5s"))
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait_event("incident-closed", 30, after=seen)
    daemon.wait_for(lambda: all(r["kind"] != "config-stale" for r in status(daemon)["reasons"]), 10, "all is said")
