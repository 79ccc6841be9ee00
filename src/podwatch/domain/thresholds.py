"""Thresholds of the judgement. Built from the settings in daemon/; each default has its reason beside it.

All times are seconds, all sizes bytes, all ratios 0 to 1.
"""

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class DetectionPolicy:
    """Thresholds of the detectors (docs/detection.md)."""

    inference_gpus: tuple[int, ...] = ()
    """NVML indices that hold the inference engine; empty turns the silent-death detector off."""
    shared_gpus: tuple[int, ...] = ()
    """Those of them that also hold a trainer: there, a death is a fall by the engine's share, not to zero."""
    trainer_gpus: tuple[int, ...] = ()
    """NVML indices that hold the trainer; with the inference GPUs they are the run's own."""
    required_roles: tuple[str, ...] = ("inference", "engine", "orchestrator", "trainer")
    """prime-rl's launcher ignores each of these when it ends with code 0."""
    memory_floor_bytes: int = GIB
    """A bare CUDA context and a driver take 0.3-0.7 GiB; a loaded model takes far more."""
    baseline_min_bytes: int = 2 * GIB
    """Below this, no model was loaded."""
    hold_seconds: float = 8.0
    """Four polls of 2 s: longer than any observed dip during a weight swap, and short enough for a verdict in 15 s."""
    hang_floor_seconds: float = 25 * 60.0
    """prime-rl waits up to 2 x 720 s for a weight update without any progress."""
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
    """Configured: the engine sleeps between phases, so empty memory is no death."""
    sleep_auto: bool = True
    """Assume the same if the engine was started with ``--enable-sleep-mode`` or ``/is_sleeping`` has answered yes."""
    clean_exit_finishes: bool = False
    """Exit code 0 means that training is finished here: one of several nodes, of which rank 0 judges the whole."""
    startup_k: float = 3.0
    """Patience as a multiple of the longest start-up seen: a cold cache takes two to three times as long as a warm one
    (vllm #52682: 3.2 min warm, 5.8-7.5 min cold)."""


@dataclass(frozen=True, slots=True)
class LogRule:
    """A pattern to find in the trainer's logs. ``count`` matches within ``within_seconds`` raise a finding. It supports
    verdicts of the detectors named in ``supports``; alone it never leads to a restart."""

    name: str
    pattern: str
    count: int = 1
    within_seconds: float = 600.0
    critical: bool = False
    says: str = ""
    fix: str = ""
    supports: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DiskPolicy:
    """When podwatch deletes from the disk, and how much (docs/disk.md)."""

    prune_above: float = 0.85
    prune_to: float = 0.75
    margin: float = 1.1
    inodes_below: float = 0.05
    """podwatch acts if less than this share of inodes is free."""
    lead_seconds: float = 300.0
    """Checkpoints that are not in the store are deleted only this long before the next save is due, because their
    upload may still complete. Five minutes are many rescans."""
    react_seconds: float = 30.0
    """From the end of a save to room for another: a rescan (10 s), the settle time (5 s), the disk's answer (5 s), and
    some reserve. Saves that come faster than this need room for several."""
    steps_in_use: int = 2
    """By-products of this many steps below the newest complete checkpoint stay: inference samples with a policy up to
    two steps behind the trainer, more if the trainer is configured so."""
    stop_when_full: bool = False
    """Stop training cleanly before a save that cannot fit, instead of letting it crash."""
