"""Sections of the status document: the machine, the log rules, the metrics of training."""

import math
from typing import Any

from podwatch.client.times import rfc3339
from podwatch.domain.snapshot import HostSample
from podwatch.telling.view import DaemonView


def host_document(host: HostSample | None) -> dict[str, Any] | None:
    if host is None:
        return None
    nearest = host.files[0] if host.files else None
    return {
        "memory_total_bytes": host.memory_total_bytes,
        "memory_available_bytes": host.memory_available_bytes,
        "swap_total_bytes": host.swap_total_bytes,
        "swap_used_bytes": host.swap_used_bytes,
        "shm_total_bytes": host.shm_total_bytes,
        "shm_used_bytes": host.shm_used_bytes,
        "container_limit_bytes": host.cgroup_limit_bytes,
        "container_used_bytes": host.cgroup_used_bytes,
        "oom_kills": host.oom_kills,
        "files": None
        if nearest is None
        else {"pid": nearest.pid, "name": nearest.name, "open": nearest.open_files, "limit": nearest.limit},
        "files_unreadable": host.files_unreadable,
        "xids_watched": host.xids_watched,
        "xids": [{"gpu": x.gpu, "code": x.code} for x in host.xids],
    }


def log_rules_document(view: DaemonView) -> list[dict[str, Any]]:
    """Rules with a match since the start of training, and disabled rules."""
    return [
        {
            "rule": match.rule,
            "role": match.role,
            "count": match.count,
            "first_at": rfc3339(view.wall_of(match.first_at)),
            "last_at": rfc3339(view.wall_of(match.last_at)),
            "line": match.line,
            "off": match.error,
        }
        for match in view.snapshot.logs.value or ()
    ]


def figures_document(view: DaemonView) -> dict[str, Any] | None:
    """The newest value of each metric of training; values that are not finite are text, because JSON has no NaN."""
    steps = view.snapshot.training.value or ()
    if not steps:
        return None
    newest: dict[str, float] = {}
    for metrics in steps:
        newest.update(metrics.values)
    return {
        "step": steps[-1].step,
        "source": steps[-1].source,
        "values": {name: value if math.isfinite(value) else str(value) for name, value in sorted(newest.items())},
    }
