"""The text of ``podwatch prune --dry-run``: each set, kept or removed, and why."""

from podwatch.domain.snapshot import DiskSample
from podwatch.judgement.retention import RemovalInput, RemovalPlan, Trigger

_UNITS = ((1_000_000_000_000, "TB"), (1_000_000_000, "GB"), (1_000_000, "MB"), (1_000, "kB"))


def size(count: int) -> str:
    """Bytes for a person, decimal units as disks and stores use them."""
    for factor, unit in _UNITS:
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def explain(given: RemovalInput, plan: RemovalPlan) -> str:
    """Several lines, without a trailing newline."""
    disk: DiskSample = given.disk
    lines = [
        f"{disk.path}: {disk.used_ratio:.0%} of {size(disk.capacity_bytes)} used, {size(disk.free_bytes)} free; "
        f"next save about {size(given.next_save_bytes)}"
    ]
    if plan.trigger is Trigger.NONE:
        lines.append("nothing has to go")
    else:
        why = {
            Trigger.USAGE: "the disk is too full",
            Trigger.ROOM: "the next save would not fit",
            Trigger.INODES: "inodes run out",
        }[plan.trigger]
        lines.append(f"{why}: {size(plan.target_bytes)} must come free")
    for removal in plan.removals:
        what = f"step {removal.step}" if removal.step is not None else removal.path
        part = f" {removal.part}" if removal.part else ""
        lines.append(f"  remove  {what}{part}  {size(removal.bytes)}  {removal.reason}")
    lines.extend(f"  keep    step {kept.step}  {kept.reason}" for kept in plan.kept)
    if plan.shortfall_bytes:
        lines.append(f"{size(plan.shortfall_bytes)} are still missing: nothing else may go")
    if plan.critical:
        lines.append("CRITICAL: the next save does not fit without losing sets that are not in the store")
    return "\n".join(lines)
