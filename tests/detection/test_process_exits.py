"""Who ended, how, and what it means."""

from dataclasses import replace

import pytest

from podwatch.domain.snapshot import observed
from tests.detection.looks import World, process, world
from tests.drivers.detection import (
    Agreement,
    ExitStatus,
    FindingKind,
    HostSample,
    LogMatch,
    LogRule,
    ProcessEnd,
    ProcessRole,
    Supervision,
    judging,
)

MEMORY = HostSample(100 << 30, 50 << 30, oom_kills=2)


def gone(found: World, role: ProcessRole, status: ExitStatus = ExitStatus(0)) -> None:  # noqa: B008 - frozen
    ended = [p for p in found.others if p.role is role]
    found.others = [p for p in found.others if p.role is not role]
    found.trainer = {"ends": tuple(ProcessEnd(p.identity, role, status, found.now) for p in ended)}


@pytest.mark.parametrize("role", [ProcessRole.ORCHESTRATOR, ProcessRole.TRAINER])
def test_an_orchestrator_or_trainer_that_ended_is_a_failure_once_no_step_comes(role: ProcessRole) -> None:
    found = world()
    found.quiet(60)
    gone(found, role)
    found.quiet(40)
    assert found.kinds() == {FindingKind.REQUIRED_CHILD_EXITED}
    found.stepping = found.generating = False
    finding, took = found.until_verdict(1200)
    assert finding.kind is FindingKind.REQUIRED_CHILD_EXITED
    assert "ended with exit code 0" in finding.summary
    assert 560 <= took <= 620
    own = ["trainer's gpu memory"] if role is ProcessRole.TRAINER else []
    assert [e.signal for e in finding.evidence] == [role.value, *own, "steps"], "an engine's health says nothing here"


@pytest.mark.parametrize(
    ("status", "after", "memory"),
    [
        (ExitStatus(signal=9), 3, True),
        (ExitStatus(code=137), 3, True),
        (ExitStatus(), 3, True),
        (ExitStatus(code=1), 3, False),
        (ExitStatus(signal=11), 3, False),
        (ExitStatus(signal=9), 2, False),
    ],
)
def test_an_end_by_the_kernel_for_memory_is_told_apart(status: ExitStatus, after: int, memory: bool) -> None:
    found = world()
    found.host = MEMORY
    found.quiet(60)
    found.host = replace(MEMORY, oom_kills=after)
    found.trainer = {"alive": False, "exit": status, "descendants": ()}
    finding, _ = found.until_verdict(10)
    assert finding.kind is FindingKind.TRAINER_EXITED
    assert ("killed by the kernel because memory ran out" in finding.summary) is memory
    assert any(e.signal == "out of memory" and e.agreement is Agreement.AGREES for e in finding.evidence) is memory


def test_a_process_that_bore_a_roles_name_for_one_reading_is_not_missed() -> None:
    """A fork has its parent's name until it calls exec."""
    found = world()
    found.others = [p for p in found.others if p.role is not ProcessRole.ORCHESTRATOR]
    found.quiet(60)
    found.others.append(process(91, ProcessRole.ORCHESTRATOR))
    found.run(2)
    found.others.pop()
    found.run(60)
    assert found.kinds() == set()


def test_an_old_oom_kill_explains_nothing() -> None:
    found = world()
    found.host = MEMORY
    found.quiet(20)
    found.host = replace(MEMORY, oom_kills=3)
    found.quiet(120)
    found.trainer = {"alive": False, "exit": ExitStatus(signal=9), "descendants": ()}
    assert "memory ran out" not in found.until_verdict(10)[0].summary


def test_an_oom_kill_before_this_start_explains_nothing() -> None:
    found = world()
    found.host = MEMORY
    found.quiet(20)
    found.start_id, found.trainer = "s2", {"started_at": found.now}
    found.host = replace(MEMORY, oom_kills=3)
    found.quiet(4)
    found.trainer |= {"alive": False, "exit": ExitStatus(signal=9), "descendants": ()}
    assert "memory ran out" not in found.until_verdict(10)[0].summary


@pytest.mark.parametrize(("earlier", "later"), [(5, 2), (0, 3), (2, 5)])
def test_the_first_count_that_is_read_after_a_start_explains_nothing(earlier: int, later: int) -> None:
    """The host is read every ten seconds, and another cgroup has another count."""
    found = world()
    found.host = replace(MEMORY, oom_kills=earlier)
    found.quiet(20)
    stale = observed(found.host, found.now - 2.0)
    found.start_id, found.trainer = "s2", {"started_at": found.now}
    found.readings = {"host": stale}
    found.quiet(8)
    found.readings, found.host = {}, replace(MEMORY, oom_kills=later)
    found.quiet(4)
    found.trainer |= {"alive": False, "exit": ExitStatus(signal=9), "descendants": ()}
    assert "memory ran out" not in found.until_verdict(10)[0].summary


def test_a_child_killed_for_memory_is_told_so() -> None:
    found = world()
    found.host = MEMORY
    found.quiet(60)
    found.host = replace(MEMORY, oom_kills=3)
    found.memory[0], found.engines, found.servers = 0, [], []
    found.run(20)
    children = [f for f in found.findings if f.kind is FindingKind.REQUIRED_CHILD_EXITED]
    assert [f.confirmed for f in children] == [True, True]
    assert all("killed by the kernel because memory ran out" in f.summary for f in children)


def test_a_log_rule_is_shown_and_does_not_count() -> None:
    found = world()
    rule = LogRule("engine-dead", "EngineDeadError", supports=("silent-death", "required-child-exited"))
    found.policies = judging(found.policies, log_rules=(rule,))
    found.quiet(60)
    found.memory[0] = 0
    found.logs = (LogMatch("engine-dead", "inference", 3, found.now, found.now, "EngineDeadError: gone"),)
    found.quiet(300)
    (warning,) = (f for f in found.findings if f.kind is FindingKind.SILENT_DEATH)
    assert not warning.confirmed
    (shown,) = (e for e in warning.evidence if e.signal == "log: engine-dead")
    assert (shown.agreement, "EngineDeadError" in shown.value) == (Agreement.AGREES, True)
    found.logs = (replace(found.logs[0], rule="unrelated"),)
    found.quiet(4)
    assert not [e for f in found.findings for e in f.evidence if e.signal.startswith("log:")]


@pytest.mark.parametrize(
    ("used_before", "oom", "start_id", "low", "high"),
    [
        (None, False, "attach-7-70", 110, 124),
        (3600.0, False, "attach-7-70", 110, 124),
        (600.0, False, "attach-7-70", 890, 904),
        (None, True, "attach-7-70", 0, 10),
        (None, False, "s1", 0, 10),
    ],
    ids=[
        "no terminal",
        "terminal of an hour ago",
        "terminal in use",
        "killed for memory",
        "ours, its supervisor killed",
    ],
)
def test_a_person_has_time_to_start_what_they_stopped(
    used_before: float | None, oom: bool, start_id: str, low: int, high: int
) -> None:
    """Only where podwatch did not start it, and longer where somebody typed in its terminal lately. What the kernel
    killed, no person did; and one that podwatch started has a person behind it as little as under its supervisor."""
    found = world()
    found.start_id, found.host = start_id, MEMORY
    found.quiet(60)
    used = None if used_before is None else found.now - used_before
    if oom:
        found.host = replace(MEMORY, oom_kills=3)
    ended = {"alive": False, "exit": ExitStatus(), "descendants": (), "terminal_used_wall": used}
    found.trainer = {**ended, "supervision": Supervision.ATTACH}
    if low:
        first = next(f for f in found.run(4) if f.kind is FindingKind.TRAINER_EXITED)
        assert not first.confirmed
        assert ("terminal was used recently" in first.suggestion) is (high > 800)
    finding, took = found.until_verdict(1000)
    assert finding.kind is FindingKind.TRAINER_EXITED
    assert low <= took <= high


def test_the_end_of_a_topmost_script_counts_when_the_training_below_it_makes_no_more_steps() -> None:
    """Its supervisor was killed: what is left is a tree whose exit status nobody learns."""
    found = world()
    found.quiet(60)
    found.trainer = {"alive": False, "exit": ExitStatus(), "supervision": Supervision.ATTACH}
    found.quiet(300)
    (finding,) = (f for f in found.findings if f.kind is FindingKind.TRAINER_EXITED)
    assert not finding.confirmed
    assert "still train" in finding.suggestion
    found.stepping = found.generating = False
    finding, took = found.until_verdict(1200)
    assert finding.kind is FindingKind.TRAINER_EXITED
    assert took >= 560
