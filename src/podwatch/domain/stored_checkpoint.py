"""A checkpoint in the store, as the rooms above the store read it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A save in the store's inventory. ``save_id``: as the store names it; ``here``: as this pod names the same save,
    empty where it does not have it. ``wall``: when it was stored, by the store's clock. ``problem``: why it cannot be
    restored, as the store shows it or as a fetch has found. ``milestone``: retention keeps it for good."""

    step: int
    save_id: str
    lineage: str = ""
    generation: int = 0
    seq: int = 0
    total_bytes: int = 0
    wall: float = 0.0
    pinned: bool = False
    exports: bool = False
    milestone: bool = False
    problem: str = ""
    here: str = ""

    @property
    def key(self) -> tuple[int, str]:
        return (self.step, self.save_id)

    @property
    def order(self) -> tuple[int, int]:
        """Of its publication."""
        return (self.generation, self.seq)

    @property
    def whole(self) -> bool:
        return not self.problem
