"""Opens a new lineage of the run: the one place where that happens, whatever the occasion (DESIGN section 2)."""

from dataclasses import replace

from podwatch.domain.run import EarlierSave, Lineage, RunRecord
from podwatch.recovery import plan
from podwatch.recovery.memory import Memory


def opened(
    record: RunRecord,
    memory: Memory,
    step: int | None,
    *,
    parent: str = "",
    earlier: tuple[EarlierSave, ...] | None = None,
    left_step: int | None = None,
    opened_wall: float = 0.0,
) -> RunRecord:
    """The record with a new lineage that leaves ``parent`` (the present one if not given) at ``step`` (None: at the
    beginning of training). ``memory`` learns how far the older ones belong to it. ``earlier``: what is here and stays
    behind from now on; None: no more than before. ``left_step`` and ``opened_wall``: see ``Lineage``. Nothing is
    written."""
    left = parent or record.lineage.id
    if step is None:
        memory.ancestry = {}
    else:
        memory.ancestry = {line: min(last, step) for line, last in memory.ancestry.items()}
        memory.ancestry[left] = step
    lineage = Lineage(plan.new_id(), left, step, left_step, opened_wall)
    return replace(record, lineage=lineage, earlier=record.earlier if earlier is None else earlier)
