"""Nodes that speak through real files in one directory: who starts when, from which step, and how all of them end."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from podwatch.app.nodes import READ_AT_ONCE, Gang, GangFiles, OwnNode
from podwatch.config.settings import NodesSettings
from podwatch.domain.earlier_attempts import Host
from podwatch.domain.engine_and_attempt import Place
from podwatch.domain.errors import RemoteError
from podwatch.domain.finding import Finding, FindingKind, Severity, Verdict
from podwatch.domain.nodes import GangEnd, GangRecord, NodeFailure
from podwatch.job.exit_code import Blame, JobEnd, Outcome, judge
from podwatch.job.node_rules import ECHO_SECONDS
from podwatch.recovery.restart_budget import LOG_LINES_KEPT
from podwatch.system.own_directories import Workspace
from tests.support.clock import ManualClock

pytestmark = pytest.mark.slow

NODES = NodesSettings(wait=20.0, silence=10.0)
EXITED = Finding(
    FindingKind.TRAINER_EXITED, Severity.CRITICAL, "the trainer ended with exit code 1", 0.0, verdict=Verdict.RESTART,
    confirmed=True,
)  # fmt: skip


@dataclass
class Node:
    """What podwatch knows on one node."""

    phase: str = "running"
    trains: bool = True
    finished: bool = False
    lost: str = ""
    newest: tuple[int | None, float | None] = (None, None)
    echo: bool = False
    generation: int = 1
    refusals: int = 0
    machine: Host = field(default_factory=Host)
    broken: bool = False
    shown: list[str] = field(default_factory=list)

    def step(self) -> tuple[int | None, float | None]:
        return self.newest

    def show(self, text: str) -> None:
        self.shown.append(text)

    async def explain(self, finding: Finding) -> NodeFailure:
        blame = Blame.MACHINE if self.broken else Blame.UNKNOWN
        return NodeFailure(str(finding.kind), finding.summary, str(blame), echo=self.echo, broken=self.broken)

    async def confirm(self) -> int:
        if self.refusals:
            self.refusals -= 1
            raise RemoteError("it is not decided yet whether this pod holds the run's lease")
        return self.generation


class Cluster:
    """Nodes with one clock, which moves only while the test drives them."""

    def __init__(self, root: Path) -> None:
        self.clock, self._output = ManualClock(), root / "outputs"
        self._output.mkdir()
        self.gangs: list[Gang] = []
        self.verdicts: Any = None

    def add(self, rank: int, process: str, attempt: str = "job:1", count: int = 2) -> tuple[Gang, Node]:
        files = GangFiles(Workspace(self._output, node=rank), "run")
        node, place = Node(), Place(rank, count, attempt)
        gang = Gang(place, files, NODES, self.clock, process=process, host=f"n{rank}", own=node, verdicts=self.verdicts)
        self.gangs.append(gang)
        return gang, node

    @property
    def files(self) -> GangFiles:
        return GangFiles(Workspace(self._output), "run")

    async def pass_time(self, seconds: float = 1.0) -> None:
        for _ in range(round(seconds)):
            for gang in list(self.gangs):
                await gang.turn()
            self.clock.advance(1.0)
            for _ in range(5):
                await asyncio.sleep(0)

    async def until(self, done: Callable[[], bool], most: float = 300.0) -> None:
        for _ in range(round(most)):
            if done():
                return
            await self.pass_time()
        raise AssertionError("not within that time")

    async def result(self, work: Coroutine[Any, Any, Any], most: float = 300.0) -> Any:
        task = asyncio.create_task(work)
        await self.until(task.done, most)
        return task.result()

    async def form(self, leader: Gang, *others: Gang, step: int | None = 40) -> None:
        """Start them as one attempt."""
        waiting = [asyncio.create_task(gang.awaited()) for gang in others]
        await self.result(leader.gather())
        assert not any(task.done() for task in waiting), "nothing is prepared yet"
        await self.result(leader.announce(step, "files"))
        await self.until(lambda: all(task.done() for task in waiting))
        assert [task.result() for task in waiting] == [(step, "files")] * len(others)


def in_a_cluster(test: Callable[[Cluster], Awaitable[None]]) -> Callable[[Path], None]:
    def run(tmp_path: Path) -> None:
        async def inside() -> None:
            cluster = Cluster(tmp_path)
            try:
                await test(cluster)
            finally:
                for gang in cluster.gangs:
                    await gang.leave()

        asyncio.run(asyncio.wait_for(inside(), 60))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def code(end: JobEnd | None) -> int:
    assert end is not None
    return int(judge(end).code)


@in_a_cluster
async def test_the_others_start_from_the_step_of_rank_0(cluster: Cluster) -> None:
    leader, _ = cluster.add(0, "p0", count=3)
    others = [cluster.add(rank, f"p{rank}", count=3)[0] for rank in (1, 2)]
    await cluster.form(leader, *others, step=40)
    record = cluster.files.record()
    assert record == GangRecord(1, "job:1", 3, ("p0", "p1", "p2"), True, 40, "files")
    assert [view.rank for view in leader.view()] == [0, 1, 2]


@in_a_cluster
async def test_a_fresh_start_and_a_claim_that_is_decided_late(cluster: Cluster) -> None:
    leader, here = cluster.add(0, "p0")
    other, _ = cluster.add(1, "p1")
    here.refusals = 5
    await cluster.form(leader, other, step=None)
    assert any("not decided yet" in text for text in here.shown)


@in_a_cluster
async def test_an_old_record_is_not_followed_and_is_replaced(cluster: Cluster) -> None:
    """The attempt before left its record and its reports; a node of the same rank and engine job waits for the new."""
    cluster.files.write(GangRecord(4, "job:1", 2, ("old0", "old1"), True, 16))
    other, _ = cluster.add(1, "p1")
    waiting = asyncio.create_task(other.awaited())
    await cluster.pass_time(10)
    assert not waiting.done()
    leader, here = cluster.add(0, "p0")
    here.generation = 5
    await cluster.result(leader.gather())
    await cluster.result(leader.announce(24, "files"))
    await cluster.until(waiting.done)
    assert waiting.result() == (24, "files")


@in_a_cluster
async def test_rank_0_changes_nothing_before_the_nodes_of_an_earlier_attempt_have_ended(cluster: Cluster) -> None:
    old_leader, _ = cluster.add(0, "old0")
    old, _ = cluster.add(1, "old1")
    await cluster.form(old_leader, old)
    cluster.gangs.remove(old_leader)  # its machine is gone; the other node trains on
    leader, here = cluster.add(0, "p0", "job:2")
    cluster.add(1, "p1", "job:2")
    here.generation = 2
    gathering = asyncio.create_task(leader.gather())
    await cluster.until(lambda: old.end is not None)
    assert old.over is not None
    assert (old.over.outcome, code(old.over)) == (Outcome.SUPERSEDED, 86)
    await cluster.pass_time(5)
    assert not gathering.done(), "its trainer still runs"
    cluster.gangs.remove(old)
    there_no_more(old)
    await old.leave()
    await cluster.until(gathering.done, NODES.silence - 3)


@in_a_cluster
async def test_one_failure_has_one_name_and_one_code_on_all_nodes(cluster: Cluster) -> None:
    """The rank on node 1 is killed. Node 0 notices its own broken connection first."""
    leader, here = cluster.add(0, "p0")
    other, _ = cluster.add(1, "p1")
    await cluster.form(leader, other)
    here.echo = True
    assert [f.confirmed for f in leader.judged((EXITED,))] == [False], "podwatch waits for the others' reports"
    await cluster.pass_time(1)
    assert [f.confirmed for f in other.judged((EXITED,))] == [False]
    await cluster.until(lambda: leader.end is not None and other.end is not None, ECHO_SECONDS + 4)
    assert leader.end == other.end
    (found,) = leader.judged((EXITED,))
    assert (found.kind, found.verdict, found.confirmed) == (FindingKind.NODE_FAILED, Verdict.RESTART, True)
    assert "node 1 (n1) failed" in found.summary
    (own_finding,) = other.judged((EXITED,))
    assert replace(own_finding, evidence=EXITED.evidence) == EXITED, "the node that failed acts on its own finding"
    shown = {e.signal: e.value for e in own_finding.evidence}
    assert "node 1 (n1) failed" in shown["reason"]
    assert {"node 0 (n0)", "node 1 (n1)"} <= shown.keys(), "its incident shows the last step of all"
    assert other.findings() == ()
    own = JobEnd(Outcome.GAVE_UP, "the trainer ended")
    last = asyncio.create_task(other.agree(own))
    first = await cluster.result(leader.agree(own))
    await cluster.pass_time(3)
    assert not last.done(), "srun ends all at the first exit: rank 0, which has something to store, ends first"
    there_no_more(leader)
    await leader.leave()
    cluster.gangs.remove(leader)
    assert await cluster.result(waited(last), 5) == first
    assert code(first) == 86


@in_a_cluster
async def test_a_command_at_fault_ends_all_nodes_with_65(cluster: Cluster) -> None:
    leader, _ = cluster.add(0, "p0")
    other, _ = cluster.add(1, "p1")
    await cluster.form(leader, other)
    wrong = JobEnd(Outcome.GAVE_UP, "unknown argument", Blame.COMMAND)
    answer = asyncio.create_task(other.agree(wrong))
    await cluster.until(lambda: leader.end is not None)
    both = await cluster.result(together(leader.agree(JobEnd(Outcome.GAVE_UP, "a peer is gone")), waited(answer)))
    assert [code(end) for end in both] == [65, 65]


@in_a_cluster
async def test_rank_0_tells_the_others_before_it_ends_that_the_run_is_refused(cluster: Cluster) -> None:
    """Before any start, while the other node still waits: srun returns the highest code of its tasks."""
    leader, _ = cluster.add(0, "p0")
    other, _ = cluster.add(1, "p1")
    waiting = asyncio.create_task(other.awaited())
    refused = JobEnd(Outcome.REFUSED, "the command is at fault")
    assert code(await cluster.result(leader.agree(refused))) == 65
    assert code(other.over) == 65
    assert not waiting.done(), "it never starts"
    waiting.cancel()


@in_a_cluster
async def test_a_node_that_cannot_start_ends_the_others(cluster: Cluster) -> None:
    """Rank 0 has started, and its ranks wait for those of the other node: each second costs."""
    leader, _ = cluster.add(0, "p0")
    other, there = cluster.add(1, "p1")
    there.trains = False
    await cluster.form(leader, other)
    other.cannot_start("node 0 starts from step 40, which this node does not see")
    await cluster.until(lambda: None not in (leader.end, other.end), ECHO_SECONDS + 5)
    assert leader.end == other.end
    assert (leader.over or JobEnd(Outcome.FAILED)).reason == (
        "node 1 (n1) failed: node 0 starts from step 40, which this node does not see"
    )
    assert code(leader.over) == code(other.over) == 86


@in_a_cluster
async def test_a_node_that_falls_silent_ends_the_others(cluster: Cluster) -> None:
    leader, _ = cluster.add(0, "p0")
    other, _ = cluster.add(1, "p1")
    await cluster.form(leader, other)
    cluster.gangs.remove(other)
    await cluster.pass_time(NODES.silence - 5)
    assert leader.end is None
    await cluster.until(lambda: leader.end is not None, 10)
    assert "node 1 (n1) has not reported for" in (leader.over or JobEnd(Outcome.FAILED)).reason
    assert code(leader.over) == 86
    await cluster.pass_time(2)
    cluster.gangs.remove(leader)
    cluster.gangs.append(other)  # it was frozen: it cannot know whether the others still train, and sees the end
    await cluster.until(lambda: other.end is not None)
    assert other.end == leader.end
    cluster.gangs.append(leader)


@in_a_cluster
async def test_rank_0_that_falls_silent_ends_the_others(cluster: Cluster) -> None:
    leader, _ = cluster.add(0, "p0")
    other, _ = cluster.add(1, "p1")
    await cluster.form(leader, other)
    cluster.gangs.remove(leader)
    await cluster.until(lambda: other.end is not None, NODES.silence + 10)
    assert "node 0 (n0) has not reported for" in (other.over or JobEnd(Outcome.FAILED)).reason
    assert code(other.over) == 86


@in_a_cluster
async def test_the_wait_for_the_other_nodes_is_bounded(cluster: Cluster) -> None:
    leader, here = cluster.add(0, "p0", count=3)
    cluster.add(1, "p1", count=3)
    gathering = asyncio.create_task(leader.gather())
    await cluster.until(lambda: leader.end is not None, NODES.wait + 5)
    assert not gathering.done()
    gathering.cancel()
    assert "rank 2 has not reported" in here.shown[-1]
    assert (leader.over or JobEnd(Outcome.FAILED)).outcome is Outcome.BLOCKED
    assert code(leader.over) == 86


@in_a_cluster
async def test_the_wait_for_rank_0_is_bounded(cluster: Cluster) -> None:
    other, _ = cluster.add(1, "p1")
    waiting = asyncio.create_task(other.awaited())
    await cluster.until(lambda: other.end is not None, NODES.wait + 5)
    waiting.cancel()
    assert "must be the same directory on all nodes" in (other.over or JobEnd(Outcome.FAILED)).reason
    assert code(other.over) == 86


@in_a_cluster
async def test_a_late_write_of_an_old_rank_0_is_corrected(cluster: Cluster) -> None:
    leader, here = cluster.add(0, "p0")
    other, _ = cluster.add(1, "p1")
    here.generation = 5
    await cluster.form(leader, other)
    right = cluster.files.record()
    cluster.files.write(GangRecord(4, "job:0", 2, ("old0", "old1"), True, 8))
    await cluster.pass_time(2)
    assert cluster.files.record() == right
    assert other.end is None


@in_a_cluster
async def test_a_finished_node_waits_for_rank_0_to_store_the_last_checkpoint(cluster: Cluster) -> None:
    leader, here = cluster.add(0, "p0")
    other, there = cluster.add(1, "p1")
    await cluster.form(leader, other)
    here.finished = there.finished = True
    done = JobEnd(Outcome.FINISHED, "at its target")
    answer = asyncio.create_task(other.agree(done))
    await cluster.pass_time(40)
    assert not answer.done(), "rank 0 still uploads"
    both = await cluster.result(together(leader.agree(done), waited(answer)))
    assert [code(end) for end in both] == [0, 0]


@in_a_cluster
async def test_a_preempted_node_ends_all_with_86(cluster: Cluster) -> None:
    leader, _ = cluster.add(0, "p0")
    other, there = cluster.add(1, "p1")
    await cluster.form(leader, other)
    other.stopping(JobEnd(Outcome.PREEMPTED, "the engine ended the job"))
    cluster.gangs.remove(other)
    there.trains = False
    await other.leave()
    await cluster.until(lambda: leader.end is not None, ECHO_SECONDS + 4)
    assert "node 1 (n1) failed: the engine ended the job" in (leader.over or JobEnd(Outcome.FAILED)).reason
    assert code(leader.over) == 86


@in_a_cluster
async def test_a_restarted_daemon_continues_in_its_attempt(cluster: Cluster) -> None:
    leader, _ = cluster.add(0, "p0")
    other, _ = cluster.add(1, "p1")
    await cluster.form(leader, other)
    for rank, old in ((0, leader), (1, other)):
        cluster.gangs.remove(old)
        again, _ = cluster.add(rank, f"p{rank}")  # the same init, so the same process
        await again.start()
    await cluster.pass_time(10)
    assert [gang.end for gang in cluster.gangs] == [None, None]
    assert [len(gang.view()) for gang in cluster.gangs] == [2, 2]


def there_no_more(gang: Gang) -> None:
    """Nothing trains on its node any more."""
    assert isinstance(gang._own, Node)
    gang._own.trains = False


async def together(*work: Awaitable[JobEnd]) -> list[JobEnd]:
    return list(await asyncio.gather(*work))


async def waited(task: "asyncio.Task[JobEnd]") -> JobEnd:
    return await task


@in_a_cluster
async def test_the_broken_machine_of_another_node_reaches_the_end_that_rank_0_records(cluster: Cluster) -> None:
    leader, _ = cluster.add(0, "p0")
    other, there = cluster.add(1, "p1")
    there.machine, there.broken = Host("m1", "n1", ("GPU-1",)), True
    await cluster.form(leader, other)
    other.judged((EXITED,))
    await cluster.until(lambda: leader.end is not None, ECHO_SECONDS + 4)
    assert leader.over is not None
    assert leader.over.broken == (there.machine,)


@in_a_cluster
async def test_nothing_starts_on_the_bad_machine_of_another_node(cluster: Cluster) -> None:
    """Rank 0 asks once all nodes are there, and before it changes anything; all nodes end, and one is named."""
    asked: list[Mapping[str, Host]] = []

    async def ask(hosts: Mapping[str, Host]) -> JobEnd | None:
        asked.append(hosts)
        return JobEnd(Outcome.BAD_HOST, "node 2 (n2): an ECC error", broken=(Host("m-b", "2"),))

    cluster.verdicts = SimpleNamespace(forbids_hosts=ask)
    leader, _ = cluster.add(0, "p0", count=3)
    others = [cluster.add(rank, f"p{rank}", count=3) for rank in (1, 2)]
    for (gang, here), name in zip(others, "ab", strict=True):
        here.machine = Host(f"m-{name}", f"{gang.place.rank}")
    gathering = asyncio.create_task(leader.gather())
    waiting = [asyncio.create_task(gang.awaited()) for gang, _ in others]
    ends = [leader, *(gang for gang, _ in others)]
    await cluster.until(lambda: all(gang.end is not None for gang in ends))
    assert asked == [{"node 1 (n1)": Host("m-a", "1"), "node 2 (n2)": Host("m-b", "2")}]
    assert {code(gang.over) for gang in ends} == {86}
    assert leader.end == GangEnd("bad-host", "node 2 (n2): an ECC error", rank=2)
    assert not any(task.done() for task in (gathering, *waiting)), "nothing is prepared, and nothing starts"
    for task in (gathering, *waiting):
        task.cancel()


@in_a_cluster
async def test_what_the_nodes_read_grows_with_their_number_and_not_with_its_square(cluster: Cluster) -> None:
    """The reports of 17 nodes, read by all of them every second, are 289 requests to one file server."""
    count, reads, seconds = 17, 0, 6
    leader, _ = cluster.add(0, "p0", count=count)
    others = [cluster.add(rank, f"p{rank}", count=count) for rank in range(1, count)]
    await cluster.form(leader, *(gang for gang, _ in others))
    read = GangFiles._read

    def counted(self: GangFiles, path: Path) -> bytes:
        nonlocal reads
        reads += 1
        return read(self, path)

    GangFiles._read = counted  # type: ignore[method-assign]
    try:
        await cluster.pass_time(seconds)
    finally:
        GangFiles._read = read  # type: ignore[method-assign]
    assert reads / seconds < count * (READ_AT_ONCE + 4)
    _, here = others[-1]
    here.newest = (77, 0.0)
    await cluster.pass_time(count / READ_AT_ONCE + 2)
    for gang in (leader, others[0][0]):
        assert [view.rank for view in gang.view()] == list(range(count))
        assert max(view.silent_seconds for view in gang.view()) <= count / READ_AT_ONCE + 2
        assert gang.view()[-1].step == 77, "every node still hears of every other one"
    leader.end = GangEnd("gave-up", "node 7 failed", rank=7)
    await cluster.pass_time(2)
    assert all(gang.end == leader.end for gang, _ in others), "known at once"


async def test_a_lost_connection_is_an_echo_however_long_the_report_after_it() -> None:
    """torchrun prints a table of many lines after the line that says why."""
    lost = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:34501"
    tails = {"train.log": [lost, *["  rank : 0 (local_rank: 0)"] * LOG_LINES_KEPT]}

    async def log_tails(_lines: tuple[str, ...]) -> dict[str, list[str]]:
        return tails

    tools = SimpleNamespace(
        sensors=SimpleNamespace(logs=SimpleNamespace(last_lines=lambda _count: ())),
    )
    failures: Any = SimpleNamespace(
        context=SimpleNamespace(attempt=None, tools=tools),
        log_tails=log_tails,
        blame=lambda *_args, **_more: (Blame.UNKNOWN, False),
    )
    failure = await OwnNode(failures, None).explain(EXITED)
    assert failure.log == lost
    assert failure.echo
