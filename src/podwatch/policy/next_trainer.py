"""Which trainers, seen beside or after the trainer podwatch supervised, podwatch attaches to. Pure."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

SEEN_LATE: Final = 30.0
"""podwatch can notice the end of a trainer this much later than it happened, after its operator started the next."""


class Sighting(Protocol):
    """What this module needs of a candidate. ``age`` in seconds; ``of_run``: it was seen working in output_dir."""

    @property
    def start_id(self) -> str: ...

    @property
    def of_run(self) -> bool: ...

    @property
    def age(self) -> float: ...


S = TypeVar("S", bound=Sighting)


@dataclass(frozen=True, slots=True)
class Sifted(Generic[S]):
    """``successors``: podwatch can attach to them. ``rivals`` ran at the same time as podwatch's trainer and work in
    its output_dir: podwatch neither attaches to them nor starts training beside them. ``pending`` can become trainers.
    """

    successors: tuple[S, ...] = ()
    rivals: tuple[S, ...] = ()
    pending: tuple[S, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.successors or self.rivals or self.pending)


def sift(
    candidates: Iterable[S], pending: Iterable[S], *, ended: float | None, wall: float, ignored: Collection[str] = ()
) -> Sifted[S]:
    """Sort candidates. ``ended``: when podwatch's last trainer ended (None: unknown); ``wall``: now; epoch seconds.
    ``ignored``: start ids that an operator declared not to be this run's. A process that ran at the same time as
    podwatch's trainer is never its successor; if it only uses the GPUs or only names the run, it does not prevent a
    start either."""
    seen = [c for c in candidates if c.start_id not in ignored]
    waiting = [c for c in pending if c.start_id not in ignored]
    beside = {c.start_id for c in (*seen, *waiting) if ended is not None and wall - c.age <= ended - SEEN_LATE}
    return Sifted(
        tuple(c for c in seen if c.start_id not in beside),
        tuple(c for c in seen if c.start_id in beside and c.of_run),
        tuple(c for c in waiting if c.start_id not in beside),
    )
