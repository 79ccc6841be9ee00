"""A mapping that computes its values on access: a thousand steps with all their paths are megabytes, and a rescan needs
a few of them."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeVar

T = TypeVar("T")


class OnDemand(Mapping[int, T]):
    """Step -> ``make(step)``, in the order of ``steps``; values are not kept."""

    def __init__(self, steps: Collection[int], make: Callable[[int], T]) -> None:
        self._steps = dict.fromkeys(steps)
        self._make = make

    def __getitem__(self, step: int) -> T:
        if step not in self._steps:
            raise KeyError(step)
        return self._make(step)

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)
