"""Evaluations that training stops for: what is fetched before the stop, when it stops, and the evaluations that share
one stop.

``Site.with_training_stopped`` (recovery/requests.py) stops training and starts it again; this runs between.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from podwatch.domain.errors import HostError, PodwatchError
from podwatch.domain.snapshot import Desired
from podwatch.hooks import evaluations_due
from podwatch.hooks.evaluations_due import Result, Target

if TYPE_CHECKING:
    from podwatch.hooks.evaluation import Evaluations, Prepared, Site
    from podwatch.hooks.hook_runner import Desk

TURN_SECONDS: Final = 3.0
"""Time between two looks whether training can be stopped now: well within ``hooks.evaluations_due.FRESH_SECONDS``."""
AGAIN_SECONDS: Final = 15.0
"""Until the next try after training could not be stopped, or its GPUs were not free."""
MISSING_SECONDS: Final = 300.0
"""A checkpoint that is neither complete here nor in the store is given up after this time: after a start of podwatch or
of training it is examined again first."""
OVERHEAD_SECONDS: Final = 300.0
"""Beyond the time limits, for preparing, starting and ending evaluations on a slow disk."""


class NoRoom(HostError):  # noqa: N818 - no error: it is fetched later
    """The disk has no room for this checkpoint now."""


@dataclass(frozen=True, slots=True)
class Where:
    """Where an evaluation runs. ``gpus``: CUDA_VISIBLE_DEVICES; None leaves it as it is. ``stopped``: on training's
    GPUs."""

    gpus: str | None
    stopped: bool = False

    @property
    def text(self) -> str:
        return "on training's GPUs" if self.stopped else "beside training"


@dataclass(frozen=True, slots=True)
class Fetched:
    """A checkpoint from the store, ready to be evaluated; on this pod until ``files`` is closed."""

    prepared: "Prepared"
    files: contextlib.AsyncExitStack


class Batch:
    """The evaluations that share one stop. Implements recovery's Work: no error leaves ``run``."""

    def __init__(
        self,
        owner: "Evaluations",
        desk: "Desk",
        site: "Site",
        targets: Sequence[Target],
        fetched: Mapping[Target, Fetched],
    ) -> None:
        self._owner, self._desk, self._site = owner, desk, site
        self._targets, self._fetched = tuple(targets), dict(fetched)

    @property
    def title(self) -> str:
        return evaluations_due.named(self._targets)

    @property
    def most_seconds(self) -> float:
        """The last one begins within one time limit, and then has its own."""
        return 2 * self._owner.settings.timeout + OVERHEAD_SECONDS

    async def run(self) -> None:
        owner, clock = self._owner, self._desk.clock
        end = clock.monotonic() + owner.settings.timeout
        try:
            where = Where(await self._site.training_gpus(), stopped=True)
            for number, target in enumerate(self._targets):
                if number and clock.monotonic() >= end:
                    return  # the others wait for the next save
                await self._one(target, where)
        except (PodwatchError, OSError) as error:
            owner.complain(str(error))
        except Exception as error:  # training starts again, whatever is wrong here
            owner.complain(f"internal error: {error!r}"[:200])

    async def _one(self, target: Target, where: Where) -> None:
        here = self._fetched.get(target)
        if here is not None:
            result = await self._owner.evaluate(target, here.prepared, where)
            await here.files.aclose()
        else:
            async with self._owner.prepared(target) as prepared:
                result = await self._owner.evaluate(target, prepared, where)
        await self._owner.keep(result, target)


class StoppedTraining:
    """Decides when training stops, and for what. ``turn`` is called while an evaluation waits."""

    def __init__(self, owner: "Evaluations", desk: "Desk", site: "Site") -> None:
        self._owner, self._desk, self._site = owner, desk, site
        self._fetched: dict[Target, Fetched] = {}
        self._missing: dict[Target, float] = {}
        """Since when (monotonic) a target is neither complete here nor in the store."""
        self._full = False
        """Nothing more is fetched until the fetched ones are evaluated."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for target in tuple(self._fetched):
            await self._release(target)

    async def turn(self) -> None:
        """Fetch what is only in the store; stop training and evaluate if it is time; else wait a moment."""
        owner, site = self._owner, self._site
        local = site.local()
        for target in tuple(self._fetched):
            if target not in owner.state.waiting:  # a newer one replaced it
                await self._release(target)
        absent = self._to_fetch(local)
        ready = evaluations_due.ready(owner.state, local, self._fetched)
        targets = evaluations_due.stop_for(owner.state, ready, self._desk.clock.wall(), site.desired)
        if absent is not None and not targets and not (self._full and self._fetched):
            await self._fetch(absent)
            return
        refused = site.stop_refused()
        if targets and not refused and site.desired is Desired.RUNNING:
            refused = await owner.no_room()  # known before training stops for nothing
        owner.hold_back(refused)
        if targets and not refused:
            await self._stop_for(targets)
        else:
            await owner.pause(TURN_SECONDS)

    async def _stop_for(self, targets: Sequence[Target]) -> None:
        owner = self._owner
        batch = Batch(owner, self._desk, self._site, targets, self._fetched)
        steps = {target.step for target in targets}
        owner.reading |= steps
        try:
            stopped, why = await self._site.with_training_stopped(batch)
        finally:
            owner.reading -= steps
        for target in targets:
            await self._release(target)
        if why:
            owner.hold_back(why)
        in_vain = stopped and all(target in owner.state.waiting for target in targets)
        await owner.interrupted(why or "podwatch could not run it", targets if in_vain else ())
        if why and not stopped:
            await owner.pause(AGAIN_SECONDS)

    # -- the store

    def _to_fetch(self, local: Sequence[tuple[int, str]]) -> Target | None:
        """The first target that is not here and is in the store, or has been missing for so long that the attempt to
        fetch it says why."""
        now, stored = self._desk.clock.monotonic(), self._site.stored()
        absent = [
            t for t in self._owner.state.waiting if t not in self._fetched and not evaluations_due.among(t, local)
        ]
        self._missing = {t: self._missing.get(t, now) for t in absent}
        long = (t for t in absent if evaluations_due.among(t, stored) or now - self._missing[t] > MISSING_SECONDS)
        return next(long, None)

    async def _fetch(self, target: Target) -> None:
        files = contextlib.AsyncExitStack()
        self._full = False
        try:
            one = await files.enter_async_context(self._owner.prepared(target, patient=bool(self._fetched)))
        except NoRoom:
            self._full = True
            return
        if isinstance(one, Result):  # it cannot be fetched: that is its result
            await files.aclose()
            await self._owner.give_up(target, one)
        else:
            self._fetched[target] = Fetched(one, files)

    async def _release(self, target: Target) -> None:
        one = self._fetched.pop(target, None)
        if one is not None:
            await one.files.aclose()
