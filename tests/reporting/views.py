"""Hand-built views of a daemon in the states a person may meet at 4 a.m."""

from dataclasses import replace

from podwatch.detection.learned import Learned
from podwatch.domain.checkpoint import CheckpointSet, Completeness, PartState
from podwatch.domain.event import Incident
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity, Verdict
from podwatch.domain.process import ExitStatus, ProcessIdentity, ProcessRole, ProcessSample
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
from podwatch.reporting.view import Counters, DaemonView, RecoveryView, SyncView

GB = 10**9
GIB = 1 << 30
NOW = 10_000.0
WALL = 1_769_832_000.0  # 2026-01-31T04:00:00Z
LAUNCHER = ProcessIdentity(4242, 777, "boot", 1)


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
        supervision=Supervision.KEEPER,
        alive=alive,
        started_at=NOW - started_ago,
        launcher=LAUNCHER,
        exit=None if exit_code is None else ExitStatus(code=exit_code, at_wall=WALL - 42),
        descendants=processes if alive else (),
    )


def gpu(index: int, used: int, *, busy: float = 97.0, state: GpuState = GpuState.OK, detail: str = "") -> GpuSample:
    return GpuSample(index, f"GPU-{index:08d}", "NVIDIA H100", state, used, 80 * GIB, busy, 61.0, detail)


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
        snapshot=snapshot,
        now=NOW,
        now_wall=WALL,
        started_wall=WALL - 12_000,
        pid=99,
        opening="adopted the running trainer at step 40",
        sensors={"gpu": seeing, "trainer": seeing, "disk": seeing, "inference": seeing, "progress": seeing},
        sync=SyncView(
            store_url="b2://beautifulsoup-rl",
            ok=True,
            last_step=80,
            last_published_wall=WALL - 840,
            uploading_step=85,
            uploaded_bytes=12 * GB,
            total_bytes=47 * GB,
            upload_rate=15e6,
            stored=frozenset({(80, "s80")}),
        ),
        learned=Learned(gpu_baseline_bytes=((0, 71 * GIB),), step_seconds=(240.0,), startups=(900.0,)),
        counters=Counters(
            turns=6000, restarts=1, published=16, incidents={"silent-death": 1}, events={"published": 16}
        ),
        checkpoints=(checkpoint(80, age=1260), checkpoint(85)),
        pins={80: "before the change"},
        next_save_bytes=52 * GB,
        steps_at_risk=0,
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
        capabilities={"filesystem": "ext4", "slow": False, "holes": True, "leases": None, "inotify": True},
        log_path="/var/lib/podwatch/bs4-qwen3-8b/trainer.log",
    )


def death() -> Finding:
    return Finding(
        kind=FindingKind.SILENT_DEATH,
        severity=Severity.CRITICAL,
        summary="GPU 0 held 71.0 GiB and holds 0.0 GiB",
        since=NOW - 14,
        suggestion="podwatch restarts training from the newest complete checkpoint",
        verdict=Verdict.RESTART,
        confirmed=True,
        evidence=(
            Evidence("gpu0 memory", "0.0 GiB", Agreement.AGREES, 8.0),
            Evidence("health", "refused", Agreement.AGREES, 6.0),
        ),
        subject="gpu0",
    )


def incident(*, resolved: bool) -> Incident:
    return Incident(
        id=1,
        kind="silent-death",
        opened_wall=WALL - 2800,
        summary="GPU 0 lost its memory",
        evidence='[{"signal": "health", "value": "refused", "agreement": "agrees", "window_seconds": 6.0}]',
        closed_wall=WALL - 2400 if resolved else None,
        resolution="restarted from step 80, confirmed at step 81" if resolved else "",
        resumed_step=80 if resolved else None,
        lost_steps=3 if resolved else None,
    )


def dead_recovering() -> DaemonView:
    """The engine died silently; podwatch is stopping the tree."""
    view = healthy()
    gpus = observed((gpu(0, 0, busy=0.0), gpu(1, 64 * GIB, busy=0.0)), NOW)
    inference = observed((InferenceSample("http://127.0.0.1:8000", Health.REFUSED),), NOW)
    return replace(
        view,
        snapshot=replace(view.snapshot, gpus=gpus, inference=inference),
        findings=(death(),),
        recovery=RecoveryView(
            phase="stopping", active=True, detail="SIGTERM sent 6 s ago", resumed_step=85, attempts=1
        ),
        incident=incident(resolved=False),
    )


def after_recovery() -> DaemonView:
    return replace(healthy(), incident=incident(resolved=True))


def waiting() -> DaemonView:
    """Down, backing off until the next try."""
    view = healthy()
    return replace(
        view,
        snapshot=replace(view.snapshot, trainer=observed(trainer(alive=False, exit_code=1), NOW)),
        recovery=RecoveryView(phase="backoff", waiting=True, attempts=3, next_try_wall=WALL + 80),
        incident=incident(resolved=False),
    )


def gave_up() -> DaemonView:
    view = healthy()
    return replace(
        view,
        snapshot=replace(view.snapshot, trainer=observed(trainer(alive=False, exit_code=1), NOW)),
        recovery=RecoveryView(
            phase="gave-up", gave_up=True, attempts=5, detail="5 restarts in 2 h 10 min without a step"
        ),
        incident=incident(resolved=False),
    )


def not_backed_up() -> DaemonView:
    finding = Finding(
        FindingKind.NOT_BACKED_UP,
        Severity.WARNING,
        "no store is configured: checkpoints exist on this pod only",
        NOW - 9000,
        "set [sync] store to b2://bucket",
    )
    view = healthy()
    checkpoints = (checkpoint(80, age=1260), checkpoint(85), checkpoint(83, complete=False))
    return replace(view, sync=SyncView(), findings=(finding,), checkpoints=checkpoints)


def blind() -> DaemonView:
    """NVML hangs and the process table cannot be read."""
    view = healthy()
    snapshot = replace(
        view.snapshot,
        gpus=unobserved(SensorState.BLIND, NOW - 60, "NVML has not answered for 60 s"),
        trainer=unobserved(SensorState.BLIND, NOW - 60, "/proc cannot be read"),
    )
    sensors = {
        **view.sensors,
        "gpu": unobserved(SensorState.BLIND, NOW - 60, "NVML has not answered for 60 s"),
        "trainer": unobserved(SensorState.BLIND, NOW - 60, "/proc cannot be read"),
    }
    return replace(view, snapshot=snapshot, sensors=sensors)


def stopped() -> DaemonView:
    view = healthy()
    snapshot = replace(view.snapshot, trainer=observed(trainer(alive=False), NOW))
    return replace(view, snapshot=snapshot, desired=Desired.STOPPED)


ALL = {
    "running": healthy,
    "after-recovery": after_recovery,
    "dead-recovering": dead_recovering,
    "waiting": waiting,
    "gave-up": gave_up,
    "not-backed-up": not_backed_up,
    "blind": blind,
    "stopped": stopped,
}
