"""Ends the rented machine of a plain pod by ``[end_pod] command``, once nothing more is to be done on it
(docs/pods.md).

A finished run is billed until its machine ends. In job mode the engine ends it; a plain pod has to end itself. The
command can destroy the disk with all that is on it, so it runs only after the final sync is done or its time is over,
learns whether everything is stored, and runs a limited number of times, each journaled before.
"""

import asyncio
import shlex
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from podwatch.app.settings_in_force import Configuration
from podwatch.app.shutdown import Exit
from podwatch.config.trusted_files import check_command
from podwatch.domain.document import Document, Text, Whole
from podwatch.domain.errors import HostError, PodwatchError
from podwatch.domain.event import Event, EventName
from podwatch.domain.finding import FindingKind, Severity
from podwatch.domain.lease import LeaseAction
from podwatch.domain.secrets import scrub, scrub_argv
from podwatch.domain.snapshot import Desired
from podwatch.job.exit_code import Outcome
from podwatch.journal import Journal
from podwatch.recovery.recovery import Recovery
from podwatch.recovery.state import Phase
from podwatch.system.child import run_child
from podwatch.trainer.environment import build_environment

TRIED: Final = "end-pod"
"""Journal key of ``Tried``."""
GONE_SECONDS: Final = 180.0
"""How long the machine may take to end after the command succeeded; docker stop and a provider's queue are done by
then."""
PAUSES: Final = (10.0, 30.0, 60.0, 300.0)
"""Seconds between two tries; the last one repeats."""
Recheck = Callable[[], Awaitable[bool]]
"""Whether everything is stored now."""
_ENDS: Final = frozenset({Outcome.FINISHED, Outcome.GAVE_UP, Outcome.SUPERSEDED})
"""The ends of a run after which its machine ends: whoever stops or preempts it may still want something of it."""
_FIX: Final = "end this machine in the provider's console: it is billed; then correct [end_pod] (docs/pods.md)"


@dataclass(frozen=True, slots=True)
class PodEnd:
    """One end of the run on this pod. ``id`` differs for the same run after an operator has started it again.
    ``stored``: every complete checkpoint of the run on this machine is in the store, so that its disk can go."""

    outcome: Outcome
    id: str
    stored: bool


@dataclass(frozen=True, slots=True)
class Tried(Document):
    """How often the command was run for one end of the run."""

    end: Text
    tries: Whole


class PodEnder:
    """Runs the command. ``environ``: podwatch's own environment, with the provider's variables."""

    def __init__(self, config: Configuration, recovery: Recovery, leaving: Exit, environ: Mapping[str, str]) -> None:
        self._config, self._recovery, self._exit, self._environ = config, recovery, leaving, environ
        tools = recovery.context.tools
        self._journal, self._clock, self._emit = tools.journal, tools.clock, tools.emit

    def wants(self, outcome: Outcome) -> bool:
        """Whether this end of the run ends the machine."""
        return bool(self._config.settings.end_pod.command) and outcome in _ENDS

    async def end_pod(self, outcome: Outcome, *, stored: bool, recheck: Recheck) -> None:
        """As ``end``, for the run's end now."""
        await self.end(PodEnd(outcome, self._end_id(outcome), stored), recheck)

    async def end(self, end: PodEnd, recheck: Recheck | None = None) -> None:
        """Run the command until this machine is gone, or the tries are used up, or the end does not hold any more. Call
        it after the final sync. A pause delays it; ``recheck`` then finds out again whether everything is stored. Never
        raises; returns at the latest after ``tries`` times the pauses and limits, not counting that."""
        settings = self._config.settings.end_pod
        if not self.wants(end.outcome):
            return
        tries = await self._tries(end)
        said = ""
        while tries < settings.tries and self._holds(end):
            if self._recovery.context.paused:
                end = await self._after_pause(end, recheck)
                continue
            tries += 1
            said = await self._try(end, tries)
            if not await self._machine_remains(end, GONE_SECONDS if not said else PAUSES[min(tries, len(PAUSES)) - 1]):
                return
            said = said or f"it succeeded, but the machine still runs {GONE_SECONDS / 60:.0f} min later"
        if self._holds(end):
            why = said or "the tries for this end were used up before podwatch was restarted"
            text = f"[end_pod] command did not end this machine in {settings.tries} tries: {why}"
            self._recovery.context.notes.add(FindingKind.POD_NOT_ENDED, Severity.CRITICAL, text, _FIX)

    async def _after_pause(self, end: PodEnd, recheck: Recheck | None) -> PodEnd:
        """Wait until podwatch is not paused, or the end does not hold any more; returns the end with what is stored
        then: an operator may have pinned another checkpoint meanwhile."""
        text = "podwatch is paused: the end of this machine, which is billed, waits for `podwatch unpause`"
        self._say(text, Severity.WARNING)
        self._exit.waits_for = text
        try:
            while self._recovery.context.paused and self._holds(end):
                await self._clock.sleep(1.0)
            return end if recheck is None or not self._holds(end) else replace(end, stored=await recheck())
        finally:
            self._exit.waits_for = ""

    async def _tries(self, end: PodEnd) -> int:
        known = Tried.kept(await self._journal.run(Journal.learned, TRIED))
        return known.tries if known is not None and known.end == end.id else 0

    async def _try(self, end: PodEnd, number: int) -> str:
        """Run it once; returns why it failed, empty if it succeeded. Counted before it runs: on a full disk
        in memory alone, because a machine that is not ended is billed."""
        settings = self._config.settings.end_pod
        try:
            await self._journal.run(Journal.learn, TRIED, Tried(end.id, number).to_json())
        except HostError as error:
            return f"it cannot be recorded: {error}"
        stored = "everything is stored" if end.stored else "NOT everything is stored"
        self._say(
            f"podwatch ends this machine ({end.outcome}; {stored}): try {number} of {settings.tries} of"
            f" {shlex.join(scrub_argv(settings.command))[:200]}",
            Severity.WARNING,
        )
        failed = await self._run(end)
        if failed:
            self._say(f"[end_pod] command failed: {failed}", Severity.WARNING)
        return failed

    async def _run(self, end: PodEnd) -> str:
        settings = self._config.settings.end_pod
        own = {
            "PODWATCH_RUN_ID": self._config.settings.run_id,
            "PODWATCH_OUTCOME": str(end.outcome),
            "PODWATCH_STORED": "yes" if end.stored else "no",
        }
        try:
            environment = build_environment(self._environ, {}, settings.env_file) | own
            if self._config.settings.trains_as_another:
                await asyncio.to_thread(check_command, settings.command, Path("/"), environment.get("PATH"))
            done = await run_child(settings.command, timeout=settings.timeout, env=environment)
        except PodwatchError as error:
            return str(error)
        if done.ok:
            return ""
        last = (done.output.strip().splitlines() or [""])[-1][:300]
        how = f"no end within {settings.timeout:.0f} s" if done.timed_out else f"exit code {done.code}"
        return scrub(f"{how}: {last}" if last else how)

    async def _machine_remains(self, end: PodEnd, seconds: float) -> bool:
        """Wait; returns False as soon as the end does not hold any more."""
        until = self._clock.monotonic() + seconds
        while self._holds(end):
            left = until - self._clock.monotonic()
            if left <= 0:
                return True
            await self._clock.sleep(min(1.0, left))
        return False

    def _end_id(self, outcome: Outcome) -> str:
        """Identifies this end of the run on this pod; it differs after an operator has started training again."""
        run = self._recovery.context.run
        start = run.last_start.start_id if run.last_start is not None else ""
        return f"{outcome}:{run.lineage.id}:{start}"

    def _holds(self, end: PodEnd) -> bool:
        """Whether the end still holds: no operator has started training since."""
        context = self._recovery.context
        if context.handle is not None or self._end_id(end.outcome) != end.id:
            return False
        match end.outcome:
            case Outcome.FINISHED:
                return context.desired is Desired.FINISHED
            case Outcome.GAVE_UP:
                # At the time of the next try a pause shows its own phase.
                return context.phase is Phase.GAVE_UP or (context.paused and context.phase is Phase.PAUSED)
            case Outcome.SUPERSEDED:
                return context.tools.standing.act is LeaseAction.SUPERSEDED
        return False

    def _say(self, text: str, severity: Severity) -> None:
        self._emit(Event(EventName.POD_ENDING, self._clock.wall(), text, severity))
