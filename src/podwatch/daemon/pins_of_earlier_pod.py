"""Takes over what was pinned on the pod that held the run before: this pod would delete it from the store."""

import contextlib
from collections.abc import Mapping
from typing import Protocol

from podwatch.daemon.status_view import Remembered
from podwatch.domain.errors import PodwatchError
from podwatch.journal import AsyncJournal, Journal

ELSEWHERE = "on an earlier pod"
"""Start of the reason of an adopted pin. The evaluations of this pod remove only their own pins."""


class Predecessor(Protocol):
    """The lease, as far as it knows the pod before."""

    @property
    def foreign_pins(self) -> Mapping[int, str]:
        """Step -> reason, of its heartbeat; empty once they were taken over."""
        ...

    def took_over_pins(self) -> None: ...


async def adopt_pins(lease: Predecessor | None, memory: Remembered, journal: AsyncJournal) -> None:
    """Pin the same steps here. If the journal cannot take them, it has a finding of its own, and the next heartbeat
    tries again."""
    if lease is None or not (found := lease.foreign_pins):
        return
    with contextlib.suppress(PodwatchError):
        for step in found.keys() - memory.pins.keys():
            text = found[step] if found[step].startswith(ELSEWHERE) else f"{ELSEWHERE}: {found[step]}"
            await journal.run(Journal.pin, step, text[:200])
        await memory.read_pins()
        lease.took_over_pins()
