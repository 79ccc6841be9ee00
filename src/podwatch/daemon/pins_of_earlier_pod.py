"""Takes over what was pinned on the pod that held the run before: this pod would delete it from the store."""

import contextlib
from typing import TYPE_CHECKING

from podwatch.domain.errors import PodwatchError
from podwatch.domain.run_state import RunState
from podwatch.recovery.run_file import RunFile

if TYPE_CHECKING:
    from podwatch.sync.lease.holder import LeaseHolder

ELSEWHERE = "on an earlier pod"
"""Start of the reason of an adopted pin. The evaluations of this pod remove only their own pins."""


async def adopt_pins(lease: "LeaseHolder | None", file: RunFile) -> None:
    """Pin the same steps here. If they cannot be recorded, that has a finding of its own, and the next heartbeat tries
    again."""
    if lease is None or not (found := lease.foreign_pins):
        return

    def adopted(run: RunState) -> RunState:
        for step in found.keys() - run.pins.keys():
            text = found[step] if found[step].startswith(ELSEWHERE) else f"{ELSEWHERE}: {found[step]}"
            run = run.pinned(step, text[:200])
        return run

    with contextlib.suppress(PodwatchError):
        await file.edit(adopted)
        lease.took_over_pins()
