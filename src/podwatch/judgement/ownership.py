"""Which checkpoints on this pod belong to this run. What does not is neither chosen, uploaded nor published, until an
operator adopts it (DESIGN section 2, "Which run")."""

from dataclasses import dataclass, field

from podwatch.domain.checkpoint import CheckpointSet


@dataclass(frozen=True, slots=True)
class Ownership:
    """``first_seen_wall`` (epoch seconds): podwatch guards this directory for the run since then. ``started_from``: the
    step of the last start; everything above it was moved to quarantine then. ``fetched``: (step, save_id) of what came
    from this run's store. ``adopted``: an operator took over what is here.

    What podwatch published is no evidence: 772aae4 published sets that it refused to resume from.
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
