"""Who may be the next trainer, of what was seen beside or after ours (DESIGN section 2, "Supervise"). Pure."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

SEEN_LATE: Final = 30.0
"""Seconds that the end of a trainer may be noticed after it happened: its operator may have been quicker."""


class Sighting(Protocol):
    """What is needed of a candidate. ``age`` in seconds; ``of_run``: it was seen at work in output_dir."""

    @property
    def start_id(self) -> str: ...

    @property
    def of_run(self) -> bool: ...

    @property
    def age(self) -> float: ...


S = TypeVar("S", bound=Sighting)


@dataclass(frozen=True, slots=True)
class Sifted(Generic[S]):
    """``successors`` may be attached to. ``rivals`` ran beside our trainer and work in its output_dir: never attached
    to, and nothing is started beside them. ``pending`` may become a trainer."""

    successors: tuple[S, ...] = ()
    rivals: tuple[S, ...] = ()
    pending: tuple[S, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.successors or self.rivals or self.pending)


def sift(
    candidates: Iterable[S], pending: Iterable[S], *, ended: float | None, wall: float, ignored: Collection[str] = ()
) -> Sifted[S]:
    """``ended``: epoch second at which our last trainer ended (None: none is known); ``wall``: now. ``ignored`` are the
    start ids of what an operator said is not this run's. What ran beside our trainer is never its successor; where it
    only uses the GPUs, or only names the run, it is no concern of a start either."""
    seen = [c for c in candidates if c.start_id not in ignored]
    waiting = [c for c in pending if c.start_id not in ignored]
    beside = {c.start_id for c in (*seen, *waiting) if ended is not None and wall - c.age <= ended - SEEN_LATE}
    return Sifted(
        tuple(c for c in seen if c.start_id not in beside),
        tuple(c for c in seen if c.start_id in beside and c.of_run),
        tuple(c for c in waiting if c.start_id not in beside),
    )
