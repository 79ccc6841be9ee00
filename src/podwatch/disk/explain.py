"""What is said of the disk: the answer to ``podwatch prune``, and findings before a save fails. Pure; each names the
numbers.
"""

from collections.abc import Sequence
from typing import Any

from podwatch.config.settings import DiskSettings
from podwatch.config.units import GIB
from podwatch.disk.next_save import NextSave
from podwatch.disk.plan import RemovalPlan, Trigger
from podwatch.domain.finding import Finding, FindingKind, Severity, Verdict
from podwatch.domain.snapshot import DiskSample
from podwatch.domain.times import size

BY_HAND = "free space, or wait until checkpoints are in the store; `podwatch prune --dry-run` explains each checkpoint"
STATE_BYTES = 256 << 20
"""Least free space for podwatch's state (journal, recording, incident bundles)."""
TEMP_BYTES = GIB
"""Least free space for the trainer's temporary files, such as compiler output."""


def plan_document(plan: RemovalPlan, *, done: bool = False, waits_for: str = "") -> dict[str, Any]:
    """The answer to ``podwatch prune``: one entry for each checkpoint or path, with the reason. ``done``: executed.
    ``waits_for``: why podwatch does not execute it by itself."""
    entries: list[dict[str, Any]] = [
        {
            "action": "remove",
            "kind": str(r.kind),
            "step": r.step,
            "path": r.path,
            "part": r.part,
            "size_bytes": r.bytes,
            "reason": r.reason,
        }
        for r in plan.removals
    ]
    entries += [
        {"action": "keep", "step": k.step, "reason": k.reason, "size_bytes": k.bytes or None} for k in plan.remaining
    ]
    return {
        "entries": entries,
        "trigger": str(plan.trigger),
        "target_bytes": plan.target_bytes,
        "freed_bytes": plan.freed_bytes,
        "shortfall_bytes": plan.shortfall_bytes,
        "critical": plan.critical,
        "waiting_steps": [r.step for r in plan.waiting],
        "missing_bytes": plan.missing_bytes,
        "missing_inodes": plan.missing_inodes,
        "message": _message(plan, done=done, waits_for=waits_for),
    }


def _message(plan: RemovalPlan, *, done: bool, waits_for: str) -> str:
    if plan.trigger is Trigger.NONE:
        return "there is enough space: nothing to remove"
    verb = "freed" if done else "would be freed"
    message = f"{size(plan.freed_bytes)} of {size(plan.target_bytes)} {verb} ({plan.trigger})"
    if plan.shortfall_bytes:
        message += f"; {size(plan.shortfall_bytes)} short"
        if plan.missing_for_biggest and not plan.critical:
            message += " for a save as big as the biggest of the last ones; one of the usual size fits"
    if plan.waiting:
        message += f"; {size(sum(r.bytes for r in plan.waiting))} more to be freed before the next save"
    if plan.removals and waits_for:
        message += f". podwatch deletes nothing by itself now: {waits_for}"
    return message


# -- findings ----------------------------------------------------------------------------------------------------------


def no_room(
    plan: RemovalPlan, disk: DiskSample, next_save: NextSave, policy: DiskSettings, at: float
) -> tuple[Finding, ...]:
    """A finding if a save of the usual size does not fit (critical), or fits only after deleting checkpoints that are
    not in the store (warning, while there is time), or one as big as the biggest does not fit (warning). ``at``: time
    of the disk reading."""
    free = f"{size(disk.free_bytes)} are free"
    usual = size(next_save.usual_bytes)
    if plan.missing_bytes > 0:
        stops = next_save.near and policy.on_full == "stop"
        summary = _too_small(plan, disk, next_save)
        stop = Verdict.STOP if stops else Verdict.NONE
        return (Finding(FindingKind.DISK_NO_ROOM, Severity.CRITICAL, summary, at, BY_HAND, stop, stops),)
    if plan.missing_inodes > 0:
        need = f"the next save needs {next_save.usual_files} files, {disk.inodes_free} inodes are free"
        summary = f"{need}: {plan.missing_inodes} short"
        return (Finding(FindingKind.DISK_NO_ROOM, Severity.CRITICAL, summary, at, BY_HAND),)
    if plan.waiting:
        steps = ", ".join(str(r.step) for r in plan.waiting)
        due = f", in about {(next_save.due_in or 0.0) / 60:.0f} min,"
        need = f"the next save needs {usual}, {free}"
        summary = f"{need}: before that save{due} podwatch deletes step {steps}, which is not in the store"
        fix = "use a faster uplink, save less often, or use a bigger disk; `podwatch prune --dry-run` explains the plan"
        return (Finding(FindingKind.DISK_NO_ROOM, Severity.WARNING, summary, at, fix),)
    if plan.missing_for_biggest > 0:
        summary = (
            f"a save as big as the biggest of the last ones ({size(next_save.bytes)}) does not fit: {free},"
            f" {size(plan.missing_for_biggest)} short; podwatch deletes nothing for it that is not in the store"
        )
        return (Finding(FindingKind.DISK_NO_ROOM, Severity.WARNING, summary, at, BY_HAND),)
    return ()


def _too_small(plan: RemovalPlan, disk: DiskSample, next_save: NextSave) -> str:
    freed = plan.freed_bytes + sum(r.bytes for r in plan.waiting)
    can = f"can remove {size(freed)}" if freed else "can remove nothing more"
    needed = plan.missing_bytes + freed + disk.free_bytes  # so that the numbers add up
    margin = f" ({size(next_save.usual_bytes)} and the margin)" if needed >= next_save.usual_bytes else ""
    return (
        f"the next save needs {size(needed)}{margin}, {size(disk.free_bytes)} are free, podwatch {can}:"
        f" {size(plan.missing_bytes)} short"
    )


def other_disks(disks: Sequence[DiskSample], *, device: int, at: float) -> tuple[Finding, ...]:
    """Findings about the file systems of temporary files, podwatch's state and the output directory. ``device``: that
    of the checkpoints; their own disk has findings of its own."""
    found = []
    for disk in disks:
        if disk.device != 0 and disk.device == device:
            continue
        if disk.role == "temp" and disk.free_bytes < TEMP_BYTES:
            found.append(_low(disk, "the trainer's temporary directory", at, "empty it, or set TMPDIR elsewhere"))
        elif disk.role == "state" and disk.free_bytes < STATE_BYTES:
            found.append(_low(disk, "podwatch's own state", at, "empty it, or set state_dir elsewhere"))
        elif disk.role == "output" and disk.used_ratio > 0.95:
            found.append(_low(disk, "the output directory", at, "delete logs and by-products of the trainer"))
    return tuple(found)


def part_elsewhere(disk: DiskSample, next_save: NextSave, margin: float, at: float) -> tuple[Finding, ...]:
    """A finding if a part of the next save does not fit on its own file system, where podwatch plans no removals.
    ``next_save``: what is written there."""
    need = int(next_save.bytes * margin)
    if need <= disk.free_bytes:
        return ()
    summary = (
        f"the next save needs {size(need)} in {disk.path} ({disk.role}), {size(disk.free_bytes)} are"
        " free: podwatch frees no space on that disk by itself"
    )
    fix = f"free space there; if most of a checkpoint is on it, set trainer.checkpoint_dir to {disk.path}"
    return (Finding(FindingKind.DISK_NO_ROOM, Severity.CRITICAL, summary, at, fix, subject=disk.role),)


def _low(disk: DiskSample, what: str, at: float, fix: str) -> Finding:
    summary = f"{what} ({disk.path}) has {size(disk.free_bytes)} left"
    return Finding(FindingKind.DISK_HIGH, Severity.WARNING, summary, at, fix, subject=disk.role)
