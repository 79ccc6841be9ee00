"""Which checkpoints on this pod belong to this run. Others are neither chosen nor uploaded nor published until an
operator adopts them."""

from dataclasses import dataclass, field

from podwatch.domain.checkpoint import CheckpointSet


@dataclass(frozen=True, slots=True)
class Ownership:
    """``first_seen_wall`` (epoch seconds): since when podwatch guards this directory for the run. ``started_from``: the
    step of the last start; everything above it was moved to quarantine then. ``fetched``: (step, save_id) fetched from
    this run's store. ``adopted``: an operator adopted the checkpoints on this pod.

    That podwatch published a checkpoint is no evidence: 772aae4 published checkpoints that it refused to resume from.
    """

    first_seen_wall: float
    started_from: int | None = None
    fetched: frozenset[tuple[int, str]] = field(default_factory=frozenset)
    adopted: bool = False

    def owns(self, found: CheckpointSet) -> bool:
        return (
            self.adopted
            or found.changed_wall >= self.first_seen_wall
            or (found.step, found.save_id) in self.fetched
            or (self.started_from is not None and found.step <= self.started_from)
        )
