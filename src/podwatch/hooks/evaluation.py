"""Evaluates checkpoints: follows the events, prepares each checkpoint that is due, runs the command, keeps the table.

The decisions are in hooks/evaluations_due.py; the rest of podwatch is behind ``Site`` (app/evaluation.py). One
evaluation at a time. Nothing here is on the path of detection, and an exception ends no more than one evaluation.
Evaluations that training stops for: hooks/evaluations_in_one_stop.py.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from podwatch.config.settings import EvaluationSettings
from podwatch.domain.errors import HostError, PodwatchError, UsageError
from podwatch.domain.event import Event, EventName
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.domain.secrets import scrub
from podwatch.domain.snapshot import Desired
from podwatch.domain.times import size
from podwatch.hooks import evaluation_files, evaluations_due, start_child
from podwatch.hooks.evaluation_files import metrics_of, place_of
from podwatch.hooks.evaluations_due import Result, Rules, State, Target
from podwatch.hooks.evaluations_in_one_stop import Batch, NoRoom, StoppedTraining, Where
from podwatch.hooks.hook_runner import JOURNAL_PAUSE, PAGE, Desk
from podwatch.journal import Journal

WATCH_SECONDS: Final = 1.0
"""Time between two looks at the free space and at what the next save needs, while an evaluation runs: a disk takes
about 1 GB in it, a fifth of the reserve."""
HELD_SECONDS: Final = 300.0
"""A restart takes less; after that the status shows why an evaluation waits."""
LAST_SECONDS: Final = 120.0
"""After the end of training its last checkpoint is complete within this time, or is not waited for."""
DISK_SECONDS: Final = 60.0
"""For reading results and deleting what an evaluation left; a hung file system must not end the evaluations."""
SOURCES: Final = frozenset(
    {EventName.CHECKPOINT_COMPLETE, EventName.PUBLISHED, EventName.TRAINER_FINISHED, EventName.TRAINER_STARTING}
)

Fields = dict[str, str | int | float | bool | None]


@dataclass(frozen=True, slots=True)
class Room:
    """Free bytes of the fullest disk that training and podwatch write to (None: unknown), and the bytes that must stay
    free there."""

    free: int | None
    needed: int


class Site(Protocol):
    """The pod and its checkpoints."""

    async def here(self, target: Target) -> tuple[str, Mapping[str, Any]] | None:
        """(save id, facts as hooks get them) of this complete checkpoint; None if it is not on this pod."""
        ...

    async def fetch(self, step: int, to: Path) -> tuple[str, Mapping[str, Any]]:
        """Fetch it from the store into the empty directory ``to``. Raises PodwatchError."""
        ...

    def stored(self) -> Sequence[tuple[int, str]]:
        """(step, save id) of the checkpoints in the store."""
        ...

    def local(self) -> Sequence[tuple[int, str]]:
        """(step, save id) of the complete checkpoints on this pod."""
        ...

    async def room(self) -> Room: ...

    async def newest(self) -> int | None:
        """The highest step on this pod whose checkpoint is complete or being written, after a new look."""
        ...

    async def keep_best(self, result: Result | None, text: str) -> None:
        """Pin the best checkpoint, here and in the store, and release the one before."""
        ...

    @property
    def desired(self) -> Desired:
        """Whether training runs (or is being restarted), or has ended: then its GPUs are free for an evaluation."""
        ...

    def stop_refused(self) -> str:
        """Why podwatch cannot stop training now, nor use its GPUs; empty if it can."""
        ...

    async def training_gpus(self) -> str | None:
        """CUDA_VISIBLE_DEVICES as training has it; None if training has none."""
        ...

    async def with_training_stopped(self, batch: Batch) -> tuple[bool, str]:
        """Stop training, run the batch, start training again; returns once the batch is over. Returns whether training
        was stopped, and why the batch did not run to its end (empty if it did)."""
        ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """An evaluation that can run: its command is complete, and its checkpoint is on this pod."""

    target: Target
    argv: tuple[str, ...]
    about: Mapping[str, Any]
    output: Path
    source: str


def rules_of(settings: EvaluationSettings) -> Rules:
    return Rules(settings.every_saves, settings.every_steps, settings.at_end, settings.coalesce)


class Evaluations:
    """One per daemon with ``[evaluation] command``."""

    def __init__(self, desk: Desk, site: Site) -> None:
        self._desk, self._site = desk, site
        self.settings = desk.settings.evaluation
        self._rules = rules_of(self.settings)
        self.state = State()
        self.table: tuple[Result, ...] = ()
        self.reading: frozenset[int] = frozenset()
        """Steps whose local checkpoint is being read."""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        self._held_back, self._held_since = "", 0.0
        self._ended_at: float | None = None
        """Monotonic second at which the end of training was noticed here."""

    @property
    def place(self) -> Path:
        """Directory of outputs and of fetched checkpoints."""
        return place_of(self.settings, self._desk.state, self._desk.settings.run_id)

    # -- state

    async def load(self) -> None:
        """Continue what an earlier podwatch left. Without a state, only later events count."""
        journal = self._desk.journal
        kept = evaluations_due.State.kept(await journal.run(Journal.learned, evaluations_due.STATE_KEY))
        last = await journal.run(Journal.events, limit=1)
        newest = last[-1].id if last else 0
        self.state = State(cursor=newest) if kept is None or kept.cursor > newest else kept
        self.table = evaluations_due.results_from_list(await journal.run(Journal.learned, evaluations_due.RESULTS_KEY))
        self.state, lost = evaluations_due.resumed(self.state)
        await self._save(self.state)
        for target in lost:
            await self.keep(self._failed(target, "podwatch ended while it ran; it is not repeated"), target)
        with contextlib.suppress(PodwatchError, OSError):
            await self._desk.disk.call(evaluation_files.clean, self.place, timeout=DISK_SECONDS)

    async def _save(self, state: State) -> None:
        """Durable on return. Raises HostError."""
        value = state.to_json()
        await self._desk.journal.run(Journal.learn, evaluations_due.STATE_KEY, value)
        kept = await self._desk.journal.run(Journal.learned, evaluations_due.STATE_KEY)
        if evaluations_due.State.kept(kept) != state:
            raise HostError("the state of the evaluations cannot be recorded")
        self.state = state

    async def request(self, steps: Sequence[int] | None) -> tuple[Target, ...]:
        """Evaluate these steps, or all checkpoints here and in the store. Durable on return. Raises UsageError."""
        local, stored = dict(self._site.local()), dict(self._site.stored())
        known = {**stored, **local}
        wanted = sorted(known) if steps is None else list(dict.fromkeys(steps))
        if unknown := [step for step in wanted if step not in known]:
            text = ", ".join(map(str, unknown))
            fix = "`podwatch checkpoints` and `podwatch store ls` list the checkpoints"
            raise UsageError(f"no complete checkpoint of step {text}, neither here nor in the store", fix=fix)
        if not wanted:
            raise UsageError("there is no complete checkpoint yet", fix="wait for the first save")
        targets = tuple(Target(step, known[step]) for step in wanted)
        async with self._changing:
            await self._save(evaluations_due.requested(self.state, targets))
        self._wake.set()
        return targets

    def findings(self, at: float) -> tuple[Finding, ...]:
        found: tuple[Finding, ...] = ()
        if self._held_back and self.state.waiting and at - self._held_since > HELD_SECONDS:
            waiting = evaluations_due.named(self.state.waiting)
            text = f"podwatch does not stop training to evaluate {waiting}: {self._held_back}"
            fix = 'if that does not end: free some disk space, or set [evaluation] gpus = "none"'
            found = (Finding(FindingKind.EVALUATION_WAITING, Severity.INFO, text, at, fix),)
        if self.state.failures < evaluations_due.FAILING_AFTER:
            return found
        text = f"the last {self.state.failures} evaluations failed: {self.state.why}"
        fix = f"read the output in {self._desk.state / 'evaluation.log'}; `podwatch eval --steps N` tries it again"
        return (*found, Finding(FindingKind.EVALUATION_FAILING, Severity.WARNING, text, at, fix))

    # -- work

    def start(self) -> None:
        self._task = asyncio.create_task(self._work(), name="evaluation")

    def event(self, event: Event) -> None:
        """Never blocks."""
        if event.name is EventName.TRAINER_STARTING:
            self._ended_at = None
        if event.name in SOURCES:
            self._wake.set()

    async def stop(self) -> None:
        """End the evaluation in progress; it is interrupted. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _work(self) -> None:
        async with StoppedTraining(self, self._desk, self._site) as stopped:
            while True:
                try:
                    self._wake.clear()
                    await self._gather()
                    if not self.state.waiting:
                        await self._wake.wait()
                    elif self._at_end and await self._last_is_open():
                        await self.pause(2.0)
                    elif self.settings.gpus == "stop-training":
                        await stopped.turn()
                    else:
                        await self._next()
                except PodwatchError as error:
                    self.complain(str(error))
                    await self._desk.clock.sleep(JOURNAL_PAUSE)
                except Exception as error:  # an error here must not end the evaluations for good
                    self.complain(f"internal error: {error!r}"[:200])
                    await self._desk.clock.sleep(JOURNAL_PAUSE)

    @property
    def _at_end(self) -> bool:
        return any(target.why == evaluations_due.END for target in self.state.waiting)

    async def _last_is_open(self) -> bool:
        """Whether training has ended, and a checkpoint newer than those that were reported can still become complete:
        the evaluation at the end is of the last one."""
        now = self._desk.clock.monotonic()
        if self._ended_at is None:
            self._ended_at = now
        if now - self._ended_at > LAST_SECONDS:
            return False
        there, known = await self._site.newest(), self.state.newest
        return not self.state.ended or (there is not None and (known is None or there > known.step))

    async def owed(self) -> str:
        """What the end of a finished run has to wait for, as text; empty if nothing."""
        if not self._rules.at_end:
            return ""
        with contextlib.suppress(PodwatchError):  # the loop's own try reports it
            await self._gather()
        target = evaluations_due.last(self.state)
        if target is not None:
            return f"the evaluation of step {target.step}"
        return "the last checkpoint, to evaluate it" if await self._last_is_open() else ""

    async def pause(self, seconds: float) -> None:
        """Wait until something happened that can make a checkpoint due, for at most ``seconds``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    def complain(self, why: str) -> None:
        self.state = replace(
            self.state, failures=max(self.state.failures, evaluations_due.FAILING_AFTER), why=scrub(why)
        )

    async def _gather(self) -> None:
        """Take the events since the last look into account."""
        journal = self._desk.journal
        while True:
            async with self._changing:
                state = self.state
                page = await journal.run(Journal.events, after_id=state.cursor, limit=PAGE)
                for event in page:
                    state = evaluations_due.on_event(state, event, self._rules)
                if state != self.state:
                    quiet = replace(state, cursor=self.state.cursor) == self.state
                    if quiet:  # only the cursor: it is written with the next change
                        self.state = state
                    else:
                        await self._save(state)
            if len(page) < PAGE:
                return

    async def _next(self) -> None:
        """Evaluate the first that waits, beside training."""
        target = self.state.waiting[0]
        async with self.prepared(target) as prepared:
            result = await self.evaluate(target, prepared, Where(""))
        await self.keep(result, target)

    def hold_back(self, why: str) -> None:
        """Record why training is not stopped for the evaluations that wait; empty: nothing prevents it."""
        if not (why and self._held_back):
            self._held_since = self._desk.clock.monotonic()
        self._held_back = why

    @property
    def when(self) -> str:
        """When the requested evaluations run, for the answer to the request; empty: as soon as possible."""
        if self.settings.gpus != "stop-training":
            return ""
        if why := self._site.stop_refused():
            return f"podwatch cannot stop training for it now: {why}"
        running = self._site.desired is Desired.RUNNING
        return "podwatch stops training for it after the next save" if running else ""

    async def give_up(self, target: Target, result: Result) -> None:
        """Record the failure of one that never ran."""
        async with self._changing:
            await self._save(replace(self.state, waiting=tuple(t for t in self.state.waiting if t != target)))
        await self.keep(result, target)

    async def interrupted(self, why: str, also: Collection[Target] = ()) -> None:
        """Repeat the evaluations that did not come to their end, and those (``also``) for which training was stopped in
        vain; or give them up and record that they failed."""
        async with self._changing:
            state, lost = evaluations_due.resumed(self.state, also)
            if state == self.state:
                return
            cut = (*self.state.running, *also)
            await self._save(state)
        for target in cut:
            text = f"the evaluation of step {target.step} was interrupted: {why}"
            self._desk.emit(self._event(EventName.EVALUATION_FAILED, text, target, {"interrupted": True}))
        for target in lost:
            await self.keep(self._failed(target, "it was interrupted too often; it is not repeated"), target)

    # -- one evaluation

    async def evaluate(self, target: Target, prepared: Prepared | Result, where: Where) -> Result:
        """Run it. Raises HostError if its begin cannot be recorded. ``keep`` its result once ``prepared`` has ended:
        when a result is reported, the files of the evaluation are deleted."""
        async with self._changing:
            await self._save(evaluations_due.started(self.state, target))
        return await self._run(prepared, where) if isinstance(prepared, Prepared) else prepared

    @contextlib.asynccontextmanager
    async def prepared(self, target: Target, *, patient: bool = False) -> AsyncIterator[Prepared | Result]:
        """The evaluation, ready to run, or its result if it cannot. At the end everything that it left in its directory
        is deleted. ``patient``: raises NoRoom if the disk is full."""
        try:
            self.reading |= {target.step}
            yield await self._prepare(target, patient=patient)
        finally:
            self.reading -= {target.step}
            with contextlib.suppress(PodwatchError, OSError):
                left = self._desk.disk.call(evaluation_files.remove, self.place, target.step, timeout=DISK_SECONDS)
                await asyncio.shield(left)

    async def no_room(self) -> str:
        """Why the disk has no room for an evaluation now; empty if it has, or cannot be read."""
        room = await self._site.room()
        if room.free is None or evaluations_due.enough_room(room.free, room.needed):
            return ""
        return f"the disk has {size(room.free)} free; {_KEPT.format(_size(room))}"

    async def _prepare(self, target: Target, *, patient: bool) -> Prepared | Result:
        if text := await self.no_room():
            if patient:
                raise NoRoom(text)
            return self._failed(target, text)
        source = "local"
        try:
            order = (self.place, target.step, self._desk.settings.user_of(self.settings))
            work = await self._desk.disk.call(evaluation_files.make, *order, timeout=DISK_SECONDS)
            found = await self._site.here(target)
            if found is None:
                source = "store"
                found = await self._site.fetch(target.step, work / "checkpoint")
        except PodwatchError as error:
            if patient and isinstance(error, NoRoom):
                raise
            return self._failed(target, str(error), source)
        except OSError as error:
            return self._failed(target, f"cannot write to {self.place}: {error.strerror or error}", source)
        save_id, about = found
        target = replace(target, save_id=save_id)
        output = work / "output"
        values = {
            "checkpoint": str(about.get("checkpoint") or ""),
            "weights": str(about.get("weights") or ""),
            "step": str(target.step),
            "run_id": self._desk.settings.run_id,
            "output": str(output),
        }
        missing = {
            "weights": evaluations_due.no_weights(
                str(about.get("layout") or "?"), str(about.get("convert") or ""), str(about.get("note") or "")
            )
        }
        try:
            argv = evaluations_due.fill(self.settings.command, values, missing)
        except evaluations_due.MissingValue as error:
            return self._failed(target, str(error), source)
        return Prepared(target, argv, {**about, **values}, output, source)

    async def _run(self, one: Prepared, where: Where) -> Result:
        desk, settings, target = self._desk, self.settings, one.target
        text = f"evaluating step {target.step} {where.text}"
        fields: Fields = {"source": one.source, "stopped": where.stopped}
        desk.emit(self._event(EventName.EVALUATION_STARTED, text, target, fields))
        document = {
            "schema_version": 1, "run_id": desk.settings.run_id, "step": target.step, "save_id": target.save_id,
            "reason": target.why, "checkpoint": one.about["checkpoint"], "parts": one.about.get("parts", {}),
            "weights": one.about["weights"] or None, "output": str(one.output), "source": one.source,
        }  # fmt: skip
        own = {
            "PODWATCH_STEP": str(target.step), "PODWATCH_CHECKPOINT": one.about["checkpoint"],
            "PODWATCH_WEIGHTS": one.about["weights"], "PODWATCH_OUTPUT": str(one.output),
            "PODWATCH_HOOK_RUN_ID": desk.settings.run_id,
        }  # fmt: skip
        if where.gpus is not None:
            own["CUDA_VISIBLE_DEVICES"] = where.gpus
        if desk.config:
            own["PODWATCH_CONFIG"] = desk.config
        command = settings.as_hook(one.argv)
        try:
            order = await desk.disk.call(
                lambda: start_child.order_for(
                    command, desk.settings, os.environ, own=own, document=document,
                    title=f"evaluation of step {target.step}", state=desk.state,
                ),
                timeout=DISK_SECONDS,
            )  # fmt: skip
        except (PodwatchError, OSError) as error:
            return self._failed(target, str(error), one.source)
        done = await self._watched(start_child.run(order))
        metrics: dict[str, float] = {}
        why = done.why(settings.timeout)
        if done.ok:
            try:
                metrics = await desk.disk.call(metrics_of, one.output, done.tail, timeout=DISK_SECONDS)
            except (OSError, ValueError) as error:
                why = f"cannot read its results: {error}"
            why = why or ("" if metrics else NO_RESULTS)
        ok = done.ok and not why
        return Result(target.step, target.save_id, ok, desk.clock.wall(), done.seconds, one.source, scrub(why), metrics)

    async def _watched(self, run: Coroutine[Any, Any, start_child.Result]) -> start_child.Result:
        """The result of ``run``, which is ended early if it takes the disk space that training needs."""
        task = asyncio.create_task(run)
        try:
            while True:
                await asyncio.wait([task], timeout=WATCH_SECONDS)
                if task.done():
                    return task.result()
                room = await self._site.room()
                if room.free is not None and not evaluations_due.enough_room(room.free, room.needed):
                    return start_child.Result(None, problem=_too_little(room))
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])

    def _failed(self, target: Target, why: str, source: str = "local") -> Result:
        return Result(target.step, target.save_id, False, self._desk.clock.wall(), source=source, why=scrub(why))

    def _event(
        self,
        name: EventName,
        text: str,
        target: Target | Result,
        fields: Fields,
        severity: Severity = Severity.INFO,
    ) -> Event:
        known: Fields = {"step": target.step, "save_id": target.save_id, **fields}
        return Event(name, self._desk.clock.wall(), text, severity, known)

    # -- results

    async def keep(self, result: Result, target: Target) -> None:
        """Record the result, report it, and pin the best."""
        settings, journal = self.settings, self._desk.journal
        self.table = evaluations_due.with_result(self.table, result)
        await journal.run(Journal.learn, evaluations_due.RESULTS_KEY, [row.to_json() for row in self.table])
        async with self._changing:
            failures = 0 if result.ok else self.state.failures + 1
            left = tuple(t for t in self.state.running if t != target)
            await self._save(replace(self.state, running=left, failures=failures, why=result.why))
        value = result.metrics.get(settings.metric) if settings.metric else None
        fields: Fields = {"seconds": round(result.seconds, 3), "source": result.source, "reason": target.why}
        if not result.ok:
            text = f"the evaluation of step {result.step} failed: {result.why}. Training is not affected;"
            text += f" its output: {self._desk.state / 'evaluation.log'}"
            return self._desk.emit(self._event(EventName.EVALUATION_FAILED, text, result, fields, Severity.WARNING))
        shown = "" if value is None else f": {settings.metric} {value:.6g}"
        missing = f" (it has no number {settings.metric!r})" if settings.metric and value is None else ""
        text = f"step {result.step} is evaluated after {result.seconds:.1f} s{shown}{missing}"
        fields |= {"metric": settings.metric or None, "value": value}
        self._desk.emit(self._event(EventName.EVALUATION_DONE, text, result, fields))
        await self._note_best()
        return None

    @property
    def best(self) -> Result | None:
        there = evaluations_due.with_earlier((*self._site.local(), *self._site.stored()), self.state.again)
        return evaluations_due.best(self.table, self.settings.metric, lower=self.settings.lower_is_better, there=there)

    def best_text(self) -> str:
        """The best result, for the heartbeat; empty if there is none."""
        top = self.best if self.settings.metric else None
        return "" if top is None else f"{self._value(top)} at step {top.step}"

    def _value(self, one: Result) -> str:
        return f"{self.settings.metric} {one.metrics[self.settings.metric]:.6g}"

    async def _note_best(self) -> None:
        if not self.settings.metric:
            return
        top = self.best
        with contextlib.suppress(PodwatchError):  # tried again after the next evaluation
            await self._site.keep_best(top, "" if top is None else f"{evaluations_due.BEST_PIN}: {self._value(top)}")


NO_RESULTS: Final = "it wrote no JSON with numbers: neither results.json in {output} nor as the last line of its output"
_KEPT: Final = "podwatch keeps {} for training (a reserve, and the next save)"


def _too_little(room: Room) -> str:
    return f"ended: it left {size(room.free or 0)} free on the disk; {_KEPT.format(_size(room))}"


def _size(room: Room) -> str:
    return size(room.needed)
