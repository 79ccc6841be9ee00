"""One run over two real Slurm nodes that each have a disk of their own: each rank saves its shard there. Node 0 has the
index of each checkpoint, node 1 its shard; only together, and in the store, they are one.

PODWATCH_SLURM=gate runs one scenario: a killed rank. Without it all of them run (`make test-slurm`, `make nightly`).
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.suites.slurm.gang import GangTraining, a_killed_engine, a_killed_podwatch, name_of
from tests.suites.slurm.lab import MISSING, Lab
from tests.suites.slurm.test_gang import EARLY, cluster, codes, lab, nightly

__all__ = ["cluster", "lab"]
torch = pytest.importorskip("torch", reason="needs torch: make test-slurm")
pytestmark = [pytest.mark.timeout(900), pytest.mark.skipif(bool(MISSING), reason=MISSING)]


@pytest.fixture
def run(lab: Lab, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[GangTraining]:
    made = GangTraining(lab, tmp_path, "own-" + name_of(request.node.name), own_disks=True)
    (made.control / "hold").touch()  # training waits for what the test does
    yield made
    lab.run("scancel", "--full", "-u", "root")
    lab.wait(lab.idle, 40, "every job is gone")
    made.close()


def saved_on(run: GangTraining, lab: Lab, node: str) -> set[str]:
    return {path.name for path in (lab.nodes[node].disk / run.run_id / "outputs").glob("step-*/*")}


def test_a_killed_rank(run: GangTraining, lab: Lab, tmp_path: Path) -> None:
    """Each node has only its own shard. After the kill each node fetches what it lacks, and training continues from the
    newest checkpoint."""
    job = run.submit()
    run.wait_stored(EARLY, job)
    assert "__0_0.distcp" in saved_on(run, lab, "n1")
    assert "__1_0.distcp" in saved_on(run, lab, "n2")
    assert "__1_0.distcp" not in saved_on(run, lab, "n1"), "the nodes share a disk"
    assert not {"__0_0.distcp", ".metadata"} & saved_on(run, lab, "n2")
    (run.control / "kill.n2").touch()
    run.wait(lambda: lab.job(job).get("Restarts") == "1", "Slurm starts the job again", job)
    (run.control / "hold").unlink()
    run.quick()
    run.wait_completed(job)
    assert codes(run.said(job)) == {86}, run.said(job)
    assert "node 1 (n2) failed" in run.said(job)
    run.finished_well(job, tmp_path)
    first, second = (run.lives(node)[-1] for node in ("n1", "n2"))
    assert first["step"] == second["step"] != ""


@nightly
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_engine(run: GangTraining, tmp_path: Path, rank: int) -> None:
    a_killed_engine(run, tmp_path, rank)


@nightly
@pytest.mark.parametrize("name", ["n1", "n2"])
def test_a_node_loses_its_disk(run: GangTraining, lab: Lab, tmp_path: Path, name: str) -> None:
    """Power off, and the machine comes back with an empty disk."""
    job = run.submit()
    run.wait_stored(EARLY, job)
    lab.nodes[name].power_off()
    run.wait(lambda: lab.state(job) == "PENDING", "Slurm notices it", job)
    lab.recover()
    (run.control / "hold").unlink()
    run.quick()
    run.wait(lambda: lab.state(job) == "COMPLETED", "the job completes", job, 180)
    run.finished_well(job, tmp_path)
    assert all(run.lives(node)[-1]["step"] for node in ("n1", "n2")), "it continued"


@nightly
@pytest.mark.parametrize("name", ["n1", "n2"])
def test_podwatch_killed(run: GangTraining, tmp_path: Path, name: str) -> None:
    """Also in the middle of an upload of its part."""
    a_killed_podwatch(run, tmp_path, name)
