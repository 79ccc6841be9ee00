"""The torch example as a Slurm job that podwatch guards: whatever ends an attempt, the run ends in the weights of one
that nobody touched, its final checkpoint is stored before the job ends, and nothing is left on any node.

PODWATCH_SLURM=gate runs one scenario: a machine fault. Without it all of them run (`make test-slurm`, `make nightly`).
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.suites.slurm.lab import MISSING, Lab, cgroup_missing
from tests.suites.slurm.training import STEPS, SlurmTraining, ends

torch = pytest.importorskip("torch", reason="needs torch: make test-slurm")
pytestmark = [pytest.mark.timeout(900), pytest.mark.skipif(bool(MISSING), reason=MISSING)]
nightly = pytest.mark.skipif(os.environ.get("PODWATCH_SLURM") == "gate", reason="in `make test-slurm` and nightly")
cgroup = pytest.param("cgroup", marks=pytest.mark.skipif(bool(cgroup_missing()), reason=cgroup_missing()))
EARLY = 16
"""A step whose checkpoint is in the store before anything happens to the run."""


@pytest.fixture(scope="module")
def labs() -> Iterator[dict[str, Lab]]:
    made: dict[str, Lab] = {}
    yield made
    for lab in made.values():
        lab.close()


@pytest.fixture
def lab(labs: dict[str, Lab], request: pytest.FixtureRequest) -> Lab:
    """One cluster for each way of tracking processes. Both nodes are up and idle."""
    tracking = getattr(request, "param", "linuxproc")
    if tracking not in labs:
        labs[tracking] = Lab(tracking)
        labs[tracking].start()
    found = labs[tracking]
    found.recover()
    return found


@pytest.fixture
def run(lab: Lab, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SlurmTraining]:
    name = request.node.name.removeprefix("test_").partition("[")[0].replace("_", "-")
    made = SlurmTraining(lab, tmp_path, name)
    yield made
    lab.run("scancel", "--full", "-u", "root")
    lab.wait(lab.idle, 40, "every job is gone")
    made.close()


def test_a_machine_fault_continues_on_the_other_node(run: SlurmTraining, lab: Lab, tmp_path: Path) -> None:
    """The GPU of n1 fails: 86, and Slurm runs the job again, on n1. That machine is on the run's list now: 86 before
    training starts. Then the node is drained, as a site's health check does."""
    job = run.submit()
    run.wait_stored(EARLY, job)
    (run.control / "fault.n1").touch()
    run.wait(lambda: 86 in ends(run.said(job)), "the job ends with 86", job)
    lives = len(run.lives())
    run.wait(lambda: len(ends(run.said(job))) == 2, "the job starts on n1 again, and leaves", job)
    assert ends(run.said(job)) == [86, 86]
    assert len(run.lives()) == lives, "training was not started on a machine that is on the list"
    lab.run("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=ECC")
    run.quick()
    run.wait_completed(job)
    assert lab.job(job)["BatchHost"] == "n2"
    run.finished_well(job, "n2", tmp_path)
    assert run.lives()[-1]["resumed"] >= EARLY, "n2 had an empty disk: the checkpoint came from the store"
    assert run.heartbeat()["state"] == "released"


@nightly
def test_preempted_by_a_higher_partition(run: SlurmTraining, lab: Lab, tmp_path: Path) -> None:
    job = run.submit()
    run.wait_stored(EARLY, job)
    other = lab.submit("--partition=high", "--nodelist=n1", f"--output={run.directory}/high.out", "--wrap", "sleep 600")
    run.wait(lambda: 86 in ends(run.said(job)), "the job leaves", job)
    assert run.heartbeat()["state"] == "preempted", "it left in order, within the grace"
    run.quick()
    run.wait_completed(job)
    lab.run("scancel", str(other))
    lab.wait(lab.idle, 30, "the higher job is gone")
    run.finished_well(job, "n2", tmp_path)
    assert run.lives()[-1]["resumed"] >= EARLY


@nightly
def test_a_node_dies(run: SlurmTraining, lab: Lab, tmp_path: Path) -> None:
    """Power off: no goodbye, no released lease, no disk."""
    job = run.submit()
    run.wait_stored(EARLY, job)
    lab.nodes["n1"].power_off()
    run.wait(lambda: lab.state(job) == "PENDING", "Slurm notices it", job)
    run.quick()
    run.wait_completed(job)
    run.finished_well(job, "n2", tmp_path)
    assert run.lives()[-1]["resumed"] >= EARLY


@nightly
def test_cancelled_and_submitted_again(run: SlurmTraining, lab: Lab, tmp_path: Path) -> None:
    """scancel is final for the job, whatever its code; a new job continues the run."""
    job = run.submit()
    run.wait_stored(EARLY, job)
    lab.run("scancel", str(job))
    run.wait(lambda: lab.state(job) == "CANCELLED", "the job is cancelled", job)
    lab.wait(lab.idle, 30, "nothing is left on the nodes")
    assert run.heartbeat()["state"] == "preempted"
    assert not (lab.nodes["n1"].disk / run.run_id / "outputs" / "final.pt").exists()
    second = run.submit("--exclude=n1")
    run.quick()
    run.wait_completed(second)
    run.finished_well(second, "n2", tmp_path)
    assert lab.state(job) == "CANCELLED"
    assert run.lives()[-1]["resumed"] >= EARLY


@nightly
def test_a_typo_is_held_and_continues_once_corrected(run: SlurmTraining, lab: Lab, tmp_path: Path) -> None:
    run.configure("--max-stpes", "64")
    job = run.submit()
    run.wait(lambda: lab.state(job) == "SPECIAL_EXIT", "the job is held", job)
    lab.wait(lab.idle, 30, "nothing is left on the nodes")
    assert ends(run.said(job)) == [65]
    assert "unrecognized arguments" in run.said(job)
    starts = len(run.lives())
    lab.run("scontrol", "release", str(job))  # without a correction: at once 65 again, and no start
    run.wait(lambda: len(ends(run.said(job))) == 2, "it ends again", job)
    assert ends(run.said(job)) == [65, 65]
    assert len(run.lives()) == starts, "the verdict is kept in the store: the same command is not tried again"
    run.wait(lambda: lab.state(job) == "SPECIAL_EXIT", "the job is held again", job)
    run.configure()
    lab.run("scontrol", "release", str(job))
    run.quick()
    run.wait_completed(job)
    run.finished_well(job, "n1", tmp_path)


@nightly
@pytest.mark.parametrize("lab", ["linuxproc", cgroup], indirect=True)
def test_podwatch_killed_takes_training_with_it(run: SlurmTraining, lab: Lab, tmp_path: Path) -> None:
    """SIGKILL for podwatch alone: where Slurm tracks by cgroup it kills the rest, else podwatch's supervisor does.
    Slurm does not rerun this job (0:9); a new one continues."""
    job = run.submit()
    run.wait_stored(EARLY, job)
    node = lab.nodes["n1"]
    for pid, command in node.processes().items():
        if "podwatch" in command and "run" in command and "srun" not in command:
            os.kill(pid, signal.SIGKILL)
            break
    else:
        raise AssertionError(f"no podwatch on n1: {node.processes()}")
    run.wait(lambda: lab.state(job) == "FAILED", "the job fails", job)
    lab.wait(lab.idle, 30, "nothing is left on the nodes")
    second = run.submit("--exclude=n1")
    run.quick()
    run.wait_completed(second)
    run.finished_well(second, "n2", tmp_path)


@nightly
def test_a_lost_agent_and_two_runs_at_once(run: SlurmTraining, lab: Lab, tmp_path: Path) -> None:
    """slurmd dies and the job lives on, while Slurm runs it again on the other node: the lease decides, one loses."""
    job = run.submit()
    run.wait_stored(EARLY, job)
    lab.nodes["n1"].kill_slurmd()
    run.wait(lambda: lab.state(job) == "PENDING", "Slurm gives the node up", job)
    run.wait(lambda: lab.job(job)["JobState"] == "RUNNING", "it runs on n2", job)
    run.quick()
    run.wait(lambda: run.stored() == STEPS, "the final checkpoint is stored", job)
    run.wait(lambda: lab.state(job) in ("COMPLETED", "PENDING", "FAILED"), "the job on n2 ends", job)
    assert not run.store.violations()
    assert run.stored() == STEPS
