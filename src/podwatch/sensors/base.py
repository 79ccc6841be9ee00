"""The interface of every sensor."""

from typing import Protocol, TypeVar, runtime_checkable

from podwatch.domain.reading import Reading

T_co = TypeVar("T_co", covariant=True)


class Sensor(Protocol[T_co]):
    name: str
    """Stable: the label of ``podwatch_sensor_up``."""

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """Stop. Returns promptly even while a call hangs."""
        ...

    def latest(self) -> "Reading[T_co]":
        """The newest reading; never blocks."""
        ...


@runtime_checkable
class Wakeable(Protocol):
    """A sensor that can read again before its next poll."""

    def wake(self) -> None:
        """Read again now; the result appears in ``latest`` soon. Never blocks."""
        ...
