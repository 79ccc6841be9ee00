"""What must hold for every night, whatever it brings. Random segments of a pod's life, and random looks altogether."""

import math
from dataclasses import fields, replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.detection.looks import GIB, URL, World, kills, process
from tests.drivers.detection import (
    Agreement,
    CheckpointMark,
    Desired,
    DiskSample,
    ExitStatus,
    Finding,
    FindingKind,
    GpuSample,
    GpuState,
    Health,
    HostSample,
    InferenceSample,
    Learned,
    Liveness,
    LogMatch,
    LogRule,
    ProcessEnd,
    ProcessIdentity,
    ProcessRole,
    ProcessSample,
    ProgressSample,
    ProgressSource,
    Reading,
    SensorState,
    Snapshot,
    Supervision,
    TrainerSample,
    Verdict,
    advance,
    each_rule,
    initial,
    judging,
    knowing_only,
    memory_of_this_start,
    observed,
    survives_being_kept,
    unobserved,
)

pytestmark = pytest.mark.slow

RULES = (LogRule("engine-dead", "x", supports=("silent-death", "hang", "required-child-exited")),)
POLICIES = judging(gpu__inference=(0,), gpu__trainer=(1,), startup_patience=600.0, log_rules=RULES)
CHILDREN = {FindingKind.SILENT_DEATH, FindingKind.HANG, FindingKind.REQUIRED_CHILD_EXITED}
READS = ("gpus", "trainer", "inference", "progress")
UNSEEN = (SensorState.BLIND, SensorState.DENIED, SensorState.ABSENT, SensorState.PENDING)

SOURCE = {"gpu memory": "gpus", "gpu utilisation": "gpus", "engine process": "trainer", "health": "inference",
          "liveness": "inference", "generation tokens": "inference", "steps": "progress"}  # fmt: skip
"""Which reading a second signal comes from; a CUDA context from the trainer's."""


@st.composite
def segments(draw: st.DrawFn) -> dict[str, object]:
    """A stretch of time in which some things are wrong, or cannot be seen."""
    return {
        "seconds": draw(st.sampled_from([4.0, 10.0, 30.0, 200.0, 2000.0])),
        "memory": draw(st.sampled_from([60 * GIB, 60 * GIB, 300 << 20, None])),
        "engine": draw(st.booleans()),
        "cuda": draw(st.sampled_from([True, True, None])),
        "health": draw(st.sampled_from(list(Health))),
        "liveness": draw(st.sampled_from([None, *Liveness])),
        "asleep": draw(st.sampled_from([None, None, None, True])),
        "use": draw(st.sampled_from([0.0, 80.0, None])),
        "running": draw(st.sampled_from([0.0, 4.0, None])),
        "generating": draw(st.booleans()),
        "stepping": draw(st.booleans()),
        "saving": draw(st.booleans()),
        "gone": draw(st.sampled_from([None, None, *ProcessRole])),
        "log": draw(st.booleans()),
        "unseen": draw(st.dictionaries(st.sampled_from(READS), st.sampled_from(UNSEEN), max_size=4)),
        "desired": draw(st.sampled_from([Desired.RUNNING] * 4 + [Desired.STOPPED])),
    }


@cache
def warmed_up(known: bool) -> World:
    world = World(POLICIES)
    world.inference[URL] = replace(world.inference[URL], liveness=Liveness.OK)
    if not known:
        world.readings = {"inference": unobserved(SensorState.BLIND, 0.0, "not yet")}
        world.engines = []
    world.quiet(60)
    return world


def healthy_world(*, known: bool = True) -> World:
    """After a minute; ``known`` is whether servers and engine processes could be seen in it."""
    old = warmed_up(known)
    world = World(POLICIES, now=old.now, step=old.step, step_at=old.step_at, inference=dict(old.inference))
    world.state = old.state
    return world


def live(world: World, segment: dict[str, object]) -> None:
    """Change the world as the segment says."""
    world.memory = {0: segment["memory"], 1: 70 * GIB}  # type: ignore[dict-item]
    world.engines = [process(12, ProcessRole.ENGINE, (0,), cuda=segment["cuda"])] if segment["engine"] else []  # type: ignore[arg-type]
    world.use = {0: segment["use"], 1: segment["use"]}  # type: ignore[dict-item]
    sample = world.inference[URL]
    world.inference[URL] = replace(
        sample,
        health=segment["health"], liveness=segment["liveness"], asleep=segment["asleep"],  # type: ignore[arg-type]
        requests_running=segment["running"],
    )  # fmt: skip
    world.generating, world.stepping, world.saving = (bool(segment[k]) for k in ("generating", "stepping", "saving"))
    role = segment["gone"]
    if isinstance(role, ProcessRole):
        world.trainer = {"ends": (ProcessEnd(process(70, role).identity, role, ExitStatus(0), world.now),)}
        if role in (ProcessRole.ORCHESTRATOR, ProcessRole.TRAINER):
            world.others = [p for p in world.others if p.role is not role]
    world.logs = (LogMatch("engine-dead", "inference", 5, world.now, world.now, "x"),) if segment["log"] else ()
    world.poll = 2.0 if float(segment["seconds"]) <= 30 else 10.0  # type: ignore[arg-type]
    unseen: dict[str, SensorState] = segment["unseen"]  # type: ignore[assignment]
    world.readings = {name: unobserved(state, world.now, "cannot be seen") for name, state in unseen.items()}


def check_verdict(finding: Finding, snapshot: Snapshot, armed: Learned) -> None:
    """A verdict that kills rests on two signals, the second of them no log rule, read, and healthy before."""
    first, *second = finding.evidence
    assert first.agreement is Agreement.AGREES
    assert first.window_seconds > 0
    for evidence in finding.evidence:
        assert evidence.signal
        assert evidence.value
        assert evidence.window_seconds >= 0
        assert math.isfinite(evidence.window_seconds)
    agreeing = [e for e in second if e.agreement is Agreement.AGREES and not e.signal.startswith("log: ")]
    counted = []
    for evidence in agreeing:
        reading: Reading[object] = getattr(snapshot, SOURCE.get(evidence.signal, "trainer"))
        assert reading.ok, f"{evidence} from a reading that is {reading.state}"
        counted.append(evidence.signal)
        seen = armed.seen
        match evidence.signal:
            case "health":
                ended = finding.kind is FindingKind.REQUIRED_CHILD_EXITED
                assert ended or any(name.startswith("health:") for name in seen)
            case "liveness":
                assert any(name.startswith("liveness:") for name in seen)
            case "generation tokens":
                assert any(name.startswith("tokens:") for name in seen)
            case "gpu memory":
                assert "gpu0" in seen
            case "gpu utilisation":
                assert armed.utilization_works
            case "steps":
                assert "progress" in seen
            case "engine process":
                assert "engine" in seen
            case "out of memory":
                counted.pop()
            case name:
                assert name == "CUDA context on gpu0"
                assert "cuda0" in seen
    assert counted, "a verdict without a second signal"
    if finding.kind is FindingKind.SILENT_DEATH and finding.subject == "gpu0":
        assert "gpu0" in armed.seen


@settings(deadline=None, max_examples=80)
@given(st.lists(segments(), min_size=1, max_size=5), st.booleans())
def test_a_verdict_names_two_signals_that_were_seen_and_armed(night: list[dict[str, object]], known: bool) -> None:
    world = healthy_world(known=known)
    for segment in night:
        live(world, segment)
        end = world.now + float(segment["seconds"])  # type: ignore[arg-type]
        while world.now < end:
            armed = world.state.learned
            snapshot = replace(world.snapshot(), desired=segment["desired"])  # type: ignore[arg-type]
            world.state, findings = advance(world.state, snapshot, POLICIES)
            acting = [f for f in findings if f.verdict is not Verdict.NONE]
            if segment["desired"] is Desired.STOPPED:
                assert not acting
            for finding in acting:
                assert finding.kind in CHILDREN
                check_verdict(finding, snapshot, armed)
                assert finding.since <= snapshot.at
            world.now += world.poll


@settings(deadline=None, max_examples=20)
@given(segments(), st.dictionaries(st.sampled_from(["inference", "progress"]), st.sampled_from(UNSEEN), min_size=2))
def test_silence_and_log_rules_agree_with_nothing(segment: dict[str, object], unseen: dict[str, SensorState]) -> None:
    """Memory is gone, and the tree shows an engine that lives; nothing else can be seen, and a rule matched in the
    logs: never a verdict."""
    world = healthy_world()
    quiet = {"memory": 300 << 20, "engine": True, "gone": None, "unseen": unseen, "log": True, "asleep": None}
    live(world, segment | quiet)
    if segment["use"] is not None:
        world.use = {0: 50.0, 1: 50.0}
    world.poll = 15.0
    world.quiet(2400)
    assert FindingKind.SILENT_DEATH in world.kinds()


@settings(deadline=None, max_examples=20)
@given(segments(), st.sampled_from([Health.REFUSED, Health.UNHEALTHY]))
def test_what_never_was_healthy_agrees_with_nothing(segment: dict[str, object], health: Health) -> None:
    """A server that never answered, an engine never recognised: empty memory stays unconfirmed while steps are made."""
    world = healthy_world(known=False)
    sick = {"memory": 300 << 20, "engine": False, "gone": None, "unseen": {}, "asleep": None, "stepping": True}
    live(world, segment | sick | {"health": health, "liveness": Liveness.UNRESPONSIVE})
    world.quiet(600)


@settings(deadline=None, max_examples=20)
@given(segments(), st.sampled_from(UNSEEN))
def test_a_tree_that_cannot_be_seen_is_never_killed(segment: dict[str, object], state: SensorState) -> None:
    world = healthy_world()
    live(world, segment | {"unseen": {"trainer": state}})
    for findings in world.turns(300):
        assert not [f for f in findings if f.verdict is not Verdict.NONE]


@settings(deadline=None, max_examples=20)
@given(st.lists(segments(), min_size=1, max_size=3))
def test_another_start_wipes_everything_but_what_was_learned(night: list[dict[str, object]]) -> None:
    world = healthy_world()
    for segment in night:
        live(world, segment | {"seconds": min(200.0, float(segment["seconds"]))})  # type: ignore[arg-type]
        world.run(float(min(200.0, segment["seconds"])))  # type: ignore[type-var, arg-type]
    live(world, night[-1] | {"unseen": {}, "gone": None})
    world.start_id, world.trainer = "s2", {"started_at": world.now}
    snapshot = world.snapshot()
    after, findings = advance(world.state, snapshot, POLICIES)
    fresh, same = advance(knowing_only(world.state.learned), snapshot, POLICIES)
    assert memory_of_this_start(after) == memory_of_this_start(fresh)
    assert after.learned.gpu_baseline_bytes == world.state.learned.gpu_baseline_bytes
    assert not [name for name in after.learned.seen if name.startswith(("gpu", "tokens"))]
    assert not kills(findings)
    assert not kills(same)


# --- whatever a look may hold -----------------------------------------------------------------------------------------

numbers = st.floats(-1e9, 1e12)
times = st.floats(0, 1e6)
small = st.integers(0, 3)
identities = st.builds(ProcessIdentity, st.integers(1, 99), st.integers(1, 99))
statuses = st.builds(ExitStatus, st.none() | st.integers(0, 255), st.none() | st.integers(1, 64))
processes = st.builds(
    ProcessSample, identities, st.integers(1, 99), st.text(max_size=8), st.text(max_size=40),
    st.sampled_from(ProcessRole), st.sampled_from("SRDZ"), st.none() | st.booleans(), st.frozensets(small),
)  # fmt: skip
gpus = st.builds(
    GpuSample, small, st.text(max_size=4), st.text(max_size=4), st.sampled_from(GpuState),
    st.none() | st.integers(0, 1 << 40), st.none() | st.integers(0, 1 << 40), st.none() | numbers,
    mig=st.booleans(), throttled=st.just(("hw-thermal",)) | st.just(()),
)  # fmt: skip
ends = st.builds(ProcessEnd, identities, st.sampled_from(ProcessRole), statuses, times)
trainers = st.builds(
    TrainerSample, st.sampled_from(["", "a", "b"]), st.sampled_from(Supervision), st.booleans(), st.none() | times,
    st.none() | identities, st.none() | statuses, st.lists(processes, max_size=5).map(tuple),
    st.booleans(), st.frozensets(st.sampled_from(ProcessRole)), ends=st.lists(ends, max_size=3).map(tuple),
)  # fmt: skip
servers = st.builds(
    InferenceSample, st.sampled_from([URL, "x", ""]), st.sampled_from(Health), st.none() | small,
    st.none() | numbers, st.none() | numbers, st.none() | numbers, st.none() | st.sampled_from(Liveness),
    st.none() | st.booleans(), st.booleans(),
)  # fmt: skip
samples = st.builds(
    ProgressSample, st.sampled_from(ProgressSource), st.sampled_from(["trainer", "orchestrator", "x"]), times,
    st.none() | st.integers(0, 100),
)  # fmt: skip
hosts = st.builds(
    HostSample, st.integers(1, 1 << 40), st.integers(0, 1 << 40), oom_kills=st.none() | small,
    cgroup_limit_bytes=st.none() | st.integers(0, 1 << 40),
    cgroup_used_bytes=st.none() | st.integers(0, 1 << 40), shm_total_bytes=st.none() | small,
    shm_used_bytes=st.none() | small,
)  # fmt: skip
matches = st.builds(LogMatch, st.sampled_from(["engine-dead", "x"]), st.text(max_size=4), small, times, times)
disks = st.builds(DiskSample, st.just("/"), *[st.integers(0, 1 << 40)] * 5)


def readings(values: st.SearchStrategy[object]) -> st.SearchStrategy[Reading[object]]:
    return st.builds(observed, values, times) | st.builds(
        unobserved, st.sampled_from(UNSEEN), times, st.text(max_size=8)
    )


looks = st.builds(
    Snapshot,
    times,
    times,
    readings(st.lists(gpus, max_size=4).map(tuple)),
    readings(trainers),
    readings(disks),
    readings(st.lists(servers, max_size=3).map(tuple)),
    readings(st.lists(samples, max_size=4).map(tuple)),
    st.booleans(),
    st.sampled_from(Desired),
    readings(hosts),
    readings(st.lists(matches, max_size=2).map(tuple)),
    checkpoint=st.builds(CheckpointMark, st.none() | small, st.none() | times),
    disks=readings(st.lists(disks, max_size=2).map(tuple)),
    boot_at=st.none() | times,
)


@settings(deadline=None, max_examples=50)
@given(st.lists(looks, min_size=1, max_size=6), st.booleans())
def test_every_detector_is_total(night: list[Snapshot], shared: bool) -> None:
    """Out of order, contradictory, empty: an answer all the same, and a state that can be told and kept."""
    policies = judging(POLICIES, gpu__inference=(0, 1), gpu__trainer=(1,) if shared else (), max_steps=50)
    state = initial(policies)
    for snapshot in night:
        for rule in each_rule(state, snapshot, policies):
            assert all(kind in rule.kinds for kind in rule.raised)
            assert all(isinstance(name, str) for name in rule.armed)
        state, findings = advance(state, snapshot, policies)
        assert not [f for f in findings if f.subject.startswith("detector-")]
        assert survives_being_kept(state.learned)
        assert state.armed is not None


def test_the_strategy_covers_every_field_of_a_look() -> None:
    """A new field has to be added above, or its detectors are not put to the test."""
    covered = {"at", "wall", "gpus", "trainer", "disk", "inference", "progress", "saving", "desired", "host", "logs",
               "training", "checkpoint", "disks", "boot_at"}  # fmt: skip
    assert {f.name for f in fields(Snapshot)} == covered
