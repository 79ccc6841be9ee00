"""Maintenance: podwatch watches and backs up checkpoints, but neither stops nor starts training."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause: who requested it, when and why. Times are epoch seconds, because it survives podwatch and a reboot.

    ``until``: None if it lasts until `podwatch unpause`. ``held_by``: the processes that hold the GPUs after the pause
    expired, so that it continues.
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
        """The recorded pause; None if there is none. An unreadable record counts as a pause without an end, which the
        status shows: the operator who paused wanted podwatch to change nothing."""
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
