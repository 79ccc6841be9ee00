"""The detectors, turn by turn, over generated pods."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from podwatch.detection import rules
from podwatch.detection.observe import Turn
from podwatch.detection.window import Signal, Window, judged
from tests.drivers.detection import (
    TICKS_PER_SECOND,
    Agreement,
    DetectionState,
    DiskSample,
    Finding,
    FindingKind,
    GpuSample,
    GpuState,
    Health,
    InferenceSample,
    Learned,
    Policies,
    ProcessRole,
    ProcessSample,
    ProgressSample,
    ProgressSource,
    SensorState,
    Severity,
    Snapshot,
    Supervision,
    TrainerSample,
    Verdict,
    advance,
    initial,
    judging,
    observed,
    unobserved,
)
from tests.support.pods.tree import ENGINE, LAUNCHER, ORCHESTRATOR, SERVER, TRAINER, process
from tests.support.pods.world import GIB

POLICY = judging(gpu__inference=(0,))
FULL, EMPTY = 60 * GIB, 300 << 20
Change = Callable[[Snapshot], Snapshot]


def snap(
    at: float,
    *,
    memory: int | None = FULL,
    step: int | None = 5,
    step_at: float = 0.0,
    health: Health | None = Health.OK,
    engine: bool = True,
    server: bool = True,
    utilization: float | None = 80.0,
    tokens: float | None = None,
    start_id: str = "s1",
    **trainer: object,
) -> Snapshot:
    processes = [LAUNCHER, ORCHESTRATOR, TRAINER, *([ENGINE] if engine else []), *([SERVER] if server else [])]
    sample = TrainerSample(start_id, Supervision.SUPERVISED, True, 0.0, LAUNCHER.identity, None, tuple(processes))
    return Snapshot(
        at=at,
        wall=at,
        gpus=observed(
            (
                GpuSample(0, "a", "x", memory_used_bytes=memory, utilization_percent=utilization),
                GpuSample(1, "b", "x", memory_used_bytes=FULL, utilization_percent=utilization),
            ),
            at,
        ),
        trainer=observed(replace(sample, **trainer), at),  # type: ignore[arg-type]
        disk=observed(DiskSample("/", 100, 50, 50), at),
        inference=unobserved(SensorState.ABSENT, at, "not configured")
        if health is None
        else observed((InferenceSample("http://x", health, None, 4.0, at if tokens is None else tokens),), at),
        progress=observed(
            () if step is None else (ProgressSample(ProgressSource.STEP_LINE, "trainer", step_at, step),), at
        ),
    )


def run(
    snapshots: Iterable[Snapshot], state: DetectionState | None = None, policy: Policies = POLICY
) -> tuple[DetectionState, tuple[Finding, ...]]:
    state = initial(policy) if state is None else state
    findings: tuple[Finding, ...] = ()
    for snapshot in snapshots:
        state, findings = advance(state, snapshot, policy)
    return state, findings


def healthy(seconds: float = 60.0, **kw: object) -> DetectionState:
    state, findings = run(snap(float(at), **kw) for at in range(0, int(seconds), 2))  # type: ignore[arg-type]
    assert not [f for f in findings if f.severity is not Severity.INFO], findings
    return state


def restarts(findings: Iterable[Finding]) -> list[Finding]:
    return [f for f in findings if f.verdict is Verdict.RESTART and f.confirmed]


def test_memory_gone_with_the_engine_is_a_silent_death_with_its_evidence() -> None:
    state = healthy()
    state, findings = run((snap(60.0 + n, memory=EMPTY, engine=False) for n in range(0, 7, 2)), state)
    assert not findings, "not before the hold time"
    state, findings = run([snap(68.0, memory=EMPTY, engine=False)], state)
    (finding,) = restarts(findings)
    assert (finding.kind, finding.subject, finding.since) == (FindingKind.SILENT_DEATH, "gpu0", 60.0)
    agreeing = {e.signal for e in finding.evidence if e.agreement is Agreement.AGREES}
    assert agreeing == {"gpu0 memory", "engine process", "CUDA context on gpu0"}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("engine gone", {"engine": False}),
        ("health refused", {"health": Health.REFUSED}),
        ("health 503", {"health": Health.UNHEALTHY}),
        ("server ended with 0", {"server": False}),
    ],
)
def test_each_second_signal_is_enough(name: str, change: dict[str, object]) -> None:
    _, findings = run((snap(60.0 + n, memory=EMPTY, **change) for n in range(0, 12, 2)), healthy())  # type: ignore[arg-type]
    assert [f.kind for f in restarts(findings)][:1], name


def with_processes(snapshot: Snapshot, *more: ProcessSample) -> Snapshot:
    trainer = snapshot.trainer.value
    assert trainer is not None
    return replace(snapshot, trainer=observed(replace(trainer, descendants=(*trainer.descendants, *more)), snapshot.at))


def test_an_engine_that_ended_long_ago_agrees_with_nothing_that_happens_now() -> None:
    """It was replaced, and everything works: a dip of the memory hours later has no second signal."""
    old = process(77, ProcessRole.ENGINE, cuda=False)
    state, _ = run((with_processes(snap(60.0 + n), old) for n in range(0, 60, 2)), healthy())
    state, _ = run((snap(120.0 + n) for n in range(0, 60, 2)), state)
    dip = (snap(900.0 + n, step_at=890.0, memory=EMPTY) for n in range(0, 20, 2))
    assert not restarts(run(dip, state)[1])


@pytest.mark.parametrize("looks", [1, 5])
def test_a_process_that_bore_the_engines_name_for_a_moment_is_not_missed(looks: int) -> None:
    fork = process(99, ProcessRole.ENGINE)
    state, _ = run((with_processes(snap(60.0 + 2 * n), fork) for n in range(looks)), healthy())
    state, _ = run((snap(80.0 + n) for n in range(0, 100, 2)), state)
    assert not restarts(run((snap(180.0 + n, memory=EMPTY) for n in range(0, 20, 2)), state)[1])
    state, _ = run([with_processes(snap(198.0), fork)], state)
    assert not restarts(run((snap(200.0 + n, memory=EMPTY) for n in range(0, 20, 2)), state)[1])


def test_one_engine_of_two_is_a_death_however_long_nobody_could_look() -> None:
    second = process(99, ProcessRole.ENGINE, (0,))
    state, _ = run((with_processes(snap(60.0 + n), second) for n in range(0, 60, 2)), healthy())
    blind = unobserved(SensorState.BLIND, 0.0, "hangs")
    state, _ = run((replace(snap(120.0 + n, memory=EMPTY), trainer=blind) for n in range(0, 300, 2)), state)
    (finding,) = restarts(run((snap(420.0 + n, memory=EMPTY) for n in range(0, 4, 2)), state)[1])
    assert "confirmed by engine process" in finding.summary


def test_memory_alone_only_warns() -> None:
    _, findings = run((snap(60.0 + n, memory=EMPTY) for n in range(0, 300, 2)), healthy())
    assert not restarts(findings)
    assert [(f.kind, f.severity) for f in findings] == [(FindingKind.SILENT_DEATH, Severity.WARNING)]


def test_no_step_for_long_confirms_but_not_while_tokens_flow() -> None:
    flowing = (snap(60.0 + n, memory=EMPTY) for n in range(0, 1700, 2))
    assert not restarts(run(flowing, healthy())[1])
    dry = (snap(60.0 + n, memory=EMPTY, tokens=58.0) for n in range(0, 1700, 2))
    (finding,) = [f for f in restarts(run(dry, healthy())[1]) if f.kind is FindingKind.SILENT_DEATH]
    assert "steps" in finding.summary


def test_what_cannot_be_observed_agrees_with_nothing() -> None:
    def blind(at: float) -> Snapshot:
        s = snap(at, memory=EMPTY, health=None)
        assert s.trainer.value is not None
        hidden = tuple(
            replace(p, cuda=None, gpus=frozenset(), role=ProcessRole.OTHER) for p in s.trainer.value.descendants
        )
        return replace(
            s,
            trainer=observed(replace(s.trainer.value, descendants=hidden), at),
            progress=unobserved(SensorState.BLIND, at, "gone"),
        )

    # Nothing but memory was ever visible, except one step that armed the detector.
    first = [
        replace(blind(float(n)), gpus=snap(float(n)).gpus, progress=snap(float(n)).progress) for n in range(0, 60, 2)
    ]
    state, _ = run(first)
    assert "silent-death:gpu0" in state.armed
    _, findings = run((blind(60.0 + n) for n in range(0, 3000, 2)), state)
    assert not restarts(findings)
    assert FindingKind.SILENT_DEATH in {f.kind for f in findings}


def test_never_armed_before_something_besides_memory_was_healthy() -> None:
    state, _ = run(snap(float(n), step=None, health=Health.REFUSED) for n in range(0, 60, 2))
    assert not [name for name in state.armed if not name.startswith("inference:")]
    _, findings = run((snap(60.0 + n, step=None, memory=EMPTY, health=Health.REFUSED) for n in range(0, 60, 2)), state)
    assert not restarts(findings)


@pytest.mark.parametrize("hole", ["blind", "missing", "lost", "gap", "healthy blink"])
def test_a_hole_in_the_samples_restarts_the_hold(hole: str) -> None:
    def dead(at: float) -> Snapshot:
        return snap(at, memory=EMPTY, engine=False)

    state, _ = run([dead(60.0), dead(62.0), dead(64.0), dead(66.0)], healthy())
    if hole == "gap":
        state, findings = run([dead(76.0)], state)
    else:
        middle = dead(68.0)
        if hole == "blind":
            middle = replace(middle, gpus=unobserved(SensorState.BLIND, 68.0, "hang"))
        elif hole == "missing":
            middle = replace(middle, gpus=observed((GpuSample(1, "b", "x", memory_used_bytes=FULL),), 68.0))
        elif hole == "lost":
            middle = replace(middle, gpus=observed((GpuSample(0, "a", "x", GpuState.LOST),), 68.0))
        else:
            middle = snap(68.0)
        state, findings = run([middle, dead(70.0)], state)
    assert not restarts(findings)
    at = 78.0 if hole == "gap" else 72.0
    _, findings = run((dead(at + n) for n in range(0, 10, 2)), state)
    assert restarts(findings), "and it is seen after a whole window"


def test_a_sensor_that_repeats_itself_is_no_evidence() -> None:
    state, _ = run([snap(60.0, memory=EMPTY, engine=False)], healthy())
    frozen = snap(60.0, memory=EMPTY, engine=False).gpus
    later = (replace(snap(60.0 + n, memory=EMPTY, engine=False), gpus=frozen) for n in range(2, 100, 2))
    _, findings = run(later, state)
    assert not restarts(findings)
    assert "sensor-blind:gpus" in {f.key for f in findings}


def test_a_slow_poll_still_sees_a_death() -> None:
    state, _ = run(snap(float(n)) for n in range(0, 200, 10))
    _, findings = run((snap(200.0 + n, memory=EMPTY, engine=False) for n in range(0, 40, 10)), state)
    assert restarts(findings)


def test_a_drop_on_a_shared_gpu_and_one_of_several() -> None:
    policy = judging(gpu__inference=(0, 1), gpu__trainer=(0,))
    state, _ = run((snap(float(n)) for n in range(0, 60, 2)), policy=policy)
    small = (snap(60.0 + n, memory=int(FULL * 0.7), engine=False) for n in range(0, 30, 2))
    assert not restarts(run(small, state, policy)[1])
    big = (snap(60.0 + n, memory=int(FULL * 0.5), engine=False) for n in range(0, 30, 2))
    assert [f.subject for f in restarts(run(big, state, policy)[1])] == ["gpu0"]


def test_a_restart_wipes_the_detectors_and_keeps_what_was_learned() -> None:
    state = healthy()
    state, _ = run((snap(60.0 + n, memory=EMPTY, engine=False) for n in range(0, 20, 2)), state)
    state, findings = run([snap(82.0, memory=EMPTY, engine=False, start_id="s2", step=None, started_at=81.0)], state)
    assert not restarts(findings)
    assert not [name for name in state.armed if not name.startswith("inference:")]
    assert state.learned.baseline(0) == FULL
    _, findings = run(
        (snap(84.0 + n, memory=EMPTY, health=Health.REFUSED, engine=False, start_id="s2", step=None, started_at=81.0)
         for n in range(0, 600, 2)), state
    )  # fmt: skip
    assert not restarts(findings), "start-up is patient"


def test_an_armed_detector_survives_a_restart_of_podwatch() -> None:
    learned = Learned.from_json(json.loads(json.dumps(healthy().learned.to_json())))
    _, findings = run(
        (snap(90.0 + n, memory=EMPTY, engine=False) for n in range(0, 12, 2)),
        initial(Policies(detection=POLICY), learned),
    )
    assert restarts(findings)


@pytest.mark.parametrize("why", ["finish line", "target", "stopped"])
def test_a_run_that_ends_may_let_its_engine_go(why: str) -> None:
    policy = judging(POLICY, max_steps=6) if why == "target" else POLICY
    state, _ = run((snap(float(n)) for n in range(0, 60, 2)), policy=policy)
    fine = (snap(60.0 + n, server=False) for n in range(0, 60, 2))
    _, findings = run(fine, healthy())
    assert [(f.kind, f.confirmed) for f in findings] == [(FindingKind.REQUIRED_CHILD_EXITED, False)]
    loading = {"step": None, "memory": EMPTY, "health": Health.REFUSED}
    state, _ = run(snap(float(n), **loading) for n in range(0, 10, 2))  # type: ignore[arg-type]
    broken = (snap(10.0 + n, engine=False, server=False, **loading) for n in range(0, 20, 2))  # type: ignore[arg-type]
    assert {f.kind for f in restarts(run(broken, state)[1])} == {FindingKind.REQUIRED_CHILD_EXITED}
    alone = (snap(10.0 + n, server=False, **loading) for n in range(0, 60, 2))  # type: ignore[arg-type]
    assert not restarts(run(alone, state)[1]), "a server that never was healthy agrees with nothing"
    replaced_ = (snap(60.0 + n) for n in range(0, 60, 2))
    assert not run(replaced_, healthy())[1]


def stalled(start: float, seconds: float, change: Change = lambda s: s, **kw: object) -> Iterable[Snapshot]:
    return (change(snap(start + n, tokens=1.0, **kw)) for n in range(0, int(seconds), 10))  # type: ignore[arg-type]


def test_a_hang_needs_the_limit_and_a_second_signal() -> None:
    state = healthy()
    assert not run(stalled(60.0, 1400.0), state)[1]
    (finding,) = restarts(run(stalled(60.0, 1600.0), state)[1])
    assert finding.kind is FindingKind.HANG
    assert "generation tokens" in finding.summary
    assert re.search(r"no progress for \d+ min \(limit 25 min\)", finding.summary)
    assert not restarts(run(stalled(60.0, 1750.0, utilization=0.0, health=None), state)[1]), "tools may be at work"
    (idle,) = restarts(run(stalled(60.0, 1850.0, utilization=0.0, health=None), state)[1])
    assert "gpu utilisation" in idle.summary
    assert not run((snap(60.0 + n) for n in range(0, 1600, 10)), state)[1], "an evaluation: the engine works"
    _, findings = run((snap(60.0 + n) for n in range(0, 3100, 10)), state)
    assert [(f.kind, f.confirmed) for f in findings] == [(FindingKind.HANG, False)], "busy GPUs and tokens: a warning"


def test_saves_and_slow_runs_are_no_hang() -> None:
    state = healthy()
    saving = stalled(60.0, 3000.0, lambda s: replace(s, saving=True))
    state_after, findings = run(saving, state)
    assert not restarts(findings)
    assert not restarts(run(stalled(3060.0, 1400.0), state_after)[1]), "the save moved the clock on"
    slow = Learned(gap_seconds=(600.0,) * 9, step_seconds=(600.0,) * 9)
    known, _ = run((snap(float(n)) for n in range(0, 60, 2)), initial(Policies(detection=POLICY), slow))
    assert not restarts(run(stalled(60.0, 3500.0), known)[1])
    assert restarts(run(stalled(60.0, 3700.0), known)[1])


def test_unknown_utilisation_and_a_blind_progress_sensor_never_kill() -> None:
    state = healthy(health=None)
    _, findings = run(stalled(60.0, 4000.0, utilization=None, health=None), state)
    assert not restarts(findings)
    assert FindingKind.HANG in {f.kind for f in findings}
    blind = stalled(
        60.0, 4000.0, lambda s: replace(s, progress=unobserved(SensorState.BLIND, s.at, "x")), utilization=0.0
    )
    assert not restarts(run(blind, state)[1])


def test_a_ping_cannot_outvote_steps() -> None:
    def pinging(s: Snapshot) -> Snapshot:
        ping = ProgressSample(ProgressSource.HEARTBEAT, "trainer", s.at)
        return replace(s, progress=observed((*(s.progress.value or ()), ping), s.at))

    assert restarts(run(stalled(60.0, 1600.0, pinging), healthy())[1])


def test_start_up_has_its_own_patience() -> None:
    kw: dict[str, object] = {"step": None, "utilization": 0.0}
    assert not restarts(run(stalled(0.0, 4100.0, **kw))[1])
    _, findings = run(stalled(0.0, 4500.0, **kw))
    assert [f.confirmed for f in findings] == [False], "no step was ever seen on this run: it only warns"
    proven = initial(
        Policies(detection=POLICY), Learned(gap_seconds=(60.0,), step_seconds=(60.0,), utilization_works=True)
    )
    assert restarts(run(stalled(0.0, 4500.0, **kw), proven)[1])


def test_a_finished_run_that_lingers() -> None:
    _, findings = run(stalled(60.0, 800.0, finish_line=True), healthy())
    assert not findings
    _, (finding,) = run(stalled(60.0, 1100.0, finish_line=True), healthy())
    assert (finding.kind, finding.verdict) == (FindingKind.FINISHED, Verdict.FINISH)


def test_a_lost_gpu_is_critical_and_never_a_restart() -> None:
    lost = observed((GpuSample(0, "a", "x", GpuState.LOST), GpuSample(1, "b", "x", memory_used_bytes=FULL)), 60.0)
    _, findings = run([replace(snap(60.0), gpus=lost)], healthy())
    assert [(f.kind, f.severity, f.verdict) for f in findings] == [
        (FindingKind.GPU_LOST, Severity.CRITICAL, Verdict.NONE)
    ]


def test_blind_sensors_show() -> None:
    gone = unobserved(SensorState.DENIED, 60.0, "run as root")  # type: ignore[var-annotated]
    _, findings = run([replace(snap(60.0), trainer=gone)], healthy())
    assert [(f.key, f.summary, f.suggestion) for f in findings] == [
        (
            "sensor-blind:trainer",
            "the trainer sensor cannot observe: run as root",
            "",
        )  # not the same text as advice, too
    ]
    state = healthy()
    for at in range(60, 130, 2):
        s = replace(snap(float(at)), gpus=unobserved(SensorState.BLIND, float(at), "hang"))
        state, findings = advance(state, s, Policies(detection=POLICY))
        assert bool(findings) is (at >= 90), at


def test_no_second_signal_is_said_from_the_first_minute() -> None:
    def poor(at: float) -> Snapshot:
        s = snap(at, health=None, step=None)
        assert s.trainer.value is not None
        hidden = tuple(replace(p, cuda=None, role=ProcessRole.OTHER) for p in s.trainer.value.descendants)
        return replace(s, trainer=observed(replace(s.trainer.value, descendants=hidden), at))

    _, findings = run(poor(float(n)) for n in range(0, 64, 2))
    assert FindingKind.NO_SECOND_SIGNAL in {f.kind for f in findings}
    assert FindingKind.NO_SECOND_SIGNAL not in {f.kind for f in run(snap(float(n)) for n in range(0, 64, 2))[1]}


def test_disk_warnings() -> None:
    full = replace(snap(0.0), disk=observed(DiskSample("/data", 1000, 900, 100, 1000, 10), 0.0))
    assert {f.kind for f in run([full])[1]} == {FindingKind.DISK_HIGH, FindingKind.INODES_LOW}


@pytest.mark.parametrize(("lived", "restarted"), [(5.0, False), (3600.0, True)])
@pytest.mark.parametrize("engines", [1, 2])
def test_an_engine_that_is_older_than_podwatch_is_missed_at_once(engines: int, lived: float, restarted: bool) -> None:
    """podwatch was started again ten seconds ago. What bears the title is no fork if it has borne it for an hour."""
    tree = [process(77 + n, ProcessRole.ENGINE, cuda=False) for n in range(engines)]
    born = max(p.identity.start_ticks for p in tree) / TICKS_PER_SECOND
    others = (LAUNCHER, ORCHESTRATOR, TRAINER, SERVER)

    def at(n: float, *left: ProcessSample, memory: int) -> Snapshot:
        return replace(snap(n, health=None, memory=memory, descendants=(*others, *left)), boot_at=born + lived + n)

    state, _ = run(at(float(n), *tree, memory=FULL) for n in range(0, 10, 2))
    state = replace(state, learned=state.learned.saw("gpu0"))  # the podwatch before had seen it full
    gone = (at(10.0 + n, *tree[1:], memory=EMPTY) for n in range(0, 20, 2))
    deaths = [f for f in restarts(run(gone, state)[1]) if f.kind is FindingKind.SILENT_DEATH]
    assert bool(deaths) == restarted


@pytest.mark.parametrize(("seconds", "restarted"), [(10, False), (60, True)])
def test_what_bore_an_engines_title_for_seconds_is_no_engine_that_is_missing(seconds: int, restarted: bool) -> None:
    """A fork bears it until it execs. One that was there for long is missed."""
    other = process(77, ProcessRole.ENGINE, cuda=False)
    tree = (LAUNCHER, ORCHESTRATOR, TRAINER, ENGINE, SERVER, other)
    state, _ = run((snap(60.0 + n, descendants=tree) for n in range(0, seconds, 2)), healthy())
    at = 60.0 + seconds
    empty = (snap(at + n, memory=EMPTY) for n in range(0, 20, 2))
    assert bool(restarts(run(empty, state)[1])) == restarted


def broken(turn: Turn) -> tuple[Finding, ...]:
    raise ZeroDivisionError("a fault of ours")


def test_a_rule_that_fails_is_reported_and_the_others_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    state = healthy()
    monkeypatch.setattr(rules, "RULES", (rules.Rule("broken", broken, ()), *rules.RULES))
    full = snap(60.0, memory=EMPTY, engine=False)
    _, findings = advance(state, replace(full, disk=observed(DiskSample("/", 100, 99, 1), 60.0)), POLICY)
    assert [(f.key, f.severity, f.confirmed) for f in findings] == [
        ("sensor-blind:detector-broken", "critical", False), ("disk-high", "warning", False),
    ]  # fmt: skip


def test_a_reading_that_cannot_be_understood_is_reported_and_the_others_are_taken() -> None:
    """A fault of podwatch, or of a library below it: the guard stays."""
    odd = replace(snap(60.0, memory=EMPTY), inference=observed((None,), 60.0))  # type: ignore[arg-type]
    state, findings = advance(healthy(), odd, POLICY)
    assert "sensor-blind:detector-observe-servers" in {f.key for f in findings}
    assert state.start.of("gpu0").since == 60.0


def test_only_two_modules_can_ask_for_a_restart() -> None:
    """``window`` demands two windows that are armed and failing; of ``exits`` only the end of the launcher."""
    folder = Path(rules.__file__).parent
    asking = {path.name for path in folder.glob("*.py") if "Verdict.RESTART" in path.read_text()}
    assert asking == {"window.py", "exits.py", "merge.py"}, "merge only repeats what was asked for"
    assert (folder / "exits.py").read_text().count("Verdict.RESTART") == 1
    armed, unarmed = Window(True, 0.0, 10.0, 5), Window(False, 0.0, 10.0, 5)
    for first, second in ((armed, unarmed), (unarmed, armed), (armed, Window(True)), (Window(True), armed)):
        signals = [Signal("x", "y", Agreement.AGREES, 10.0, window) for window in (first, second)]
        finding = judged(FindingKind.SILENT_DEATH, "x", 0.0, signals[0], signals[1:], subject="s")
        assert (finding.verdict, finding.confirmed) == (Verdict.NONE, False)
    both = [Signal("x", "y", Agreement.AGREES, 10.0, armed)] * 2
    assert judged(FindingKind.SILENT_DEATH, "x", 0.0, both[0], both[1:], subject="s").confirmed
    assert not judged(FindingKind.SILENT_DEATH, "x", 0.0, both[0], both[1:], subject="s", waits="an operator").confirmed
