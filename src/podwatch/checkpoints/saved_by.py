"""The number of processes that wrote a checkpoint, read before a resume from it."""

from podwatch.checkpoints.layouts.base import Layout
from podwatch.checkpoints.scan import scan_part


def saved_by(layout: Layout, step: int) -> int | None:
    """The world size that the layout's rule finds in the checkpoint; None: not known, absent or not readable.
    Blocks."""
    try:
        parts = layout.steps().get(step)
    except OSError:
        return None
    return layout.judge(step, [scan_part(p).found for p in parts]).world_size if parts else None
