"""Findings about full disks: the checkpoints disk before a save fails, and those of temporary files, state and output.
Pure functions; each finding names the numbers.
"""

from collections.abc import Mapping, Sequence

from podwatch.config.settings import DiskSettings
from podwatch.config.units import GIB, format_size
from podwatch.domain.finding import Finding, FindingKind, Severity, Verdict
from podwatch.domain.snapshot import DiskSample
from podwatch.policy.disk_forecast import NextSave
from podwatch.policy.local_retention import (
    RemovalPlan,
)

BY_HAND = "free space, or wait until checkpoints are in the store; `podwatch prune --dry-run` explains each checkpoint"
STATE_BYTES = 256 << 20
"""Least free space for podwatch's state (journal, recording, incident bundles)."""
TEMP_BYTES = GIB
"""Least free space for the trainer's temporary files, such as compiler output. Staged checkpoints are added."""
NAMED = 3
"""Checkpoints named in a finding; the dry run shows all."""


def no_room(
    plan: RemovalPlan, disk: DiskSample, next_save: NextSave, policy: DiskSettings, at: float
) -> tuple[Finding, ...]:
    """A finding if a save of the usual size does not fit (critical), or fits only after deleting checkpoints that are
    not in the store (warning, while there is time), or one as big as the biggest does not fit (warning). ``at``: time
    of the disk reading."""
    subject = "" if disk.role in ("", "checkpoints") else disk.role
    where = f" in {disk.path}" if subject else ""
    many = f" ({next_save.saves} saves can come before podwatch can remove anything)" if next_save.saves > 1 else ""
    free = f"{format_size(disk.free_bytes)} are free{where}"
    if plan.missing_bytes > 0:
        soon = next_save.soon and policy.on_full == "stop"
        gone = f"can remove {format_size(plan.freed_bytes)}" if plan.freed_bytes else "can remove nothing more"
        needed = plan.missing_bytes + plan.freed_bytes + disk.free_bytes  # so that the numbers add up
        margin = f" ({format_size(next_save.usual_room)} and the margin)" if needed >= next_save.usual_room else ""
        summary = (
            f"the next save needs {format_size(needed)}{margin}{many}, {free},"
            f" podwatch {gone}: {format_size(plan.missing_bytes)} short{_ways_out(plan)}"
        )
        stop = Verdict.STOP if soon else Verdict.NONE
        return (
            Finding(FindingKind.DISK_NO_ROOM, Severity.CRITICAL, summary, at, BY_HAND, stop, soon, subject=subject),
        )
    if plan.missing_inodes > 0:
        summary = (
            f"the next save needs {next_save.usual_inodes} files, {disk.inodes_free} inodes are free{where}:"
            f" {plan.missing_inodes} short{_ways_out(plan)}"
        )
        return (Finding(FindingKind.DISK_NO_ROOM, Severity.CRITICAL, summary, at, BY_HAND, subject=subject),)
    if plan.waiting:
        steps = ", ".join(str(r.step) for r in plan.waiting)
        due = "" if next_save.due_in is None else f", in about {next_save.due_in / 60:.0f} min,"
        need = f"the next save needs {format_size(next_save.usual_room)}{many}"
        summary = f"{need}, {free}: before that save{due} podwatch deletes step {steps}, which is not in the store"
        fix = "use a faster uplink, save less often, or use a bigger disk; `podwatch prune --dry-run` explains the plan"
        return (Finding(FindingKind.DISK_NO_ROOM, Severity.WARNING, summary, at, fix, subject=subject),)
    if plan.missing_for_biggest > 0:
        summary = (
            f"a save as big as the biggest of the last ones ({format_size(next_save.bytes)}) does not fit: {free},"
            f" {format_size(plan.missing_for_biggest)} short; podwatch deletes nothing for it that is not in the store"
            f"{_ways_out(plan)}"
        )
        return (Finding(FindingKind.DISK_NO_ROOM, Severity.WARNING, summary, at, BY_HAND, subject=subject),)
    return ()


def _ways_out(plan: RemovalPlan) -> str:
    ways = sorted((k for k in plan.kept if k.unlock and k.bytes), key=lambda k: -k.bytes)
    texts = [f"podwatch could remove {format_size(k.bytes)} if step {k.step} were {k.unlock}" for k in ways[:NAMED]]
    return "".join(f"; {text}" for text in texts)


def other_disks(
    disks: Sequence[DiskSample],
    next_save: NextSave,
    *,
    devices: Mapping[str, int],
    checkpoints_device: int,
    stages_in_temp: bool,
    margin: float,
    at: float,
) -> tuple[Finding, ...]:
    """Findings about the other file systems: temporary directory, podwatch's state, output directory. ``devices``:
    part -> its file system."""
    found = []
    staged = int(next_save.bytes * margin) if stages_in_temp else 0
    for disk in disks:
        shared = disk.device and disk.device == checkpoints_device
        if disk.role == "temp":
            # On the checkpoints' own disk the staged copy needs space in addition to the save.
            need = staged + (int(next_save.room * margin) if shared else 0) if staged else 0
            if need > disk.free_bytes:
                found.append(
                    Finding(
                        FindingKind.DISK_NO_ROOM,
                        Severity.CRITICAL,
                        f"the trainer stages the next save in {disk.path}, where {format_size(disk.free_bytes)} are"
                        f" free and {format_size(need)} are needed",
                        at,
                        "set TMPDIR in [trainer] env to a directory with room, or empty this one",
                        subject="temp",
                    )
                )
            elif not shared and disk.free_bytes < TEMP_BYTES:
                found.append(_low(disk, "the trainer's temporary directory", at, "empty it, or set TMPDIR elsewhere"))
        elif disk.role == "state" and not shared and disk.free_bytes < STATE_BYTES:
            found.append(_low(disk, "podwatch's own state", at, "empty it, or set state_dir elsewhere"))
        elif disk.role == "output" and not shared and disk.device not in devices.values() and disk.used_ratio > 0.95:
            # logs and by-products only: no save is written here
            found.append(_low(disk, "the output directory", at, "delete logs and by-products of the trainer"))
    return tuple(found)


def _low(disk: DiskSample, what: str, at: float, fix: str) -> Finding:
    summary = f"{what} ({disk.path}) has {format_size(disk.free_bytes)} left"
    return Finding(FindingKind.DISK_HIGH, Severity.WARNING, summary, at, fix, subject=disk.role)
