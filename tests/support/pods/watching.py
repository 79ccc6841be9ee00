"""The detectors turned over a pod."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.drivers.detection import (
    Finding,
    Policies,
    Snapshot,
    Verdict,
    acts,
    advance,
    confirming,
    initial,
    reborn,
)
from tests.support.pods.deaths import Fault, shape_for, strike
from tests.support.pods.healthy import Run
from tests.support.pods.oddities import add_all
from tests.support.pods.shapes import SHAPES, Shape


def judged(run: Run, hours: float, policies: Policies) -> Iterator[tuple[Snapshot, tuple[Finding, ...]]]:
    state = initial(policies)
    for snapshot in run.world.snapshots(hours):
        if run.world.reborn:
            state = reborn(state, policies)
        state, findings = advance(state, snapshot, policies)
        run.world.confirming = confirming(state, snapshot, policies)
        yield snapshot, findings


@dataclass(slots=True)
class Night:
    """What came of hours in which nothing was wrong. ``false``: (shape, seed, seconds into it, what was said)."""

    hours: float = 0.0
    turns: int = 0
    warned: int = 0
    false: tuple[tuple[str, int, float, str], ...] = ()
    warnings: dict[str, int] | None = None
    ended: int = 0
    """How often an operator ended the run, and how often its engine was ``replaced``."""
    replaced: int = 0


def healthy_night(
    seed: int, hours: float, shape: Shape | None = None, *, beside: Callable[[Snapshot], None] | None = None
) -> Night:
    """One run of one shape, with every oddity. After a false verdict it is judged anew, as after a restart. ``beside``
    sees the same snapshots."""
    shape = SHAPES[seed % len(SHAPES)] if shape is None else shape
    policies = shape.policies()
    run = add_all(Run(shape, seed))
    world, state, began = run.world, initial(policies), run.world.now
    turns = warned = 0
    false: list[tuple[str, int, float, str]] = []
    kinds: dict[str, int] = {}
    for snapshot in world.snapshots(hours):
        if beside is not None:
            beside(snapshot)
        if world.reborn:
            state = reborn(state, policies)
        state, findings = advance(state, snapshot, policies)
        world.confirming = confirming(state, snapshot, policies)
        turns += 1
        if findings:
            warned += 1
            for finding in findings:
                kinds[finding.kind] = kinds.get(finding.kind, 0) + 1
                if acts(finding):
                    false.append((shape.name, seed, snapshot.at - began, finding.summary))
                    state = reborn(state, policies)
                    break
    return Night(hours, turns, warned, tuple(false), kinds, run.starts - 1, run.reloads)


@dataclass(frozen=True, slots=True)
class Caught:
    """``seconds`` from the blow to the right finding, None if it never came; ``bound`` is how soon it had to.
    ``wrong``: what was done before or instead. ``acting`` are the conditions that asked for an act, afterwards."""

    fault: str
    seed: int
    seconds: float | None
    bound: float
    wrong: str = ""
    acting: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        return self.seconds is not None and self.seconds <= self.bound and not self.wrong


def catch(
    fault: Fault, seed: int, *, beside: Callable[[Snapshot], None] | None = None, horizon: float = 0.0,
    pidfds: bool = True,
) -> tuple[Caught, float]:  # fmt: skip
    """One fault in one pod with the default settings, and the monotonic second of the blow. ``beside`` sees the same
    snapshots, until ``horizon`` seconds after the blow. ``pidfds``: the kernel tells of an engine's end at once."""
    shape = shape_for(fault)
    policies = shape.policies()
    run = strike(Run(shape, seed), fault)
    world, state = run.world, initial(policies)
    world.pidfds = pidfds
    caught: Caught | None = None
    bound = 0.0
    for snapshot in world.snapshots(24.0):
        if beside is not None:
            beside(snapshot)
        struck = world.struck_at
        took = -1.0 if struck is None else snapshot.at - struck
        if caught is not None:
            if took > horizon:
                break
            continue
        if world.reborn:
            state = reborn(state, policies)
        before = state.learned
        state, findings = advance(state, snapshot, policies)
        world.confirming = confirming(state, snapshot, policies)
        if struck is not None:
            bound = max(bound, fault.bound(before, policies, shape))
        caught = _verdict(fault, seed, findings, took, bound)
        if caught is not None and horizon <= 0.0:
            break
    if caught is None:
        caught = Caught(fault.name, seed, None, bound, "never struck" if world.struck_at is None else "")
    return caught, world.struck_at or 0.0


def _verdict(fault: Fault, seed: int, findings: tuple[Finding, ...], took: float, bound: float) -> Caught | None:
    """The end of the search, if this turn is it. ``took`` is below zero before the blow."""
    if not findings and took <= bound + 600.0:
        return None
    acting = [f for f in findings if acts(f)]
    if took < 0.0:
        return Caught(fault.name, seed, None, 0.0, f"before the blow: {acting[0].summary}") if acting else None
    right = [f for f in (findings if fault.verdict is Verdict.NONE else acting) if f.kind in fault.kinds]
    if right and right[0].verdict is fault.verdict:
        return Caught(fault.name, seed, took, bound, "", tuple(f.key for f in acting))
    if acting:
        return Caught(fault.name, seed, None, bound, acting[0].summary)
    return Caught(fault.name, seed, None, bound) if took > bound + 600.0 else None
