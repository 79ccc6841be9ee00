"""Ways in which training dies, each at a moment of its own, and what must hold afterwards."""

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.suites.trainers.guarded import GuardedTraining
from tests.suites.trainers.kinds import INTERVAL
from tests.support import forking


@dataclass
class Blow:
    """``at`` is the second just before training was hit, ``made`` the step behind it then."""

    name: str
    at: float = 0.0
    made: int = 0
    words: list[str] = field(default_factory=list)


def _hit(run: GuardedTraining, blow: Blow, act: Callable[[], None], words: str) -> None:
    blow.made = run.steps_made()
    blow.at = time.time()
    act()
    blow.words.append(words)


def _kill(run: GuardedTraining, dice: random.Random, blow: Blow) -> None:
    """SIGKILL for one of its processes: with several ranks any of them, or the launcher."""
    processes = run.processes()
    victim = dice.choice(processes)
    _hit(run, blow, lambda: forking.kill(victim), f"SIGKILL for process {processes.index(victim)} of {len(processes)}")


def at_random(run: GuardedTraining, dice: random.Random, blow: Blow) -> None:
    time.sleep(dice.uniform(0, 1.5))
    _kill(run, dice, blow)


def after_a_save(run: GuardedTraining, dice: random.Random, blow: Blow) -> None:
    """Inside every settle time there is."""
    saves = len(run.told("saves"))
    run.wait(lambda: len(run.told("saves")) > saves, "a save")
    delay = dice.uniform(0, 1)
    time.sleep(delay)
    _kill(run, dice, blow)
    blow.words.append(f"{delay:.2f} s after a save")


def in_a_save(run: GuardedTraining, dice: random.Random, blow: Blow) -> None:
    run.wait(run.saving, "a save that has begun")
    delay = dice.uniform(0, 0.4)
    time.sleep(delay)
    _kill(run, dice, blow)
    blow.words.append(f"{delay:.2f} s after a save began")


def exception(run: GuardedTraining, dice: random.Random, blow: Blow) -> None:
    _hit(run, blow, lambda: run.order("raise"), "an exception in the training script")


def hang(run: GuardedTraining, dice: random.Random, blow: Blow) -> None:
    """No process ends. The GPUs fall idle, which confirms it."""
    if dice.random() < 0.5:
        _hit(run, blow, lambda: run.order("hang"), "it sleeps for ever")
    else:
        _hit(run, blow, lambda: [os.kill(p, signal.SIGSTOP) for p in run.processes()] and None, "SIGSTOP")
    run.busy(False)


def everything(run: GuardedTraining, dice: random.Random, blow: Blow) -> None:
    """As when a container is restarted: nobody is left who saw the writers end."""
    if dice.random() < 0.7:
        saves = len(run.told("saves"))
        run.wait(lambda: len(run.told("saves")) > saves, "a save")
    time.sleep(dice.uniform(0, 1))
    _hit(run, blow, run.kill_everything, "SIGKILL for podwatch, supervisor and trainer")
    away = dice.uniform(0, 1.5)
    time.sleep(away)
    run.daemon.start()
    blow.words.append(f"podwatch is back {away:.1f} s later")


DECK: dict[str, Callable[[GuardedTraining, random.Random, Blow], None]] = {
    "kill at a random moment": at_random,
    "kill after a save": after_a_save,
    "kill in a save": in_a_save,
    "exception": exception,
    "hang": hang,
    "everything at once": everything,
}


@dataclass
class Recovery:
    number: int
    blow: Blow
    resumed: int | None = None
    started: float | None = None
    """Seconds from the blow to the new process."""
    ahead: tuple[int, ...] = ()
    """Steps of checkpoints that were moved to quarantine, none of which the library can load."""

    def line(self) -> str:
        started = "-" if self.started is None else f"{self.started:.1f} s"
        step = "-" if self.started is None else "fresh" if self.resumed is None else str(self.resumed)
        ahead = " ".join(map(str, self.ahead)) or "-"
        words = "; ".join(self.blow.words)
        return f"{self.number:>3}  {self.blow.name:<24}{self.blow.made:>6}{step:>7}{ahead:>8}{started:>9}   {words}"


HEADER = f"{'':>3}  {'what happened':<24}{'made':>6}{'from':>7}{'cut off':>8}{'new pid':>9}"


def recovered(run: GuardedTraining, blow: Blow, number: int, before: dict[str, Any], events: int) -> Recovery:
    """Wait until training continues after this blow, and judge where it continued from.

    ``before`` is the start that was hit. The newest whole checkpoint at that time is known twice, never from podwatch:
    the trainer's own word that a save was over, and what the real library can load of all that lies above the step.
    """

    def new() -> dict[str, Any] | None:
        starts = run.starts(blow.at)
        return starts[0] if starts and run.steps_made(starts[0]["at"]) else None

    start = run.wait(new, f"training continues after: {blow.name}")
    run.busy(True)
    run.wait_confirmed(events)
    found = Recovery(number, blow, start["step"], start["at"] - blow.at)
    assert len(run.starts(blow.at)) == 1, f"one blow, several starts: {found.line()}"
    step = start["step"] or 0
    saved = [line["step"] for line in run.told("saves", before["at"]) if line["at"] < start["at"]]
    newest = max([before["step"] or 0, *saved])
    assert step >= newest, f"step {newest} was saved and passed over: {found.line()}\n{run.daemon.tail()}"
    left = [n for n in start["present"] if n > step]
    assert not left, f"checkpoints above the resume step were left in place: {left}: {found.line()}"
    aside = {path: n for path, n in run.quarantined().items() if path not in run.judged}
    run.judged |= set(aside)
    found.ahead = tuple(sorted(aside.values()))
    passed = [n for path, n in aside.items() if run.trainer.whole(path, n)]
    assert not passed, f"whole checkpoints were passed over: {passed}: {found.line()}"
    if start["step"] is not None:
        first = next(line["step"] for line in run.told("steps", start["at"]))
        assert first == step + 1, f"it was told to resume from {step} and made step {first}: {found.line()}"
    return found


GAP = (2, INTERVAL + 3)
"""Steps made after a recovery before the next blow."""
