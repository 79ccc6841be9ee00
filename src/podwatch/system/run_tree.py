"""The pinned tree of one run: its configured directories, and the user who trains in them."""

import pwd

from podwatch.config.settings import TrainerSettings
from podwatch.system.pinned import PinnedTree


def run_tree(trainer: TrainerSettings) -> PinnedTree:
    """Opens nothing yet. One per process: what it has pinned is what it compares with."""
    roots = [p for p in (trainer.output_dir, trainer.checkpoint_dir) if p is not None]
    try:
        owner = pwd.getpwnam(trainer.user).pw_uid if trainer.user else None
    except KeyError:
        owner = None  # the start says so
    return PinnedTree(roots, owner=owner)
