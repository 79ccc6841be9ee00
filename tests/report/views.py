"""Views of a daemon in the states an operator may meet at 4 a.m.

Every finding in them is made by the code that makes it on a pod: no screen shows a text of an older podwatch."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from podwatch.app.backup_findings import backup_findings
from podwatch.config.settings import Settings
from podwatch.detection.learned import Learned
from podwatch.detection.merge import Healing, fold
from podwatch.detection.rules import advance, initial
from podwatch.domain.checkpoint import CheckpointSet, Completeness, PartState
from podwatch.domain.event import Incident
from podwatch.domain.facts import Facts, StoreFacts
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.domain.nodes import NodeView
from podwatch.domain.process import ExitStatus, ProcessIdentity, ProcessRole, ProcessSample
from podwatch.domain.run_state import RunState
from podwatch.domain.snapshot import (
    Desired,
    DiskSample,
    GpuSample,
    GpuState,
    Health,
    InferenceSample,
    ProgressSample,
    ProgressSource,
    Reading,
    SensorState,
    Snapshot,
    Supervision,
    TrainerSample,
    observed,
    unobserved,
)
from podwatch.domain.status_document import Capabilities, RecoveryView, Status
from podwatch.domain.stored_checkpoint import StoredCheckpoint
from podwatch.journal.bundle import plain
from podwatch.recovery.failure import given_up
from podwatch.recovery.restart_budget import Decision, Failure, RestartHistory, after_failure
from podwatch.report.daemon_view import Counters, DaemonView
from podwatch.report.rows import worded
from podwatch.report.run_cost import Account, Price, Spent, account
from tests.detection.looks import world
from tests.drivers.detection import judging

GB = 10**9
GIB = 1 << 30
NOW = 10_000.0
WALL = 1_769_832_000.0  # 2026-01-31T04:00:00Z
LAUNCHER = ProcessIdentity(4242, 777, "boot", 1)


def spent(*, failures: int = 1, target: int | None = 200, price: Price | None = None) -> Account:
    """Three and a half hours. Each failure took 20 minutes and five steps of 82 s."""
    incidents = [
        Incident(n, "silent-death", WALL - 5000, "", closed_wall=WALL - 3800, resumed_step=80, lost_steps=5)
        for n in range(1, failures + 1)
    ]
    known = Spent(WALL - 12_600, 12_600.0, step_seconds=82.0)
    left = None if target is None else target - 85
    return account(known, incidents, WALL, price=price or Price(4.2, "EUR"), median=80.0, left=left)


def checkpoint(step: int, *, age: float = 60.0, complete: bool = True) -> CheckpointSet:
    part = PartState("trainer", f"/app/outputs/checkpoints/step_{step}/trainer", True, complete, 31 * GB)
    return CheckpointSet(
        step=step,
        layout="prime-rl",
        completeness=Completeness.COMPLETE if complete else Completeness.INCOMPLETE,
        parts=(part,),
        size_bytes=47 * GB,
        file_count=12,
        changed_wall=WALL - age,
        save_id=f"s{step}" if complete else "",
        reason="" if complete else "no .metadata",
    )


def trainer(*, alive: bool = True, started_ago: float = 11_520.0, exit_code: int | None = None) -> TrainerSample:
    processes = tuple(
        ProcessSample(ProcessIdentity(4242 + n, 777 + n), 1, "python", "python", ProcessRole.OTHER) for n in range(14)
    )
    return TrainerSample(
        start_id="a",
        supervision=Supervision.SUPERVISED,
        alive=alive,
        started_at=NOW - started_ago,
        launcher=LAUNCHER,
        exit=None if exit_code is None else ExitStatus(code=exit_code, at_wall=WALL - 42),
        descendants=processes if alive else (),
    )


def gpu(index: int, used: int, *, busy: float = 97.0, state: GpuState = GpuState.OK, detail: str = "") -> GpuSample:
    return GpuSample(index, f"GPU-{index:08d}", "NVIDIA H100", state, used, 80 * GIB, busy, 61.0, detail)


def changed(
    view: DaemonView,
    *,
    snapshot: Snapshot | None = None,
    checkpoints: tuple[CheckpointSet, ...] | None = None,
    pins: Mapping[int, str] | None = None,
    desired: Desired | None = None,
    **others: Any,
) -> DaemonView:
    """``view`` with other facts, and other fields of its own."""
    facts = view.facts
    if desired is not None:
        facts = replace(facts, run=replace(facts.run, desired=desired))
    given = {"pod": snapshot, "checkpoints": checkpoints, "pins": pins}
    facts = replace(facts, **{name: value for name, value in given.items() if value is not None})
    return replace(view, facts=facts, **others)


def healthy() -> DaemonView:
    """Step 85, all fine, backed up."""
    snapshot = Snapshot(
        at=NOW,
        wall=WALL,
        gpus=observed((gpu(0, 71 * GIB), gpu(1, 64 * GIB)), NOW),
        trainer=observed(trainer(), NOW),
        disk=observed(DiskSample("/app/outputs", 250 * GB, 140 * GB, 110 * GB, 1_000_000, 900_000), NOW),
        disks=observed((DiskSample("/tmp", 20 * GB, 17 * GB, 3 * GB, 1_000, 900, "temp", 7),), NOW),
        inference=observed((InferenceSample("http://127.0.0.1:8000", Health.OK, 200, 3.0, 1e6),), NOW),
        progress=observed(
            (
                ProgressSample(ProgressSource.STEP_LINE, "trainer", NOW - 18, 85),
                ProgressSample(ProgressSource.HEARTBEAT, "trainer", NOW - 3),
            ),
            NOW,
        ),
    )
    seeing = Reading(SensorState.OK, NOW - 1.2)
    return DaemonView(
        version="0.1.0",
        run_id="bs4-qwen3-8b",
        facts=Facts(
            snapshot,
            RunState("bs4-qwen3-8b"),
            checkpoints=(checkpoint(80, age=1260), checkpoint(85)),
            pins={80: "before the change"},
        ),
        now=NOW,
        now_wall=WALL,
        started_wall=WALL - 12_000,
        pid=99,
        opening="adopted the running trainer at step 40",
        sensors={"gpu": seeing, "trainer": seeing, "disk": seeing, "inference": seeing, "progress": seeing},
        sync=StoreFacts(
            store_url="b2://beautifulsoup-rl",
            ok=True,
            last_step=80,
            last_published_wall=WALL - 840,
            uploading_step=85,
            uploaded_bytes=12 * GB,
            total_bytes=47 * GB,
            upload_rate=15e6,
            checkpoints=(StoredCheckpoint(80, "s80", here="s80"),),
            listed=True,
        ),
        learned=Learned(gpu_baseline_bytes=((0, 71 * GIB),), step_seconds=(240.0,), startups=(900.0,)),
        counters=Counters(
            turns=6000, restarts=1, published=16, incidents={"silent-death": 1}, events={"published": 16}
        ),
        next_save_bytes=52 * GB,
        steps_at_risk=0,
        account=spent(),
        target_step=200,
        armed=("silent-death", "hang"),
        second_signals=("cuda context", "health"),
        inference_gpus=(0,),
        trainer_gpus=(1,),
        http_url="http://127.0.0.1:9477",
        config_path="/etc/podwatch/podwatch.toml",
        output_dir="/app/outputs",
        layout="prime-rl",
        layout_because="the command runs rl",
        capabilities=Capabilities("ext4", slow=False, inotify=True),
        log_path="/var/lib/podwatch/bs4-qwen3-8b/trainer.log",
    )


@cache
def death() -> Finding:
    """What the detector reports 14 s after the engine on GPU 0 was killed."""
    pod = world(gpu__trainer=(1,))
    pod.memory[0] = 71 * GIB
    pod.quiet(60)
    (url,) = pod.inference
    pod.memory[0], pod.engines, pod.stepping, pod.generating = 0, [], False, False
    pod.inference[url] = InferenceSample(url, Health.REFUSED)
    return replace(pod.until_verdict(60)[0], since=NOW - 14)


@cache
def crash(*, steps: bool = True) -> Finding:
    """What the detector reports when the launcher ended with code 1, 42 s ago: at step 88, or before its first step."""
    pod = world(gpu__trainer=(1,))
    pod.step = 86
    pod.readings = {} if steps else {"progress": observed((), 0.0)}
    pod.quiet(60)
    pod.stepping, pod.engines, pod.servers, pod.inference = False, [], [], {}
    pod.trainer = {"alive": False, "exit": ExitStatus(code=1, at_wall=pod.now), "descendants": ()}
    return replace(pod.until_verdict(60)[0], since=NOW - 42)


def incident(*, resolved: bool, cause: Finding | None = None) -> Incident:
    """The incident of ``cause`` (a silent death): 46 minutes old if it is resolved, else as old as the cause."""
    cause = cause or death()
    return Incident(
        id=1,
        kind=str(cause.kind),
        opened_wall=WALL - 2800 if resolved else WALL - (NOW - cause.since),
        summary=cause.summary,
        evidence=json.dumps(plain(cause.evidence)),
        closed_wall=WALL - 2400 if resolved else None,
        resolution="restarted from step 80" if resolved else "",
        resumed_step=80 if resolved else None,
        lost_steps=3 if resolved else None,
    )


def down(*, ended: bool, made_steps: bool = True) -> DaemonView:
    """Training is down, three steps after its newest checkpoint: its engine is dead, or (``ended``) all of it.
    ``made_steps``: the last start made steps."""
    view = healthy()
    sample = trainer(alive=False, exit_code=1) if ended else trainer()
    held = 0 if ended else 64 * GIB
    progress = (ProgressSample(ProgressSource.STEP_LINE, "trainer", NOW - 130, 88),) if made_steps else ()
    snapshot = replace(
        view.facts.pod,
        trainer=observed(sample, NOW),
        gpus=observed((gpu(0, 0, busy=0.0), gpu(1, held, busy=0.0)), NOW),
        inference=observed((InferenceSample("http://127.0.0.1:8000", Health.REFUSED),), NOW),
        progress=observed(progress, NOW),
    )
    return changed(
        view,
        snapshot=snapshot,
        checkpoints=(checkpoint(80, age=2060), checkpoint(85, age=860)),
        steps_at_risk=3 if made_steps else None,
    )


def dead_recovering() -> DaemonView:
    """The engine died silently; podwatch is stopping the tree."""
    healing = Healing(
        death(), step=85, lost_steps=3, lost_seconds=730.0, launcher="prime-rl", down_seconds=NOW - death().since
    )
    return replace(
        down(ended=False),
        findings=fold((death(),), healing),
        recovery=RecoveryView(
            phase="stopping", active=True, detail="SIGTERM sent 6 s ago", resumed_step=85, attempts=1
        ),
        incident=incident(resolved=False),
    )


def after_recovery() -> DaemonView:
    """The screen of the README: a death at step 83, 46 min ago. A step takes 8 min, so that its figures add up."""
    recovery = RecoveryView(
        phase="running",
        detail="the start is confirmed at step 81 (resumed from step 80)",
        resumed_step=80,
        confirmed=True,
    )
    view, pace = healthy(), 480.0
    known = Spent(WALL - 12_600, 12_600.0, step_seconds=pace)
    snapshot = replace(
        view.facts.pod,
        trainer=observed(trainer(started_ago=2_700.0), NOW),
        progress=observed((ProgressSample(ProgressSource.STEP_LINE, "trainer", NOW - 500, 85),), NOW),
    )
    sync = replace(view.sync, last_published_wall=WALL - 2_500, upload_rate=28e6)
    return changed(
        view,
        snapshot=snapshot,
        sync=sync,
        learned=replace(view.learned, step_seconds=(pace,), startups=(300.0,)),
        checkpoints=(checkpoint(80, age=4_190), checkpoint(85, age=460)),
        account=account(
            known, [incident(resolved=True)], WALL, price=Price(4.2, "EUR"), median=0.95 * pace, left=200 - 85
        ),
        recovery=recovery,
        incident=incident(resolved=True),
    )


def failures(count: int, *, apart: float) -> Decision:
    """What podwatch decides after so many crashes of a command that worked before."""
    settings = Settings.model_validate({"run_id": "r", "trainer": {"output_dir": "/out"}})
    history = RestartHistory(ever_worked=True)
    for number in range(count):
        failure = Failure(FindingKind.TRAINER_EXITED, number * apart, loaded=False, made_step=False, resumed_from=85)
        decision = after_failure(history, failure, settings, 0.5)
        history = decision.history
    return decision


def waiting() -> DaemonView:
    """Down, backing off until the next try."""
    healing = Healing(crash(), step=85, lost_steps=3, retry_seconds=80, down_seconds=NOW - crash().since)
    return replace(
        down(ended=True),
        findings=fold((), healing),
        recovery=RecoveryView(
            phase="backoff",
            waiting=True,
            attempts=3,
            next_try_at=WALL + 80,
            detail=failures(3, apart=300).reason,
        ),
        incident=incident(resolved=False, cause=crash()),
    )


def gave_up() -> DaemonView:
    """Five starts in a row crashed before their first step; the store has everything."""
    view, cause = down(ended=True, made_steps=False), crash(steps=False)
    decision = failures(5, apart=1950)
    assert decision.history.gave_up
    summary, fix = given_up(decision.reason, ())
    finding = Finding(FindingKind.GAVE_UP, Severity.CRITICAL, summary, NOW - 42, fix)
    stored = tuple(StoredCheckpoint(step, f"s{step}", here=f"s{step}") for step in (80, 85))
    return changed(
        view,
        findings=fold((finding,), Healing(cause, step=85, gave_up=True, down_seconds=42.0)),
        recovery=RecoveryView(
            phase="gave-up",
            gave_up=True,
            attempts=decision.history.streak_count,
            next_try_at=WALL + decision.delay_seconds - 42,
            detail=decision.reason,
        ),
        checkpoints=(checkpoint(80, age=10_500), checkpoint(85, age=9300)),
        sync=StoreFacts(
            store_url=view.sync.store_url,
            ok=True,
            last_step=85,
            last_published_wall=WALL - 6100,
            checkpoints=stored,
            listed=True,
        ),
        incident=incident(resolved=False, cause=cause),
    )


def not_backed_up() -> DaemonView:
    view = healthy()
    checkpoints = (checkpoint(80, age=1260), checkpoint(85), checkpoint(83, complete=False))
    findings = backup_findings(None, checkpoints, now=NOW, wall=WALL, max_lag=3600.0, since=NOW - 9000)
    return changed(view, sync=StoreFacts(), findings=findings, checkpoints=checkpoints)


def blind() -> DaemonView:
    """NVML hangs and the process table cannot be read."""
    view = healthy()
    snapshot = replace(
        view.facts.pod,
        gpus=unobserved(SensorState.BLIND, NOW - 60, "NVML has not answered for 60 s"),
        trainer=unobserved(SensorState.BLIND, NOW - 60, "/proc cannot be read"),
    )
    sensors = {
        **view.sensors,
        "gpu": unobserved(SensorState.BLIND, NOW - 60, "NVML has not answered for 60 s"),
        "trainer": unobserved(SensorState.BLIND, NOW - 60, "/proc cannot be read"),
    }
    policies = judging(gpu__inference=(0,), gpu__trainer=(1,))
    _, findings = advance(initial(policies), snapshot, policies)
    return changed(view, snapshot=snapshot, sensors=sensors, findings=findings)


def stopped() -> DaemonView:
    view = down(ended=True)
    snapshot = replace(view.facts.pod, trainer=observed(trainer(alive=False), NOW))
    return changed(view, snapshot=snapshot, desired=Desired.STOPPED)


def evaluating() -> DaemonView:
    """Training is stopped for an evaluation, which holds its GPUs."""
    view = healthy()
    snapshot = replace(
        view.facts.pod,
        trainer=observed(trainer(alive=False), NOW),
        inference=observed((), NOW),
    )
    recovery = RecoveryView(
        phase="evaluating", evaluating=True, detail="training is stopped to evaluate step 85", resumed_step=85
    )
    return changed(view, snapshot=snapshot, recovery=recovery)


def gang(*, ended: bool = False) -> DaemonView:
    """Rank 0 of a run over three nodes, of which the last has not reported. ``ended``: node 1 failed, and all end."""
    here = NodeView(0, "gpu-0.cluster", "stopping" if ended else "running", 85, 0.4, here=True)
    other = NodeView(1, "gpu-1.cluster", "gave-up" if ended else "running", 84, 34.0, reason=ended)
    last = (NodeView(2, "gpu-2.cluster", "running", None, 0.9),) if ended else ()
    return replace(down(ended=True) if ended else healthy(), nodes=(here, other, *last), node_count=3)


ALL = {
    "running": healthy,
    "after-recovery": after_recovery,
    "dead-recovering": dead_recovering,
    "waiting": waiting,
    "gave-up": gave_up,
    "not-backed-up": not_backed_up,
    "blind": blind,
    "stopped": stopped,
    "evaluating": evaluating,
    "nodes": gang,
    "nodes-ended": lambda: gang(ended=True),
}


def reworded(document: dict[str, Any]) -> dict[str, Any]:
    """A changed status document, worded again as the daemon does."""
    return worded(Status.from_json(document)).to_json()


def facts(document: dict[str, Any]) -> dict[str, str]:
    """The text of each row, by label."""
    return {row["label"]: row["text"] for row in document["rows"]}
