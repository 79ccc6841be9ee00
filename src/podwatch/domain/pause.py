"""Maintenance: podwatch watches and keeps checkpoints safe, but kills and starts nothing (DESIGN section 3)."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pause:
    """Who asked for it, when and why; times are epoch seconds, because it outlives podwatch and a reboot.

    ``until`` is None where it lasts until `podwatch unpause`. ``held_by`` says, once it has expired, who holds the GPUs
    and so makes it go on.
    """

    since: float
    until: float | None = None
    by: str = ""
    reason: str = ""
    held_by: str = ""

    def to_dict(self) -> dict[str, object]:
        return {"since": self.since, "until": self.until, "by": self.by, "reason": self.reason}

    @classmethod
    def from_dict(cls, data: object) -> "Pause | None":
        """What was kept; None for no pause. Anything unreadable is a pause without an end: whoever paused meant that
        nothing is touched, and a person is told."""
        if not data:
            return None
        if not isinstance(data, Mapping):
            return cls(0.0, reason="the record of the pause cannot be read")
        try:
            until = data.get("until")
            return cls(
                float(data.get("since") or 0.0),
                None if until is None else float(until),
                str(data.get("by") or ""),
                str(data.get("reason") or ""),
            )
        except (TypeError, ValueError):
            return cls(0.0, reason="the record of the pause cannot be read")
