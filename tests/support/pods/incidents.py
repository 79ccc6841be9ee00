"""The two nights that podwatch was written for, rebuilt from what is known of them (facts/peers.md section 1).

    python -m tests.support.pods.incidents DIRECTORY

A: prime-rl of January 2026, engine on GPU 0, trainer on GPU 1, steps of 3 to 5 minutes. At three in the morning GPU 0
goes to 0 MiB, its use to 0 %; the API server ends with code 0, which the launcher ignores; 128 APIConnectionErrors fill
the orchestrator's log; the trainer waits. Nothing ends. A person finds it after 15 minutes. B: the same on a pod that
was started by hand, where podwatch had no address to ask and may read no process's devices; found after three hours.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from tests.drivers.detection import LogMatch, Night, Snapshot, Supervision, write_night
from tests.support.pods.deaths import OWN, lose_engine, lose_server
from tests.support.pods.healthy import Run
from tests.support.pods.shapes import Shape
from tests.support.pods.world import BEGIN, Piece

DIES_AFTER = 1500.0
"""Seconds of healthy recording before: a few steps, so that the detectors are armed by what they saw themselves."""
ERRORS = 128
HOLDS = "the engine on GPU 0 dies without a word, its API server ends with code 0; a person notices much later"


@dataclass(frozen=True, slots=True)
class Incident:
    name: str
    night: datetime
    """When the engine died."""
    noticed_after: float
    shape: Shape
    seed: int

    def snapshots(self) -> Iterator[Snapshot]:
        run = Run(self.shape, self.seed)
        run.world.late = 0.0  # even times pack better
        run.world.pidfds = False  # the podwatch that would have recorded them knew none
        run.world.wall_offset = self.night.timestamp() - BEGIN - DIES_AFTER
        run.world.add(_dies(run), "death", DIES_AFTER)
        return run.world.snapshots((DIES_AFTER + self.noticed_after) / 3600.0)

    def recorded(self) -> Night:
        return Night(self.name, HOLDS, tuple(self.snapshots()), self.shape.policies())


_PLAIN = replace(
    OWN, step_seconds=230.0, slow_step=0.0, evaluation=0.0, tool_bound=0.0, long_update=0.0, long_save=0.0, person=0.0,
    load=(90.0, 120.0), compile=(30.0, 60.0), liveness=False, save=(100.0, 120.0), logs=False,
)  # fmt: skip
INCIDENTS = (
    Incident("incident-a", datetime(2026, 1, 6, 3, 0, 0, tzinfo=UTC), 15 * 60.0, _PLAIN, 1),
    Incident(
        "incident-b", datetime(2026, 1, 8, 2, 10, 0, tzinfo=UTC), 3 * 3600.0,
        replace(_PLAIN, urls=False, cuda=False, supervision=Supervision.ATTACH), 2,
    ),
)  # fmt: skip


def _dies(run: Run) -> Piece:
    w = run.world
    w.drop("life")
    w.struck_at = w.now
    w.saving = False
    lose_engine(run)
    yield 4.0
    lose_server(run)
    first, count = w.now, 0
    run.training(False)
    while count < ERRORS:
        yield 3.0
        count += 16
        line = "APIConnectionError: Connection error."
        w.logs = (LogMatch("api-connection-error", "orchestrator", count, first, w.now, line),)


def main() -> None:
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for incident in INCIDENTS:
        path = directory / f"{incident.name}.jsonl.xz"
        night = incident.recorded()
        write_night(path, night)
        print(f"{path}: {len(night.turns)} turns, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
