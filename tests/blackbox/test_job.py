"""`podwatch run --job`: one process for an engine. It ends with the run, and nothing outlives it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import contract, processes
from tests.support.asking import messages, published, running
from tests.support.daemon import DaemonProcess
from tests.support.rig import Rig, alive
from tests.support.store_layout import newest_pointer

pytestmark = pytest.mark.slow


class Job:
    """A daemon under its init, as an engine runs it."""

    def __init__(self, rig: Rig, environ: dict[str, str] | None = None, **changes: Any) -> None:
        self.rig = rig
        self.daemon: DaemonProcess = rig.daemon(environ, **changes)

    def start(self, *flags: str) -> "Job":
        self.daemon.start("--job", *flags)
        return self

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        assert self.daemon.process is not None
        return self.daemon.process

    def ends(self, seconds: float = 60.0) -> int:
        """The code that the engine gets; at that moment nothing of the job is left."""
        try:
            code = self.process.wait(3 * seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end\n{self.daemon.tail()}") from None
        assert self.rig.members() == [], self.daemon.tail()
        return code

    def gone(self) -> None:
        """After a SIGKILL of the job: everything has ended, soon."""
        self.process.wait()
        end = time.monotonic() + 60
        while self.rig.members() and time.monotonic() < end:
            time.sleep(0.05)
        assert self.rig.members() == [], [processes.command(pid) for pid in self.rig.members()]

    def supervisor(self) -> int:
        return int(self.record()["supervisor"])

    def record(self) -> dict[str, Any]:
        (path,) = self.rig.root.glob("state/*/supervisor/record.json")
        document: dict[str, Any] = json.loads(path.read_text())
        return document

    def verdicts(self) -> list[tuple[str, int]]:
        return [(e["outcome"], e["exit_code"]) for e in self.daemon.events() if e["podwatch_event"] == "run-ended"]


def heartbeat(store: Path) -> dict[str, Any]:
    (path,) = store.rglob("heartbeat.json")
    document: dict[str, Any] = json.loads(path.read_text())
    contract.check("heartbeat", document)
    return document


def latest(store: Path) -> dict[str, Any]:
    document = newest_pointer(store)
    contract.check("pointer", document)
    return document


def test_a_finished_run_is_stored_and_ends_with_0(rig: Rig, elsewhere: Path) -> None:
    rig.trainer_flags = ["--max-steps", "12", "--ckpt.interval", "4"]
    job = Job(rig, sync__store=f"file://{elsewhere}").start()
    assert job.ends() == 0, job.daemon.tail()
    assert latest(elsewhere)["step"] == 12
    assert heartbeat(elsewhere)["state"] == "released"
    assert job.verdicts() == [("finished", 0)]


def test_a_run_that_finishes_while_a_stop_waits_for_its_save_ends_with_0(rig: Rig, elsewhere: Path) -> None:
    rig.trainer_flags = ["--max-steps", "12", "--ckpt.interval", "4"]
    rig.order(wait=True, at=10)
    job = Job(rig, sync__store=f"file://{elsewhere}").start()
    running(job.daemon, rig, step=8)
    job.daemon.wait_for((rig.control / "waits").exists, 20, "the trainer stands between two steps")
    assert job.daemon.command("stop-training", "--after-save").returncode == 0
    rig.obey()
    assert job.ends() == 0, job.daemon.tail()
    assert latest(elsewhere)["step"] == 12
    assert job.verdicts() == [("finished", 0)]


def test_a_typo_ends_with_65(rig: Rig) -> None:
    rig.order(exit=2, say=["train.py: error: unrecognized arguments: --foo"])
    job = Job(rig).start()
    assert job.ends() == 65, job.daemon.tail()
    assert job.verdicts() == [("gave-up", 65)]


def test_a_machine_fault_ends_with_86(rig: Rig) -> None:
    rig.order(exit=1, say=["RuntimeError: CUDA error: uncorrectable ECC error encountered"])
    job = Job(rig).start()
    assert job.ends() == 86, job.daemon.tail()
    assert job.verdicts() == [("gave-up", 86)]


def test_an_operators_stop_ends_with_65_and_so_does_the_next_attempt_until_retry(rig: Rig) -> None:
    job = Job(rig).start()
    running(job.daemon, rig)
    assert job.daemon.command("stop-training").returncode == 0
    assert job.ends() == 65
    assert job.verdicts() == [("stopped", 65)]
    assert job.start().ends() == 65
    seen = len(job.daemon.events())
    job.start("--retry")
    running(job.daemon, rig, after=seen)
    job.process.terminate()
    assert job.ends() == 86


def test_who_waits_for_the_end_of_training_hears_of_it_although_the_job_ends_with_it(rig: Rig) -> None:
    job = Job(rig).start()
    running(job.daemon, rig, step=5)
    done = job.daemon.command("stop-training", "--wait")
    assert done.returncode == 0, done
    assert done.stdout in ("training is stopped\n", "training has ended\n"), done.stdout
    assert job.ends() == 65


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_engines_signal_is_a_preemption_however_often_it_comes(
    rig: Rig, elsewhere: Path, number: signal.Signals
) -> None:
    job = Job(rig, sync__store=f"file://{elsewhere}", recovery__end_grace="120s").start()
    running(job.daemon, rig, step=5)
    published(job.daemon)
    for again in (number, signal.SIGTERM, signal.SIGCONT, number):
        job.process.send_signal(again)
        time.sleep(0.05)
    assert job.ends() == 86, job.daemon.tail()
    assert heartbeat(elsewhere)["state"] == "preempted"
    assert job.verdicts() == [("preempted", 86)]
    seen = len(job.daemon.events())
    rig.trainer_flags = []
    job.start()
    running(job.daemon, rig, after=seen)
    assert not messages(job.daemon, "incident-opened"), "a preemption is no failure of training"
    assert rig.starts[1]["step"] >= 5
    job.process.terminate()
    assert job.ends() == 86


def test_a_killed_job_takes_supervisor_and_trainer_with_it(rig: Rig) -> None:
    job = Job(rig).start()
    trainer = running(job.daemon, rig)
    supervisor = job.supervisor()
    job.process.kill()
    job.gone()
    assert not alive(trainer)
    assert not alive(supervisor)
    seen = len(job.daemon.events())
    job.start()
    running(job.daemon, rig, after=seen)
    assert not messages(job.daemon, "incident-opened"), "the end of the job is no failure of training"
    job.process.terminate()
    assert job.ends() == 86


def test_a_daemon_that_crashes_is_started_again_and_takes_over_the_trainer(rig: Rig) -> None:
    job = Job(rig).start()
    trainer = running(job.daemon, rig)
    daemon = int(json.loads(next(job.daemon.runtime.glob("*/endpoint.json")).read_text())["pid"])
    assert processes.read_stat(daemon).parent_pid == job.process.pid  # type: ignore[union-attr]
    os.kill(daemon, signal.SIGKILL)
    job.daemon.wait_event("trainer-adopted", 30)
    assert rig.trainer_pid == trainer
    assert job.process.poll() is None
    job.process.terminate()
    assert job.ends() == 86


def test_neither_supervisor_nor_trainer_holds_the_engines_output(rig: Rig) -> None:
    job = Job(rig).start()
    trainer = running(job.daemon, rig)
    engines = job.daemon.log.stat()
    for pid in (trainer, job.supervisor(), *processes.descendants(job.supervisor())):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                held = link.stat()
            except OSError:
                continue
            assert (held.st_dev, held.st_ino) != (engines.st_dev, engines.st_ino), (pid, link)
    job.process.terminate()
    assert job.ends() == 86


def test_what_training_saves_at_the_engines_signal_is_stored(rig: Rig, elsewhere: Path) -> None:
    rig.trainer_flags = ["--ckpt.interval", "4", "--save-at-sigterm", "1"]
    job = Job(rig, sync__store=f"file://{elsewhere}", recovery__end_grace="120s", checkpoints__settle="5s").start()
    running(job.daemon, rig, step=4)
    rig.order(wait=True)
    job.daemon.wait_for((rig.control / "waits").exists, 20, "the trainer stands between two steps")
    job.process.terminate()
    assert job.ends() == 86, job.daemon.tail()
    saved = max(int(path.name.removeprefix("step_")) for path in (rig.output / "checkpoints").iterdir())
    assert latest(elsewhere)["step"] == saved
    assert heartbeat(elsewhere)["state"] == "preempted"


def control(store: Path, rig: Rig, document: dict[str, str]) -> None:
    place = store / rig.run_id / "podwatch" / "control.json"
    place.parent.mkdir(parents=True)
    place.write_text(json.dumps(document))


def test_a_run_that_another_pod_holds_is_waited_for_then_86(rig: Rig, elsewhere: Path) -> None:
    claims = elsewhere / rig.run_id / "podwatch" / "claims"
    claims.mkdir(parents=True)
    (claims / "1-0123456789abcdef").write_text("{}")
    job = Job(rig, sync__store=f"file://{elsewhere}", recovery__standby="2s").start()
    assert job.ends() == 86, job.daemon.tail()
    assert job.verdicts() == [("held", 86)]
    assert rig.starts == []


def test_an_order_to_stop_in_the_store_ends_with_65(rig: Rig, elsewhere: Path) -> None:
    control(elsewhere, rig, {"desired": "stopped", "reason": "budget"})
    job = Job(rig, sync__store=f"file://{elsewhere}").start()
    assert job.ends() == 65, job.daemon.tail()
    assert job.verdicts() == [("stopped", 65)]
    assert "budget" in messages(job.daemon, "run-ended")[0]


def test_a_final_checkpoint_that_cannot_be_stored_is_named_and_ends_with_69(rig: Rig, elsewhere: Path) -> None:
    store = elsewhere / "store"
    store.mkdir()
    rig.trainer_flags = ["--ckpt.interval", "4"]
    job = Job(rig, sync__store=f"file://{store}", recovery__final_sync="5s").start()
    running(job.daemon, rig, step=4)
    published(job.daemon)
    store.rename(elsewhere / "gone")
    store.write_text("no directory")
    rig.order(finish=True)
    assert job.ends() == 69, job.daemon.tail()
    assert job.verdicts() == [("finished", 69)]
    assert "the checkpoint of step" in messages(job.daemon, "run-ended")[0]
    assert messages(job.daemon, "final-sync"), "progress is shown"


def newest(daemon: DaemonProcess) -> int:
    """The newest checkpoint that the log calls complete."""
    return max(int(e["step"]) for e in daemon.events() if e["podwatch_event"] == "checkpoint-complete")


SLOW = {"sync__max_rate": "3kB"}
"""An upload takes seconds."""


def test_a_save_that_a_stop_waited_for_is_stored_before_the_job_ends(rig: Rig, elsewhere: Path) -> None:
    rig.trainer_flags = ["--ckpt.interval", "20"]
    job = Job(rig, sync__store=f"file://{elsewhere}", **SLOW).start()
    running(job.daemon, rig)
    assert job.daemon.command("stop-training", "--after-save").returncode == 0
    assert job.ends() == 65, job.daemon.tail()
    assert job.verdicts() == [("stopped", 65)]
    assert latest(elsewhere)["step"] == newest(job.daemon)
    assert "Not in the store" not in messages(job.daemon, "run-ended")[0]
    assert "training is stopped; podwatch stores" in messages(job.daemon, "final-sync")[0]


def test_a_machine_fault_takes_no_checkpoint_with_it(rig: Rig, elsewhere: Path) -> None:
    rig.trainer_flags = ["--ckpt.interval", "4"]
    job = Job(rig, sync__store=f"file://{elsewhere}", **SLOW).start()
    running(job.daemon, rig, step=4)
    rig.order(exit=1, say=["RuntimeError: CUDA error: uncorrectable ECC error encountered"])
    assert job.ends() == 86, job.daemon.tail()
    assert job.verdicts() == [("gave-up", 86)]
    assert latest(elsewhere)["step"] == newest(job.daemon)


def test_what_an_operators_stop_could_not_store_is_named_and_the_code_stays(rig: Rig, elsewhere: Path) -> None:
    store = elsewhere / "store"
    store.mkdir()
    rig.trainer_flags = ["--ckpt.interval", "4"]
    job = Job(rig, sync__store=f"file://{store}", recovery__final_sync="5s").start()
    running(job.daemon, rig, step=4)
    published(job.daemon)
    store.rename(elsewhere / "gone")
    store.write_text("no directory")
    assert job.daemon.command("stop-training", "--after-save").returncode == 0
    assert job.ends() == 65, job.daemon.tail()
    assert job.verdicts() == [("stopped", 65)]
    assert f"Not in the store: the checkpoint of step {newest(job.daemon)}" in messages(job.daemon, "run-ended")[0]


def test_a_signal_while_a_stopped_run_is_stored_does_not_make_the_engine_run_it_again(
    rig: Rig, elsewhere: Path
) -> None:
    rig.trainer_flags = ["--ckpt.interval", "4"]
    job = Job(rig, sync__store=f"file://{elsewhere}", sync__max_rate="1kB", recovery__end_grace="5s").start()
    running(job.daemon, rig, step=4)
    assert job.daemon.command("stop-training").returncode == 0
    job.daemon.wait_event("final-sync", 60)
    job.process.terminate()
    assert job.ends() == 65, job.daemon.tail()
    assert job.verdicts() == [("stopped", 65)]
    assert "Not in the store: the checkpoint" in messages(job.daemon, "run-ended")[0]


def test_no_file_an_empty_state_directory_and_a_probe(rig: Rig, elsewhere: Path) -> None:
    rig.trainer_flags = ["--max-steps", "60", "--ckpt.interval", "20"]
    daemon = rig.daemon()
    daemon.config.unlink()
    state = rig.root / "state"
    podwatch = [sys.executable, "-m", "podwatch"]
    given = ["--store", f"file://{elsewhere}", "--run-id", rig.run_id, "--state-dir", str(state)]
    quick = {"http.port": "0", "trainer.layout": "prime-rl", "log.format": "json"}
    words = [word for key, value in quick.items() for word in ("--set", f"{key}={value}")]
    with daemon.log.open("ab") as log:
        command = [*podwatch, "run", "--job", *given, *words, "--", *rig.command()]
        daemon.process = subprocess.Popen(command, env=daemon.environ, cwd=rig.root, stdout=log, stderr=log)
    daemon.wait_event("trainer-confirmed", 60)

    def asked(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*podwatch, *arguments], env=daemon.environ, cwd=rig.root, capture_output=True, text=True, timeout=300
        )

    assert asked("status", "--live").returncode == 0
    endpoint = json.loads(next(daemon.runtime.glob("*/endpoint.json")).read_text())
    os.kill(endpoint["pid"], signal.SIGSTOP)
    assert asked("status", "--live").returncode == 1
    os.kill(endpoint["pid"], signal.SIGCONT)
    assert daemon.process.wait(180) == 0, daemon.tail()
    first = daemon.log.read_text().splitlines()[:8]
    assert any(
        line.startswith(f"podwatch: assumed trainer.output_dir = {rig.output} (from --output-dir") for line in first
    )
    assert latest(elsewhere)["step"] == 60
    assert rig.members() == []


def test_an_attempt_waits_for_what_an_earlier_one_left(rig: Rig) -> None:
    """The engine killed podwatch, and its supervisor is stuck. The next attempt trains once that has ended."""
    job = Job(rig, {"SLURM_JOB_ID": "7"}).start()
    trainer = running(job.daemon, rig)
    supervisor = job.supervisor()
    os.kill(supervisor, signal.SIGSTOP)
    job.process.kill()
    job.process.wait()
    seen = len(job.daemon.events())
    job.start()
    job.daemon.wait_for(
        lambda: f"supervisor {supervisor}" in job.daemon.log.read_text(), 60, "it names what it waits for"
    )
    assert alive(trainer)
    os.kill(supervisor, signal.SIGCONT)
    running(job.daemon, rig, after=seen)
    assert not alive(supervisor)
    assert not alive(trainer)
    job.process.terminate()
    assert job.ends() == 86


def test_an_attempt_that_waits_too_long_ends_with_86(rig: Rig) -> None:
    job = Job(rig, {"SLURM_JOB_ID": "7"}, recovery__standby="3s").start()
    trainer = running(job.daemon, rig)
    supervisor = job.supervisor()
    os.kill(supervisor, signal.SIGSTOP)
    job.process.kill()
    job.process.wait()
    job.start()
    assert job.process.wait(180) == 86, job.daemon.tail()
    assert alive(trainer)
    assert "an earlier attempt is still ending here" in job.daemon.log.read_text()
    os.kill(supervisor, signal.SIGCONT)
    job.gone()


def test_a_signal_during_the_final_sync_is_86(rig: Rig, elsewhere: Path) -> None:
    """Told to stop before everything is stored: never 0, or the engine would count the job as completed."""
    rig.trainer_flags = ["--ckpt.interval", "4"]
    job = Job(rig, sync__store=f"file://{elsewhere}", sync__max_rate="10kB", recovery__end_grace="5s").start()
    running(job.daemon, rig, step=4)
    rig.order(finish=True)
    job.daemon.wait_event("final-sync", 60)
    job.process.terminate()
    assert job.ends() == 86, job.daemon.tail()
    assert job.verdicts() == [("preempted", 86)]


def test_without_job_mode_on_finished_exit_ends_podwatch(rig: Rig, elsewhere: Path) -> None:
    rig.trainer_flags = ["--max-steps", "30", "--ckpt.interval", "10"]
    stays = rig.daemon(sync__store=f"file://{elsewhere}")
    stays.start()
    stays.wait_event("run-ended", 60)
    assert stays.process is not None
    assert stays.process.poll() is None, "it stays"
    assert stays.stop() == 0
    leaves = rig.daemon(sync__store=f"file://{elsewhere}", recovery__on_finished="exit").start()
    assert leaves.process is not None
    assert leaves.process.wait(180) == 0, leaves.tail()
    assert latest(elsewhere)["step"] == 30
