"""Roles by the operator's own patterns."""

import pytest

from podwatch.domain.process import ProcessIdentity, ProcessRole, ProcessSample
from podwatch.trainer.process_roles import RolePatterns
from tests.support.known_trainers import ROLES

PATTERNS = {
    ProcessRole.TRAINER: [r"python\S* .*train\.py"],
    ProcessRole.ORCHESTRATOR: [r"rollouts\.py"],
    ProcessRole.INFERENCE: [r"my-server", r"serve\.py"],
    ProcessRole.ENGINE: [r"^holder: "],
}
LAUNCHER = ProcessIdentity(10, 100)


def sample(pid: int, command: str) -> ProcessSample:
    name = command.split()[0].rpartition("/")[2][:15]
    return ProcessSample(ProcessIdentity(pid, pid * 10), 1, name, command, ROLES.classify(name, command))


def role(command: str, pid: int = 11) -> ProcessRole:
    return RolePatterns(PATTERNS).applied((sample(pid, command),), LAUNCHER)[0].role


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python -u src/train.py --config x.yaml", ProcessRole.TRAINER),
        ("/opt/venv/bin/python3.11 rollouts.py", ProcessRole.ORCHESTRATOR),
        ("/usr/local/bin/my-server --port 8000", ProcessRole.INFERENCE),
        ("holder: rank 0", ProcessRole.ENGINE),
        ("python evaluate.py", ProcessRole.OTHER),
        ("VLLM::EngineCore", ProcessRole.ENGINE),
        ("uv run python train.py", ProcessRole.TRAINER),
        ("bash -c python train.py && python rollouts.py", ProcessRole.OTHER),
        ("sh run_train.sh python train.py", ProcessRole.OTHER),
        ("python train.py --rollouts rollouts.py", ProcessRole.TRAINER),
        ("x" * 5000 + " rollouts.py", ProcessRole.OTHER),
    ],
)
def test_the_first_role_that_matches_counts_and_shells_bear_none(command: str, expected: ProcessRole) -> None:
    assert role(command) is expected


def test_an_own_pattern_counts_more_than_what_podwatch_recognises() -> None:
    """A program called ``orchestrator`` that trains."""
    patterns = RolePatterns({ProcessRole.TRAINER: ["^orchestrator"]})
    tree = (sample(11, "orchestrator --train"),)
    assert tree[0].role is ProcessRole.ORCHESTRATOR
    assert patterns.applied(tree, LAUNCHER)[0].role is ProcessRole.TRAINER


def test_the_launcher_keeps_its_role_so_that_an_end_below_it_is_not_its_own_business() -> None:
    assert role("python train.py", pid=10) is ProcessRole.OTHER
    assert role("python train.py", pid=11) is ProcessRole.TRAINER


def test_without_patterns_nothing_is_touched() -> None:
    tree = (sample(11, "python train.py"),)
    assert RolePatterns({}).applied(tree, LAUNCHER) is tree
