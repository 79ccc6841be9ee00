"""Checkpoints that podwatch holds back: the evidence, the findings, and the operator's decisions.

Two reasons: a second trainer in the same output_dir can have written them (``TwoWriters``), or training of this run
cannot have reached their step number (``Implausible``). The journal keeps the first, the records of the checkpoints
both, so that a restarted podwatch neither publishes nor accepts a checkpoint that it held back before.

``TwoWriters.check`` blocks and runs before each rescan: a checkpoint that the rescan finds complete was written before
it. The other methods are for the event loop.
"""

import os
from dataclasses import dataclass, replace

from podwatch.checkpoints.held_back import HeldBack, in_reach
from podwatch.checkpoints.layout import Layout
from podwatch.checkpoints.second_writer import Beside, Span, follow
from podwatch.checkpoints.shapes import StepSeen
from podwatch.config.settings import Settings
from podwatch.domain.checkpoint import NO_TRAINING, CheckpointSet, HeldAs, newest_complete
from podwatch.domain.document import Document, Many
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.domain.process import FoundTree, ProcessIdentity
from podwatch.domain.secrets import scrub
from podwatch.domain.snapshot import ProgressSource, Snapshot, TrainerSample
from podwatch.journal import Journal
from podwatch.sensors.processes import ProcessSensor
from podwatch.system.clock import Clock
from podwatch.system.procfs import is_alive
from podwatch.trainer.find import PodReader, sought_run
from podwatch.trainer.process_roles import Roles
from podwatch.trainer.rules import SoughtRun
from podwatch.trainer.trainer_handle import TrainerHandle, started_wall

TWO_WRITERS_KEY = "two-writers"
"""Journal key of the time spans."""
SHOWN = 100
"""Characters of a command line in a finding."""


class TwoWriters:
    """``processes`` gives the trainer that podwatch watches; ``settings`` and ``layout`` say how others are
    recognised."""

    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        held: HeldBack,
        *,
        roles: Roles,
        clock: Clock,
        journal: Journal,
        processes: ProcessSensor,
    ) -> None:
        self._settings, self._layout = settings, layout
        self._output_dir = settings.trainer.output_dir
        self._clock, self._journal, self._processes = clock, journal, processes
        self._reader = PodReader(roles)
        self._looked_wall = 0.0
        self._ours: frozenset[ProcessIdentity] = frozenset()
        """Processes of the trainer that podwatch watches, or watched last: what is left of it is no writer beside
        it."""
        self._start_ids: frozenset[str] = frozenset()
        self._watched: TrainerHandle | None = None
        self._writers: tuple[FoundTree, ...] = ()
        """Those that write beside the watched trainer; without one, those that write beside each other."""
        self.problem = ""
        self.found: tuple[FoundTree, ...] = ()
        self.beside = Beside(looked_at=float("-inf"))
        self.held = held

    # -- processes (blocks) -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check every process of the pod."""
        at, wall = self._clock.monotonic(), self._clock.wall()
        handle, sample = self._processes.handle, self._processes.latest().value
        suspected = {other.launcher for other in self.found}
        try:
            watched = handle if handle is not None and is_alive(handle.launcher) else None
            if watched is not None:
                self._ours = _processes_of(watched, sample)
                self._start_ids = frozenset({watched.start_id})
            found = self._reader.find_writers(self._sought(), self._ours)
        except OSError as error:  # out of descriptors or memory: no result this time
            self.problem = f"the processes of this pod cannot be read: {error}"
            return
        self.problem = ""
        writers = tuple(other for other in found if other.writes)
        if watched is None and len(writers) < 2:
            writers = ()
        who = ", ".join(f"pid {other.launcher.pid}" for other in writers)
        born = {other.launcher: started_wall(other.launcher, self._clock) for other in found}
        # A process that was known and not suspected has written nothing before this look.
        since = sorted(
            max(born[o.launcher], self._looked_wall)
            if self._reader.knew(o.launcher) and o.launcher not in suspected
            else born[o.launcher]
            for o in writers
        )
        second = since[0 if watched is not None else 1] if since else None
        if self.held.update(follow(self.held.spans, second, who, wall)):
            self._keep()
        first = at - (wall - min(born.values())) if born and watched is not None else None
        self.beside = Beside(at, follow(self.beside.spans, first, who, at))
        self.found, self._watched, self._writers, self._looked_wall = found, watched, writers, wall

    def _sought(self) -> SoughtRun:
        """As the paths lead now. On any GPU: a second trainer on another one mixes checkpoints, too."""
        roots = tuple(os.path.realpath(root) for root in self._layout.watch_roots())
        return replace(sought_run(self._settings, self._start_ids), gpus=frozenset(), roots=roots)

    # -- findings (on the loop) ---------------------------------------------------------------------------------------

    def findings(self, sets: tuple[CheckpointSet, ...], now: float) -> tuple[Finding, ...]:
        """``now`` monotonic."""
        found = (self._two(self._writers, sets, now),) if self._writers else self._after(sets, now)
        if self.problem:
            text = f"podwatch cannot see whether a second trainer writes to {self._output_dir}: {self.problem}"
            found = (*found, Finding(FindingKind.SENSOR_BLIND, Severity.WARNING, text, now, subject="two-writers"))
        return found

    def _after(self, sets: tuple[CheckpointSet, ...], now: float) -> tuple[Finding, ...]:
        """The finding after the second trainer ended: the held-back checkpoints, which need a decision."""
        held = [s.step for s in sets if s.held_as is HeldAs.TWO_WRITERS]
        if not held:
            return ()
        newest = newest_complete(sets)
        behind = newest is None or newest.step < held[-1]
        ended = self.held.spans[-1].end if self.held.spans else None
        return (
            Finding(
                FindingKind.TWO_WRITERS,
                Severity.WARNING if behind else Severity.INFO,
                f"held back: step {', '.join(map(str, held))}, written while a second trainer was running. podwatch"
                " does not publish it and does not resume from it; later saves are published as usual",
                now if ended is None else now - max(0.0, self._clock.wall() - ended),
                f"if it is sound, `podwatch sync --step {held[-1]}` publishes it; `podwatch start --step {held[-1]}`"
                " resumes from it",
                subject="held",
            ),
        )

    def _two(self, writers: tuple[FoundTree, ...], sets: tuple[CheckpointSet, ...], now: float) -> Finding:
        others = "; ".join(f"pid {o.launcher.pid} ({shown(o.top.argv)}): {o.reason}" for o in writers)
        held = ", ".join(str(s.step) for s in sets if s.held_as is HeldAs.TWO_WRITERS)
        pids = " ".join(str(o.launcher.pid) for o in writers)
        who, fix = f"podwatch watches none of them: {others}", f"stop all but one: `kill {pids}`"
        if (handle := self._watched) is not None:
            sample = self._processes.latest().value
            tree = sample.descendants if sample else ()
            ours = next((p.command for p in tree if p.identity == handle.launcher), "")
            command = shown(ours.split() or self._settings.trainer.command)
            who = f"podwatch watches pid {handle.launcher.pid} ({command}); the other is {others}"
            fix = f"stop one of them: `kill {pids}`, or `podwatch stop-training` for the one that podwatch watches"
        return Finding(
            FindingKind.TWO_WRITERS,
            Severity.CRITICAL,
            f"two trainers write to {self._output_dir}: {who}. podwatch neither publishes nor resumes from"
            " checkpoints that are saved meanwhile" + (f" (held back: step {held})" if held else ""),
            self.held.spans[-1].start - self._clock.wall() + now if self.held.spans else now,
            fix,
            subject="writers",
        )

    def _keep(self) -> None:
        self._journal.learn(TWO_WRITERS_KEY, HeldSpans(self.held.spans).to_json())


def shown(argv: tuple[str, ...] | list[str]) -> str:
    """The command line as text: scrubbed as a whole, then cut."""
    text = scrub(" ".join(argv))
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def _processes_of(handle: TrainerHandle, sample: TrainerSample | None) -> frozenset[ProcessIdentity]:
    tree = sample.descendants if sample is not None and sample.start_id == handle.start_id else ()
    supervisor = () if handle.record is None else (handle.record.supervisor,)
    return frozenset((handle.launcher, *supervisor, *(process.identity for process in tree)))


@dataclass(frozen=True, slots=True)
class HeldSpans(Document):
    """When a second trainer wrote: for saves that are not complete yet, and so have no record."""

    spans: Many[Span] = ()


def recalled_spans(document: object) -> HeldBack:
    """The state in the journal's ``document``; holds nothing back if it cannot be read."""
    return HeldBack((HeldSpans.kept(document) or HeldSpans()).spans)


_OWN = (ProgressSource.STEP_LINE, ProgressSource.HEARTBEAT)


class Implausible:
    """Call ``turn`` at each turn of the sensing loop, then ``findings``; neither blocks. ``turn`` updates ``held``."""

    def __init__(self, held: HeldBack) -> None:
        self._held = held
        self._since: dict[tuple[int, str], float] = {}

    def turn(self, snapshot: Snapshot) -> None:
        """See how far training is."""
        for sample in snapshot.progress_of_start:
            if sample.source in _OWN and sample.trained and sample.step is not None:
                self._held.show(sample.step)

    def findings(self, sets: tuple[CheckpointSet, ...], now: float) -> tuple[Finding, ...]:
        """``now`` monotonic."""
        odd = {(s.step, s.save_id): s for s in sets if s.held_as is HeldAs.IMPLAUSIBLE}
        self._since = {key: self._since.get(key, now) for key in odd}
        return tuple(
            Finding(
                FindingKind.IMPLAUSIBLE_STEP,
                Severity.WARNING,
                f"the checkpoint of step {one.step} cannot be this run's: {one.held.partition(': ')[2]}. podwatch does"
                " not resume from it, upload it or delete it; the next start moves it to quarantine",
                self._since[key],
                f"move it out of the checkpoint directory; if it is this run's, `podwatch start --step {one.step}`"
                f" resumes from it, and `podwatch sync --step {one.step}` uploads it",
                subject=f"step {one.step}",
            )
            for key, one in odd.items()
        )


def believed_progress(seen: tuple[StepSeen, ...], sets: tuple[CheckpointSet, ...]) -> tuple[StepSeen, ...]:
    """``seen`` without implausible steps. A layout reports the highest checkpoint directory; if that is not of the
    current lineage, or not scanned yet, the newest checkpoint of the lineage replaces it."""
    line = {s.step: s for s in in_reach([s for s in sets if s.of_line])}
    odd = {s.step for s in sets if s.held_as is HeldAs.IMPLAUSIBLE}
    newest = max(line, default=None)
    found = []
    for one in seen:
        if "checkpoint" not in one.role:
            if one.step not in odd and one.step < NO_TRAINING:
                found.append(one)
        elif one.step in line:
            found.append(one)
        elif newest is not None:
            found.append(StepSeen(one.role, newest, line[newest].changed_wall))
    return tuple(found)
