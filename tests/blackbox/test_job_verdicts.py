"""Attempt after attempt of a job, each with an empty disk: what the store says about the ones before it."""

import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.blackbox.test_job import Job, heartbeat
from tests.support import contract
from tests.support.asking import messages, published, running
from tests.support.rig import Rig

pytestmark = pytest.mark.slow

FAULT = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
TYPO = "train.py: error: unrecognized arguments: --foo"


def verdict(store: Path) -> dict[str, Any]:
    (path,) = store.rglob("verdict.json")
    document: dict[str, Any] = json.loads(path.read_text())
    contract.check("verdict", document)
    return document


def recorded(store: Path) -> dict[str, Any]:
    """The verdict once the store has the attempt that trains, with progress."""

    limit = time.monotonic() + 60
    while not any(json.loads(p.read_text())["attempt"].get("progress") for p in store.rglob("verdict.json")):
        assert time.monotonic() < limit, "no attempt with progress in verdict.json"
        time.sleep(0.1)
    return verdict(store)


def attempt(rig: Rig, number: int, **environ: str) -> dict[str, str]:
    return {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(number), "SLURMD_NODENAME": "n1"} | environ


def wipe(rig: Rig) -> None:
    """What an engine does between two attempts."""
    shutil.rmtree(rig.root / "state", ignore_errors=True)
    shutil.rmtree(rig.output, ignore_errors=True)


def test_a_typo_is_run_once_and_refused_on_the_next_machine_until_it_is_fixed(rig: Rig, elsewhere: Path) -> None:
    rig.order(exit=2, say=[TYPO])
    job = Job(rig, attempt(rig, 0), sync__store=f"file://{elsewhere}", sync__claim_wait="1s").start()
    assert job.ends() == 65, job.daemon.tail()
    last = verdict(elsewhere)["last"]
    assert (last["code"], last["outcome"], last["blame"]) == (65, "gave-up", "command")
    starts = len(rig.starts)
    wipe(rig)
    job.daemon.environ |= attempt(rig, 1, SLURMD_NODENAME="n2")
    began = time.monotonic()
    assert job.start().ends() == 65
    assert len(rig.starts) == starts, "no training was started"
    assert time.monotonic() - began < 60
    assert job.verdicts()[-1] == ("refused", 65)
    assert "--retry" in messages(job.daemon, "run-ended")[-1]
    wipe(rig)
    rig.order()
    rig.trainer_flags = ["--max-steps", "8", "--ckpt.interval", "4"]
    fixed = Job(rig, attempt(rig, 2), sync__store=f"file://{elsewhere}", sync__claim_wait="1s").start()
    assert fixed.ends() == 0, fixed.daemon.tail()
    beat = heartbeat(elsewhere)
    assert (beat["outcome"], beat["step"], beat["end"]["exit_code"]) == ("finished", 8, 0)
    assert beat["instance"] == {"provider": "slurm", "id": "7", "attempt": "2", "node": "n1", "label": ""}
    wipe(rig)
    assert fixed.start().ends() == 0
    assert fixed.verdicts()[-1] == ("finished", 0)
    assert "it finished" in messages(fixed.daemon, "run-ended")[-1]


def test_a_machine_fault_moves_the_job_and_its_machine_is_refused(rig: Rig, elsewhere: Path) -> None:
    rig.order(exit=1, say=[FAULT])
    job = Job(rig, attempt(rig, 0), sync__store=f"file://{elsewhere}", sync__claim_wait="1s").start()
    assert job.ends() == 86, job.daemon.tail()
    (bad,) = verdict(elsewhere)["bad_hosts"]
    assert bad["host"]["node"] == "n1"
    starts = len(rig.starts)
    wipe(rig)
    job.daemon.environ |= attempt(rig, 1)
    assert job.start().ends() == 86
    assert (job.verdicts()[-1], len(rig.starts)) == (("bad-host", 86), starts)


def test_a_killed_attempt_is_followed_at_once_by_the_next_one_on_the_machine(rig: Rig, elsewhere: Path) -> None:
    """Its process has provably ended, so that nobody waits five minutes for its heartbeat to stop."""
    job = Job(rig, attempt(rig, 0), sync__store=f"file://{elsewhere}", sync__holder_patience="10m").start()
    running(job.daemon, rig, step=5)
    published(job.daemon)
    recorded(elsewhere)
    job.process.send_signal(signal.SIGKILL)
    job.gone()
    assert verdict(elsewhere)["attempt"] is not None
    seen = len(job.daemon.events())
    job.daemon.environ |= attempt(rig, 1)
    began = time.monotonic()
    job.start()
    running(job.daemon, rig, after=seen)
    assert time.monotonic() - began < 120
    assert heartbeat(elsewhere)["generation"] == 2, "a claim of its own"
    job.process.terminate()
    assert job.ends() == 86
    assert verdict(elsewhere)["failures"] == 0, "it had made progress"


def test_an_attempt_beside_its_own_living_old_tree_never_trains(
    rig: Rig, make_rig: Callable[[], Rig], elsewhere: Path
) -> None:
    """slurmd was killed: the job is requeued while its old tree lives on. The lease decides, and the loser ends."""
    shared = {"sync__store": f"file://{elsewhere}", "sync__heartbeat": "5s", "sync__holder_patience": "20s"}
    old = Job(rig, attempt(rig, 0), **shared).start()
    trainer = running(old.daemon, rig, step=5)
    published(old.daemon)
    before = recorded(elsewhere)
    other = make_rig()
    other.run_id = rig.run_id
    again = Job(other, attempt(other, 1, SLURMD_NODENAME="n2"), recovery__standby="2s", **shared).start()
    assert again.process.wait(180) == 86, again.daemon.tail()
    assert other.starts == []
    assert rig.trainer_pid == trainer, "the old tree trains on, undisturbed"
    assert heartbeat(elsewhere)["instance"]["attempt"] == "0"
    assert verdict(elsewhere) == before, "the loser leaves the record of the one that trains"
    old.process.terminate()
    assert old.process.wait(60) == 86
    once_more = Job(other, attempt(other, 2, SLURMD_NODENAME="n2"), **shared).start()
    running(once_more.daemon, other)
    assert heartbeat(elsewhere)["generation"] == 2
    once_more.process.terminate()
    assert once_more.ends() == 86, once_more.daemon.tail()
