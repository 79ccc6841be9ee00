"""Rank and number of nodes, from the variables that each engine sets (docs/nodes.md)."""

import pytest

from podwatch.domain.engine_and_attempt import place_of
from podwatch.domain.errors import ConfigurationError, ExitCode

SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NNODES": "2", "SLURM_NODEID": "1"}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "rank", "count", "attempt"),
    [
        (SRUN, 1, 2, "slurm:7:0:0"),
        ({**SRUN, "SLURM_NODEID": "0", "SLURM_RESTART_COUNT": "3"}, 0, 2, "slurm:7:0:3"),
        ({"SKYPILOT_NODE_RANK": "2", "SKYPILOT_NUM_NODES": "4", "SKYPILOT_TASK_ID": "sky-1"}, 2, 4, "skypilot:sky-1"),
        ({"DSTACK_NODE_RANK": "0", "DSTACK_NODES_NUM": "2", "DSTACK_RUN_ID": "d"}, 0, 2, "dstack:d"),
    ],
)
def test_each_engine(environ: dict[str, str], rank: int, count: int, attempt: str) -> None:
    place = place_of(environ)
    assert place is not None
    assert (place.rank, place.count, place.attempt, place.leads) == (rank, count, attempt, rank == 0)


def test_two_attempts_of_a_job_have_two_names_and_its_nodes_one() -> None:
    first, second = place_of({**SRUN, "SLURM_NODEID": "0"}), place_of(SRUN)
    again = place_of({**SRUN, "SLURM_RESTART_COUNT": "1"})
    step = place_of({**SRUN, "SLURM_STEP_ID": "1"})
    assert first is not None
    assert second is not None
    assert again is not None
    assert step is not None
    assert first.attempt == second.attempt
    assert len({second.attempt, again.attempt, step.attempt}) == 3


def test_an_indexed_job_takes_its_count_from_the_setting() -> None:
    environ = {"JOB_COMPLETION_INDEX": "1", "KUBERNETES_JOB_NAME": "run1", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert place_of(environ) is None, "pods of an Indexed Job can each train a run of their own"
    place = place_of(environ, count=2)
    assert place is not None
    assert (place.rank, place.count, place.attempt) == (1, 2, "kubernetes:0:run1:0")
    jobset = place_of({**environ, "JOBSET_NAME": "set", "JOBSET_RESTART_ATTEMPT": "4"}, count=2)
    assert jobset is not None
    assert jobset.attempt == "kubernetes:set:run1:4"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NODEID": "0"},  # the batch script, not a step of srun
        {**SRUN, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"},  # srun -N1 in a job of two nodes
        {**SRUN, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "4"},
        {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1"},
        {"DSTACK_NODE_RANK": "0", "DSTACK_NODES_NUM": "1"},
        {"JOB_COMPLETION_INDEX": "3"},
    ],
)
def test_a_run_on_one_node_stays_one(environ: dict[str, str]) -> None:
    assert place_of(environ) is None


def test_the_setting_takes_precedence() -> None:
    assert place_of(SRUN, count=1) is None
    place = place_of(SRUN, rank=0, count=3)
    assert place is not None
    assert (place.rank, place.count, place.source) == (0, 3, "[nodes]")
    alone = place_of({}, rank=1, count=2)
    assert alone is not None
    assert (alone.rank, alone.count, alone.attempt) == (1, 2, "")


@pytest.mark.parametrize(
    ("environ", "rank", "count", "names"),
    [
        ({**SRUN, "SLURM_NODEID": "2"}, None, None, "rank of this node is 2"),
        ({**SRUN, "SLURM_NODEID": "x"}, None, None, "SLURM_NODEID"),
        ({**SRUN, "SLURM_NODEID": "-1"}, None, None, "SLURM_NODEID"),
        ({**SRUN, "SLURM_STEP_NUM_NODES": "2x"}, None, None, "SLURM_STEP_NUM_NODES"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "4"}, None, None, "4 processes on 2 nodes"),
        ({"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "0"}, None, None, "cannot have 0 nodes"),
        ({}, 1, None, "number of nodes is not known"),
        ({}, None, 2, "rank of this one is not known"),
        ({}, 2, 2, "rank of this node is 2"),
        ({}, 1, 1, "rank is 1"),
        (SRUN, 5, None, "rank of this node is 5"),
    ],
)
def test_strange_values_are_refused(environ: dict[str, str], rank: int | None, count: int | None, names: str) -> None:
    with pytest.raises(ConfigurationError, match=names) as refused:
        place_of(environ, rank, count)
    assert refused.value.exit_code is ExitCode.CONFIGURATION
    assert "[nodes]" in refused.value.fix or "--ntasks-per-node=1" in refused.value.fix
