"""Open a new lineage of the run. No other module does."""

from dataclasses import replace

from podwatch.domain.run import EarlierSave, Lineage, RunRecord
from podwatch.recovery import start_plan
from podwatch.recovery.remembered import Memory


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
    """Return ``record`` with a new lineage that branches off ``parent`` (default: the current one) at ``step`` (None:
    at the beginning of training). Updates ``memory`` with how far older lineages belong to it; writes nothing to disk.
    ``earlier``: the local saves that stay behind (None: as before). ``left_step``, ``opened_wall``: see ``Lineage``."""
    left = parent or record.lineage.id
    if step is None:
        memory.ancestry = {}
    else:
        memory.ancestry = {line: min(last, step) for line, last in memory.ancestry.items()}
        memory.ancestry[left] = step
    lineage = Lineage(start_plan.new_id(), left, step, left_step, opened_wall)
    return replace(record, lineage=lineage, earlier=record.earlier if earlier is None else earlier)
