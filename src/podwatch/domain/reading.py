"""What a sensor answered, "could not observe" included.

Promise 3 rests on this type: a detector that gets anything but ``OK`` has no evidence, and silence never agrees.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

T = TypeVar("T", covariant=True)
V = TypeVar("V")


class SensorState(StrEnum):
    """How much a reading can be trusted."""

    OK = "ok"
    """Observed within the sensor's deadline."""
    ABSENT = "absent"
    """There is nothing to observe here: not configured, library or device not on this machine."""
    DENIED = "denied"
    """The operating system refused; the fix is in ``detail``."""
    BLIND = "blind"
    """The sensor stopped answering within its deadline, or answers nonsense."""
    PENDING = "pending"
    """Not observed yet since podwatch started."""


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """One sensor's newest answer.

    ``value`` is None unless ``state`` is OK. ``at`` is the monotonic second at which the value was observed (for a
    reading that is not OK: at which the state was found). ``detail`` says why, in words a person can act on.
    """

    state: SensorState
    at: float
    value: T | None = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.state is SensorState.OK and self.value is not None


def observed(value: V, at: float) -> Reading[V]:
    """A reading that holds a value."""
    return Reading(SensorState.OK, at, value)


def unobserved(state: SensorState, at: float, detail: str) -> "Reading[V]":
    """A reading that holds no value, and why."""
    return Reading(state, at, None, detail)
