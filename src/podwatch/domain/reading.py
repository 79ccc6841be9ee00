"""The readings of sensors, including "could not observe".

A detector that gets a state other than ``OK`` has no evidence, and a missing reading never confirms a verdict.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

T = TypeVar("T", covariant=True)
V = TypeVar("V")


class SensorState(StrEnum):
    """Whether a reading was observed, or why not."""

    OK = "ok"
    """Observed within the sensor's deadline."""
    ABSENT = "absent"
    """Nothing to observe: not configured, or the library or device is not on this machine."""
    DENIED = "denied"
    """The operating system denied access; the fix is in ``detail``."""
    BLIND = "blind"
    """The sensor no longer answers within its deadline, or its answers are invalid."""
    PENDING = "pending"
    """Not observed yet since podwatch started."""


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """One sensor's newest answer.

    ``value`` is None unless ``state`` is OK. ``at``: the monotonic second at which the value (or, if it is not OK, the
    state) was observed. ``detail``: the reason and, if there is one, the fix.
    """

    state: SensorState
    at: float
    value: T | None = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.state is SensorState.OK and self.value is not None


def observed(value: V, at: float) -> Reading[V]:
    """A reading with a value."""
    return Reading(SensorState.OK, at, value)


def unobserved(state: SensorState, at: float, detail: str) -> "Reading[V]":
    """A reading without a value; ``detail`` is the reason."""
    return Reading(state, at, None, detail)
