"""What the store says of a whole run: when it trained, for how long, at what cost, how it ended; and how the stored
configurations of two runs differ. Data from a store is never trusted: what is not what it should be is left out."""

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from podwatch.domain.engine_and_attempt import NO_INSTANCE, Instance
from podwatch.domain.lease import Heartbeat
from podwatch.domain.secrets import scrub

CONTEXT_LINES: Final = 3
ENDED: Final = frozenset({"finished", "stopped", "gave-up", "failed", "refused", "blocked", "bad-host"})
"""Outcomes after which the run does not continue on its own. One that was preempted continues elsewhere."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run, by its last heartbeat. Times are epoch seconds; None is unknown."""

    run_id: str
    outcome: str = ""
    reason: str = ""
    host: str = ""
    instance: Instance = NO_INSTANCE
    started_wall: float | None = None
    ended_wall: float | None = None
    step: int | None = None
    target: int | None = None
    goodput: float | None = None
    failures: int | None = None
    lost_seconds: float | None = None
    steps_lost: int | None = None
    cost: float | None = None
    cost_lost: float | None = None
    currency: str = ""
    best: str = ""
    """The best result of an evaluation; empty if none is known."""

    @property
    def ended(self) -> bool:
        return self.outcome in ENDED

    @property
    def duration(self) -> float | None:
        if self.started_wall is None or self.ended_wall is None or self.ended_wall < self.started_wall:
            return None
        return self.ended_wall - self.started_wall


def summarize(run_id: str, said: Heartbeat, *, began_wall: float | None, written_wall: float | None) -> RunSummary:
    """``said``: the heartbeat. ``began_wall``: the oldest time that the store shows; ``written_wall``: when
    the heartbeat was written, by the store's clock."""
    account = said.account
    since = None if account is None else account.since
    counted = None if since is None else account  # figures without their times are no totals
    money = None if counted is None else counted.money
    written, last = said.written_wall, said.step_wall
    behind = None if written is None or last is None else max(0.0, written - last)
    ended = written_wall if written_wall is None or behind is None else written_wall - behind
    begins = [at for at in (began_wall, since) if at is not None]
    step, stored = said.step, said.last_stored_step
    return RunSummary(
        run_id,
        outcome=said.outcome,
        reason=said.reason,
        host=said.host,
        instance=said.instance,
        started_wall=min(begins, default=None),
        ended_wall=ended,
        step=stored if step is None else step,  # the last start made none: the run has at least what is stored
        target=said.target,
        goodput=None if account is None else account.goodput_ratio,
        failures=None if counted is None else counted.failures,
        lost_seconds=None if counted is None else counted.lost_seconds,
        steps_lost=None if counted is None else counted.steps_lost,
        cost=None if money is None else money.so_far,
        cost_lost=None if money is None else money.lost,
        currency="" if money is None else money.currency[:8],
        best=said.best_result,
    )


# -- configuration ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartedWith:
    """What a run was started with, as the store holds it: scrubbed. ``files``: path on the pod -> text.
    ``problems``: what is not stored or not usable."""

    command: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def pairs(old: StartedWith, new: StartedWith) -> list[tuple[str, str]]:
    """Paths of the files that belong together: the same path, else the only one with the same name. An empty path: the
    other run has no such file."""
    left = {path for path in new.files if path not in old.files}
    found: list[tuple[str, str]] = []
    for path in old.files:
        if path in new.files:
            found.append((path, path))
            continue
        name = posixpath.basename(path)
        same = [other for other in left if posixpath.basename(other) == name]
        alone = sum(posixpath.basename(p) == name for p in old.files if p not in new.files) == 1
        if len(same) == 1 and alone:
            left.discard(same[0])
            found.append((path, same[0]))
        else:
            found.append((path, ""))
    return [*found, *(("", path) for path in sorted(left))]


def difference(a: str, old: StartedWith, b: str, new: StartedWith) -> list[str]:
    """A unified diff of commands, files and settings, each line without its line end; empty if they do not differ.
    ``a``, ``b``: the runs' names."""
    lines = _diff(f"{a}: command", list(old.command), f"{b}: command", list(new.command))
    for left, right in pairs(old, new):
        lines += _diff(
            f"{a}: {left}" if left else "/dev/null",
            scrub(old.files[left]).splitlines() if left else [],
            f"{b}: {right}" if right else "/dev/null",
            scrub(new.files[right]).splitlines() if right else [],
        )
    settings = [[f"{key} = {value}" for key, value in sorted(texts.settings.items())] for texts in (old, new)]
    return lines + _diff(
        f"{a}: settings given at the start", settings[0], f"{b}: settings given at the start", settings[1]
    )


def _diff(name: str, old: list[str], other: str, new: list[str]) -> list[str]:
    import difflib

    return list(difflib.unified_diff(old, new, name, other, n=CONTEXT_LINES, lineterm=""))
