"""From settings to the numbers judgement works with."""

from podwatch.config.settings import Settings
from podwatch.domain.policy import DetectionPolicy, DiskPolicy, Policies, RemotePolicy, RestartPolicy


def policies_from(settings: Settings, *, max_steps: int | None) -> Policies:
    """``max_steps`` is the target that the layout read from the command; an explicit setting wins."""
    gpu, hang, recovery, disk, sync = settings.gpu, settings.hang, settings.recovery, settings.disk, settings.sync
    return Policies(
        detection=DetectionPolicy(
            inference_gpus=gpu.inference,
            shared_gpus=tuple(sorted(set(gpu.inference) & set(gpu.trainer))),
            memory_floor_bytes=gpu.floor,
            hold_seconds=gpu.hold,
            hang_floor_seconds=hang.floor,
            hang_k=hang.k,
            hang_agree_seconds=hang.agree,
            startup_patience_seconds=settings.trainer.startup_patience,
            blind_after_seconds=max(30.0, 5 * gpu.poll + gpu.deadline),
            max_steps=settings.trainer.max_steps or max_steps,
        ),
        restart=RestartPolicy(
            budget_restarts=recovery.budget_restarts,
            budget_seconds=recovery.budget_time,
            resume_attempts=settings.trainer.resume_attempts,
            backoff_min_seconds=recovery.backoff_min,
            backoff_max_seconds=recovery.backoff_max,
            calm_seconds=recovery.calm,
            retry_after_give_up_seconds=recovery.retry_after_give_up,
        ),
        disk=DiskPolicy(prune_above=disk.prune_above, prune_to=disk.prune_to, margin=disk.margin),
        remote=RemotePolicy(keep_last=sync.keep_last, keep_every=sync.keep_every, max_lag_seconds=sync.max_lag),
    )
