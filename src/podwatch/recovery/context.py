"""Recovery's state, its one current act, the trainer that it watches, and the clean-up after a crash."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Final

from podwatch.checkpoints.layouts.base import counts_saves
from podwatch.detection.one_failure import Healing
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.errors import InternalError, PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.domain.mutation_guard import Mutation
from podwatch.domain.run import Intent, IntentKind, IntentState
from podwatch.domain.snapshot import Desired, Snapshot, Supervision
from podwatch.journal import Journal
from podwatch.recovery import quarantine
from podwatch.recovery import remembered as memory_module
from podwatch.recovery.attempt import Attempt
from podwatch.recovery.command import Difference, RunningCommand
from podwatch.recovery.remembered import Memory
from podwatch.recovery.resume_point import StoreUnknown
from podwatch.recovery.start import Procedure
from podwatch.recovery.state import Phase, RecoveryState, Tools
from podwatch.trainer.base import Candidate, Look, TrainerHandle

BLOCKED_POLL: Final = 3.0
COMMAND_POLL: Final = 60.0
"""Seconds between two comparisons of the running command with the configured one; each hashes a few small files."""
PROBLEM_RETRY: Final = 30.0
STORE_RETRY: Final = 60.0


_WAITING: Final = frozenset({Phase.IDLE, Phase.BLOCKED, Phase.BACKOFF, Phase.GAVE_UP, Phase.PAUSED, Phase.ENDING})
"""Phases in which an act only waits. Pruning continues meanwhile: the act may be waiting for disk space."""


_BEFORE_START: Final = frozenset({Phase.STOPPING, Phase.LOOKING, Phase.STARTING, Phase.BACKOFF, Phase.BLOCKED})
"""Phases in which status shows the step of the next start."""


class Core:
    """The state; ``Acts`` adds the operations, ``Recovery`` the public interface."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self.memory = Memory()
        self.procedure = Procedure(tools, self.memory, self._show)
        self.exit_code: int | None = None
        self.exit_requested = asyncio.Event()
        self.handle: TrainerHandle | None = None
        self.attempt: Attempt | None = None
        self.chosen: int | None = None
        """The step of the start in progress: protected from removal even if it is not the newest."""
        self.unconfirmed_above: int | None = None
        self.machine_fault = ""
        """A machine fault reported during this start; the failure then does not count against the checkpoint."""
        self.unconfirmed = False
        self.snapshots: deque[Snapshot] = deque(maxlen=3)
        self._phase = Phase.IDLE
        self._since = tools.clock.monotonic()
        self._detail = ""
        self._notes: dict[str, Finding] = {}
        self._act: asyncio.Task[None] | None = None
        self._interrupted: asyncio.Task[None] | None = None
        self._requests = asyncio.Lock()
        self._wish = False
        self._asked_for = False
        """The operator requested the current act."""
        self._paused = False
        self._go_on = asyncio.Event()
        self._closed = False
        self._free_since = 0.0
        self._last_incident: int | None = None
        self.looked_out_at = float("-inf")
        self.looking_out = False
        """The current act only checks whether an operator started a trainer."""
        self.running_command = RunningCommand()
        self.command_looked_at = float("-inf")
        self._comparing: asyncio.Task[None] | None = None
        self._descending: asyncio.Task[None] | None = None
        self._descended: tuple[CheckpointSet, ...] | None = None
        """The checkpoints that the last lineage check saw."""
        self.adopted = False
        """podwatch found the watched trainer under a keeper; it may have ended already."""
        self.changed_at = float("-inf")
        """Monotonic time at which the watched trainer was started, or the last one released."""
        self.seen_here = False
        """A trainer of this run was found on this pod, alive or ended, or an act on one was interrupted."""
        self.cause: Finding | None = None
        """The failure that podwatch acts on, until a step confirms the restart."""
        self.cause_start, self.cause_wall = "", 0.0
        self.cause_step: int | None = None
        """Id of the start that failed, time of the failure (epoch seconds), and the last step seen of that start."""
        self.cause_log = ""
        """The log line that explains the failure, scrubbed, with the log's name."""
        self.why_gave_up = ""
        self._tails_before: Mapping[str, tuple[str, ...]] = {}
        """The last lines of each log at the previous failure."""
        self.no_save_comes = ""
        """Why the save that a stop waits for will not come."""

    # -- state --------------------------------------------------------------------------------------------------------

    def _show(self, phase: Phase, detail: str = "") -> None:
        if phase is not self._phase:
            self._since = self.tools.clock.monotonic()
        self._phase, self._detail = phase, detail

    @property
    def desired(self) -> Desired:
        record = self.tools.record.current
        return record.desired if record is not None else Desired.RUNNING

    @property
    def acting(self) -> bool:
        return self._act is not None and not self._act.done()

    def pause(self, paused: bool) -> None:
        """Start or end maintenance. An act that is stopping or starting a trainer completes that first, then waits."""
        self._paused = paused
        if paused:
            self._go_on.clear()
        else:
            self._go_on.set()

    def held(self) -> str:
        """Return why podwatch must not stop, start or move anything on its own now; empty if it can. An operator's
        request is carried out anyway."""
        if self._wish or self._asked_for:
            return ""
        if self._paused:
            return "paused"
        if self.blocked():
            return self.blocked()
        return "mode observe" if self.tools.settings.mode == "observe" else ""

    def blocked(self) -> str:
        """Return why podwatch cannot restart training now, because of its own files or database; empty if it can."""
        return self.tools.guard.blocked_reason(Mutation.RESTART)

    @property
    def waits(self) -> bool:
        """Whether the current hold can end without a new configuration, so that an act waits for its end."""
        return bool(self.held()) and (self._paused or bool(self.blocked()))

    async def cleared(self, what: str) -> bool:
        """Wait at a safe point, before an act stops or starts anything, while paused or while the files that a restart
        relies on cannot be written. Return whether the act can continue. ``what`` names it for status."""
        while self.waits:
            if self._paused:
                self._show(Phase.PAUSED, f"paused: {what} is pending until `podwatch unpause`")
                await self._go_on.wait()
            else:
                self._show(Phase.BLOCKED, f"{what} is pending: {self.blocked()}")
                await self.tools.clock.sleep(BLOCKED_POLL)
        if self.held():
            self._show(Phase.OBSERVING, f"{self.held()}: would continue with {what}")
        return not self.held()

    @property
    def ready(self) -> bool:
        """Whether podwatch can start an act on its own: none runs, no operator's request is pending, no exit is
        pending."""
        return not (self.acting or self._wish or self._closed)

    def expected_step(self) -> int | None:
        """Return the step that the next start will resume from, by this pod's checkpoints; None: a fresh start."""
        memory = self.memory
        if self.chosen is not None or memory.fresh:
            return self.chosen
        if memory.wanted is not None:
            return memory.wanted
        ours = [s.step for s in self.tools.catalogue.sets if s.complete and not s.held and self.procedure.owns(s)]
        fit = [step for step in ours if step not in memory.refused]
        lower = [step for step in fit if memory.below is None or step < memory.below]
        return max(lower or fit, default=None)

    def failed(self, cause: Finding, attempt: Attempt | None) -> None:
        """Record the failure that podwatch acts on from now on."""
        clock = self.tools.clock
        self.cause, self.cause_start = cause, self.handle.start_id if self.handle is not None else ""
        self.cause_step, self.cause_log = attempt.last_step if attempt is not None else None, ""
        began = cause.since if attempt is None else max(cause.since, attempt.started_at)
        self.cause_wall = clock.wall() - max(0.0, clock.monotonic() - began)

    def healing(self) -> Healing | None:
        """Return the failure that podwatch acts on, and what the repair costs; None if there is none."""
        if self.cause is None:
            return None
        started = self.handle is not None and self.handle.start_id != self.cause_start
        step = self.attempt.resumed_from if started and self.attempt is not None else self.expected_step()
        fresh = step is None and (started or self.memory.fresh)
        lost = None
        if self.cause_step is not None and (fresh or step is not None) and not self.uncounted(step):
            lost = self.cause_step - (step or 0)
        due = self.memory.next_try_wall if self._phase is Phase.BACKOFF else None
        return Healing(
            self.cause,
            step=step,
            fresh=fresh,
            lost_steps=lost if lost is not None and lost >= 0 else None,
            lost_seconds=self.attempt.lost_seconds if started and self.attempt else self.lost_seconds(step),
            started=started,
            retry_seconds=None if due is None else max(0.0, due - self.tools.clock.wall()),
            paused=self._phase is Phase.PAUSED,
            launcher=self.tools.layout.name,
            log=self.cause_log,
            gave_up=self.memory.history.gave_up and not started,
            down_seconds=max(0.0, self.tools.clock.wall() - self.cause_wall),
        )

    def lost_seconds(self, step: int | None) -> float | None:
        """Return the seconds of training between the checkpoint of ``step`` and the failure; None if either is
        unknown."""
        saved = next((s.changed_wall for s in self.tools.catalogue.sets if s.complete and s.step == step), None)
        return None if saved is None or self.cause is None else max(0.0, self.cause_wall - saved)

    @property
    def state(self) -> RecoveryState:
        record, handle = self.tools.record.current, self.handle
        last = record.last_start.step if record is not None and record.last_start is not None else None
        step = self.attempt.resumed_from if self.attempt is not None else last
        failed = self.cause is not None and (self.handle is None or self.handle.start_id == self.cause_start)
        if failed or (self._phase in _BEFORE_START and self.desired is Desired.RUNNING):
            step = self.expected_step()
        return RecoveryState(
            phase=self._phase,
            since=self._since,
            step=step,
            attempts=self.memory.history.streak_count,
            next_try_wall=self.memory.next_try_wall if self._phase in (Phase.BACKOFF, Phase.GAVE_UP) else None,
            detail=self._detail,
            handle=handle,
            start_id=handle.start_id if handle is not None else "",
            supervision=handle.supervision if handle is not None else Supervision.NONE,
            protect_reasons=self._protected(last),
            unconfirmed=self.unconfirmed,
            hold_deletions=self.unconfirmed,
            acting=self.acting and not self.looking_out and self._phase not in _WAITING,
            incident_id=self._last_incident,
            adopted=self.adopted,
            changed_at=self.changed_at,
        )

    def _protected(self, last: int | None) -> tuple[tuple[int, str], ...]:
        kept = dict(self.memory.refused)
        if self.chosen is not None:
            kept[self.chosen] = "being resumed from"
        if self.procedure.restoring is not None:
            kept[self.procedure.restoring] = "being fetched"
        if self.attempt is not None and self.attempt.resumed_from is not None and not self.attempt.made_step:
            kept[self.attempt.resumed_from] = "being resumed from"
        elif last is not None and self._phase in (Phase.STARTING, Phase.CONFIRMING, Phase.BLOCKED, Phase.BACKOFF):
            kept[last] = "last resumed from"
        return tuple(sorted(kept.items()))

    def note(
        self, kind: FindingKind, severity: Severity, summary: str, suggestion: str = "", subject: str = ""
    ) -> None:
        """Raise or update a finding; ``since`` stays that of the first report."""
        since = self.tools.clock.monotonic()
        finding = Finding(kind, severity, summary, since, suggestion, subject=subject)
        old = self._notes.get(finding.key)
        self._notes[finding.key] = replace(finding, since=old.since) if old is not None else finding

    def clear(self, *kinds: FindingKind) -> None:
        self._notes = {key: f for key, f in self._notes.items() if f.kind not in kinds}

    def drop(self, subject: str) -> None:
        """Clear the findings about this subject."""
        self._notes = {key: f for key, f in self._notes.items() if f.subject != subject}

    # -- running acts -------------------------------------------------------------------------------------------------

    def spawn(self, act: Callable[[], Awaitable[None]]) -> None:
        """Start an act; the caller has made sure that none runs. Does nothing once podwatch is exiting."""
        self._asked_for, self._wish = self._wish, False
        if not self._closed:
            self._act = asyncio.create_task(self._guarded(act), name="podwatch-recovery")

    @contextlib.asynccontextmanager
    async def by_hand(self) -> AsyncIterator[None]:
        """Handle one operator request at a time. After ``interrupt`` no act starts on its own until the request has
        become one. If the request fails halfway, the interrupted work is resumed; otherwise training would be
        unguarded."""
        async with self._requests:
            self._interrupted = None
            try:
                yield
            except BaseException:
                if self._wish and (self._interrupted is not None or self.handle is None):
                    self._wish = False
                    self.spawn(self._take_up_again)
                raise
            finally:
                self._wish = False

    async def _take_up_again(self) -> None:
        if self._interrupted is not None:
            await asyncio.wait([self._interrupted])
        await self.carry_on()

    async def interrupt(self) -> None:
        """Cancel the current act, wait until it has ended, settle its open intents, and look at the pod again."""
        self._wish = True
        task, self._act = self._act, None
        if task is not None and not task.done():
            self._interrupted = task
            task.cancel()
            await asyncio.wait([task])
        look = await self.tools.launcher.look()
        await self.reconcile(look)
        mine = self.handle
        if look.handle is not None and (mine is None or mine.start_id != look.handle.start_id):
            await self.adopt(look.handle)  # the cancelled act had just started it
        elif look.handle is None and mine is not None and mine.supervision is Supervision.KEEPER:
            self.forget()  # the cancelled act had just stopped it

    async def _guarded(self, act: Callable[[], Awaitable[None]]) -> None:
        """Run an act. One that fails is retried from the journal and the state of the pod, as after a restart of
        podwatch."""
        try:
            await self._until_done(act)
        finally:
            self._asked_for = False

    async def _until_done(self, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            problem: PodwatchError
            try:
                await act()
            except PodwatchError as error:
                problem = error
            except OSError as error:
                problem = _refused(error)
            except Exception as error:  # a bug must not leave training unguarded
                problem = InternalError(f"{type(error).__name__}: {error}", fix="please report this")
            else:
                return
            self._asked_for = False
            self._show(Phase.BLOCKED, str(problem))
            self.note(FindingKind.BLOCKED, Severity.CRITICAL, problem.what, problem.fix)
            self.tools.say(EventName.RECOVERY_BLOCKED, str(problem), Severity.CRITICAL)
            await self.tools.clock.sleep(STORE_RETRY if isinstance(problem, StoreUnknown) else PROBLEM_RETRY)
            act = self.carry_on

    async def recall(self) -> None:
        """Read the run record if ``begin`` could not. Raises RootReplaced while podwatch's directory belongs to another
        user."""
        raise InternalError("no record here", fix="use Recovery")

    async def carry_on(self) -> None:
        """Do what the journal and the state of the pod require now; implemented by ``Acts``."""
        raise InternalError("no acts here", fix="use Recovery")

    # -- adopt, attach ------------------------------------------------------------------------------------------------

    async def adopt(self, handle: TrainerHandle) -> None:
        """Watch a trainer under a keeper, alive or ended (the sensing loop then judges its end)."""
        tools, record = self.tools, self.tools.record.current
        age = max(0.0, tools.clock.wall() - handle.started_wall)
        attempt = Attempt(handle.start_id, tools.clock.monotonic() - age, known=False)
        start = record.last_start if record is not None else None
        if start is not None and start.start_id == handle.start_id:
            first = None if start.step is None else await tools.blocking(tools.layout.first_step_after, start.step)
            attempt = Attempt(handle.start_id, attempt.started_at, start.step, first)
            # Otherwise a run of days that ends before its next step would look like a checkpoint that fails to load.
            attempt.made_step = self.memory.confirmed == handle.start_id
            open_incident = await tools.journal.run(Journal.current_incident)
            attempt.incident_id = open_incident.id if open_incident is not None else None
        self.watch(handle, attempt, adopted=True)
        tools.begin_start(attempt.started_at, handle.start_id)
        confirmed = self.memory.confirmed == handle.start_id or not attempt.known
        self._show(Phase.RUNNING if confirmed else Phase.CONFIRMING, "adopted")
        status = await handle.exit_status()
        pid = handle.launcher.pid
        tools.say(
            EventName.TRAINER_ADOPTED,
            f"took over the running trainer (pid {pid})"
            if status is None
            else f"the trainer (pid {pid}) ended while podwatch was not running ({status.describe()})",
            start_id=handle.start_id,
            pid=pid,
        )

    def watch(self, handle: TrainerHandle, attempt: Attempt, *, adopted: bool = False) -> None:
        self.handle, self.attempt, self.seen_here = handle, attempt, True
        clock = self.tools.clock
        self.adopted, self.changed_at = adopted, clock.monotonic() - max(0.0, clock.wall() - handle.started_wall)
        if handle.supervision is Supervision.ATTACH:
            self.cause = None  # its operator has started it again
        self.procedure.writers_ended = False
        self.machine_fault = ""
        self.memory.ended_wall = None
        self.command_looked_at = float("-inf")
        self.tools.track(handle)

    async def difference(self) -> Difference:
        """Return how the watched trainer differs from the configured command; empty if none is watched."""
        tools, handle, record = self.tools, self.handle, self.tools.record.current
        if handle is None:
            return Difference()
        start = record.last_start if record is not None else None
        try:
            return await tools.blocking(self.running_command.difference, handle, start, tools.settings, tools.layout)
        except (OSError, PodwatchError):  # nothing is known, so nothing differs
            return Difference()

    async def compare_command(self) -> None:
        """Raise, update or clear the finding about a changed command."""
        handle, found = self.handle, await self.difference()
        if handle is not self.handle:
            return None
        if handle is None or not found:
            return self.clear(FindingKind.COMMAND_CHANGED)
        self.note(
            FindingKind.COMMAND_CHANGED,
            Severity.WARNING,
            f"a restart would not start the trainer that runs now (pid {handle.launcher.pid}): {found.summary()}",
            "`podwatch config adopt` writes the running command into the configuration; `podwatch restart --dry-run`"
            " shows what a restart would run",
        )
        return None

    def compare_soon(self, now: float) -> None:
        """Start a comparison if one is due. Called at each tick of the sensing loop; never blocks."""
        if self._closed or now - self.command_looked_at < COMMAND_POLL:
            return
        if self._comparing is None or self._comparing.done():
            self.command_looked_at = now
            self._comparing = asyncio.create_task(self.compare_command(), name="podwatch-command")

    def descend_soon(self) -> None:
        """Check whether an operator's trainer has left the current lineage, as its saves show. Called at each tick of
        the sensing loop; never blocks."""
        sets, handle = self.tools.catalogue.sets, self.handle
        if handle is None or handle.supervision is not Supervision.ATTACH or sets == self._descended:
            return
        if not self._closed and not self.acting and (self._descending is None or self._descending.done()):
            self._descending = asyncio.create_task(self._descend(handle, sets), name="podwatch-lineage")

    async def _descend(self, handle: TrainerHandle, sets: tuple[CheckpointSet, ...]) -> None:
        try:
            await self.procedure.descend(handle)
        except (OSError, PodwatchError) as error:
            text = f"podwatch cannot check or record whether training has left its lineage: {error}"
            self.note(FindingKind.EARLIER_BRANCH, Severity.WARNING, text, subject="lineage")
        else:
            self.drop("lineage")
            self._descended = sets

    def forget(self) -> None:
        if self.handle is not None and self.memory.ended_wall is None:
            self.memory.ended_wall = self.tools.clock.wall()
        self.handle, self.attempt = None, None
        self.tools.track(None)
        self._free_since = self.looked_out_at = self.changed_at = self.tools.clock.monotonic()

    # -- after a crash ------------------------------------------------------------------------------------------------

    async def reconcile(self, look: Look) -> Intent | None:
        """Settle the intents that an earlier process (or a cancelled act) left open. Return the STOP intent that is
        to be finished, if its trainer still runs."""
        journal, found = self.tools.journal, look.handle
        start_id = found.start_id if found is not None else ""
        stop: Intent | None = None
        for intent in await journal.run(Journal.open_intents):
            if intent.kind is IntentKind.STOP:
                if (start_id and intent.data.get("start_id") == start_id) or meant_by(intent, look) is not None:
                    stop = intent
                    continue
                state, text = IntentState.DONE, "the trainer has ended"
            elif intent.kind is IntentKind.START:
                happened = start_id != "" and intent.data.get("start_id") == start_id
                state = IntentState.DONE if happened else IntentState.UNDONE
                text = "it was started" if happened else "it never started"
                if happened:
                    self.memory.wanted, self.memory.fresh = None, False
                    await self.procedure.remember()
            elif intent.kind is IntentKind.QUARANTINE:
                alive = found is not None and await found.exit_status() is None
                if self.held():
                    continue  # it moves files, which a held podwatch must not do
                if alive or look.candidates or look.pending:
                    # The files there now may be new ones of the running trainer.
                    state, text = IntentState.DONE, "left as it was: a trainer is running"
                else:
                    moved = await self.tools.blocking(quarantine.carry_out, self.tools.workspace, intent)
                    state, text = IntentState.DONE, f"finished after an interruption: {moved} more moved"
                    await self.tools.blocking(self.tools.catalogue.rescan)
            elif intent.kind is IntentKind.RESTORE:
                state, text = IntentState.FAILED, "interrupted; fetched again when it is needed"
            else:
                continue
            await journal.run(Journal.settle, intent.id, state, text)
        return stop

    def uncounted(self, step: int | None) -> bool:
        """Return whether steps since the checkpoint ``step`` (None: since the beginning) cannot be counted."""
        return step is not None and counts_saves(self.tools.layout)

    def close_incident(
        self,
        incident_id: int,
        resolution: str,
        *,
        resumed: int | None = None,
        lost: int | None = None,
        message: str = "",
        over: bool = True,
    ) -> None:
        """Close the incident. ``message`` is the event's text (default: ``resolution``). ``over``: podwatch stops
        acting on this failure and reporting it."""
        if over:
            self.cause = None
        self.tools.journal.post(
            Journal.update_incident,
            incident_id,
            closed_wall=self.tools.clock.wall(),
            resolution=resolution,
            resumed_step=resumed,
            lost_steps=lost,
        )
        self.tools.say(
            EventName.INCIDENT_CLOSED,
            message or resolution,
            incident=incident_id,
            resumed_step=resumed,
            lost_steps=lost,
        )

    async def close_open_incident(self, resolution: str) -> None:
        incident = await self.tools.journal.run(Journal.current_incident)
        if incident is not None:
            self.close_incident(incident.id, resolution)

    def remember_soon(self) -> None:
        """Save the memory without waiting; for the sensing loop."""
        data = self.memory.to_dict(self.tools.clock)
        self.tools.journal.post(Journal.learn, memory_module.KEY, data)


def meant_by(stop: Intent, look: Look) -> Candidate | None:
    """Return the attached trainer that podwatch was stopping, if it still runs. Found by pid and start time, because it
    may no longer look like a trainer."""
    pid, ticks, boot = (stop.data.get(name) for name in ("pid", "ticks", "boot"))
    for candidate in (*look.candidates, *look.pending):
        if (candidate.launcher.pid, candidate.launcher.start_ticks) == (pid, ticks):
            return candidate
    for identity in look.eligible:
        if boot and (identity.pid, identity.start_ticks, identity.boot_id) == (pid, ticks, boot):
            return Candidate(identity, "", "podwatch was stopping it")
    return None


def _refused(error: OSError) -> PodwatchError:
    """Return the error as one line that includes the path: a finding shows no other location."""
    where = f"{error.filename}: " if error.filename else ""
    fix = "nothing: podwatch retries automatically"
    if isinstance(error, PermissionError):
        fix = "give podwatch's user access to it, or run podwatch as the user that training runs as"
    return PodwatchError(f"{where}{error.strerror or error}", fix=fix)
