"""The status as one line for monitoring plugins: ``PODWATCH OK - text | perfdata``."""

from collections.abc import Mapping
from typing import Any

from podwatch.client.render import not_backed_up, verdict
from podwatch.client.times import from_rfc3339


def plugin_line(document: Mapping[str, Any]) -> str:
    """One line without newline. ``|`` starts the performance data, so it is replaced in the text."""
    word = str(document.get("overall") or "unknown").upper() if document.get("running") else "UNKNOWN"
    text = verdict(document)
    if not_backed_up(document):
        text += "; NOT BACKED UP"
    training, disk, sync = (document.get(k) or {} for k in ("training", "disk", "sync"))
    now = from_rfc3339(document.get("time"))
    data = []
    if document.get("running") and training.get("step") is not None:
        data.append(f"step={training['step']}")
    for name, at in (("step_age", training.get("step_at")), ("sync_age", sync.get("last_published_at"))):
        then = from_rfc3339(at)
        if document.get("running") and then is not None and now is not None:
            data.append(f"{name}={max(0.0, now - then):.0f}s")
    if document.get("running") and disk.get("used_ratio") is not None:
        data.append(f"disk_used={disk['used_ratio'] * 100:.0f}%;{disk.get('prune_above_ratio', 1) * 100:.0f};;0;100")
    clean = "".join(c if c.isprintable() else " " for c in text).replace("|", "/")
    return f"PODWATCH {word} - {clean}" + (f" | {' '.join(data)}" if data else "")
