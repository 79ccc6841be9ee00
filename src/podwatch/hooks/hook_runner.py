"""Runs the configured hooks: one task for each, which follows the journal's events and runs one occasion at a time.

An event only wakes the tasks, so nothing here is on the path of detection. The journal decides what is pending: each
hook records the last event that it began, and what it runs: what is there at podwatch's next start was interrupted by
podwatch's end. Occasions of ``hooks.occasions.AT_LEAST_ONCE`` are then run again with the same id, all others are not.
"""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from podwatch.config.settings import HookSettings, Settings
from podwatch.domain.document import Document, Many, Text, Whole
from podwatch.domain.errors import HostError, PodwatchError
from podwatch.domain.event import Emit, Event, EventName
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.domain.secrets import scrub
from podwatch.domain.times import rfc3339
from podwatch.hooks import start_child
from podwatch.hooks.occasions import (
    FAILING_AFTER,
    SOURCES,
    Occasion,
    next_of,
    occasion_of,
    pause_seconds,
)
from podwatch.journal import AsyncJournal, Journal
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import Clock, either

SCHEMA_VERSION: Final = 1
PAGE: Final = 500
"""Events read at once."""
JOURNAL_PAUSE: Final = 10.0
"""Seconds until the next try while the journal cannot be written: a run without a record must not happen."""


def key_of(name: str) -> str:
    """Journal key of one hook's ``Kept``."""
    return f"hook:{name}"


def directory(state: Path) -> Path:
    """Of logs and locks, in the run's state directory."""
    return state / "hooks"


@dataclass(frozen=True, slots=True)
class Kept(Document):
    """What outlives podwatch. ``cursor``: the last event that was begun; ``failures`` in a row; ``done``: ids of the
    newest successful occasions; ``running``: what was begun and has not ended."""

    FILE = "state of a hook"

    cursor: Whole | None = None
    failures: Whole = 0
    why: Text = ""
    done: Many[Text] = ()
    running: Many[Occasion] = ()


@dataclass(frozen=True, slots=True)
class Desk:
    """What all hooks of a daemon share. ``config`` is the path of podwatch.toml, ``state`` the run's state directory,
    ``disk`` a thread for small files."""

    settings: Settings
    journal: AsyncJournal
    clock: Clock
    emit: Emit
    checkpoint: Callable[[int | None], Awaitable[Mapping[str, Any]]]
    """What a hook gets about the checkpoint of a step: ``checkpoint`` (path, None if it is not on this pod), ``parts``
    (name -> path), and more."""
    state: Path
    config: str
    disk: Worker


def document_of(one: Occasion, hook: str, attempt: int, settings: Settings, about: Mapping[str, Any]) -> dict[str, Any]:
    """What the command reads from standard input (docs/hooks.md)."""
    return {
        "schema_version": SCHEMA_VERSION,
        "id": one.id,
        "hook": hook,
        "event": one.kind,
        "attempt": attempt,
        "at": rfc3339(one.wall),
        "run_id": settings.run_id,
        "step": one.step,
        "save_id": one.save_id,
        "output_dir": str(settings.trainer.output_dir),
        "checkpoint": None,
        "parts": {},
        "weights": None,
        "convert": "",
        "size_bytes": None,
        **about,
        "severity": one.severity,
        "message": one.message,
        "skipped": one.skipped,
        "fields": dict(one.fields),
    }


def variables_of(document: Mapping[str, Any], config: str) -> dict[str, str]:
    """The same as PODWATCH_* variables, for shell scripts; PODWATCH_CONFIG makes `podwatch` find this run."""
    found = {
        "PODWATCH_HOOK_NAME": document["hook"],
        "PODWATCH_HOOK_EVENT": document["event"],
        "PODWATCH_HOOK_ID": document["id"],
        "PODWATCH_HOOK_ATTEMPT": document["attempt"],
        "PODWATCH_HOOK_RUN_ID": document["run_id"],
        "PODWATCH_HOOK_MESSAGE": document["message"],
        "PODWATCH_HOOK_OUTPUT_DIR": document["output_dir"],
        "PODWATCH_STEP": "" if document["step"] is None else document["step"],
        "PODWATCH_CHECKPOINT": document["checkpoint"] or "",
        "PODWATCH_CONFIG": config,
    }
    return {name: str(value).replace("\0", "") for name, value in found.items() if name != "PODWATCH_CONFIG" or value}


def is_milestone(event: Event) -> bool:
    """Whether the store keeps this published checkpoint for good."""
    return event.name is EventName.PUBLISHED and event.fields.get("milestone") is True


class HookLine:
    """One hook: its pending occasions, and the run in progress."""

    def __init__(self, hook: HookSettings, desk: Desk) -> None:
        self.hook, self._desk = hook, desk
        self.wake = asyncio.Event()
        self.failures, self.why = 0, ""
        self.running = ""
        self.reading: int | None = None
        """The step of the run in progress, whose checkpoint the command possibly reads."""
        self._at_work = False
        """An occasion is being run, retries included."""
        self._unsaved = False
        """The state could not be recorded: nothing is run until it is, so that the next podwatch repeats nothing."""
        self._cursor = self._read_to = 0
        self._pending: tuple[Occasion, ...] = ()
        self._begun: dict[str, Occasion] = {}
        """By id: what runs, and what podwatch's end interrupts now."""
        self._done: list[str] = []

    # -- state

    async def load(self, newest: int) -> None:
        """Read the state of an earlier podwatch. A hook without one starts at the event ``newest``."""
        kept = Kept.kept(await self._desk.journal.run(Journal.learned, key_of(self.hook.name))) or Kept()
        known = kept.cursor is not None and kept.cursor <= newest
        self._cursor = self._read_to = kept.cursor if known and kept.cursor is not None else newest
        self.failures, self.why, self._done = kept.failures, kept.why, list(kept.done)
        for one in kept.running:
            if one.again:
                self._pending += (replace(one, interrupted=one.interrupted + 1),)
            else:
                note = "podwatch ended while it ran; it is not run again"
                self._report(one, start_child.Result(None, problem=note), 1, None)
        if not known or len(kept.running) > len(self._pending):
            with contextlib.suppress(HostError):  # without a disk everything is read again at the next start
                await self._save()

    async def _save(self, failures: int | None = None) -> None:
        """Raises HostError if it cannot be recorded."""
        # What was interrupted and has not begun again counts one interruption more once it is read again.
        waiting = [replace(one, interrupted=one.interrupted - 1) for one in self._pending if one.interrupted]
        running = (*self._begun.values(), *waiting)
        failures = self.failures if failures is None else failures
        # The newest successes are remembered: an event that is reported again is not run again.
        kept = Kept(self._cursor, failures, self.why, tuple(self._done[-50:]), running)
        try:
            await self._desk.journal.run(Journal.record, key_of(self.hook.name), kept.to_json())
        except HostError:
            self._unsaved = True
            raise
        self._unsaved = False

    # -- work

    async def work(self) -> None:
        """Until cancelled, which ends the run in progress and leaves its intent open."""
        while True:
            try:
                self.wake.clear()
                if self._unsaved:
                    await self._save()
                await self._gather()
                one, rest = next_of(self._pending, coalesce=self.hook.coalesce)
                if one is None:
                    await self.wake.wait()
                    continue
                self._at_work = True
                try:
                    await self.run(one, rest)
                finally:
                    self._at_work = False
            except PodwatchError:
                await self._desk.clock.sleep(JOURNAL_PAUSE)
            except Exception as error:  # an error here must not end the hook for good
                self.failures, self.why = max(self.failures, FAILING_AFTER), f"internal error: {error!r}"[:200]
                await self._desk.clock.sleep(JOURNAL_PAUSE)

    async def owed(self) -> str:
        """The occasion that runs or is to be run, as text; empty if none is, or none can be."""
        with contextlib.suppress(PodwatchError):
            await self._gather()
        if self._unsaved or not (self._at_work or self._pending):
            return ""
        return f"the hook {self.hook.name}"

    async def _gather(self) -> None:
        """Read the events since the last look."""
        journal = self._desk.journal
        while len(self._pending) < 200 or self.hook.coalesce:  # more stay in the journal until these have run
            page = await journal.run(Journal.events, after_id=self._read_to, limit=PAGE)
            for event in page:
                if event.id <= self._read_to:
                    continue  # another reader was faster: each event is taken once
                self._read_to = event.id
                milestone = "milestone" in self.hook.on and is_milestone(event)
                one = occasion_of(event, self.hook.on, milestone=milestone)
                if one is None or one.kind == "preempted" or one.id in self._done:  # ``Hooks.stop`` runs preempted
                    continue
                if all(p.id != one.id for p in self._pending):
                    self._pending = (*self._pending, one)
            if len(page) < PAGE:
                return

    async def run(self, one: Occasion, rest: tuple[Occasion, ...], *, most_seconds: float | None = None) -> None:
        """Run it, with its retries. That it runs is recorded before the first attempt. What waited is then ``rest``."""
        hook, before = self.hook, self._cursor
        self._cursor, self._pending = max(self._cursor, one.event_id), rest
        self._begun[one.id] = one
        try:
            await self._save()
        except HostError:
            self._cursor, self._pending = before, (one, *self._pending)
            del self._begun[one.id]
            raise
        ok = False
        attempts = 1 if most_seconds is not None else 1 + hook.retries
        for attempt in range(1, attempts + 1):
            result = await self._attempt(one, attempt, most_seconds)
            ok = result.ok
            pause = pause_seconds(attempt) if not ok and attempt < attempts else None
            self._report(one, result, attempt, pause)
            if pause is None:
                break
            await either(self._desk.clock.sleep(pause), self._replaced(one))
            if await self._is_replaced(one):
                break
        self._done += [one.id] if ok else []
        self.why = "" if ok else self.why
        failures = 0 if ok else self.failures + 1
        del self._begun[one.id]
        try:  # durable before findings() shows it, so that the next podwatch knows what this one said
            await self._save(failures)
        finally:
            self.failures = failures

    async def _is_replaced(self, one: Occasion) -> bool:
        """Whether a newer occasion of its kind waits, which replaces it."""
        await self._gather()
        return self.hook.coalesce and any(p.kind == one.kind for p in self._pending)

    async def _replaced(self, one: Occasion) -> None:
        while not await self._is_replaced(one):
            self.wake.clear()
            await self.wake.wait()

    async def _attempt(self, one: Occasion, attempt: int, most_seconds: float | None) -> start_child.Result:
        hook = self.hook
        if most_seconds is not None:
            hook = hook.model_copy(update={"timeout": min(hook.timeout, most_seconds)})
        self.reading = one.step
        try:
            return await self._attempt_of(one, hook, attempt, quick=most_seconds is not None)
        finally:
            self.reading = None

    async def _attempt_of(self, one: Occasion, hook: HookSettings, attempt: int, *, quick: bool) -> start_child.Result:
        desk = self._desk
        about = await desk.checkpoint(one.step)
        document = document_of(one, hook.name, attempt, desk.settings, about)
        try:
            order = await desk.disk.call(
                lambda: start_child.order_for(
                    hook,
                    desk.settings,
                    os.environ,
                    own=variables_of(document, desk.config),
                    document=document,
                    title=f"{one.id} attempt {attempt}",
                    state=_made(directory(desk.state)),
                )
            )
        except PodwatchError as error:
            return start_child.Result(None, problem=str(error))
        if quick:
            order = replace(order, grace=0.2)
        self.running = one.id
        try:
            return await start_child.run(order)
        finally:
            self.running = ""

    def _report(self, one: Occasion, result: start_child.Result, attempt: int, pause: float | None) -> None:
        wall, hook = self._desk.clock.wall(), self.hook
        self.why = scrub(result.why(hook.timeout))
        name, severity = (
            (EventName.HOOK_DONE, Severity.INFO) if result.ok else (EventName.HOOK_FAILED, Severity.WARNING)
        )
        text = f"hook {hook.name} ({one.kind}{'' if one.step is None else f', step {one.step}'})"
        text += f" succeeded after {result.seconds:.1f} s" if result.ok else f" failed: {self.why}"
        if pause is not None:
            text += f". podwatch tries again in {pause:.0f} s"
        elif not result.ok:
            text += f". Training is not affected; its output: {self._log}"
        fields: dict[str, str | int | float | bool | None] = {
            "hook": hook.name,
            "on": one.kind,
            "occasion": one.id,
            "step": one.step,
            "exit_code": result.code,
            "seconds": round(result.seconds, 3),
            "attempt": attempt,
            "timed_out": result.timed_out,
            "skipped": one.skipped,
        }
        if pause is not None:
            fields["retry_in_seconds"] = pause
        self._desk.emit(Event(name, wall, text, severity, fields))

    @property
    def _log(self) -> Path:
        return directory(self._desk.state) / f"{self.hook.name}.log"

    def findings(self, at: float) -> tuple[Finding, ...]:
        if self.failures < FAILING_AFTER:
            return ()
        text = f"the hook {self.hook.name} failed for the last {self.failures} events: {self.why}"
        fix = f"read its output in {self._log}; `podwatch hooks run {self.hook.name}` tries it"
        return (Finding(FindingKind.HOOK_FAILING, Severity.WARNING, text, at, fix, subject=self.hook.name),)


def _made(path: Path) -> Path | None:
    """The directory, created if needed; None where that is impossible: the hook then runs without log."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return None
    return path


class Hooks:
    """All hooks of a daemon. Construct it before anything is reported, so that no event of this start is missed."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.lines = tuple(HookLine(hook, desk) for hook in desk.settings.hooks)
        self._tasks: list[asyncio.Task[None]] = []
        self._preempted: Event | None = None

    async def load(self) -> None:
        """Read what earlier podwatch processes left."""
        journal = self._desk.journal
        last = await journal.run(Journal.events, limit=1)
        for line in self.lines:
            await line.load(last[-1].id if last else 0)

    def start(self) -> None:
        """Begin to run hooks; in the background."""
        self._tasks = [asyncio.create_task(line.work(), name=f"hook {line.hook.name}") for line in self.lines]

    def event(self, event: Event) -> None:
        """Never blocks: the tasks read the event from the journal."""
        if event.name in SOURCES:
            if event.name is EventName.DAEMON_STOPPING:
                self._preempted = event if event.fields.get("preempted") else None
            for line in self.lines:
                line.wake.set()

    async def owed(self) -> str:
        """What the end of a run has to wait for, as text: hooks of what was reported so far. Empty if nothing."""
        found = [await line.owed() for line in self.lines] if self._tasks else []
        return ", ".join(what for what in found if what)

    def findings(self, at: float) -> tuple[Finding, ...]:
        return tuple(finding for line in self.lines for finding in line.findings(at))

    @property
    def reading(self) -> frozenset[int]:
        """Steps whose checkpoint a hook possibly reads now: they are not deleted meanwhile."""
        return frozenset(line.reading for line in self.lines if line.reading is not None)

    async def stop(self, seconds: float) -> None:
        """End the runs in progress; they are interrupted. Then, at a preemption, run the hooks for it, for at most
        ``seconds``. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._preempted is None or not tasks:
            return
        wanted = [line for line in self.lines if "preempted" in line.hook.on]
        event = self._preempted
        runs = []
        for line in wanted:
            one = occasion_of(event, line.hook.on)
            if one is not None:
                runs.append(line.run(one, (), most_seconds=max(0.1, seconds - 0.5)))
        await asyncio.gather(*runs, return_exceptions=True)
