"""The trainer process has ended, its own GPU is empty, and the launcher waits: a failure, and never a false one."""

from dataclasses import replace

import pytest

from tests.detection.looks import GIB, LAUNCHER, World, kills, process, world
from tests.drivers.detection import (
    ALONE_SECONDS,
    ATTACHED_ID,
    INTERRUPTED,
    ExitStatus,
    Finding,
    FindingKind,
    LogMatch,
    ProcessEnd,
    ProcessIdentity,
    ProcessRole,
    SensorState,
    Severity,
    Supervision,
    Verdict,
    unobserved,
)

LATE = 20.0
BOOTED = 1000.0


def pod(**detection: object) -> World:
    found = world(**({"gpu__trainer": (1,)} | detection))
    found.booted = BOOTED
    found.step_seconds = 200.0
    found.quiet(120)
    return found


def end_trainer(found: World, status: ExitStatus = ExitStatus(), memory: int = 0) -> None:  # noqa: B008 - frozen
    old = process(14, ProcessRole.TRAINER)
    found.others = [p for p in found.others if p.role is not ProcessRole.TRAINER]
    gone = ProcessEnd(old.identity, ProcessRole.TRAINER, status, found.now)
    found.trainer = {**found.trainer, "ends": (gone,)}
    found.memory[1], found.stepping = memory, False


def only(found: World) -> Finding:
    (finding,) = (f for f in found.findings if f.kind is FindingKind.REQUIRED_CHILD_EXITED)
    return finding


def test_it_is_reported_at_once_and_acted_upon_when_nothing_followed() -> None:
    found = pod()
    end_trainer(found)
    found.quiet(14)
    early = only(found)
    assert (early.severity, early.verdict, early.confirmed) == (Severity.CRITICAL, Verdict.RESTART, False)
    assert "podwatch restarts training in" in early.suggestion
    finding, took = found.until_verdict(200)
    assert finding.kind is FindingKind.REQUIRED_CHILD_EXITED
    assert "the trainer process ended" in finding.summary
    assert ALONE_SECONDS - 16.0 <= took <= ALONE_SECONDS


@pytest.mark.parametrize("status", [ExitStatus(code=1), ExitStatus(signal=11), ExitStatus(signal=9)])
def test_a_crash_that_is_known_is_acted_upon_after_the_hold(status: ExitStatus) -> None:
    found = pod()
    end_trainer(found, status)
    _, took = found.until_verdict(30)
    assert took <= 12.0


@pytest.mark.parametrize("status", [ExitStatus(signal=2), ExitStatus(code=143), ExitStatus(code=0), ExitStatus()])
def test_an_end_that_may_be_an_operators_waits_for_the_other_roles(status: ExitStatus) -> None:
    found = pod()
    end_trainer(found, status)
    found.quiet(ALONE_SECONDS - 4.0)
    found.engines, found.memory[0] = [], 0  # a slow teardown: now it is the whole run
    found.others = [LAUNCHER]
    found.quiet(100)


def test_an_attached_trainer_is_left_to_its_operator() -> None:
    found = pod()
    found.start_id, found.trainer = f"{ATTACHED_ID}1", {"supervision": Supervision.ATTACH}
    found.quiet(120)
    end_trainer(found)
    found.quiet(116)
    _, took = found.until_verdict(60)
    assert took <= LATE


def test_an_interrupt_in_the_log_is_an_operators_end() -> None:
    found = pod()
    end_trainer(found, ExitStatus(code=1))
    found.logs = (LogMatch(INTERRUPTED, "trainer", 1, found.now, found.now, "KeyboardInterrupt"),)
    found.quiet(110)


def later(found: World, role: ProcessRole = ProcessRole.OTHER, parent: int = LAUNCHER.identity.pid) -> None:
    """A process that starts now."""
    new = process(77, role)
    ticks = int((found.now + BOOTED) * 100)
    found.others.append(replace(new, identity=ProcessIdentity(77, ticks), parent_pid=parent))


def test_a_script_that_goes_on_with_its_next_phase_is_not_waiting() -> None:
    """``python sft.py; aws s3 cp ...; python rl.py``, or ``sleep infinity`` behind the training: not acted upon by
    memory; what the steps say stays."""
    found = pod()
    end_trainer(found, ExitStatus(code=1))
    found.run(4)
    later(found)
    found.quiet(400)


def test_a_worker_that_another_role_starts_is_no_next_phase() -> None:
    found = pod()
    end_trainer(found, ExitStatus(code=1))
    found.run(4)
    later(found, parent=13)
    _, took = found.until_verdict(30)
    assert took <= 12.0


def test_a_trainer_that_is_started_again_inside_the_launcher_is_no_failure() -> None:
    """torchrun --max-restarts keeps its own process; others start a new one."""
    found = pod()
    end_trainer(found, ExitStatus(signal=9))
    found.run(4)
    found.others.append(process(15, ProcessRole.TRAINER))
    found.quiet(400)


@pytest.mark.parametrize(
    "change",
    [
        {"memory": {0: 60 * GIB, 1: 30 * GIB}},
        {"readings": {"gpus": unobserved(SensorState.BLIND, 0.0, "NVML hangs")}},
        {"readings": {"gpus": unobserved(SensorState.DENIED, 0.0, "no permission")}},
        {"booted": None},
    ],
    ids=["memory held", "GPUs blind", "GPUs denied", "start times not known"],
)
def test_what_cannot_be_observed_is_never_evidence(change: dict[str, object]) -> None:
    found = pod()
    end_trainer(found, ExitStatus(signal=11))
    for name, value in change.items():
        setattr(found, name, value)
    found.quiet(500)


def test_a_gpu_that_is_shared_with_the_engine_says_nothing() -> None:
    found = pod(gpu__inference=(0, 1), shared_gpus=(1,))
    end_trainer(found, ExitStatus(signal=11), memory=40 * GIB)
    found.quiet(300)


def test_a_gpu_that_was_never_full_says_nothing() -> None:
    found = world(gpu__trainer=(1,))
    found.booted, found.memory[1] = BOOTED, GIB // 2
    found.quiet(120)
    end_trainer(found, ExitStatus(signal=11))
    found.quiet(300)


def test_the_trainers_gpu_is_known_from_its_processes() -> None:
    found = pod(gpu__trainer=())
    end_trainer(found, ExitStatus(signal=11))
    _, took = found.until_verdict(30)
    assert took <= 12.0


@pytest.mark.parametrize("done", [{"finish_line": True}, {}])
def test_a_run_that_is_done_may_lose_its_trainer(done: dict[str, object]) -> None:
    found = pod(max_steps=None if done else 6)
    end_trainer(found)
    found.trainer |= done
    for findings in found.turns(200):
        assert kills(findings) == []
        assert {f.kind for f in findings} <= {FindingKind.FINISHED}
