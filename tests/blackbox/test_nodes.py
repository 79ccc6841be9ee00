"""Nodes of one run that share a file system, with Slurm's variables: what one node alone can show. (Two nodes on one
machine see each other's processes: tests/suites/slurm has them with namespaces of their own.)"""

from pathlib import Path

import pytest

from tests.support.rig import Rig

pytestmark = pytest.mark.slow

LONG = 180.0
SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "2"}  # fmt: skip


def test_a_node_that_never_comes_ends_the_start_with_86(rig: Rig, elsewhere: Path) -> None:
    daemon = rig.daemon(SRUN, sync__store=f"file://{elsewhere}", nodes__wait="2s").start("--job")
    assert daemon.process is not None
    assert daemon.process.wait(LONG) == 86, daemon.tail()
    assert rig.starts == []


@pytest.mark.parametrize(
    ("rank", "environ", "changes"),
    [
        (2, {}, {}),
        (0, {"SLURM_STEP_NUM_TASKS": "16"}, {}),
        (0, {"SLURM_NODEID": "first"}, {}),
        (0, {}, {"nodes__disks": "local"}),
        (0, {}, {"mode": "observe"}),
        (0, {}, {"sync__store": None}),
    ],
    ids=["rank beyond the count", "16 podwatches", "no number", "disks of their own", "observe", "no store"],
)
def test_nodes_that_cannot_work_together_are_refused(
    rig: Rig, elsewhere: Path, rank: int, environ: dict[str, str], changes: dict[str, object]
) -> None:
    node = SRUN | {"SLURM_NODEID": str(rank)}
    daemon = rig.daemon(node | environ, **({"sync__store": f"file://{elsewhere}"} | changes)).start("--job")
    assert daemon.process is not None
    assert daemon.process.wait(LONG) == 78, daemon.tail()
    assert rig.starts == []
