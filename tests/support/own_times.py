"""Times and limits of podwatch's own: tests write them like settings, and podwatch gets them from another file.

No configuration can set them (``podwatch.config.test_times``); this part of the tests imports nothing of podwatch, so
they are listed here again.
"""

import re
from pathlib import Path

VARIABLE = "PODWATCH_TEST_TIMES"
NAMES = frozenset(
    {"gpu.poll", "gpu.deadline", "gpu.release_margin", "inference.poll", "inference.timeout",
     "checkpoints.rescan", "checkpoints.settle", "checkpoints.settle_weak", "checkpoints.settle_tracker",
     "sync.part_size", "sync.upload_gap", "sync.sweep", "sync.extra_max", "trainer.resume_attempts", "hang.k",
     "disk.margin", "evaluation.coalesce", "evaluation.reserve",
     "sync.artefacts_every", "sync.artefacts_log", "sync.heartbeat", "sync.holder_patience", "sync.claim_wait",
     "sync.refusal_wait", "recovery.backoff_min", "recovery.backoff_max", "recovery.calm", "recovery.standby",
     "recovery.job_attempts", "recovery.bad_host_for", "nodes.wait", "nodes.silence", "end_pod.timeout",
     "end_pod.tries", "resources.files_above", "resources.memory_above", "resources.shm_above",
     "resources.overdue", "resources.overdue_floor", "record.max_size", "notify.remind", "notify.per_hour",
     "notify.timeout", "notify.heartbeat_every", "wandb.every"}
)  # fmt: skip
_SECTION = re.compile(r"\[([\w.]+)\]")
_VALUE = re.compile(r"(\w+) *= *(.*)")


def split(config: str) -> tuple[str, str]:
    """``config`` without the lines that set one of ``NAMES``, and these as a file of times; empty if there are none."""
    section, rest, times = "", [], []
    for line in config.splitlines():
        if (header := _SECTION.fullmatch(line.strip())) is not None:
            section = header[1]
        value = _VALUE.fullmatch(line.strip())
        if value is not None and f"{section}.{value[1]}" in NAMES:
            times.append(f'"{section}.{value[1]}" = {value[2]}')
        else:
            rest.append(line)
    return "\n".join(rest) + "\n", "\n".join(["[times]", *times, ""]) if times else ""


def write(times: str, path: Path) -> dict[str, str]:
    """Write a file of times at ``path`` in one step; the environment that names it, empty for empty ``times``."""
    if not times:
        return {}
    unfinished = path.with_suffix(".new")
    unfinished.write_text(times)
    unfinished.chmod(0o600)
    unfinished.replace(path)
    return {VARIABLE: str(path)}
