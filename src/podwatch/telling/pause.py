"""The pause as JSON: `daemon.pause` in the status, and the answer to `pause`."""

from typing import Any

from podwatch.client.times import rfc3339
from podwatch.domain.pause import Pause


def pause_document(pause: Pause | None) -> dict[str, Any] | None:
    if pause is None:
        return None
    return {
        "since": rfc3339(pause.since),
        "until": rfc3339(pause.until),
        "by": pause.by,
        "reason": pause.reason,
        "held_by": pause.held_by,
    }
