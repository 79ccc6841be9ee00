"""One run over three real Slurm nodes: the node that is the reason is named among several that only lose it, and its
machine, if that is broken, is refused although node 0 runs elsewhere.

In `make test-slurm` and nightly, not in the gate.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podwatch.job.judge_earlier_attempts import MOST_REFUSALS
from tests.suites.slurm.gang import INTERVAL, GangTraining
from tests.suites.slurm.lab import MISSING, Lab
from tests.suites.slurm.training import ends

torch = pytest.importorskip("torch", reason="needs torch: make test-slurm")
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
    pytest.mark.skipif(os.environ.get("PODWATCH_SLURM") == "gate", reason="in `make test-slurm` and nightly"),
]
EARLY = INTERVAL


@pytest.fixture(scope="module")
def cluster() -> Iterator[Lab]:
    lab = Lab(nodes=3)
    try:
        yield lab.start()
    finally:
        lab.close()


@pytest.fixture
def run(cluster: Lab, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[GangTraining]:
    cluster.recover()
    made = GangTraining(cluster, tmp_path, request.node.name.removeprefix("test_").replace("_", "-"))
    yield made
    cluster.run("scancel", "--full", "-u", "root")
    cluster.wait(cluster.idle, 40, "every job is gone")
    made.close()


def bad_hosts(run: GangTraining) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run.verdict().get("bad_hosts", [])
    return found


def test_a_killed_rank_of_the_last_node(run: GangTraining, cluster: Lab, tmp_path: Path) -> None:
    """Two nodes lose the third at the same time: neither of them is named."""
    job = run.submit()
    run.wait_stored(EARLY, job)
    (run.control / "kill.n3").touch()
    run.wait(lambda: cluster.job(job).get("Restarts") == "1", "Slurm starts the job again", job)
    run.quick()
    run.wait_completed(job)
    assert set(ends(run.said(job))) == {86}, run.said(job)
    assert "node 2 (n3) failed" in run.said(job)
    assert "node 0 (n1) failed" not in run.said(job)
    assert "node 1 (n2) failed" not in run.said(job)
    run.finished_well(job, tmp_path)
    steps = {run.lives(node)[-1]["step"] for node in cluster.nodes}
    assert len(steps) == 1, "all continued from one step"
    assert steps != {""}


def test_the_last_node_dies(run: GangTraining, cluster: Lab, tmp_path: Path) -> None:
    job = run.submit()
    run.wait_stored(EARLY, job)
    cluster.nodes["n3"].power_off()
    run.wait(lambda: cluster.state(job) == "PENDING", "Slurm notices it", job)
    cluster.recover()
    run.quick()
    run.wait(lambda: cluster.state(job) == "COMPLETED", "the job completes", job, 180)
    run.finished_well(job, tmp_path)
    assert all(run.lives(node)[-1]["step"] for node in cluster.nodes), "it continued"


def test_a_hang_names_the_last_node(run: GangTraining, cluster: Lab, tmp_path: Path) -> None:
    """Two ranks wait for the third inside a collective, which keeps their GPUs busy."""
    gpus = run.with_gpus()
    job = run.submit()
    run.wait_stored(EARLY, job)
    order = run.control / "hang.n3"
    order.touch()
    run.wait(lambda: not order.exists(), "the rank stands still", job)
    gpus["n3"].set_load(0, utilization=0)
    run.wait(lambda: cluster.job(job).get("Restarts") == "1", "Slurm starts the job again", job)
    gpus["n3"].set_load(0, utilization=80)
    run.quick()
    run.wait_completed(job)
    said = run.said(job)
    assert set(ends(said)) == {86}, said
    assert "node 2 (n3) failed: no progress" in said
    assert "node 0 (n1) failed" not in said
    assert "node 1 (n2) failed" not in said
    run.finished_well(job, tmp_path)


def test_the_broken_machine_of_another_node_is_refused(run: GangTraining, cluster: Lab, tmp_path: Path) -> None:
    """A GPU of node 1 breaks. Slurm starts the job on the same machines again: each start is refused before anything
    trains, and after three of them podwatch trains there anyway."""
    job = run.submit()
    run.wait_stored(EARLY, job)
    before = {node: len(run.lives(node)) for node in cluster.nodes}
    (run.control / "ecc.n2").touch()
    run.wait(lambda: bad_hosts(run), "the machine is listed", job)
    assert [bad["host"]["node"] for bad in bad_hosts(run)] == ["n2"], "not node 0, which keeps the list"
    run.wait(lambda: bad_hosts(run)[0]["refusals"] == 1, "a start is refused", job)
    assert {node: len(run.lives(node)) for node in cluster.nodes} == before, "nothing trained"
    run.quick()
    run.wait(lambda: cluster.state(job) == "COMPLETED", "the job completes", job, 180)
    said = run.said(job)
    assert set(ends(said)) == {86}, said
    assert "node 1 (n2) failed" in said
    assert "node 1 (n2): node 1 (n2) failed" in said
    assert f"refusal {MOST_REFUSALS} of {MOST_REFUSALS}" in said
    assert bad_hosts(run)[0]["refusals"] == MOST_REFUSALS
    run.finished_well(job, tmp_path)
    assert {len(run.lives(node)) - before[node] for node in cluster.nodes} == {1}, "one more start, on all nodes"
