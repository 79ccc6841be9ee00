"""One node of a run over several nodes (docs/nodes.md): rank 0 chooses and prepares, the others follow, and a failure
of any node ends all of them with one code. job/node_rules.py decides; this reads, writes and waits.

The nodes speak through small files in podwatch's directory beside output_dir, which all of them share: each writes its
own report every few seconds, rank 0 also the record. A node that sees no report of the others for ``[nodes] silence``
ends too: it cannot know whether they still train.

Long because what rank 0 writes and what the others wait for are the two sides of one protocol: neither can be read, or
changed, without the other.
"""

import asyncio
import contextlib
import hashlib
import math
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from podwatch.app.ask_and_record_attempts import JobVerdicts, run_gpus
from podwatch.app.variables_of_own_processes import JOB_PROCESS
from podwatch.config.settings import NodesSettings, Settings
from podwatch.domain.earlier_attempts import Host
from podwatch.domain.engine_and_attempt import Place, instance, place_of
from podwatch.domain.errors import HostError, PodwatchError
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity, Verdict
from podwatch.domain.nodes import (
    GangEnd,
    GangRecord,
    NodeFailure,
    NodeView,
    Report,
    document,
    parse_record,
    parse_report,
)
from podwatch.domain.run import Mutation
from podwatch.domain.secrets import scrub
from podwatch.job.exit_code import JobEnd, Outcome
from podwatch.job.node_rules import (
    ECHO_SECONDS,
    Seen,
    Sight,
    arrived,
    as_gang_end,
    as_job_end,
    culprit,
    ended_by,
    gone_silent,
    is_echo,
    mine,
    missing,
    own_line,
    silent,
    still_there,
)
from podwatch.journal.explaining_line import decisive
from podwatch.recovery.failure import LINE_SHOWN, SAYS_WHY, Failures
from podwatch.recovery.state import Phase
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import Clock
from podwatch.system.open_by_descriptor import NODES
from podwatch.system.own_directories import Workspace
from podwatch.system.procfs import boot_id, machine_id
from podwatch.trainer.errors_in_output import LOG_LINES_KEPT

if TYPE_CHECKING:
    from podwatch.app.backup.backup import Backup

BEAT_SECONDS: Final = 1.0
"""Between two reports: a failure is known on all nodes within two of them, and a report is 1 KB."""
AGREE_SECONDS: Final = 30.0
"""How long a node that ends waits for the others to learn of the end: engines end the whole job at the first exit, and
the code of a node that is killed is not podwatch's."""
DIRECTORY_SECONDS: Final = 10.0
"""A shared file system that takes longer for 1 KB has not answered."""
READ_AT_ONCE: Final = 8
"""Reports that a node that follows reads in a second, on average: 64 nodes that all read all would ask one file server
for 4,096 files a second."""
POLL_SECONDS: Final = 0.2
_LIMIT: Final = 1 << 18


class GangFiles:
    """The record and the reports. Blocks; for one thread. Raises OSError and PodwatchError."""

    def __init__(self, workspace: Workspace, run_id: str) -> None:
        self._tree, self._run_id = workspace.tree, run_id
        self.directory = workspace.shared / NODES
        self._record = self.directory / "gang.json"

    def exchange(self, report: Report, of: str = "") -> tuple[GangRecord | None, tuple[Report, ...]]:
        """Write this node's report; return the record and all reports, or this one and that of the process ``of``."""
        self._tree.make(self.directory)
        self._tree.write(self._of(report.process), document(report, self._run_id))
        if of:
            found = [report, parse_report(self._read(self._of(of)), self._run_id)]
        else:
            names = [n for n in self._tree.names(self.directory) if n.startswith("report-") and n.endswith(".json")]
            found = [parse_report(self._read(self.directory / name), self._run_id) for name in names]
        return self.record(), tuple(one for one in found if one is not None)

    def record(self) -> GangRecord | None:
        return parse_record(self._read(self._record), self._run_id)

    def write(self, record: GangRecord) -> None:
        """Durable when it returns."""
        self._tree.make(self.directory)
        self._tree.write(self._record, document(record, self._run_id))

    def remove(self, processes: Iterable[str]) -> None:
        for process in processes:
            with contextlib.suppress(OSError):
                self._tree.unlink(self._of(process))

    def _of(self, process: str) -> Path:
        return self.directory / f"report-{hashlib.sha256(process.encode()).hexdigest()[:16]}.json"

    def _read(self, path: Path) -> bytes:
        try:
            return self._tree.read_ours(path, _LIMIT)
        except FileNotFoundError:
            return b""


class Gang:
    """Loop-side object; one per daemon. ``process`` identifies this podwatch among all attempts."""

    def __init__(
        self,
        place: Place,
        files: GangFiles,
        nodes: NodesSettings,
        clock: Clock,
        *,
        process: str,
        host: str,
        own: "OwnNode",
        verdicts: JobVerdicts | None = None,
        beat: float = BEAT_SECONDS,
        agree: float = AGREE_SECONDS,
    ) -> None:
        """``verdicts``: None without a usable store."""
        self.place, self._files, self._nodes, self._clock = place, files, nodes, clock
        self._process, self._beat, self._agree = process, beat, agree
        self._report = Report(place.rank, process, place.attempt, host)
        self._own, self._verdicts = own, verdicts
        self._worker = Worker("nodes")
        self._turn = asyncio.Lock()
        self._sight, self._record = Sight(), None  # type: tuple[Sight, GangRecord | None]
        self._heard_at = clock.monotonic()
        """When the directory answered last."""
        self._generation = 0
        self._members: tuple[str, ...] = ()
        self._announced: GangRecord | None = None
        self._failing: Finding | None = None
        self._failing_since = 0.0
        self._explaining: asyncio.Task[None] | None = None
        self._order: list[str] = []
        """Processes of the nodes that failed, in the order in which this node heard of them."""
        self._first_at: float | None = None
        self.problem = ""
        """Why the directory does not answer; empty if it does."""
        self.end: GangEnd | None = None
        """How this attempt ends, once that is known here."""

    @property
    def leads(self) -> bool:
        return self.place.leads

    @property
    def over(self) -> JobEnd | None:
        """The end of this attempt as the job's end on this node."""
        return None if self.end is None else as_job_end(self.end)

    # -- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """The first turn. A restarted daemon continues in the attempt that its predecessor belonged to."""
        await self.turn()
        record = self._record
        if mine(record, self.place.attempt, self.place.rank, self._process) and record is not None:
            self._join(record)

    async def run(self) -> None:
        """Report, and read the other reports, until podwatch ends."""
        while True:
            await self.turn()
            await self._clock.sleep(self._beat)

    async def leave(self) -> None:
        """The last report, written when podwatch ends. Never raises."""
        if self._explaining is not None:
            self._explaining.cancel()
        self._report = replace(self._report, left=not self._own.trains)
        await self.turn()
        self._worker.close()

    def _join(self, record: GangRecord) -> None:
        self._generation, self._members = record.generation, record.members
        self._announced = record if self.leads else None

    async def turn(self) -> None:
        """One report and one look. Never raises: a directory that does not answer is counted as silence."""
        async with self._turn:
            now = self._clock.monotonic()
            try:
                report, of = self._next_report(), self._only()
                exchange = partial(self._files.exchange, report, of)
                self._record, reports = await self._worker.call(exchange, timeout=DIRECTORY_SECONDS)
            except (OSError, PodwatchError) as error:
                self.problem = str(error) or f"no answer within {DIRECTORY_SECONDS:.0f} s"
                self._worker.renew()
            else:
                self.problem, self._heard_at = "", self._clock.monotonic()
                self._sight = self._sight.look(reports, now, every=not of)
            self._look_at_directory()
            if self.leads:
                await self._lead()
            else:
                self._follow()

    def _only(self) -> str:
        """The process whose report alone is read in this turn; empty: all are. A node that follows decides by rank 0's;
        it shows the others, and reads them in some turns, so that the nodes together read as many reports as nodes
        rather than their square."""
        turn = self._report.beat + self.place.rank  # not all nodes in the same second
        everything = turn % math.ceil(self.place.count / READ_AT_ONCE) == 0
        return "" if self.leads or not self._members or everything else self._members[0]

    def _next_report(self) -> Report:
        known, own = self._report, self._own
        step, age = own.step()
        known = replace(
            known,
            beat=known.beat + 1,
            follows=self._generation,
            phase=own.phase,
            step=step,
            step_age=age,
            finished=known.finished or own.finished,
            machine=own.machine,
        )
        if self.end is not None:
            known = replace(known, agreed=True, end=self.end if self.leads else None)
        self._report = known
        return known

    def _look_at_directory(self) -> None:
        """A node that the others cannot see ends when they take it for gone."""
        lasted = self._clock.monotonic() - self._heard_at
        if self.end is None and self._members and lasted > self._nodes.silence:
            text = f"node {self.place.rank} cannot use {self._files.directory} for {lasted:.0f} s: {self.problem}"
            self.end = GangEnd(str(Outcome.GAVE_UP), text, rank=self.place.rank)

    # -- rank 0 -------------------------------------------------------------------------------------------------------

    async def gather(self) -> None:
        """Wait until every node of this attempt has reported, and none of an earlier one can still train; nothing was
        changed before. Never returns once this attempt is over. Raises PodwatchError if this pod does not hold the run
        or the store does not confirm it."""
        if self.end is None and not (self._members and self._announced is not None):
            self._generation = await self._confirmed()
            await self._write(GangRecord(self._generation, self.place.attempt, self.place.count))
            began = self._clock.monotonic()
            while self.end is None and not self._members:
                self._gathered(self._clock.monotonic() - began)
                await self._clock.sleep(POLL_SECONDS)
            if self.end is None:
                self.end = await self._refused()
        await self._park_if_over()

    async def _refused(self) -> GangEnd | None:
        """The end of this attempt if the machine of another node is on the run's list of bad ones."""
        others = [s.report for p in self._members[1:] if (s := self._sight.seen.get(p)) is not None]
        if self._verdicts is None:
            return None
        end = await self._verdicts.forbids_hosts({report.name: report.machine for report in others})
        if end is None:
            return None
        rank = next((report.rank for report in others if report.machine in (end.broken or ())), None)
        return replace(as_gang_end(end, self.place.rank), rank=rank)

    def _gathered(self, waited: float) -> None:
        place, patience = self.place, self._nodes.wait
        old = still_there(self._sight, self._process, self._generation, self._nodes.silence)
        members = arrived(self._sight, place.attempt, place.count, self._report)
        if members is not None and not old:
            self._members = members
            return
        if old:
            names = ", ".join(report.name for report in old)
            text = f"{names} of an earlier attempt may still train"
            patience += self._nodes.silence
        else:
            ranks = ", ".join(map(str, missing(self._sight, place.attempt, place.count)))
            text = f"of the {place.count} nodes of this run, rank {ranks} has not reported in {self._files.directory}"
        self._own.show(f"waiting: {text}")
        if waited > patience:
            fix = "" if old else "; it must be the same directory on all nodes"
            self.end = GangEnd(str(Outcome.BLOCKED), f"{text} within {patience:.0f} s{fix}", rank=place.rank)

    async def announce(self, step: int | None, files: str) -> None:
        """Everything is prepared: let every node start from ``step``, whose files have this hash. Raises as
        ``gather``."""
        await self._park_if_over()
        if self._announced is not None and self._announced.step != step:
            text = f"rank 0 would start from step {step}, but the other nodes have started from {self._announced.step}"
            self.end = GangEnd(str(Outcome.GAVE_UP), text, rank=0)
            await self._park_if_over()
        self._generation = await self._confirmed()
        ready = GangRecord(self._generation, self.place.attempt, self.place.count, self._members, True, step, files)
        await self._write(ready)
        self._announced = ready
        gone = [p for p, s in self._sight.seen.items() if p not in self._members and (s.report.left or not s.alive)]
        with contextlib.suppress(OSError, PodwatchError):
            await self._worker.call(self._files.remove, gone, timeout=DIRECTORY_SECONDS)

    async def _confirmed(self) -> int:
        """The generation of this pod's claim. Waits while the claim is not decided yet, or the store does not answer;
        raises what it says after that."""
        end = self._clock.monotonic() + self._nodes.wait
        while True:
            try:
                return await self._own.confirm()
            except PodwatchError as error:
                if self._clock.monotonic() > end or self.end is not None:
                    raise
                self._own.show(f"waiting: {error}")
            await self._clock.sleep(self._beat)

    async def _write(self, record: GangRecord) -> None:
        """Replace the record, never one of a newer generation: this node has confirmed its own a moment ago."""
        async with self._turn:
            known = await self._worker.call(self._files.record, timeout=DIRECTORY_SECONDS)
            if known is not None and known.generation > record.generation:
                self._superseded(known)
            else:
                await self._worker.call(self._files.write, record, timeout=DIRECTORY_SECONDS)

    async def _lead(self) -> None:
        if self.end is not None:
            return
        record = self._record
        if record is not None and self._generation and record.generation > self._generation:
            self._superseded(record)
        elif record is not None and self._announced is not None and record.generation < self._generation:
            # A frozen rank 0 of an earlier attempt wrote it late.
            with contextlib.suppress(OSError, PodwatchError):
                await self._worker.call(self._files.write, self._announced, timeout=DIRECTORY_SECONDS)
        elif self._own.lost and self._members:
            self.end = GangEnd(str(Outcome.SUPERSEDED), self._own.lost, rank=0)
        elif self._members and not self._own.finished:
            self._judge_members()

    def _judge_members(self) -> None:
        members = [s.report for p in self._members if (s := self._sight.seen.get(p)) is not None]
        members = [self._report if r.process == self._process else r for r in members]
        failed = [r for r in members if r.failure is not None or (r.left and not r.finished)]
        self._order += [r.process for r in failed if r.process not in self._order]
        if not failed:
            gone = silent(self._sight, self._members, self._process, self._nodes.silence)
            if gone:
                self.end = gone_silent(gone[0], self._nodes.silence)
            return
        now = self._clock.monotonic()
        self._first_at = now if self._first_at is None else self._first_at
        if len(failed) == len(members) or now - self._first_at >= ECHO_SECONDS:
            failed.sort(key=lambda r: self._order.index(r.process))
            self.end = ended_by(culprit(failed), members)

    # -- the others ---------------------------------------------------------------------------------------------------

    async def awaited(self) -> tuple[int | None, str]:
        """The step that rank 0 has prepared (None: from the beginning), and the hash of its files. Never returns once
        this attempt is over."""
        began = self._clock.monotonic()
        while self.end is None:
            record = self._record
            if record is not None and mine(record, self.place.attempt, self.place.rank, self._process):
                self._join(record)
                return record.step, record.files
            leader = self._leader()
            if leader is not None:
                began = self._clock.monotonic()
            waited = self._clock.monotonic() - began
            self._own.show(f"waiting for node 0 to choose the step ({'seen' if leader else 'not seen'})")
            if waited > self._nodes.wait:
                text = (
                    f"node 0 of this attempt has not reported in {self._files.directory} for {waited:.0f} s; it must be"
                    " the same directory on all nodes"
                )
                self.end = GangEnd(str(Outcome.BLOCKED), text, rank=0)
            await self._clock.sleep(POLL_SECONDS)
        await self._park_if_over()
        return None, ""

    def cannot_start(self, why: str) -> None:
        """Report that this node cannot start in this attempt, so that rank 0 ends it."""
        self._fail(JobEnd(Outcome.BLOCKED, why))

    def _leader(self) -> Report | None:
        """Rank 0 of this attempt, if it lives."""
        for seen in self._sight.seen.values():
            report = seen.report
            same = report.rank == 0 and report.attempt == self.place.attempt and not report.left
            if same and seen.alive and seen.unchanged < self._nodes.silence:
                return report
        return None

    def _follow(self) -> None:
        if self.end is not None:
            return
        if not self._members:
            leader = self._leader()
            self.end = leader.end if leader is not None and leader.end is not None else None
            return
        record = self._record
        if record is not None and record.generation > self._generation:
            self._superseded(record)
            return
        seen = self._sight.seen.get(self._members[0])
        if seen is None:
            return
        if seen.report.end is not None:
            self.end = seen.report.end
        elif seen.report.left or seen.unchanged > self._nodes.silence:
            gone = gone_silent(seen.report, seen.unchanged)
            self.end = gone if not seen.report.left else replace(gone, reason=f"{seen.report.name} has ended")

    # -- the end ------------------------------------------------------------------------------------------------------

    def judged(self, findings: Sequence[Finding]) -> tuple[Finding, ...]:
        """The findings that recovery acts on. One failure has one name on all nodes: podwatch waits some seconds for
        the others' reports before it acts on this node's."""
        local = next((f for f in findings if f.confirmed and f.verdict is Verdict.RESTART), None)
        if self.end is not None:
            if local is not None and self.end.rank == self.place.rank:
                return tuple(
                    replace(f, evidence=(*f.evidence, *self._all_nodes(self.end))) if f is local else f
                    for f in findings
                )
            return (*(f for f in findings if f.verdict is not Verdict.RESTART), self._finding(self.end))
        if local is None:
            return tuple(findings)
        now = self._clock.monotonic()
        if self._failing is None:
            self._failing, self._failing_since = local, now
            self._explaining = asyncio.create_task(self._explain(local), name="podwatch-node-failure")
        if now - self._failing_since > self._agree:
            return tuple(findings)
        return tuple(replace(f, confirmed=False) if f.verdict is Verdict.RESTART else f for f in findings)

    def findings(self) -> tuple[Finding, ...]:
        """For status: the reason why this attempt ends, if it is another node's; and a directory that does not
        answer."""
        if self.end is not None and self.end.rank != self.place.rank and self.end.outcome != Outcome.FINISHED:
            return (self._finding(self.end),)
        return ()

    def _finding(self, end: GangEnd) -> Finding:
        since = self._heard_at if self._first_at is None else self._first_at
        if end.outcome == Outcome.FINISHED:
            text = "training is finished on all nodes"
            return Finding(FindingKind.FINISHED, Severity.INFO, text, since, verdict=Verdict.FINISH, confirmed=True)
        return Finding(
            FindingKind.NODE_FAILED,
            Severity.CRITICAL,
            f"{end.reason}. All nodes of this run end",
            since,
            "nothing, the engine starts all nodes again",
            verdict=Verdict.RESTART,
            confirmed=True,
            evidence=self._last_steps(),
        )

    def _all_nodes(self, end: GangEnd) -> tuple[Evidence, ...]:
        """For the incident on the node that is the reason, which otherwise shows that node alone."""
        return (Evidence("reason", end.reason, Agreement.AGREES), *self._last_steps())

    def _last_steps(self) -> tuple[Evidence, ...]:
        return tuple(_evidence(s.report) for s in self._members_seen())

    async def _explain(self, finding: Finding) -> None:
        self._report = replace(self._report, failure=await self._own.explain(finding))

    async def agree(self, end: JobEnd, *, storing: float = 0.0) -> JobEnd:
        """The end that all nodes have, once they know of it; ``end``: this node's own. Bounded, except that a finished
        node waits for rank 0, which stores the last checkpoint, as long as that lives. ``storing``: seconds for which
        rank 0 does so after another end."""
        if end.outcome is Outcome.FINISHED:
            self._report = replace(self._report, finished=True)
        if self.leads:
            await self._decide(end)
            await self._until(self._all_agreed)
        elif end.outcome is Outcome.FINISHED:
            while self.end is None:
                await self._clock.sleep(POLL_SECONDS)
        else:
            self._fail(end)
            await self._until(lambda: self.end is not None)
        await self.turn()  # so that the others see it before this process ends
        if not self.leads and self.end is not None:
            await self._until(self._leader_left, self._nodes.wait + storing)
        return self.over or end

    async def _decide(self, end: JobEnd) -> None:
        if self.end is None and end.outcome is Outcome.GAVE_UP and self._members:
            self._fail(end)
            await self._until(lambda: self.end is not None)
        if self.end is None:
            self.end = as_gang_end(end, self.place.rank)
        await self.turn()

    def _fail(self, end: JobEnd) -> None:
        if self._report.failure is None and self.end is None:
            failure = NodeFailure(str(end.outcome), end.reason, str(end.blame))
            self._report = replace(self._report, failure=failure)

    def _leader_left(self) -> bool:
        """Whether rank 0 has ended, or is gone. It ends first: engines end the whole job at the first exit, and rank 0
        alone has a verdict and a last checkpoint to store."""
        if not self._members:
            return True
        seen = self._sight.seen.get(self._members[0])
        return seen is None or seen.report.left or seen.unchanged > self._nodes.silence

    async def _until(self, done: Callable[[], bool], seconds: float | None = None) -> None:
        end = self._clock.monotonic() + (self._agree if seconds is None else seconds)
        while not done() and self._clock.monotonic() < end:
            await self._clock.sleep(POLL_SECONDS)

    def stopping(self, end: JobEnd) -> None:
        """podwatch ends because its engine, or an error, says so: the last report shows it."""
        if self.leads and self.end is None:
            self.end = as_gang_end(end, self.place.rank)
        else:
            self._fail(end)

    def blocked_reason(self, mutation: Mutation) -> str:
        """For the MutationGuard of a node that follows."""
        if mutation in (Mutation.DELETE, Mutation.PUBLISH):
            return "this is not node 0 of the run, which deletes and publishes for all of its nodes"
        return ""

    def _all_agreed(self) -> bool:
        others = [s for p, s in self._sight.seen.items() if p != self._process and self._is_member(p, s.report)]
        if len(others) < self.place.count - 1:
            return False
        return all(s.report.agreed or s.report.left or s.unchanged > self._nodes.silence for s in others)

    def _is_member(self, process: str, report: Report) -> bool:
        if self._members:
            return process in self._members
        return report.attempt == self.place.attempt and not report.follows

    def _superseded(self, record: GangRecord) -> None:
        text = f"a newer attempt of this run has started (generation {record.generation}, this one {self._generation})"
        self.end = GangEnd(str(Outcome.SUPERSEDED), text)

    async def _park_if_over(self) -> None:
        """Wait without end: app/end_of_run.py ends podwatch."""
        if self.end is not None:
            await asyncio.Event().wait()

    # -- status -------------------------------------------------------------------------------------------------------

    def view(self) -> tuple[NodeView, ...]:
        """The nodes of this attempt that have reported, by rank."""
        return tuple(
            NodeView(
                s.report.rank,
                s.report.host,
                s.report.phase,
                s.report.step,
                round(s.unchanged, 1),
                self.end is not None and self.end.rank == s.report.rank,
                s.report.rank == self.place.rank,
            )
            for s in self._members_seen()
        )

    def _members_seen(self) -> list[Seen]:
        found = [s for p, s in self._sight.seen.items() if p == self._process or self._is_member(p, s.report)]
        return sorted(found, key=lambda s: s.report.rank)


class OwnNode:
    """What this node reports of itself, and why its training failed; ``backup``: None where this is not rank 0."""

    def __init__(self, failures: Failures, backup: "Backup | None") -> None:
        self._context, self._failures, self._backup = failures.context, failures, backup
        self._machine = Host(machine_id(), instance(os.environ).node)

    @property
    def machine(self) -> Host:
        """With the GPUs as they were last seen: a broken one can take the driver with it."""
        tools = self._context.tools
        seen = run_gpus(tools.settings, tools.gpus)
        if seen and seen != self._machine.gpus:
            self._machine = replace(self._machine, gpus=seen)
        return self._machine

    @property
    def phase(self) -> str:
        return str(self._context.phase)

    @property
    def trains(self) -> bool:
        return self._context.handle is not None

    @property
    def finished(self) -> bool:
        return self._context.phase is Phase.FINISHED

    @property
    def lost(self) -> str:
        standing = self._context.tools.standing
        return standing.why_not if standing.stop else ""

    def step(self) -> tuple[int | None, float | None]:
        attempt = self._context.attempt
        if attempt is None or attempt.last_step is None:
            return None, None
        at = next((s.at for s in attempt.samples if s.step == attempt.last_step), None)
        now = self._context.tools.clock.monotonic()
        return attempt.last_step, None if at is None else max(0.0, now - at)

    def show(self, text: str) -> None:
        self._context.show(Phase.STARTING, text)

    async def explain(self, finding: Finding) -> NodeFailure:
        context, failures = self._context, self._failures
        tools = context.tools
        lines = tuple(tools.sensors.logs.last_lines(LOG_LINES_KEPT))
        log, echo = "", False
        if finding.kind in SAYS_WHY:
            tails = await failures.log_tails(lines)
            best, last = decisive(tails), [line for tail in tails.values() for line in tail[-LOG_LINES_KEPT:]]
            said = "" if best is None else best[1]  # what a launcher prints at the end can be longer than ``last``
            log, echo = own_line(last) or said, is_echo((*last, said))
            log = scrub(log)[:LINE_SHOWN]
        blame, broken = failures.blame(finding.kind, context.attempt, lines, explained_by=log)
        return NodeFailure(str(finding.kind), finding.summary, str(blame), log, echo and not broken, broken)

    async def confirm(self) -> int:
        if self._backup is None:
            raise HostError("rank 0 has no store, so it cannot know whether it holds the run")
        return (await self._backup.lease.confirm()).generation


def own_place(settings: Settings) -> Place | None:
    """None for a run on one node."""
    rank, count = settings.nodes.rank, settings.nodes.count
    if rank is None or count is None or count < 2:
        return None
    return place_of(os.environ, rank, count)


def make_gang(place: Place, failures: Failures, backup: "Backup | None", verdicts: JobVerdicts | None) -> Gang:
    tools = failures.context.tools
    settings, clock, own = tools.settings, tools.clock, OwnNode(failures, backup)
    process = os.environ.get(JOB_PROCESS) or f"{boot_id()}:{os.getpid()}"
    files, host = GangFiles(tools.workspace, settings.run_id), socket.gethostname()
    return Gang(place, files, settings.nodes, clock, process=process, host=host, own=own, verdicts=verdicts)


def _evidence(report: Report) -> Evidence:
    step = "no step seen" if report.step is None else f"step {report.step}"
    age = "" if report.step_age is None else f", {report.step_age:.0f} s ago"
    failed = "" if report.failure is None else f"; {report.failure.summary}"
    return Evidence(report.name, f"{step}{age}{failed}", Agreement.AGREES if failed else Agreement.UNAVAILABLE)
