"""Evaluates checkpoints: follows the events, prepares each checkpoint that is due, runs the command, keeps the table.

The decisions are in policy/evaluation.py; the rest of podwatch is behind ``Site`` (daemon/evaluation.py). One
evaluation at a time. Nothing here is on the path of detection, and an exception ends no more than one evaluation.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from podwatch.config.settings import EvaluationSettings
from podwatch.config.units import format_size
from podwatch.domain.errors import HostError, PodwatchError, UsageError
from podwatch.domain.event import Event, EventName
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.domain.secrets import scrub
from podwatch.hooks import child, evaluation_files
from podwatch.hooks.evaluation_files import metrics_of, place_of
from podwatch.hooks.runner import JOURNAL_PAUSE, PAGE, Desk, is_milestone
from podwatch.journal import Journal
from podwatch.policy import evaluation as policy
from podwatch.policy.evaluation import Result, Rules, State, Target

WATCH_SECONDS: Final = 2.0
"""Time between two looks at the free space while an evaluation runs: a disk takes about 1 GB/s."""
GPU_SECONDS: Final = 30.0
"""Until the next look for a free GPU."""
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

    def free_gpus(self) -> tuple[str, ...]:
        """UUIDs of the GPUs that neither this run nor anything else uses now."""
        ...

    async def keep_best(self, result: Result | None, text: str) -> None:
        """Pin the best checkpoint, here and in the store, and release the one before."""
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
    return Rules(settings.every_saves, settings.every_steps, settings.milestones, settings.at_end, settings.coalesce)


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

    @property
    def place(self) -> Path:
        """Directory of outputs and of fetched checkpoints."""
        return place_of(self.settings, self._desk.state, self._desk.settings.run_id)

    # -- state

    async def load(self) -> None:
        """Continue what an earlier podwatch left. Without a state, only later events count."""
        journal = self._desk.journal
        kept = policy.state_from_dict(await journal.run(Journal.learned, policy.STATE_KEY))
        last = await journal.run(Journal.events, limit=1)
        newest = last[-1].id if last else 0
        self.state = State(cursor=newest) if kept is None or kept.cursor > newest else kept
        self.table = policy.results_from_list(await journal.run(Journal.learned, policy.RESULTS_KEY))
        self.state, lost = policy.resumed(self.state)
        await self._save(self.state)
        for target in lost:
            await self._keep(self._failed(target, "podwatch ended while it ran; it is not repeated"), target)
        with contextlib.suppress(PodwatchError, OSError):
            await self._desk.disk.call(evaluation_files.clean, self.place, timeout=DISK_SECONDS)

    async def _save(self, state: State) -> None:
        """Durable on return. Raises HostError."""
        value = policy.state_to_dict(state)
        await self._desk.journal.run(Journal.learn, policy.STATE_KEY, value)
        kept = await self._desk.journal.run(Journal.learned, policy.STATE_KEY)
        if policy.state_from_dict(kept) != state:
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
            await self._save(policy.requested(self.state, targets))
        self._wake.set()
        return targets

    def findings(self, at: float) -> tuple[Finding, ...]:
        if self.state.failures < policy.FAILING_AFTER:
            return ()
        text = f"the last {self.state.failures} evaluations failed: {self.state.why}"
        fix = "`podwatch eval logs` shows the output; `podwatch eval --steps N` tries it again"
        return (Finding(FindingKind.EVALUATION_FAILING, Severity.WARNING, text, at, fix),)

    # -- work

    def start(self) -> None:
        self._task = asyncio.create_task(self._work(), name="evaluation")

    def event(self, event: Event) -> None:
        """Never blocks."""
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
        while True:
            try:
                self._wake.clear()
                await self._gather()
                if not self.state.waiting:
                    await self._wake.wait()
                else:
                    await self._next()
            except PodwatchError as error:
                self._complain(str(error))
                await self._desk.clock.sleep(JOURNAL_PAUSE)
            except Exception as error:  # an error here must not end the evaluations for good
                self._complain(f"internal error: {error!r}"[:200])
                await self._desk.clock.sleep(JOURNAL_PAUSE)

    def _complain(self, why: str) -> None:
        self.state = replace(self.state, failures=max(self.state.failures, policy.FAILING_AFTER), why=scrub(why))

    async def _gather(self) -> None:
        """Take the events since the last look into account."""
        journal = self._desk.journal
        while True:
            async with self._changing:
                state = self.state
                page = await journal.run(Journal.events, after_id=state.cursor, limit=PAGE)
                for event in page:
                    mark = self.settings.milestones and await is_milestone(self._desk, event)
                    state = policy.on_event(state, event, self._rules, milestone=mark)
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
        gpus: tuple[str, ...] = ()
        if self.settings.gpus == "free":
            gpus = self._site.free_gpus()[: self.settings.gpu_count]
            if len(gpus) < self.settings.gpu_count:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(GPU_SECONDS):
                        await self._wake.wait()
                return
        async with self._changing:
            await self._save(policy.started(self.state, target))
        async with self._prepared(target) as prepared:
            if isinstance(prepared, Prepared):
                result = await self._run(prepared, ",".join(gpus))
            else:
                result = prepared
        await self._keep(result, target)

    # -- one evaluation

    @contextlib.asynccontextmanager
    async def _prepared(self, target: Target) -> AsyncIterator[Prepared | Result]:
        """The evaluation, ready to run, or its result if it cannot. At the end everything that it left in its directory
        is deleted."""
        try:
            self.reading |= {target.step}
            yield await self._prepare(target)
        finally:
            self.reading -= {target.step}
            with contextlib.suppress(PodwatchError, OSError):
                left = self._desk.disk.call(evaluation_files.remove, self.place, target.step, timeout=DISK_SECONDS)
                await asyncio.shield(left)

    async def _prepare(self, target: Target) -> Prepared | Result:
        room = await self._site.room()
        if room.free is not None and not policy.enough_room(room.free, room.needed):
            return self._failed(target, f"the disk has {format_size(room.free)} free; {_KEPT.format(_size(room))}")
        source = "local"
        try:
            order = (self.place, target.step, self.settings.user)
            work = await self._desk.disk.call(evaluation_files.make, *order, timeout=DISK_SECONDS)
            found = await self._site.here(target)
            if found is None:
                source = "store"
                found = await self._site.fetch(target.step, work / "checkpoint")
        except PodwatchError as error:
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
            "weights": policy.no_weights(
                str(about.get("layout") or "?"), str(about.get("convert") or ""), str(about.get("note") or "")
            )
        }
        try:
            argv = policy.fill(self.settings.command, values, missing)
        except policy.MissingValue as error:
            return self._failed(target, str(error), source)
        return Prepared(target, argv, {**about, **values}, output, source)

    async def _run(self, one: Prepared, gpus: str) -> Result:
        """``gpus``: CUDA_VISIBLE_DEVICES."""
        desk, settings, target = self._desk, self.settings, one.target
        text = f"evaluating step {target.step} beside training"
        desk.emit(self._event(EventName.EVALUATION_STARTED, text, target, {"source": one.source}))
        document = {
            "schema_version": 1, "run_id": desk.settings.run_id, "step": target.step, "save_id": target.save_id,
            "reason": target.why, "checkpoint": one.about["checkpoint"], "parts": one.about.get("parts", {}),
            "weights": one.about["weights"] or None, "output": str(one.output), "source": one.source,
        }  # fmt: skip
        own = {
            "PODWATCH_STEP": str(target.step), "PODWATCH_CHECKPOINT": one.about["checkpoint"],
            "PODWATCH_WEIGHTS": one.about["weights"], "PODWATCH_OUTPUT": str(one.output),
            "PODWATCH_HOOK_RUN_ID": desk.settings.run_id, "CUDA_VISIBLE_DEVICES": gpus,
        }  # fmt: skip
        if desk.config:
            own["PODWATCH_CONFIG"] = desk.config
        command = settings.as_check(one.argv)
        try:
            order = await desk.disk.call(
                lambda: child.order_for(
                    command, desk.settings, os.environ, own=own, document=document,
                    title=f"evaluation of step {target.step}", state=desk.state,
                ),
                timeout=DISK_SECONDS,
            )  # fmt: skip
        except (PodwatchError, OSError) as error:
            return self._failed(target, str(error), one.source)
        done = await self._watched(child.run(order))
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

    async def _watched(self, run: Coroutine[Any, Any, child.Result]) -> child.Result:
        """The result of ``run``, which is ended early if it takes the disk space that training needs."""
        task = asyncio.create_task(run)
        try:
            while True:
                await asyncio.wait([task], timeout=WATCH_SECONDS)
                if task.done():
                    return task.result()
                room = await self._site.room()
                if room.free is not None and not policy.enough_room(room.free, room.needed):
                    text = f"ended: it left {format_size(room.free)} free on the disk; {_KEPT.format(_size(room))}"
                    return child.Result(None, problem=text)
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

    async def _keep(self, result: Result, target: Target) -> None:
        """Record the result, report it, and pin the best."""
        settings, journal = self.settings, self._desk.journal
        worse = None
        if settings.metric:
            worse = policy.regression(
                self.table, result, settings.metric, lower=settings.lower_is_better, tolerance=settings.regression
            )
        self.table = policy.with_result(self.table, result)
        await journal.run(Journal.learn, policy.RESULTS_KEY, policy.results_to_list(self.table))
        async with self._changing:
            failures = 0 if result.ok else self.state.failures + 1
            left = tuple(t for t in self.state.running if t != target)
            await self._save(replace(self.state, running=left, failures=failures, why=result.why))
        value = result.metrics.get(settings.metric) if settings.metric else None
        fields: Fields = {"seconds": round(result.seconds, 3), "source": result.source, "reason": target.why}
        if not result.ok:
            text = f"the evaluation of step {result.step} failed: {result.why}. Training is not affected;"
            text += " `podwatch eval logs` shows its output"
            return self._desk.emit(self._event(EventName.EVALUATION_FAILED, text, result, fields, Severity.WARNING))
        shown = "" if value is None else f": {settings.metric} {value:.6g}"
        missing = f" (it has no number {settings.metric!r})" if settings.metric and value is None else ""
        text = f"step {result.step} is evaluated after {result.seconds:.1f} s{shown}{missing}"
        fields |= {"metric": settings.metric or None, "value": value}
        self._desk.emit(self._event(EventName.EVALUATION_DONE, text, result, fields))
        await self._note_best()
        if worse is not None:
            top, share = worse
            text = f"{settings.metric} of step {result.step} is {value:.6g}, {_percent(share)} worse than the best,"
            text += f" {top.metrics[settings.metric]:.6g} of step {top.step}. Training continues; `podwatch restart"
            text += f" --step {top.step}` returns to it"
            told: Fields = {"metric": settings.metric, "value": value, "best_step": top.step}
            told["best_value"] = top.metrics[settings.metric]
            self._desk.emit(self._event(EventName.EVALUATION_REGRESSED, text, result, told, Severity.WARNING))
        return None

    @property
    def best(self) -> Result | None:
        there = frozenset((*self._site.local(), *self._site.stored()))
        return policy.best(self.table, self.settings.metric, lower=self.settings.lower_is_better, there=there)

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
            await self._site.keep_best(top, "" if top is None else f"{policy.BEST_PIN}: {self._value(top)}")


NO_RESULTS: Final = "it wrote no JSON with numbers: neither results.json in {output} nor as the last line of its output"
_KEPT: Final = "podwatch keeps {} for training ([evaluation] reserve, and the next save)"


def _size(room: Room) -> str:
    return format_size(room.needed)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 100 else "more than 100 times"
