"""Ways to hurt a run, each at a moment of its own, and what must hold afterwards."""

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tests.suites.chaos.guarded_run import INTERVAL, GuardedRun, pause
from tests.support import forking

FATAL_ROLES = ("engine", "trainer", "orchestrator", "inference", "rl")


@dataclass
class Blow:
    """One kill as it was carried out. ``at`` is the second of the kill that training did not survive (0: it went on);
    ``finished``, ``whole`` and ``saving`` are how the run stood then."""

    name: str
    at: float = 0.0
    finished: int = 0
    whole: int = 0
    saving: bool = False
    words: list[str] = field(default_factory=list)


Kill = Callable[[GuardedRun, random.Random, Blow], None]


def wait_known(run: GuardedRun, role: str) -> None:
    """An engine that podwatch has seen for a moment only (less than four holds) is none that it can miss; real ones
    load for minutes."""
    if role in ("engine", "inference"):
        run.wait(lambda: "engine-process" in run.second_signals, "podwatch knows the engine")


def kill(run: GuardedRun, blow: Blow, *roles: str) -> None:
    """SIGKILL these roles, and note how the run stands."""
    for role in roles:
        if run.daemon.status() is not None:
            wait_known(run, role)
    pids = [pid for role in roles if (pid := run.supervisor if role == "supervisor" else run.pid(role))]
    blow.finished, blow.whole, blow.saving = run.finished_steps(), run.whole(), run.saving
    blow.at = time.time()
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            blow.words.append(f"{pid} had ended")
    blow.words.append(f"SIGKILL {' + '.join(roles)} after step {blow.finished}")


def engine(run: GuardedRun, dice: random.Random, blow: Blow) -> None:
    kill(run, blow, "engine")


def server(run: GuardedRun, dice: random.Random, blow: Blow) -> None:
    kill(run, blow, "inference")


def orchestrator(run: GuardedRun, dice: random.Random, blow: Blow) -> None:
    kill(run, blow, "orchestrator")


def trainer_mid_step(run: GuardedRun, dice: random.Random, blow: Blow) -> None:
    run.wait(lambda: not run.saving, "a step and no save")
    kill(run, blow, "trainer")


def trainer_mid_save(run: GuardedRun, dice: random.Random, blow: Blow) -> None:
    run.wait(lambda: run.saving, "a save")
    pause(dice, 0, 0.4)
    kill(run, blow, "trainer")


def supervisors_child(run: GuardedRun, dice: random.Random, blow: Blow) -> None:
    """The launcher: its whole tree is orphaned to the supervisor."""
    kill(run, blow, "rl")


def supervisor(run: GuardedRun, dice: random.Random, blow: Blow) -> None:
    """Training goes on; nobody is left to know its exit code."""
    if pid := run.supervisor:
        forking.kill(pid)
        blow.words.append("SIGKILL supervisor: training goes on")
    else:
        blow.words.append("the supervisor was gone already")
    pause(dice, 0.5, 1.5)


def supervisor_and_launcher(run: GuardedRun, dice: random.Random, blow: Blow) -> None:
    """Both parents at once: engine, orchestrator and trainer become orphans of PID 1."""
    kill(run, blow, "supervisor", "rl")


def podwatch(run: GuardedRun, dice: random.Random, blow: Blow) -> None:
    run.kill_podwatch()
    pause(dice, 0, 1.5)
    run.daemon.start()
    blow.words.append("SIGKILL podwatch, started again: training goes on")
    run.wait(run.daemon.status, "podwatch answers again")


def podwatch_mid_recovery(run: GuardedRun, dice: random.Random, blow: Blow) -> None:
    role = dice.choice(FATAL_ROLES)
    kill(run, blow, role)
    pause(dice, 0, 4)
    run.kill_podwatch()
    blow.words.append(f"podwatch {time.time() - blow.at:.1f} s later")
    pause(dice, 0, 1)
    run.daemon.start()


def podwatch_away(run: GuardedRun, dice: random.Random, blow: Blow) -> None:
    """Training dies while no podwatch runs: the next one learns of it from the supervisor, or from silence."""
    role = dice.choice(FATAL_ROLES)
    wait_known(run, role)
    run.kill_podwatch()
    pause(dice, 0, 0.5)
    kill(run, blow, role)
    pause(dice, 0, 1)
    run.daemon.start()


def store_away(run: GuardedRun, dice: random.Random, blow: Blow) -> None:
    """A restart does not wait for the store."""
    run.store_away()
    blow.words.append("the store is away")
    pause(dice, 0, 2)
    kill(run, blow, dice.choice(FATAL_ROLES))


def gpu_blind(run: GuardedRun, dice: random.Random, blow: Blow) -> None:
    run.world.hang_all(True)
    pause(dice, 1, 2.5)
    run.world.hang_all(False)
    blow.words.append("every NVML call hung: training goes on")
    pause(dice, 1, 1.5)


DECK: dict[str, Kill] = {
    "engine": engine,
    "trainer, mid-step": trainer_mid_step,
    "trainer, mid-save": trainer_mid_save,
    "orchestrator": orchestrator,
    "inference server": server,
    "supervisor's child": supervisors_child,
    "supervisor": supervisor,
    "supervisor + its child": supervisor_and_launcher,
    "podwatch": podwatch,
    "podwatch, mid-recovery": podwatch_mid_recovery,
    "training while podwatch is away": podwatch_away,
    "training while the store is away": store_away,
    "GPU sensor blind": gpu_blind,
}


@dataclass(frozen=True)
class Recovery:
    """One line of the table. Seconds are since the kill; None where training went on."""

    number: int
    blow: Blow
    detected: float | None = None
    resumed: int | None = None
    lost: int = 0
    started: float | None = None
    confirmed: float | None = None

    def line(self) -> str:
        def seconds(value: float | None) -> str:
            return "-" if value is None else f"{value:.1f} s"

        step = "-" if self.started is None else "fresh" if self.resumed is None else str(self.resumed)
        lost = "-" if self.started is None else str(self.lost)
        return (
            f"{self.number:>3}  {self.blow.name:<33}{seconds(self.detected):>9}{step:>7}{lost:>6}"
            f"{seconds(self.started):>9}{seconds(self.confirmed):>10}   {'; '.join(self.blow.words)}"
        )


HEADER = f"{'':>3}  {'killed':<33}{'detected':>9}{'from':>7}{'lost':>6}{'new pid':>9}{'confirmed':>10}   what was done"


def wall(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["timestamp"]).timestamp()


def recovered(run: GuardedRun, blow: Blow, number: int, seen: int) -> Recovery:
    """Wait until training goes on after this blow, and hold it to its promises."""
    if not blow.at:
        return Recovery(number, blow)
    events = run.events

    def goes_on() -> dict[str, Any] | None:
        """The confirmation of a start made after the kill."""
        assert not run.ended, f"the run ended before {blow.name}: it has too few steps for this machine"
        if not run.starts(blow.at):
            return None
        first = run.starts(blow.at)[0]["at"]
        confirmed = (e for e in events()[seen:] if e["podwatch_event"] == "trainer-confirmed")
        return next((e for e in confirmed if wall(e) > first), None)

    after = run.wait(goes_on, f"training goes on after: {blow.name}")
    start = [s for s in run.starts(blow.at) if s["at"] < wall(after)][-1]
    opened = next((wall(e) for e in events()[seen:] if e["podwatch_event"] == "incident-opened"), None)
    lost = max(0, blow.finished - (start["resumed"] or 0))
    found = Recovery(
        number, blow, opened and opened - blow.at, start["resumed"], lost,
        start["at"] - blow.at, wall(after) - blow.at,
    )  # fmt: skip
    assert opened is not None, f"no incident was opened: {found.line()}"
    assert (start["resumed"] or 0) >= blow.whole, f"an older checkpoint than {blow.whole} was taken: {found.line()}"
    # Layout A saves at the top of the next step, so after the line of the last one: that save may not have begun yet.
    due = run.variant == "A" and blow.finished % INTERVAL == 0 and blow.whole < blow.finished
    most = INTERVAL if blow.saving or due else INTERVAL - 1
    assert lost <= most, f"{lost} steps were lost, {most} at most: {found.line()}"
    return found
