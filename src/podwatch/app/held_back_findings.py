"""Checkpoints that podwatch holds back: the evidence, the findings, and the operator's decisions.

Two reasons: a second trainer in the same output_dir can have written them (``TwoWriters``), or training of this run
cannot have reached their step number (``Implausible``). The journal keeps the first, the records of the checkpoints
both, so that a restarted podwatch neither publishes nor accepts a checkpoint that it held back before.

``TwoWriters.look`` blocks and runs before each rescan: a checkpoint that the rescan finds complete was written before
it. The other methods are for the event loop.
"""

import os
import pwd
from dataclasses import dataclass

from podwatch.checkpoints.held_back import HeldBack
from podwatch.checkpoints.layout import Layout
from podwatch.checkpoints.second_writer import Beside, Span, follow
from podwatch.checkpoints.shapes import StepSeen
from podwatch.config.settings import TrainerSettings
from podwatch.domain.checkpoint import NO_TRAINING, CheckpointSet, HeldAs, newest_complete
from podwatch.domain.document import Document, Many
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.domain.secrets import scrub
from podwatch.domain.snapshot import ProgressSource, Snapshot, TrainerSample
from podwatch.journal import Journal
from podwatch.sensors.processes import ProcessSensor
from podwatch.system.clock import Clock
from podwatch.system.procfs import identify, is_alive
from podwatch.trainer.base import TrainerHandle
from podwatch.trainer.other_writers import Other, Others, Run, program_of
from podwatch.trainer.process_roles import Roles
from podwatch.trainer.trainer_handle import SupervisedTrainer, started_wall

TWO_WRITERS_KEY = "two-writers"
"""Journal key of the time spans."""
SHOWN = 100
"""Characters of a command line in a finding."""


class TwoWriters:
    """``processes`` gives the trainer that podwatch watches; ``layout`` the checkpoint directories."""

    def __init__(
        self,
        trainer: TrainerSettings,
        held: HeldBack,
        *,
        roles: Roles,
        layout: Layout,
        clock: Clock,
        journal: Journal,
        processes: ProcessSensor,
    ) -> None:
        self._output_dir, self._command, self._layout = trainer.output_dir, trainer.command, layout
        self._clock, self._journal, self._processes = clock, journal, processes
        self._users = frozenset({os.geteuid(), *_uid_of(trainer.user)})
        self._others = Others(roles)
        me = identify(os.getpid())
        self._own = frozenset() if me is None else frozenset({me})
        self._looked_wall = 0.0
        self._run, self._start_id = self._described(None, None), ""
        """Of the trainer that podwatch watches, or watched last: what is left of it is no writer beside it."""
        self._watched: TrainerHandle | None = None
        self._writers: tuple[Other, ...] = ()
        """Those that write beside the watched trainer; without one, those that write beside each other."""
        self.problem = ""
        self.found: tuple[Other, ...] = ()
        self.beside = Beside(looked_at=float("-inf"))
        self.held = held

    # -- processes (blocks) -------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Check every process of the pod."""
        at, wall = self._clock.monotonic(), self._clock.wall()
        handle, sample = self._processes.handle, self._processes.latest().value
        suspected = {other.identity for other in self.found}
        try:
            watched = handle if handle is not None and is_alive(handle.launcher) else None
            if watched is not None:
                self._run, self._start_id = self._described(watched, sample), watched.start_id
            found = self._others.look(self._run, self._start_id)
        except OSError as error:  # out of descriptors or memory: no result this time
            self.problem = f"the processes of this pod cannot be read: {error}"
            return
        self.problem = ""
        writers = tuple(other for other in found if other.writes)
        if watched is None and len(writers) < 2:
            writers = ()
        who = ", ".join(f"pid {other.identity.pid}" for other in writers)
        born = {other.identity: started_wall(other.identity, self._clock) for other in found}
        # A process that was known and not suspected has written nothing before this look.
        since = sorted(
            max(born[o.identity], self._looked_wall)
            if self._others.knew(o.identity) and o.identity not in suspected
            else born[o.identity]
            for o in writers
        )
        second = since[0 if watched is not None else 1] if since else None
        if self.held.update(follow(self.held.spans, second, who, wall)):
            self._keep()
        first = at - (wall - min(born.values())) if born and watched is not None else None
        self.beside = Beside(at, follow(self.beside.spans, first, who, at))
        self.found, self._watched, self._writers, self._looked_wall = found, watched, writers, wall

    def _described(self, handle: TrainerHandle | None, sample: TrainerSample | None) -> Run:
        started = "" if handle is None else handle.start_id
        tree = sample.descendants if sample is not None and sample.start_id == started else ()
        launcher = None if handle is None else handle.launcher
        kin = {process.identity for process in tree} | ({launcher} if launcher is not None else set())
        if isinstance(handle, SupervisedTrainer):
            kin.add(handle.record.supervisor)
        programs = {program_of(process.command.split()) for process in tree if process.identity == launcher}
        return Run(
            output_dir=os.path.realpath(self._output_dir),
            roots=tuple(os.path.realpath(root) for root in self._layout.watch_roots()),
            ours=frozenset(kin),
            users=self._users,
            own=self._own,
            programs=frozenset(programs | {program_of(self._command)}) - {("", "")},
        )

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

    def _two(self, writers: tuple[Other, ...], sets: tuple[CheckpointSet, ...], now: float) -> Finding:
        others = "; ".join(f"pid {o.identity.pid} ({shown(o.argv)}): {o.reason}" for o in writers)
        held = ", ".join(str(s.step) for s in sets if s.held_as is HeldAs.TWO_WRITERS)
        pids = " ".join(str(o.identity.pid) for o in writers)
        who, fix = f"podwatch watches none of them: {others}", f"stop all but one: `kill {pids}`"
        if (handle := self._watched) is not None:
            sample = self._processes.latest().value
            tree = sample.descendants if sample else ()
            ours = next((p.command for p in tree if p.identity == handle.launcher), "")
            command = shown(ours.split() or self._command)
            who = f"podwatch watches pid {handle.launcher.pid} ({command}); the other is {others}"
            fix = f"stop one of them: `kill {pids}`, or `podwatch stop-training` for the one that podwatch watches"
        return Finding(
            FindingKind.TWO_WRITERS,
            Severity.CRITICAL,
            f"two trainers write to {self._output_dir}: {who}. podwatch neither publishes nor resumes from checkpoints"
            " that are saved meanwhile" + (f" (held back: step {held})" if held else ""),
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


def _uid_of(user: str) -> tuple[int, ...]:
    try:
        return (pwd.getpwnam(user).pw_uid,) if user else ()
    except KeyError:
        return ()


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
    line = {s.step: s for s in sets if s.of_line}
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
