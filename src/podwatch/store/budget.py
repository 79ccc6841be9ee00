"""How many billed calls a day costs, and what waits when the free ones are used up. Pure.

Backblaze B2 gives 2,500 listings (class C) a day for nothing, counted from 00:00 GMT, one for each thousand names; an
account with a cap refuses what is beyond. So what can wait does: looks at the whole inventory, and retention. Sending,
publishing and the lease never wait: where their calls are beyond the free ones they are billed, and where the account's
cap refuses them the error says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

FREE_CALLS = 2500
RESERVED_CALLS = 500
"""Of a day, for publications and the lease: one every 35 minutes takes 5, and every tenth is repeated."""
NAMES_PER_CALL = 1000
_DAY = 86400.0


@dataclass(slots=True)
class CallBudget:
    """``limit``: listings of a day; 0: they are not limited."""

    limit: int = FREE_CALLS
    calls: dict[str, Mapping[str, int]] = field(default_factory=dict)
    """By class, all that each connection and each child has made so far."""
    _day: int = -1
    _spent: int = 0

    @classmethod
    def of_store(cls, url: str) -> "CallBudget":
        return cls(FREE_CALLS if url.startswith("b2:") else 0)

    def count(self, who: str, calls: Mapping[str, int], wall: float) -> None:
        """``calls``: all that ``who`` has made so far."""
        self._turn(wall)
        self._spent += max(0, calls.get("C", 0) - self.calls.get(who, {}).get("C", 0))
        self.calls[who] = dict(calls)

    def spent(self, wall: float) -> int:
        self._turn(wall)
        return self._spent

    def allows(self, names: int, wall: float) -> bool:
        """Whether work that lists so many names, and can wait, may be done now: not what the rest of the day needs."""
        left_of_day = 1.0 - wall % _DAY / _DAY
        cost = max(1, -(-names // NAMES_PER_CALL))
        return not self.limit or self.spent(wall) + cost <= self.limit - RESERVED_CALLS * left_of_day

    def shortage(self, wall: float) -> str:
        """What is short, for people; empty while nothing is."""
        if not self.limit or self.spent(wall) < self.limit:
            return ""
        return (
            f"the store's {self.limit} free listings of today are used up: old checkpoints stay until 00:00 GMT; "
            "new ones are stored, and their calls are billed"
        )

    def _turn(self, wall: float) -> None:
        if (day := int(wall // _DAY)) != self._day:
            self._day, self._spent = day, 0
