"""A failure of training: counted once per start, its evidence kept, and what follows it reported."""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from podwatch.domain.errors import PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.domain.process import ProcessSample
from podwatch.domain.run_state import RunState, Stopping
from podwatch.domain.secrets import scrub
from podwatch.domain.snapshot import Snapshot
from podwatch.job.exit_code import Blame
from podwatch.journal import Journal
from podwatch.journal.bundle import capture
from podwatch.journal.explaining_line import decisive, since
from podwatch.recovery.context import Attempt, OpenFailure, RecoveryContext
from podwatch.recovery.restart_budget import Decision, Failure, after_failure, blame_of, broken_machine
from podwatch.recovery.start import StartFailed
from podwatch.trainer.errors_in_output import LOG_LINES_KEPT
from podwatch.trainer.trainer_handle import TrainerHandle

EVIDENCE_SECONDS: Final = 10.0
"""Limit for the incident bundle. The restart does not wait longer: idle GPUs cost money."""
LOGS_SECONDS: Final = 5.0
"""Share of EVIDENCE_SECONDS for reading the ends of the logs."""
SAYS_WHY: Final = frozenset({FindingKind.TRAINER_EXITED, FindingKind.REQUIRED_CHILD_EXITED, FindingKind.SILENT_DEATH})
"""Kinds where a process ended: the last error in its logs is the reason. A hang logs none."""
LINE_SHOWN: Final = 150
GIVEN_UP_FIX: Final = "fix the cause, then run `podwatch start`"


class Failures:
    """Counts and reports failures; ``snapshots`` are the last moments that the sensing loop saw."""

    def __init__(self, context: RecoveryContext) -> None:
        self.context = context
        self.snapshots: deque[Snapshot] = deque(maxlen=3)
        self.why_gave_up = ""
        self._tails_before: Mapping[str, tuple[str, ...]] = {}
        """The last lines of each log at the previous failure."""
        self._lines_before: tuple[str, ...] = ()

    def find_log_line(self, failure: OpenFailure, tails: Mapping[str, Sequence[str]]) -> str:
        """Keep the log line that explains the failure, for status and notifications, and return it; empty if there is
        none. Only for a process that ended; lines of an earlier start do not count."""
        before, self._tails_before = self._tails_before, {name: tuple(lines) for name, lines in tails.items()}
        if failure.cause.kind not in SAYS_WHY:
            return ""
        best = decisive({name: since(before.get(name, ()), lines) for name, lines in tails.items()})
        if best is None:
            return ""
        name, line = best
        line = scrub(line)
        shown = line if len(line) <= LINE_SHOWN else _cut(line[:LINE_SHOWN])
        failure.log = f'{name}: "{shown}"'
        return line

    def lines_of_this_start(self, lines: tuple[str, ...]) -> tuple[str, ...]:
        """``lines``, the end of the trainer's output, without those of the previous failure: they do not show the cause
        of this one. All where the end looks the same as before: each start possibly prints it. Call once for each
        failure."""
        before, self._lines_before = self._lines_before, lines
        return since(before, lines) or lines

    def _failure(
        self,
        attempt: Attempt | None,
        kind: FindingKind,
        lines: tuple[str, ...],
        needs_person: str = "",
        explained_by: str = "",
    ) -> Failure:
        return Failure(
            kind=kind,
            at=self.context.tools.clock.monotonic(),
            loaded=attempt is not None and attempt.loaded,
            made_step=attempt is not None and attempt.made_step and kind is not FindingKind.RESUMED_WRONG,
            resumed_from=attempt.resumed_from if attempt is not None else None,
            last_lines=lines,
            needs_person=needs_person,
            machine_fault=self.context.machine_fault,
            machine_broken=self.context.machine_broken,
            explained_by=explained_by,
        )

    def blame(
        self, kind: FindingKind, attempt: Attempt | None, lines: tuple[str, ...], *, explained_by: str = ""
    ) -> tuple[Blame, bool]:
        """Whose fault a failure of one of several nodes is, before it is counted, and whether its machine is broken. A
        node may see no step of its own, so that it never blames a command for making none: the store counts attempts
        without progress (job_attempts)."""
        failure = self._failure(attempt, kind, lines, explained_by=explained_by)
        return blame_of(failure, True), bool(broken_machine(failure, 1))

    async def count(
        self,
        start_id: str,
        attempt: Attempt | None,
        kind: FindingKind,
        lines: tuple[str, ...],
        needs_person: str = "",
        explained_by: str = "",
        stopping: Stopping | None = None,
    ) -> Decision:
        """Decide what follows this failure and record it, once per start, with the stop of what is left of it.
        ``report`` reports it."""
        tools, jitter, decisions = self.context.tools, self.context.tools.jitter.random(), list[Decision]()
        failure = self._failure(attempt, kind, lines, needs_person, explained_by)

        def counted(run: RunState) -> RunState:
            decision = after_failure(run.history, failure, tools.settings, jitter)
            decisions.append(decision)
            stepped = decision.step_back and failure.resumed_from is not None
            return replace(
                run,
                history=decision.history,
                next_try_wall=tools.clock.wall() + decision.delay_seconds if decision.delay_seconds > 0 else None,
                below=failure.resumed_from if stepped else run.below,
                stopping=stopping or run.stopping,
            ).with_start(start_id, counted=True)

        await tools.run_file.edit(counted)
        decision = decisions[-1]
        # A checkpoint proves steps that an earlier pod made. One of several nodes may see no step of its own: the store
        # counts attempts without progress (job_attempts).
        worked = decision.history.ever_worked or failure.resumed_from is not None or tools.settings.nodes.several
        self.context.blame = blame_of(failure, worked)
        self.why_gave_up = decision.reason if decision.history.gave_up else ""
        return decision

    def report(self, decision: Decision, cause: str, lines: tuple[str, ...], attempt: Attempt | None) -> None:
        """Report the decision. ``cause``: the failure as a sentence without its full stop."""
        step = attempt.resumed_from if attempt is not None else None
        if decision.step_back and step is not None:
            self.context.tools.say(
                EventName.STEPPED_BACK,
                f"podwatch resumes from a checkpoint below step {step}: {decision.reason}. Step"
                f" {step} is moved to quarantine; `podwatch quarantine list` shows it",
                Severity.WARNING,
                step=step,
            )
        if decision.history.gave_up:
            self.context.notes.add(FindingKind.GAVE_UP, Severity.CRITICAL, *given_up(decision.reason, lines))
            text = f"{cause}. podwatch gave up: {decision.reason}"  # the finding names the fix
            self.context.tools.say(EventName.GAVE_UP, text, Severity.CRITICAL)

    async def capture(
        self, incident_id: int, finding: Finding | None, handle: TrainerHandle, tails: Mapping[str, Sequence[str]]
    ) -> None:
        """Write the incident bundle. A failure here never delays the restart."""
        tools = self.context.tools
        environment = tools.environment.build(tools.settings.trainer)
        tree: tuple[ProcessSample, ...] = ()
        try:
            async with asyncio.timeout(EVIDENCE_SECONDS):
                reading = await handle.tree()
            tree = reading.value or ()
            path = await tools.evidence.call(
                lambda: capture(
                    tools.incidents_dir / str(incident_id),
                    snapshots=tuple(self.snapshots),
                    finding=finding,
                    tree=tree,
                    log_tails=tails,
                    gpu_state=tools.gpus.latest(),
                    environment_names=tuple(environment),
                ),
                timeout=EVIDENCE_SECONDS,
            )
        except (OSError, PodwatchError, ValueError) as error:  # a timeout is an OSError
            tools.say(EventName.INCIDENT_OPENED, f"cannot write the incident bundle: {error}", Severity.WARNING)
            return
        await tools.journal.run(Journal.update_incident, incident_id, bundle=str(path))

    async def log_tails(self, lines: tuple[str, ...]) -> dict[str, Sequence[str]]:
        """Return the end of every log: the next start overwrites the engine's. If the disk hangs, only the logs are
        missing from the bundle."""
        found: Mapping[str, Sequence[str]] = {}
        try:
            found = await self.context.tools.evidence.call(
                self.context.tools.sensors.logs.log_tails, timeout=LOGS_SECONDS
            )
        except TimeoutError:
            self.context.tools.evidence.renew()
        except (OSError, PodwatchError):
            pass
        return {"trainer.log": lines, **found}

    async def settle_given_up(self, why: str) -> None:
        """Close the incident: nothing more is in progress. A later try that succeeds is recorded in it."""
        incident = await self.context.tools.journal.run(Journal.current_incident)
        if incident is not None:
            self.context.close_incident(incident.id, f"podwatch gave up: {why}", over=False)

    async def could_not_start(self, error: StartFailed, step: int | None, lost: int | None) -> int:
        """Record that the command did not run: a failed start, not a bad checkpoint. Return the incident's id.
        ``lost``: steps that the failure before it has cost."""
        await self.context.edit(requested=False)  # the next tries are podwatch's own, not the operator's request
        await self.context.close_open_incident("the command could not be started", lost=lost)
        start_id = f"failed-{self.context.tools.clock.wall():.3f}"
        attempt = Attempt(start_id, self.context.tools.clock.monotonic(), step)
        incident = await self.context.tools.journal.run(
            Journal.open_incident, "start-failed", str(error), lost_steps=0
        )  # nothing was trained
        self.context.last_incident = incident.id
        needs_person = error.what if error.needs_person else ""
        decision = await self.count(start_id, attempt, FindingKind.TRAINER_EXITED, (str(error),), needs_person)
        gave_up = self.context.run.history.gave_up
        self.context.tools.say(
            EventName.INCIDENT_OPENED,
            str(error),
            Severity.CRITICAL,
            incident=incident.id,
            gave_up=gave_up,
            lost_steps=0,
        )
        self.context.notes.add(FindingKind.BLOCKED, Severity.CRITICAL, error.what, error.fix)
        self.report(decision, f"The training command could not be started: {error.what}", (str(error),), attempt)
        return incident.id


def _cut(text: str) -> str:
    """Cut ``text`` after its last whole sentence if that keeps a third of it, else after its last whole word."""
    sentence = text.rpartition(". ")[0]
    if 3 * len(sentence) >= len(text):
        return f"{sentence}. ..."
    return f"{text.rpartition(' ')[0] or text} ..."


def given_up(reason: str, lines: Sequence[str]) -> tuple[str, str]:
    """Summary and suggestion of the finding ``gave-up``. ``lines``: the trainer's last output."""
    shown = "".join(f"\n  {line}" for line in lines[-LOG_LINES_KEPT:])
    return (
        f"podwatch gave up: {reason}",
        f"{GIVEN_UP_FIX}; podwatch still guards the checkpoints"
        + (f". The trainer's last lines:{shown}" if shown else ""),
    )
