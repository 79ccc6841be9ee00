"""The numbers judgement works with. Built from the settings in daemon/; each default carries its reason.

All times are seconds, all sizes bytes, all ratios 0 to 1.
"""

from dataclasses import dataclass, field

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class DetectionPolicy:
    """Thresholds of the detectors (DESIGN sections 3 and 7)."""

    inference_gpus: tuple[int, ...] = ()
    """NVML indices that hold the inference engine; empty turns the silent-death detector off."""
    shared_gpus: tuple[int, ...] = ()
    """Of those, the ones that also hold a trainer: a death is a drop of the inference share there, not to zero."""
    trainer_gpus: tuple[int, ...] = ()
    """NVML indices that hold the trainer; with the inference GPUs they are the run's own."""
    required_roles: tuple[str, ...] = ("inference", "engine", "orchestrator", "trainer")
    """prime-rl's launcher ignores each of these when it ends with code 0 (facts/prime-rl.md section 4)."""
    memory_floor_bytes: int = GIB
    """A bare CUDA context and a driver take 0.3-0.7 GiB; a loaded model takes far more."""
    baseline_min_bytes: int = 2 * GIB
    """Below this nothing was ever loaded, so nothing can have died."""
    hold_seconds: float = 8.0
    """Four polls of 2 s: longer than any observed blink while weights are swapped, short against 15 s to a verdict."""
    hang_floor_seconds: float = 25 * 60.0
    """prime-rl waits up to 2 x 720 s for a weight update without a sign of life (facts/prime-rl.md section 4)."""
    hang_k: float = 6.0
    """A step five times slower than the median is slow, not hung."""
    hang_agree_seconds: float = 600.0
    """GPUs idle, or tokens flat, without a break for this long: above the waits inside one healthy step."""
    no_step_confirm_floor_seconds: float = 600.0
    no_step_confirm_k: float = 3.0
    idle_utilization_percent: float = 5.0
    startup_patience_seconds: float = 70 * 60.0
    """VLLM_ENGINE_READY_TIMEOUT_S is 4200 s at prime-rl's HEAD."""
    blind_after_seconds: float = 30.0
    max_steps: int | None = None
    finish_linger_seconds: float = 15 * 60.0
    memory_may_fall: bool = False
    """The engine is put to sleep between phases, by configuration: empty memory is then no death."""
    sleep_auto: bool = True
    """Also take it for so when the engine was started with ``--enable-sleep-mode`` or ``/is_sleeping`` has said yes."""
    startup_k: float = 3.0
    """Start-up may take this many times the longest that was seen: a cold cache after a warm one costs two to three
    times as much (vllm #52682: 3.2 min warm, 5.8-7.5 min cold)."""


@dataclass(frozen=True, slots=True)
class ResourcePolicy:
    """When the machine's own limits are worth a warning. Ratios are used / limit, 0 to 1."""

    files_above: float = 0.8
    memory_above: float = 0.95
    shm_above: float = 0.9
    swap_growth_bytes: int = GIB
    """Swap used this much above what it was when training started."""
    checkpoint_overdue_k: float = 3.0
    """No save for this many times the learned interval between saves."""
    checkpoint_overdue_floor_seconds: float = 3600.0
    save_interval_steps: int | None = None
    """Steps from one save to the next as the command configures them; None where it does not say."""
    throttled_seconds: float = 300.0


@dataclass(frozen=True, slots=True)
class LogRule:
    """A pattern worth knowing in the trainer's logs. ``count`` hits within ``within_seconds`` raise it. It supports a
    verdict of the detectors named in ``supports``; it never kills alone."""

    name: str
    pattern: str
    count: int = 1
    within_seconds: float = 600.0
    critical: bool = False
    says: str = ""
    fix: str = ""
    supports: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainingPolicy:
    """Health of the training itself, from the user's notes. ``stop`` makes a confirmed one stop training cleanly after
    the next save; else they only warn. None switches a rule off."""

    stop: bool = False
    plateau_steps: int | None = 200
    """RL rewards move slowly: fewer steps call every plateau of a healthy run an end."""
    plateau_stop_steps: int = 300
    """Steps without improvement before ``stop`` acts on a plateau."""
    plateau_change: float = 0.01
    entropy_below: float | None = 0.05
    kl_above: float | None = 0.5
    grad_norm_above: float | None = 5.0
    steps: int = 5
    """So many steps in a row: one odd batch is not a sick run."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When to try again, when to step back, when to give up (DESIGN sections 4 and 7)."""

    budget_restarts: int = 5
    budget_seconds: float = 2 * 3600.0
    """Giving up needs both the count and the time exhausted (facts/peers.md, bottom line 5)."""
    never_worked_tries: int = 2
    resume_attempts: int = 2
    backoff_min_seconds: float = 10.0
    backoff_max_seconds: float = 600.0
    calm_seconds: float = 30 * 60.0
    """After this long without a failure and with a new step, the counters start from zero."""
    retry_after_give_up_seconds: float = 3600.0
    """0 = never."""


@dataclass(frozen=True, slots=True)
class DiskPolicy:
    """When the disk is too full and how far to go down (DESIGN section 6)."""

    prune_above: float = 0.85
    prune_to: float = 0.75
    margin: float = 1.1
    inodes_below: float = 0.05
    """Act when less than this share of inodes is free."""
    lead_seconds: float = 300.0
    """What is not in the store goes only so long before the next save is due: until then its upload may still end.
    Five minutes are many rescans, and a quarter of the user's cadence."""
    react_seconds: float = 30.0
    """From the end of a save to room for another: a rescan (10 s), the settle time (5 s), the disk's answer (5 s), and
    as much again. Saves that come faster than this need room for several."""
    steps_in_use: int = 2
    """By-products of so many steps below the newest complete set stay: inference samples with a policy up to two
    steps behind the trainer (facts/prime-rl.md section 1), more where the trainer is configured so."""
    stop_when_full: bool = False
    """Stop training cleanly before a save that cannot fit, instead of letting it crash."""


@dataclass(frozen=True, slots=True)
class RemotePolicy:
    """Retention in the store."""

    keep_last: int = 3
    keep_every: int = 10
    """Every 10th save is a milestone and stays. 0 = no milestones."""
    superseded_grace_seconds: float = 6 * 3600.0
    """A restore may be under way from a set that has just been superseded."""
    max_lag_seconds: float = 2 * 3600.0


@dataclass(frozen=True, slots=True)
class Policies:
    detection: DetectionPolicy = field(default_factory=DetectionPolicy)
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    disk: DiskPolicy = field(default_factory=DiskPolicy)
    remote: RemotePolicy = field(default_factory=RemotePolicy)
    resources: ResourcePolicy = field(default_factory=ResourcePolicy)
    training: TrainingPolicy = field(default_factory=TrainingPolicy)
    log_rules: tuple[LogRule, ...] = ()
