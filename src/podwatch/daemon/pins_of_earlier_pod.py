"""Takes over what was pinned on the pod that held the run before: this pod would delete it from the store."""

import contextlib
from collections.abc import Mapping
from typing import Protocol

from podwatch.domain.errors import PodwatchError
from podwatch.domain.run_state import RunState
from podwatch.recovery.run_file import RunFile

ELSEWHERE = "on an earlier pod"
"""Start of the reason of an adopted pin. The evaluations of this pod remove only their own pins."""


class Predecessor(Protocol):
    """The lease, as far as it knows the pod before."""

    @property
    def foreign_pins(self) -> Mapping[int, str]:
        """Step -> reason, of its heartbeat; empty once they were taken over."""
        ...

    def took_over_pins(self) -> None: ...


async def adopt_pins(lease: Predecessor | None, file: RunFile) -> None:
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
