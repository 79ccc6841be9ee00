"""A Ctrl-C, or a SIGINT or SIGTERM by hand: the roles of a run end one after another, in any order."""

from collections.abc import Callable, Mapping

from tests.drivers.detection import INTERRUPTED, ExitStatus, Health, LogMatch, ProcessRole
from tests.support.pods.deaths import lose_engine
from tests.support.pods.healthy import Run
from tests.support.pods.world import Piece

ENDING = (ProcessRole.ENGINE, ProcessRole.INFERENCE, ProcessRole.ORCHESTRATOR, ProcessRole.TRAINER)


def interrupt(
    offsets: Mapping[ProcessRole, float], status: ExitStatus, *, logged: bool = False
) -> Callable[[Run], Piece]:
    """Each role of ``offsets`` ends so many seconds after the interrupt; LAUNCHER is the launcher, with ``status``."""

    def strike(run: Run) -> Piece:
        w = run.world
        left = set(ENDING)
        began = w.now
        if logged:
            w.logs = (LogMatch(INTERRUPTED, "trainer", 1, w.now, w.now, "KeyboardInterrupt"),)
        for role, offset in sorted(offsets.items(), key=lambda item: item[1]):
            if offset > w.now - began:
                yield offset - (w.now - began)
            left.discard(role)
            if role is ProcessRole.LAUNCHER:
                w.stop(status, leaving=tuple(left))
                continue
            w.end(role)
            if role is ProcessRole.ENGINE:
                lose_engine(run)
            elif role is ProcessRole.INFERENCE:
                for server in w.servers:
                    server.health = Health.REFUSED
            elif role is ProcessRole.TRAINER:
                run.hold("trainer", run.shape.trainer, 0)
                run.training(False)

    return strike
