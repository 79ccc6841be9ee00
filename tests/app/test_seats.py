"""The settings of one of several nodes, and what several nodes do not support (docs/nodes.md)."""

from pathlib import Path
from typing import Any

import pytest

from podwatch.app.entry import seated
from podwatch.app.paths_and_run_lock import workspace_of
from podwatch.app.settings_in_force import policies_from
from podwatch.config.loading import LoadedSettings
from podwatch.config.settings import Settings
from podwatch.domain.errors import ConfigurationError, ExitCode
from podwatch.domain.finding import FindingKind
from podwatch.recovery.restart_budget import Action, Failure, RestartHistory, after_failure

SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NODEID": "1"}  # fmt: skip


def loaded(**more: Any) -> LoadedSettings:
    trainer = {"output_dir": "/shared/run1", "layout": "dcp", **more.pop("trainer", {})}
    plain = {"run_id": "run1", "state_dir": "/home/me/state", "sync": {"store": "b2://bucket"}}
    return LoadedSettings(Settings.model_validate({**plain, "trainer": trainer, **more}), None)


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_STEP_ID", "SLURM_NODEID", "SKYPILOT_NODE_RANK", "DSTACK_NODE_RANK", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)


def under_srun(monkeypatch: pytest.MonkeyPatch, **more: str) -> None:
    for name, value in {**SRUN, **more}.items():
        monkeypatch.setenv(name, value)


def test_a_run_on_one_node_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = loaded()
    assert seated(plain, job=True) is plain
    assert seated(plain, job=False) is plain
    under_srun(monkeypatch, SLURM_STEP_NUM_NODES="1", SLURM_STEP_NUM_TASKS="1", SLURM_NODEID="0")
    assert seated(plain, job=True) is plain
    assert not plain.settings.nodes.several
    assert not policies_from(plain.settings, max_steps=None).clean_exit_finishes
    under_srun(monkeypatch)
    alone = loaded(nodes={"count": 1})
    assert seated(alone, job=True) is alone
    assert seated(plain, job=False) is plain, "not in job mode: the engine does not end with it"


def test_each_node_but_rank_0_has_directories_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    under_srun(monkeypatch)
    second = seated(loaded(), job=True).settings
    assert (second.nodes.rank, second.nodes.count) == (1, 2)
    assert second.state_dir == Path("/home/me/state/node-1")
    assert workspace_of(second).run_copy == Path("/shared/.podwatch/run1/nodes/node-1/run.json")
    monkeypatch.setenv("SLURM_NODEID", "0")
    first = seated(loaded(), job=True).settings
    assert first.state_dir == Path("/home/me/state")
    assert workspace_of(first).run_copy == Path("/shared/.podwatch/run1/run.json")
    assert workspace_of(first).shared == workspace_of(second).shared


def test_one_of_several_nodes_restarts_nothing_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    under_srun(monkeypatch)
    second = seated(loaded(), job=True).settings
    failure = Failure(FindingKind.TRAINER_EXITED, 100.0, loaded=True, made_step=True, resumed_from=40)
    decision = after_failure(RestartHistory(ever_worked=True), failure, second, 0.5)
    assert decision.action is Action.GIVE_UP, "the engine starts all nodes again"
    assert policies_from(second, max_steps=64).clean_exit_finishes
    monkeypatch.setenv("SLURM_NODEID", "0")
    first = seated(loaded(), job=True).settings
    assert not policies_from(first, max_steps=64).clean_exit_finishes, "node 0 knows the target"
    assert policies_from(first, max_steps=None).clean_exit_finishes


@pytest.mark.parametrize(
    ("more", "job", "names"),
    [
        ({"sync": {"store": ""}}, True, "needs a store"),
        ({"mode": "observe"}, True, "does not support it"),
        ({"trainer": {"supervise": "attach"}}, True, "does not support it"),
        ({"nodes": {"rank": 1, "count": 2}}, False, "needs an engine"),
        ({"nodes": {"rank": 3}}, True, "rank of this node is 3"),
    ],
)
def test_what_several_nodes_cannot_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], job: bool, names: str
) -> None:
    under_srun(monkeypatch)
    with pytest.raises(ConfigurationError, match=names) as refused:
        seated(loaded(**more), job=job)
    assert refused.value.exit_code is ExitCode.CONFIGURATION
