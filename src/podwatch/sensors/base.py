"""What every sensor offers."""

from typing import Protocol, TypeVar

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
