"""What every sensor offers."""

from typing import Protocol, TypeVar, runtime_checkable

from podwatch.domain.reading import Reading

T_co = TypeVar("T_co", covariant=True)


class Sensor(Protocol[T_co]):
    name: str
    """Stable: the label of ``podwatch_sensor_up``."""

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """Prompt, even while a call hangs."""
        ...

    def latest(self) -> "Reading[T_co]":
        """The newest reading; never blocks."""
        ...


@runtime_checkable
class Wakeable(Protocol):
    """A sensor that can be asked to look again before its next turn."""

    def wake(self) -> None:
        """Look again now; the answer is in ``latest`` soon. Never blocks."""
        ...
