"""The state that recovery's parts share: the watched trainer, the phase, recovery's findings, what holds them back.

``Attempt`` is one attempt to train: what podwatch observed since its start, for confirmation and for the decision after
a failure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from podwatch.checkpoints.second_writer import ALONE, Beside, made_by_us
from podwatch.detection.merge import Healing
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.event import EventName
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.domain.run import Mutation
from podwatch.domain.run_state import RunState
from podwatch.domain.snapshot import Desired, ProgressSample, ProgressSource, Snapshot, Supervision
from podwatch.job.exit_code import Blame
from podwatch.journal import Journal
from podwatch.recovery.confirm_resume import Confirmation, confirm
from podwatch.recovery.state import Phase, Tools
from podwatch.system.clock import Clock
from podwatch.trainer.trainer_handle import TrainerHandle

MAX_SAMPLES = 64
LOADED_ABOVE_BASE = 2 << 30
"""Bytes. A bare CUDA context is 0.3-0.7 GiB; a process with 2 GiB has loaded something."""


@dataclass
class Attempt:
    """``started_at`` is monotonic. ``resumed_from`` is None for a fresh start; ``known`` is false for an
    attached trainer: podwatch does not know which checkpoint it started from."""

    start_id: str
    started_at: float
    resumed_from: int | None = None
    first_step: int | None = None
    known: bool = True
    incident_id: int | None = None
    step_at_death: int | None = None
    """Highest step seen before the start; lost steps are counted from it."""
    lost_seconds: float | None = None
    """Seconds of training between the checkpoint that this start was made from and the failure before it. Measured
    before the start, which can write into that checkpoint again."""
    steps_read: bool = False
    """A source other than checkpoints has shown steps, so the steps lost at a failure are known."""
    made_step: bool = False
    loaded: bool = False
    last_step: int | None = None
    samples: list[ProgressSample] = field(default_factory=list)
    unproven: list[ProgressSample] = field(default_factory=list)
    """Samples that are not yet proved to come from this start's own process tree."""

    def see(
        self, snapshot: Snapshot, gpu_base: Mapping[int, int], gpus: tuple[int, ...], beside: Beside = ALONE
    ) -> bool:
        """Add one snapshot; return True when it shows a new step. A save, or a number in a file, that another process
        may have written (``beside``) is neither a step nor a confirmation."""
        for gpu in (snapshot.gpus.value or ()) if snapshot.gpus.at >= self.started_at else ():
            used = gpu.memory_used_bytes or 0
            if (not gpus or gpu.index in gpus) and used - gpu_base.get(gpu.index, 0) > LOADED_ABOVE_BASE:
                self.loaded = True
        fresh = False
        for sample in snapshot.progress.value or ():
            if sample.step is None or not sample.trained or sample.at < self.started_at:
                continue
            if sample not in self.samples and sample not in self.unproven:
                self.unproven.append(sample)
        waiting, self.unproven = self.unproven[-MAX_SAMPLES:], []
        for sample in waiting:
            made = made_by_us(sample, beside)
            if made is None:
                self.unproven.append(sample)
            if not made or sample.step is None:
                continue
            self.samples.append(sample)
            self.steps_read = self.steps_read or sample.source is not ProgressSource.CHECKPOINT
            if self.last_step is None or sample.step > self.last_step:
                # The first number seen of an attached trainer is its current step, not a step it made.
                fresh = fresh or self._is_new(sample.step)
                self.last_step = sample.step
        del self.samples[:-MAX_SAMPLES]
        self.made_step = self.made_step or fresh
        return fresh

    @property
    def counted_step(self) -> int | None:
        """The newest step from which lost steps can be counted; None where only saves showed steps."""
        return self.last_step if self.steps_read else None

    def _is_new(self, step: int) -> bool:
        if not self.known:
            return self.last_step is not None
        lowest = self.first_step if self.first_step is not None else self.resumed_from
        return lowest is None or step >= lowest

    def confirmation(self, now: float, patience: float) -> Confirmation:
        return confirm(self.resumed_from, self.first_step, self.samples, self.started_at, now, patience)


class Notes:
    """Recovery's own findings."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._notes: dict[str, Finding] = {}

    @property
    def all(self) -> tuple[Finding, ...]:
        return tuple(self._notes.values())

    def add(self, kind: FindingKind, severity: Severity, summary: str, suggestion: str = "", subject: str = "") -> None:
        """Raise or update a finding; ``since`` stays that of the first report."""
        since = self._clock.monotonic()
        finding = Finding(kind, severity, summary, since, suggestion, subject=subject)
        old = self._notes.get(finding.key)
        self._notes[finding.key] = replace(finding, since=old.since) if old is not None else finding

    def clear(self, *kinds: FindingKind) -> None:
        self._notes = {key: f for key, f in self._notes.items() if f.kind not in kinds}

    def has(self, subject: str) -> bool:
        return any(finding.subject == subject for finding in self._notes.values())

    def drop(self, subject: str) -> None:
        """Clear the findings about this subject."""
        self._notes = {key: f for key, f in self._notes.items() if f.subject != subject}


@dataclass
class OpenFailure:
    """The failure that podwatch acts on, until a step confirms the restart."""

    cause: Finding
    start_id: str
    """Id of the start that failed."""
    wall: float
    """Time of the failure, epoch seconds."""
    step: int | None
    """The last step seen of that start."""
    log: str = ""
    """The log line that explains the failure, scrubbed, with the log's name."""


class RecoveryContext:
    """One per run. Actions change it, one at a time; the sensing loop and status read it."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self.notes = Notes(tools.clock)
        self.phase, self.detail = Phase.IDLE, ""
        self.since = tools.clock.monotonic()
        self.handle: TrainerHandle | None = None
        self.attempt: Attempt | None = None
        self.recalled = False
        """run.json was read, and begun where the run had none: until then nothing is started or stopped."""
        self.adopt = ""
        """Id of the operator's `--adopt-existing`; empty without one."""
        self.adopted = False
        """podwatch found the watched trainer under a supervisor; it may have ended already."""
        self.changed_at = float("-inf")
        """Monotonic time at which the watched trainer was started, or the last one released."""
        self.free_since = 0.0
        """Monotonic time at which the last trainer was released; 0 before that."""
        self.command_looked_at = float("-inf")
        """Monotonic time of the last comparison of the command."""
        self.failure: OpenFailure | None = None
        self.last_incident: int | None = None
        self.machine_fault = ""
        """A machine fault reported during this start; the failure then does not count against the checkpoint."""
        self.machine_broken = False
        """That fault is a critical finding about a GPU: it lasts."""
        self.unconfirmed = False
        self.unconfirmed_above: int | None = None
        self.chosen: int | None = None
        """The step of the start in progress: protected from removal even if it is not the newest."""
        self.restoring: int | None = None
        self.writers_ended = False
        """podwatch saw the process tree that wrote here end, and has started nothing since."""
        self.committed = False
        """The start in progress is recorded: it is not cancelled any more."""
        self.followed: dict[int, str] = {}
        """The step that was fetched last, and its lineage in the store."""
        self.evaluation = ""
        """What training is stopped for, from the begin of that stop until training is started again."""
        self.pausing = False
        """A pause is being recorded."""
        self.blame = Blame.UNKNOWN
        """Whose fault the last counted failure is."""

    # -- state --------------------------------------------------------------------------------------------------------

    def show(self, phase: Phase, detail: str = "") -> None:
        """Set what status shows."""
        if phase is not self.phase:
            self.since = self.tools.clock.monotonic()
        self.phase, self.detail = phase, detail

    @property
    def run(self) -> RunState:
        """What is recorded of the run; immutable."""
        return self.tools.run_file.current

    async def edit(self, **changes: Any) -> RunState:
        """Change fields of ``run``; durable when this returns. Raises HostError where they cannot be recorded."""
        return await self.tools.run_file.edit(lambda run: replace(run, **changes))

    def note(self, **changes: Any) -> None:
        """The same in memory only; the next edit records it."""
        self.tools.run_file.note(lambda run: replace(run, **changes))

    def edit_soon(self, **changes: Any) -> None:
        """The same at once in memory, and recorded without waiting; for the sensing loop."""
        self.note(**changes)
        self.tools.run_file.record_soon()

    def note_end(self, start_id: str, wall: float | None) -> None:
        """Note when the trainer of this start ended (epoch seconds); None: it is watched."""
        self.tools.run_file.note(lambda run: run.with_start(start_id, ended=wall))

    async def start_was_seen(self, start_id: str) -> None:
        """Record that this start has happened: the request for it is fulfilled. A request that came after it was
        decided on stays: a stop, or a restart, which names this start as the one to stop."""

        def seen(run: RunState) -> RunState:
            restarts = run.stopping is not None and run.stopping.start_id == start_id
            if run.desired is Desired.RUNNING and not restarts:
                run = replace(
                    run, wanted=None, fresh=False, requested=False, evaluation="", next_try_wall=None, clean=False
                )
            return run.with_start(start_id, seen=True)

        await self.tools.run_file.edit(seen)

    def is_counted(self, start_id: str) -> bool:
        """Whether the end of this start was counted as a failure."""
        start = self.run.start(start_id)
        return start is not None and start.counted

    @property
    def desired(self) -> Desired:
        return self.run.desired

    @property
    def judged(self) -> Desired:
        """The desired state that the detectors judge the trainer by. While a stop waits for one more save, training is
        still meant to run: its death must be noticed, or the stop waits forever. While podwatch stops the trainer, its
        end is expected, even if a restart follows; and while an evaluation uses its GPUs, their memory shows nothing
        about training."""
        if self.phase is Phase.ENDING:
            return Desired.RUNNING
        if self.desired is Desired.RUNNING and self.phase in (Phase.STOPPING, Phase.EVALUATING):
            return Desired.STOPPED
        return self.desired

    @property
    def watched(self) -> str:
        """Id of the start that podwatch watches; empty if none."""
        return self.handle.start_id if self.handle is not None else ""

    @property
    def paused(self) -> bool:
        """Whether a pause is recorded, also by an earlier podwatch, or is being recorded now."""
        return self.pausing or self.run.pause is not None

    def held(self) -> str:
        """Return why podwatch must not stop, start or move anything on its own now; empty if it can. An operator's
        request is carried out anyway."""
        if self.blocked():
            return self.blocked()
        if self.run.requested:
            return ""
        if self.paused:
            return "paused"
        return "mode observe" if self.tools.settings.mode == "observe" else ""

    def blocked(self) -> str:
        """Return why podwatch cannot restart training now, because of its own files or database; empty if it can."""
        return self.tools.guard.blocked_reason(Mutation.RESTART)

    # -- the watched trainer ------------------------------------------------------------------------------------------

    def watch(self, handle: TrainerHandle, attempt: Attempt, *, adopted: bool = False) -> None:
        self.handle, self.attempt = handle, attempt
        clock = self.tools.clock
        self.adopted, self.changed_at = adopted, clock.monotonic() - max(0.0, clock.wall() - handle.started_wall)
        if handle.supervision is Supervision.ATTACH:
            self.failure = None  # its operator has started it again
        self.writers_ended = False
        self.machine_fault = ""
        self.machine_broken = False
        self.note_end(handle.start_id, None)
        self.command_looked_at = float("-inf")
        self.tools.track(handle)

    def forget(self) -> None:
        start = self.run.start(self.watched)
        if start is not None and start.ended is None:
            self.note_end(start.id, self.tools.clock.wall())
        self.handle, self.attempt = None, None
        self.command_looked_at = float("-inf")
        self.tools.track(None)
        self.free_since = self.changed_at = self.tools.clock.monotonic()

    # -- the checkpoints of the run -----------------------------------------------------------------------------------

    async def rescan(self) -> tuple[CheckpointSet, ...]:
        look = partial(self.tools.catalogue.rescan, writers_ended=self.writers_ended, list_again=True)
        return await self.tools.blocking(look)

    def expected_step(self) -> int | None:
        """Return the step that the next start will resume from, by this pod's checkpoints; None: a fresh start."""
        run = self.run
        if self.chosen is not None or run.fresh:
            return self.chosen
        if run.wanted is not None:
            return run.wanted
        ours = [s.step for s in self.tools.catalogue.sets if s.complete and not s.held and s.ours]
        fit = [step for step in ours if step not in run.refused]
        lower = [step for step in fit if run.below is None or step < run.below]
        return max(lower or fit, default=None)

    def last_step(self) -> int | None:
        """Return the newest step seen of the current start; None if there is none, or steps cannot be counted."""
        attempt = self.attempt
        return None if attempt is None or self.tools.layout.counts_saves else attempt.last_step

    def uncounted(self, step: int | None) -> bool:
        """Return whether steps since the checkpoint ``step`` (None: since the beginning) cannot be counted."""
        return step is not None and self.tools.layout.counts_saves

    def lost_steps(self, last: int | None, step: int | None) -> int | None:
        """Return the steps from the checkpoint ``step`` (None: from the beginning) to ``last``; None if unknown."""
        if last is None or self.uncounted(step):
            return None
        lost = last - (step or 0)
        return lost if lost >= 0 else None  # the checkpoint is above every step seen

    # -- the failure --------------------------------------------------------------------------------------------------

    def failed(self, cause: Finding, attempt: Attempt | None) -> OpenFailure:
        """Record the failure that podwatch acts on from now on."""
        clock = self.tools.clock
        began = cause.since if attempt is None else max(cause.since, attempt.started_at)
        wall = clock.wall() - max(0.0, clock.monotonic() - began)
        self.failure = OpenFailure(cause, self.watched, wall, None if attempt is None else attempt.counted_step)
        return self.failure

    def healing(self) -> Healing | None:
        """Return the failure that podwatch acts on, and what the repair costs; None if there is none."""
        failure = self.failure
        if failure is None:
            return None
        started = self.handle is not None and self.handle.start_id != failure.start_id
        step = self.attempt.resumed_from if started and self.attempt is not None else self.expected_step()
        fresh = step is None and (started or self.run.fresh)
        due = self.run.next_try_wall if self.phase is Phase.BACKOFF else None
        return Healing(
            failure.cause,
            step=step,
            fresh=fresh,
            lost_steps=self.lost_steps(failure.step, step) if fresh or step is not None else None,
            lost_seconds=self.attempt.lost_seconds if started and self.attempt else self.lost_seconds(step),
            started=started,
            retry_seconds=None if due is None else max(0.0, due - self.tools.clock.wall()),
            paused=self.phase is Phase.PAUSED,
            launcher=self.tools.layout.name,
            log=failure.log,
            gave_up=self.run.history.gave_up and not started,
            down_seconds=max(0.0, self.tools.clock.wall() - failure.wall),
        )

    def lost_seconds(self, step: int | None) -> float | None:
        """Return the seconds of training between the checkpoint of ``step`` and the failure; None if either is
        unknown."""
        saved = next((s.changed_wall for s in self.tools.catalogue.sets if s.complete and s.step == step), None)
        return None if saved is None or self.failure is None else max(0.0, self.failure.wall - saved)

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
            self.failure = None
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

    async def close_open_incident(self, resolution: str, *, lost: int | None = None) -> None:
        incident = await self.tools.journal.run(Journal.current_incident)
        if incident is not None:
            self.close_incident(incident.id, resolution, lost=lost)
