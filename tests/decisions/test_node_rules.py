"""Who belongs to an attempt over several nodes, and which node is the reason when one fails (docs/nodes.md)."""

from dataclasses import replace

from podwatch.domain.earlier_attempts import Host
from podwatch.domain.nodes import (
    GangEnd,
    GangRecord,
    NodeFailure,
    Report,
    document,
    parse_record,
    parse_report,
)
from podwatch.job.exit_code import Blame, JobEnd, Outcome, judge
from podwatch.job.node_rules import (
    MOST_BETWEEN,
    Sight,
    arrived,
    as_gang_end,
    as_job_end,
    culprit,
    ended_by,
    first_to_stop,
    is_echo,
    mine,
    missing,
    own_line,
    silent,
    still_there,
)

LEADER = Report(0, "p0", "job:1", "a")
OTHER = Report(1, "p1", "job:1", "b")
KILLED = NodeFailure(
    "trainer-exited", "the trainer ended with exit code 1", "unknown", "Signal 9 (SIGKILL) received by PID 7"
)
ECHO = NodeFailure("trainer-exited", "the trainer ended with exit code 1", echo=True)


def sight(*looks: tuple[Report, ...], every: float = 1.0) -> Sight:
    found = Sight()
    for number, reports in enumerate(looks):
        found = found.look(reports, 100.0 + every * number)
    return found


def alive(report: Report) -> tuple[Report, Report]:
    return report, replace(report, beat=report.beat + 1)


def test_a_node_has_arrived_once_its_report_changes() -> None:
    first, second = alive(OTHER)
    assert arrived(sight((LEADER, first)), "job:1", 2, LEADER) is None, "a report of a dead process never changes"
    assert missing(sight((LEADER, first)), "job:1", 2) == (1,)
    assert arrived(sight((LEADER, first), (LEADER, second)), "job:1", 2, LEADER) == ("p0", "p1")
    assert missing(sight((LEADER, first), (LEADER, second)), "job:1", 2) == ()


def test_a_look_at_some_reports_says_nothing_of_the_others() -> None:
    """They stay as they were heard last, and get older."""
    third = replace(OTHER, rank=2, process="p2")
    seen = sight(alive(LEADER), (LEADER, OTHER, third), every=1.0)
    later = seen.look((replace(LEADER, beat=9),), 105.0, every=False)
    assert later.seen["p0"].unchanged == 0
    assert (later.seen["p1"].report, later.seen["p1"].unchanged) == (OTHER, 4.0)
    assert set(seen.look((LEADER,), 105.0).seen) == {"p0"}, "one that is not there any more is forgotten"


def test_no_node_of_another_attempt_is_taken() -> None:
    for stranger in (
        replace(OTHER, attempt="job:0"),
        replace(OTHER, follows=3),
        replace(OTHER, left=True),
        replace(OTHER, rank=2),
        replace(OTHER, rank=0),
    ):
        first, second = alive(stranger)
        assert arrived(sight((LEADER, first), (LEADER, second)), "job:1", 2, LEADER) is None, stranger


def test_of_two_processes_of_one_rank_the_living_one_is_taken() -> None:
    old, new = replace(OTHER, process="old"), replace(OTHER, process="new")
    looks = ((LEADER, old, new), (LEADER, *[replace(r, beat=1) for r in (old, new)]), (LEADER, replace(old, beat=1),
             replace(new, beat=2)))  # fmt: skip
    assert arrived(sight(*looks), "job:1", 2, LEADER) == ("p0", "new")


def test_a_node_of_an_earlier_attempt_can_still_train_until_it_has_left_or_is_silent() -> None:
    old = replace(OTHER, process="old", follows=4)
    assert still_there(sight((LEADER, old)), "p0", 5, 60.0) == (old,)
    assert still_there(sight((LEADER, replace(old, left=True))), "p0", 5, 60.0) == ()
    assert still_there(sight((LEADER, old), (LEADER, old), every=15.0), "p0", 5, 60.0) == (old,)
    assert still_there(sight(*[(LEADER, old)] * 6, every=15.0), "p0", 5, 60.0) == ()
    assert still_there(sight((LEADER, replace(old, follows=5))), "p0", 5, 60.0) == (), "this attempt's"


def test_silence_counts_only_while_the_directory_answers() -> None:
    gone = sight(*[(LEADER, OTHER)] * 6, every=15.0)
    assert [r.process for r in silent(gone, ("p0", "p1"), "p0", 60.0)] == ["p1"]
    frozen = sight(*[(LEADER, OTHER)] * 6, every=MOST_BETWEEN + 1)
    assert silent(frozen, ("p0", "p1"), "p0", 60.0) == ()
    left = sight(*[(LEADER, replace(OTHER, left=True))] * 6, every=15.0)
    assert silent(left, ("p0", "p1"), "p0", 60.0) == ()


def test_an_old_record_is_never_followed() -> None:
    record = GangRecord(3, "job:1", 2, ("p0", "p1"), True, 40)
    assert mine(record, "job:1", 1, "p1")
    assert not mine(None, "job:1", 1, "p1")
    assert not mine(record, "job:2", 1, "p1"), "the attempt before"
    assert not mine(record, "job:1", 1, "again"), "the same attempt, but another process of this node"
    assert not mine(record, "job:1", 2, "p1")
    assert not mine(replace(record, ready=False), "job:1", 1, "p1"), "rank 0 has not prepared yet"


def test_the_node_whose_rank_was_killed_is_the_reason_and_not_the_echo() -> None:
    echo, killed = replace(LEADER, failure=ECHO), replace(OTHER, failure=KILLED)
    assert culprit((echo, killed)) is killed
    assert culprit((killed, echo)) is killed
    assert culprit((echo, replace(OTHER, failure=ECHO))) is echo, "nothing else is known: the first that was heard of"
    assert ended_by(killed, (echo, killed)).reason == (
        "node 1 (b) failed: the trainer ended with exit code 1 (Signal 9 (SIGKILL) received by PID 7)"
    )


def test_the_logs_show_whether_a_failure_is_an_echo() -> None:
    """As torchrun 2.13 with gloo prints them."""
    lost = "RuntimeError: [gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:40133"
    children = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
    killed = "  traceback : Signal 9 (SIGKILL) received by PID 185"
    assert is_echo((lost, children))
    assert not is_echo((children, killed))
    assert not is_echo((lost, children, killed)), "its own rank was killed, whatever the others saw then"
    assert not is_echo((children,))
    assert own_line((children, killed)) == killed.strip()
    assert own_line((lost, children)) == ""


def test_a_hang_names_the_node_that_stopped_first() -> None:
    hang = NodeFailure("hang", "no step for 25 min")
    late, early = (
        replace(LEADER, failure=hang, step=41, step_age=1500.0),
        replace(OTHER, failure=hang, step=40, step_age=1490.0),
    )
    assert culprit((late, early)) is early
    assert "node 1 (b) stopped first, at step 40, 1490 s ago" in ended_by(early, (late, early)).reason
    same = replace(early, step=41, step_age=1512.0)
    assert first_to_stop((late, same)) is same
    assert first_to_stop((late, replace(early, step=None))) is None, "one node alone proves nothing"
    exited = replace(OTHER, failure=KILLED)
    assert culprit((late, exited)) is exited, "an exit explains a hang"


def test_of_nodes_that_stopped_together_none_is_said_to_be_the_first() -> None:
    """Ranks that wait for each other print each step at the same time: the ages differ by when the logs were read."""
    hang = NodeFailure("hang", "no step for 25 min")
    busy, idle = replace(LEADER, step=41, step_age=1503.0), replace(OTHER, failure=hang, step=41, step_age=1500.0)
    assert first_to_stop((busy, idle)) is None
    assert culprit((idle,)) is idle, "only its GPUs are idle"
    reason = ended_by(idle, (busy, idle)).reason
    assert reason == "node 1 (b) failed: no step for 25 min; node 0 (a) and node 1 (b) stopped together, at step 41"
    both = (replace(busy, failure=hang), idle)
    assert culprit((idle, both[0])) is idle, "the first that was heard of"
    third = Report(2, "p2", step=41, step_age=None)
    assert first_to_stop((busy, idle, third)) is None
    assert first_to_stop((busy, idle, replace(third, step=40))) == replace(third, step=40)


def test_an_end_has_the_code_that_it_has_on_one_node() -> None:
    for outcome in Outcome:
        for blame in Blame:
            own = JobEnd(outcome, "x", blame)
            assert judge(as_job_end(as_gang_end(own, 1))) == judge(own), (outcome, blame)
    assert as_job_end(GangEnd("what", "x", "who")) == JobEnd(Outcome.GAVE_UP, "x", Blame.UNKNOWN, broken=())


def test_a_broken_machine_is_the_reason_before_every_other_failure() -> None:
    """NCCL's watchdog ends the ranks that wait for a broken GPU, with a signal and often first; or all of them hang."""
    aborted = replace(LEADER, failure=replace(KILLED, log="Signal 6 (SIGABRT) received by PID 7"))
    broken = replace(OTHER, failure=replace(KILLED, broken=True))
    assert culprit([aborted, broken]) == broken
    hang = NodeFailure("hang", "no progress for 30 min")
    waits = replace(LEADER, failure=hang, step=8, step_age=900.0)
    lost = replace(OTHER, failure=replace(hang, broken=True), step=8, step_age=60.0)
    assert culprit([waits, lost]) == lost


def test_only_the_machine_that_is_broken_is_named_as_broken() -> None:
    """A machine fault that can pass blames the machine, but neither its node nor node 0 is listed for it."""
    machine = Host("m1", "n1", ("GPU-1",))
    fault = NodeFailure("trainer-exited", "an ECC error", str(Blame.MACHINE), broken=True)
    failed = replace(OTHER, failure=fault, machine=machine)
    assert as_job_end(ended_by(failed, [LEADER, failed])).broken == (machine,)
    passing = replace(failed, failure=replace(fault, broken=False))
    end = as_job_end(ended_by(passing, [LEADER, passing]))
    assert (end.blame, end.broken, end.suspect) == (Blame.MACHINE, (), machine)
    assert as_job_end(ended_by(failed, [LEADER, failed])).suspect is None
    for other in (replace(fault, broken=False, blame=str(Blame.COMMAND)), replace(fault, broken=False, echo=True)):
        named = replace(failed, failure=other)
        assert as_job_end(ended_by(named, [LEADER, named])).suspect is None
    assert as_job_end(as_gang_end(JobEnd(Outcome.GAVE_UP, "5 failures", Blame.MACHINE), 0)).broken == ()


def test_documents_survive_and_strange_ones_are_dropped() -> None:
    record = GangRecord(3, "job:1", 2, ("p0", "p1"), True, 40, "a1b2")
    machine = Host("m1", "n1", ("GPU-1", "GPU-2"))
    end = GangEnd("gave-up", "x", "unknown", 1, machine, True)
    failure = replace(KILLED, broken=True)
    report = replace(OTHER, step=7, step_age=1.5, failure=failure, end=end, left=True, machine=machine)
    assert parse_record(document(record, "run"), "run") == record
    assert parse_record(document(replace(record, step=None), "run"), "run") == replace(record, step=None)
    assert parse_report(document(report, "run"), "run") == report
    for strange in (b"", b"[]", b"{", b'{"run_id": "run", "generation": true, "count": 2, "members": []}',
                    document(record, "other")):  # fmt: skip
        assert parse_record(strange, "run") is None
    for strange in (b"null", b'{"run_id": "run", "rank": -1, "process": "p"}', b'{"run_id": "run", "rank": 0}',
                    b'{"run_id": "run", "rank": 1, "process": "p", "step": "x"}',
                    document(report, "run").replace(b'"GPU-1"', b"1"), document(report, "other")):  # fmt: skip
        assert parse_report(strange, "run") is None
    assert parse_report(b'{"run_id": "run", "rank": 1, "process": "p"}', "run") == Report(1, "p")
