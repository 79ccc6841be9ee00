"""How many processes wrote a set, looked up when it is about to be resumed from."""

from podwatch.checkpoints.layouts.base import Layout
from podwatch.checkpoints.scan import scan_part


def saved_by(layout: Layout, step: int) -> int | None:
    """As the layout's rule finds it in the set; None: not known, or the set is not there or not readable. Blocks."""
    try:
        parts = layout.steps().get(step)
    except OSError:
        return None
    return layout.judge(step, [scan_part(p).found for p in parts]).world_size if parts else None
