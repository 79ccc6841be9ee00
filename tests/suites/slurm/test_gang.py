"""One run over two real Slurm nodes that share output_dir, torchrun with gloo and DCP: whatever ends an attempt on
whichever node, all nodes end with one code, the next attempt continues, and the run ends in the weights of one that
nobody touched.

PODWATCH_SLURM=gate runs one scenario: a killed rank. Without it all of them run (`make test-slurm`, `make nightly`).
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.suites.slurm.gang import INTERVAL, GangTraining, a_killed_engine, a_killed_podwatch, name_of
from tests.suites.slurm.lab import MISSING, Lab
from tests.suites.slurm.training import ends

torch = pytest.importorskip("torch", reason="needs torch: make test-slurm")
pytestmark = [pytest.mark.timeout(900), pytest.mark.skipif(bool(MISSING), reason=MISSING)]
nightly = pytest.mark.skipif(os.environ.get("PODWATCH_SLURM") == "gate", reason="in `make test-slurm` and nightly")
EARLY = INTERVAL


@pytest.fixture(scope="module")
def cluster() -> Iterator[Lab]:
    lab = Lab()
    try:
        yield lab.start()
    finally:
        lab.close()


@pytest.fixture
def lab(cluster: Lab) -> Lab:
    cluster.recover()
    return cluster


@pytest.fixture
def run(lab: Lab, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[GangTraining]:
    made = GangTraining(lab, tmp_path, name_of(request.node.name))
    yield made
    lab.run("scancel", "--full", "-u", "root")
    lab.wait(lab.idle, 40, "every job is gone")
    made.close()


def codes(text: str) -> set[int]:
    return set(ends(text))


def test_a_killed_rank_ends_all_nodes_with_one_code(run: GangTraining, lab: Lab, tmp_path: Path) -> None:
    """SIGKILL for the rank of node 1: both podwatches end with 86 and name node 1; Slurm starts both again, and both
    continue from the same step."""
    job = run.submit()
    run.wait_stored(EARLY, job)
    (run.control / "kill.n2").touch()
    run.wait(lambda: lab.job(job).get("Restarts") == "1", "Slurm starts the job again", job)
    run.quick()
    run.wait_completed(job)
    assert codes(run.said(job)) == {86}, run.said(job)
    assert "node 1 (n2) failed" in run.said(job)
    assert "node 0 (n1) failed" not in run.said(job)
    run.finished_well(job, tmp_path)
    first, second = (run.lives(node)[-1] for node in ("n1", "n2"))
    assert first["step"] == second["step"] != ""
    assert (first["told"], second["told"]) == ("0", "1")


@nightly
def test_a_killed_rank_of_node_0(run: GangTraining, lab: Lab, tmp_path: Path) -> None:
    """The node that chooses, prepares and uploads is the reason: the others end as it does."""
    job = run.submit()
    run.wait_stored(EARLY, job)
    (run.control / "kill.n1").touch()
    run.wait(lambda: lab.job(job).get("Restarts") == "1", "Slurm starts the job again", job)
    run.quick()
    run.wait_completed(job)
    assert codes(run.said(job)) == {86}, run.said(job)
    assert "node 0 (n1) failed" in run.said(job)
    assert "node 1 (n2) failed" not in run.said(job)
    run.finished_well(job, tmp_path)


@nightly
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_engine(run: GangTraining, tmp_path: Path, rank: int) -> None:
    a_killed_engine(run, tmp_path, rank)


@nightly
def test_a_hang_names_the_node_whose_rank_stands_still(run: GangTraining, lab: Lab, tmp_path: Path) -> None:
    """The rank of node 1 stands still and its GPU idles; that of node 0 waits for it inside a collective, which keeps
    its GPU busy, as NCCL's does. Neither log shows an error."""
    gpus = run.with_gpus()
    job = run.submit()
    run.wait_stored(EARLY, job)
    order = run.control / "hang.n2"
    order.touch()
    run.wait(lambda: not order.exists(), "the rank stands still", job)
    gpus["n2"].set_load(0, utilization=0)
    run.wait(lambda: lab.job(job).get("Restarts") == "1", "Slurm starts the job again", job)
    gpus["n2"].set_load(0, utilization=80)
    run.quick()
    run.wait_completed(job)
    said = run.said(job)
    assert codes(said) == {86}, said
    assert re.search(r"node 1 \(n2\) failed: no progress .*; confirmed by gpu utilisation", said), said
    assert re.search(r"stopped (together|first), at step \d+", said), said
    assert "node 0 (n1) failed" not in said
    run.finished_well(job, tmp_path)
    assert all(run.lives(node)[-1]["step"] for node in ("n1", "n2")), "it continued"


@nightly
@pytest.mark.parametrize("name", ["n1", "n2"])
def test_a_node_dies(run: GangTraining, lab: Lab, tmp_path: Path, name: str) -> None:
    """Power off: no last report, no released lease. The node comes back, and Slurm starts both again."""
    job = run.submit()
    run.wait_stored(EARLY, job)
    lab.nodes[name].power_off()
    run.wait(lambda: lab.state(job) == "PENDING", "Slurm notices it", job)
    lab.recover()
    run.quick()
    run.wait(lambda: lab.state(job) == "COMPLETED", "the job completes", job, 180)
    run.finished_well(job, tmp_path)
    assert all(run.lives(node)[-1]["step"] for node in ("n1", "n2")), "it continued"


@nightly
@pytest.mark.parametrize("name", ["n1", "n2"])
def test_podwatch_killed_on_one_node_ends_both(run: GangTraining, tmp_path: Path, name: str) -> None:
    a_killed_podwatch(run, tmp_path, name)


@nightly
def test_cancelled_and_submitted_again(run: GangTraining, lab: Lab, tmp_path: Path) -> None:
    job = run.submit()
    run.wait_stored(EARLY, job)
    lab.run("scancel", str(job))
    run.wait(lambda: lab.state(job) == "CANCELLED", "the job is cancelled", job)
    lab.wait(lab.idle, 60, "nothing is left on the nodes")
    assert run.heartbeat()["state"] == "preempted"
    second = run.submit()
    run.quick()
    run.wait(lambda: lab.state(second) == "COMPLETED", "the next job completes", second, 180)
    run.finished_well(second, tmp_path)
    first, other = (run.lives(node)[-1] for node in ("n1", "n2"))
    assert first["step"] == other["step"] != ""
