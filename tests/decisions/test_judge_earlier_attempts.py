"""What an attempt of a job learns from the attempts before it: refusals, counts, pauses, bad hosts."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.config.settings import RecoverySettings
from podwatch.domain.earlier_attempts import BadHost, Host, RunVerdict, Suspect
from podwatch.domain.engine_and_attempt import Instance
from podwatch.domain.run import Lineage
from podwatch.job.exit_code import PASSING_FAULTS, Blame, JobEnd, Outcome, judge
from podwatch.job.judge_earlier_attempts import (
    MOST_REFUSALS,
    Attempt,
    advanced,
    ask_hosts,
    at_end,
    at_start,
    began,
    foretold,
)
from podwatch.store.verdict import read_verdict
from tests.support.memory_objects import KEYS, MemoryObjects

RECOVERY = RecoverySettings()
HERE = Host("machine-1", "n1", ("GPU-a", "GPU-b"))
TYPO = JobEnd(Outcome.GAVE_UP, "unknown argument --lrr", Blame.COMMAND)
FAULT = JobEnd(Outcome.GAVE_UP, "XID 79 on GPU 0", Blame.MACHINE)
CRASH = JobEnd(Outcome.GAVE_UP, "5 failures in 2.1 h", Blame.UNKNOWN)
LINE = Lineage("line")


def attempt(number: int, now: float = 0.0, **changes: object) -> Attempt:
    base = Attempt(f"p{number}", "digest", Host(f"m{number}"), now, Instance("slurm", "7", str(number)), f"n{number}")
    return replace(base, **changes)  # type: ignore[arg-type]


def ended(kept: RunVerdict, end: JobEnd, who: Attempt, step: int | None = None) -> tuple[RunVerdict, int]:
    """A whole attempt that trained; its exit code."""
    start = at_start(kept, who, RECOVERY)
    assert start.end is None, start.end
    kept, counted = at_end(began(start.kept, who, LINE), end, who, step, RECOVERY)
    return kept, int(judge(counted).code)


def test_a_65_ends_the_next_attempt_at_once_and_says_how_to_clear_it() -> None:
    kept, code = ended(RunVerdict(), TYPO, attempt(1, 100.0))
    assert code == 65
    refused = at_start(kept, attempt(2, 400.0), RECOVERY)
    assert refused.end is not None
    verdict = judge(refused.end)
    assert (verdict.code, verdict.outcome) == (65, Outcome.REFUSED)
    for part in ("unknown argument --lrr", "5 min ago on pod n1", "--retry", "Change the command or the configuration"):
        assert part in verdict.sentence, verdict.sentence
    assert refused.kept == kept, "nothing to write: ten thousand restarts cost reads only"


def test_another_command_or_configuration_clears_it() -> None:
    kept, _ = ended(RunVerdict(), TYPO, attempt(1))
    fixed = at_start(kept, attempt(2, digest="fixed"), RECOVERY)
    assert fixed.end is None
    assert (fixed.kept.last, fixed.kept.failures) == (None, 0)


def test_retry_clears_it_once_for_the_job_that_carries_the_flag() -> None:
    kept, _ = ended(RunVerdict(), TYPO, attempt(1))
    kept, code = ended(kept, TYPO, attempt(2, retry=True))
    assert code == 65
    again = at_start(kept, attempt(3, retry=True), RECOVERY)
    assert again.end is not None, "the engine starts the same job again, flag and all"
    other = Instance("slurm", "8", "0")
    assert at_start(kept, attempt(4, retry=True, instance=other), RECOVERY).end is None, (
        "submitted again by an operator"
    )
    shell = Instance()
    kept, _ = ended(kept, TYPO, attempt(5, retry=True, instance=shell))
    assert at_start(kept, attempt(6, retry=True, instance=shell), RECOVERY).end is None, "typed in a shell"


ENDS = st.builds(JobEnd, st.sampled_from(Outcome), st.just("why"), st.sampled_from(Blame), lease_unknown=st.booleans())


@given(end=ENDS, step=st.none() | st.integers(1, 9))
def test_an_attempt_that_vanishes_while_its_end_is_stored_forbids_what_that_end_forbids(
    end: JobEnd, step: int | None
) -> None:
    first, second = attempt(1, 100.0), attempt(2, 400.0, host=attempt(1).host)
    trains = began(at_start(RunVerdict(), first, RECOVERY).kept, first, LINE)
    told = foretold(trains, end, first, step, RECOVERY)
    assert at_start(told, first, RECOVERY).end is None, "a podwatch that is restarted within the attempt continues"
    again = began(told, first, LINE)
    assert (again.failures, again.last if again.last and again.last.code in (0, 65) else None) == (0, None)
    kept = at_end(trains, end, first, step, RECOVERY)
    after, before = at_start(told, second, RECOVERY).end, at_start(kept[0], second, RECOVERY).end
    assert (after and after.outcome) == (before and before.outcome)
    if end.outcome not in (Outcome.HELD, Outcome.SUPERSEDED, Outcome.REFUSED, Outcome.BAD_HOST):
        assert at_end(told, end, first, step, RECOVERY) == kept, "counted once"


def test_an_operators_stop_and_a_finish_end_the_next_attempt_too() -> None:
    kept, code = ended(RunVerdict(), JobEnd(Outcome.STOPPED, "podwatch stop-training"), attempt(1), 7)
    assert code == 65
    stopped = at_start(kept, attempt(2), RECOVERY).end
    assert stopped is not None
    assert judge(stopped).code == 65
    assert "stopped" in judge(stopped).sentence
    kept, code = ended(RunVerdict(), JobEnd(Outcome.FINISHED, "step 90 of 90"), attempt(1), 90)
    assert code == 0
    finished = at_start(kept, attempt(2), RECOVERY).end
    assert finished is not None
    assert judge(finished).code == 0
    unstored, code = ended(RunVerdict(), JobEnd(Outcome.FINISHED, "", unstored=("step 90",)), attempt(1), 90)
    assert code == 69
    assert at_start(unstored, attempt(2), RECOVERY).end is None, "the next attempt can store it"


def test_an_attempt_that_was_never_told_whether_it_may_train_leaves_no_record() -> None:
    """Another pod may train: its record stays, and an outage of the store is never the command's fault."""
    kept = RunVerdict(digest="digest", failures=4, first_failure_wall=-90000.0)
    unknown = JobEnd(Outcome.BLOCKED, "the store does not answer", lease_unknown=True)
    assert at_end(kept, unknown, attempt(1), None, RECOVERY) == (kept, unknown)


def test_86_without_a_step_becomes_65_by_count_and_each_attempt_waits_longer() -> None:
    kept, now, codes, pauses = RunVerdict(), 0.0, [], []
    for number in range(RECOVERY.job_attempts):
        start = at_start(kept, attempt(number, now), RECOVERY)
        pauses.append((start.not_before_wall or now) - now)
        kept, code = ended(kept, CRASH, attempt(number, now))
        codes.append(code)
    assert codes == [86, 86, 86, 86, 65]
    assert pauses == [0, 0, 10, 20, 40]
    assert kept.last is not None
    assert "5 attempts in a row made no step" in kept.last.reason
    assert "the last one: 5 failures" in kept.last.reason


def test_a_run_that_worked_is_given_up_by_count_and_time_only() -> None:
    kept, now = advanced(RunVerdict(digest="digest"), 30), 0.0
    codes = []
    for number in range(30):
        kept, code = ended(kept, CRASH, attempt(number, now), 30)  # it always dies at the same step
        codes.append(code)
        now += 600
        if code == 65:
            break
    assert len(codes) - 1 == RECOVERY.budget_time / 600
    assert set(codes[:-1]) == {86}
    stored = attempt(99, worked=True)
    many = RunVerdict(digest="digest", failures=50, first_failure_wall=-10.0)
    assert judge(at_end(many, CRASH, stored, None, RECOVERY)[1]).code == 86, "its checkpoints show that it worked"


def test_progress_clears_the_count_a_preemption_does_not_touch_it() -> None:
    kept, _ = ended(RunVerdict(), CRASH, attempt(1), None)
    kept, _ = ended(kept, CRASH, attempt(2), None)
    kept, code = ended(kept, JobEnd(Outcome.PREEMPTED, "SIGTERM"), attempt(3), None)
    assert (kept.failures, code) == (2, 86)
    kept, _ = ended(kept, CRASH, attempt(4), 12)
    assert (kept.failures, kept.best_step) == (1, 12), "it got further than any attempt before it"
    kept, _ = ended(kept, CRASH, attempt(5), 12)
    assert kept.failures == 2


def test_going_back_on_purpose_makes_lower_steps_progress_again() -> None:
    kept = replace(advanced(RunVerdict(digest="digest"), 90), lineage="old", failures=3)
    back = began(kept, attempt(1), Lineage("new", "old", 40))
    assert back.best_step == 40
    assert advanced(back, 41).failures == 0
    assert began(kept, attempt(1), Lineage("new", "old", None)).best_step is None, "from the beginning"
    assert began(kept, attempt(1), Lineage("lost")).best_step == 90, "an empty disk is no going back"


@pytest.mark.parametrize("worked", [False, True])
def test_an_attempt_that_left_no_verdict_counts_only_if_it_made_no_progress(worked: bool) -> None:
    first = attempt(1)
    kept = began(at_start(RunVerdict(), first, RECOVERY).kept, first, LINE)
    again = at_start(kept, attempt(1), RECOVERY)
    assert again.kept == kept, "podwatch restarted within the attempt"
    assert at_start(kept, attempt(2), RECOVERY).kept.failures == 1
    assert at_start(advanced(kept, 5), attempt(2), RECOVERY).kept.failures == 0
    now, kept, starts = 0.0, RunVerdict(), 0
    while (start := at_start(kept, attempt(starts, now, worked=worked), RECOVERY)).end is None:
        kept = began(start.kept, attempt(starts, now), LINE)
        starts, now = starts + 1, now + 300
        assert starts < 100, "without end"
    assert now > RECOVERY.budget_time, "spot machines vanish: never by the count alone"
    verdict = judge(start.end)
    assert verdict.code == 65
    assert "without a verdict" in verdict.sentence
    assert at_start(start.kept, attempt(200, now), RECOVERY).end is not None, "and it stays so"


def test_a_bad_host_is_refused_a_few_times_and_not_for_ever() -> None:
    kept, code = ended(RunVerdict(), FAULT, attempt(1, 100.0, host=HERE))
    assert code == 86
    for refusal in range(1, MOST_REFUSALS + 1):
        start = at_start(kept, attempt(refusal, 200.0, host=HERE), RECOVERY)
        assert start.end is not None
        assert judge(start.end).code == 86
        assert f"XID 79 on GPU 0, 100 s ago; refusal {refusal} of {MOST_REFUSALS}" in start.end.reason
        kept = start.kept
    assert at_start(kept, attempt(9, 300.0, host=HERE), RECOVERY).end is None, "this machine is all the engine has"
    fresh, _ = ended(RunVerdict(), FAULT, attempt(1, 100.0, host=HERE))
    late = at_start(fresh, attempt(2, 100.0 + RECOVERY.bad_host_for, host=HERE), RECOVERY)
    assert late.end is None
    assert late.kept.bad_hosts == ()
    assert at_start(fresh, attempt(2, 200.0), RECOVERY).end is None, "another machine"
    changed = at_start(fresh, attempt(2, 200.0, host=HERE, digest="other"), RECOVERY)
    assert changed.end is not None, "another command does not repair the machine"
    assert at_start(fresh, attempt(2, 200.0, host=HERE, retry=True), RECOVERY).end is None
    off = at_end(fresh, FAULT, attempt(1, host=HERE), None, RecoverySettings(bad_host_for=0))[0]
    assert off.bad_hosts == ()


def test_the_machine_of_another_node_is_listed_and_not_this_one() -> None:
    there = Host("machine-2", "n2")
    fault = replace(FAULT, broken=(there,))
    kept, _ = ended(RunVerdict(), fault, attempt(1, 100.0, host=HERE))
    assert [bad.host for bad in kept.bad_hosts] == [there]
    kept, _ = ended(kept, replace(FAULT, broken=()), attempt(2, 200.0, host=HERE))
    assert [bad.host for bad in kept.bad_hosts] == [there], "a fault that can pass lists nobody"
    assert at_start(kept, attempt(3, 300.0, host=HERE), RECOVERY).end is None
    assert ask_hosts(kept, {"node 1 (n9)": Host("machine-9", "n9")}, 300.0) == (kept, None)
    now = 300.0
    for refusal in range(1, MOST_REFUSALS + 1):
        kept, end = ask_hosts(kept, {"node 1 (n9)": Host("machine-9", "n9"), "node 2 (n2)": there}, now)
        assert end is not None
        assert (judge(end).code, end.outcome, end.broken) == (86, Outcome.BAD_HOST, (there,))
        assert end.reason.startswith(f"node 2 (n2): XID 79 on GPU 0, 3 min ago; refusal {refusal} of {MOST_REFUSALS}")
    assert ask_hosts(kept, {"node 2 (n2)": there}, now) == (kept, None), "these machines are all the engine has"


def test_the_third_fault_in_a_row_that_can_pass_lists_the_machine_of_a_node() -> None:
    """Over several nodes each of them is an attempt, as it is a restart on one."""
    there = Host("machine-2", "n2", ("GPU-x",))
    passing = replace(FAULT, reason="a CUDA error", broken=(), suspect=there)
    kept = RunVerdict()
    for number in range(1, PASSING_FAULTS):
        kept, _ = ended(kept, passing, attempt(number, 100.0 * number))
        assert (kept.bad_hosts, kept.suspect) == ((), Suspect(there, number))
    again = RunVerdict.from_bytes(kept.to_bytes())
    assert again == kept, "the store keeps the count"
    listed, _ = ended(kept, passing, attempt(8, 900.0))
    assert ([bad.host for bad in listed.bad_hosts], listed.suspect) == ([there], None)


@pytest.mark.parametrize(
    ("end", "step"),
    [
        (CRASH, None),
        (replace(FAULT, broken=()), None),
        (JobEnd(Outcome.PREEMPTED), 7),
        (replace(FAULT, broken=(), suspect=Host("machine-3", "n3")), None),
        (replace(FAULT, broken=(), suspect=Host("machine-2", "n2")), 7),
    ],
)
def test_faults_that_can_pass_are_in_a_row_only_on_one_machine_and_without_progress(
    end: JobEnd, step: int | None
) -> None:
    there = Host("machine-2", "n2")
    kept = RunVerdict(digest="digest", suspect=Suspect(there, PASSING_FAULTS - 1))
    kept, _ = ended(kept, end, attempt(2, 200.0), step)
    assert kept.bad_hosts == ()
    assert kept.suspect is None or kept.suspect.faults == 1


def test_a_preemption_without_progress_keeps_the_count() -> None:
    kept = RunVerdict(digest="digest", suspect=Suspect(Host("m"), 2))
    assert ended(kept, JobEnd(Outcome.PREEMPTED), attempt(2))[0].suspect == kept.suspect


def test_one_refusal_counts_for_all_machines_that_are_bad() -> None:
    """Otherwise an engine with bad machines only would have three refusals for each of them."""
    hosts = {f"node {n}": Host(f"m{n}", f"n{n}") for n in range(3)}
    kept = RunVerdict(bad_hosts=tuple(BadHost(host, "an ECC error", 0.0, 1e9) for host in hosts.values()))
    for _ in range(MOST_REFUSALS):
        kept, end = ask_hosts(kept, hosts, 10.0)
        assert end is not None
        assert all(f"{name}: an ECC error" in end.reason for name in hosts)
    assert ask_hosts(kept, hosts, 10.0)[1] is None


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (Host("machine-1", "n1", ("GPU-b",)), True),
        (Host("machine-9", "n9", ("GPU-a",)), True),
        (Host("machine-1", "n1", ("GPU-c",)), False),
        (Host("machine-1", "n1"), True),
        (Host("machine-1", "n2"), False),
        (Host("machine-1"), True),
        (Host("machine-2"), False),
        (Host(), False),
    ],
)
def test_a_machine_is_recognised_by_gpu_then_node_then_machine_id(other: Host, same: bool) -> None:
    assert HERE.same_as(other) is same
    assert other.same_as(HERE) is same


@pytest.mark.parametrize("outcome", [Outcome.SUPERSEDED, Outcome.HELD, Outcome.REFUSED, Outcome.BAD_HOST])
def test_the_loser_of_two_attempts_leaves_the_winners_record(outcome: Outcome) -> None:
    winner = began(RunVerdict(digest="digest"), attempt(2), LINE)
    assert at_end(winner, JobEnd(outcome, "x"), attempt(1), 5, RECOVERY) == (winner, JobEnd(outcome, "x"))


def test_a_clock_that_jumped_makes_no_attempt_wait_for_longer_than_the_longest_pause() -> None:
    kept = RunVerdict(digest="digest", not_before_wall=1e9, failures=2)
    assert at_start(kept, attempt(1, 50.0), RECOVERY).not_before_wall == 50.0 + RECOVERY.backoff_max


ENDS = st.builds(JobEnd, st.sampled_from(list(Outcome)), st.just("reason"), st.sampled_from(list(Blame)))
HOSTS = st.sampled_from([Host("m1"), Host("m2"), HERE])


@given(st.lists(st.tuples(ENDS, HOSTS, st.none() | st.integers(0, 50), st.floats(1, 4000), st.booleans()), max_size=60))
def test_no_engine_restarts_a_run_without_end_and_without_progress(
    lives: list[tuple[JobEnd, Host, int | None, float, bool]],
) -> None:
    """Whatever happens: between two steps of progress or preemptions there are boundedly many attempts that train, and
    what is kept survives the store."""
    kept, now, since = RunVerdict(), 0.0, 0
    for number, (end, host, step, lasting, silent) in enumerate(lives):
        who = attempt(number, now, host=host)
        start = at_start(kept, who, RECOVERY)
        kept = start.kept
        if start.end is not None:
            assert judge(start.end).code in (0, 65, 86)
            continue
        best = kept.best_step
        kept, now = began(kept, who, LINE), now + lasting
        if not silent:
            kept, counted = at_end(kept, end, replace(who, now=now), step, RECOVERY)
            if counted != end:
                assert judge(counted).code == 65
            if step is not None and (best is None or step > best) and end.outcome is not Outcome.SUPERSEDED:
                since = 0
        elif step is not None:
            kept = advanced(kept, step)
        since = 0 if kept.failures == 0 else since + 1
        assert since <= RECOVERY.job_attempts + RECOVERY.budget_time
        assert RunVerdict.from_bytes(kept.to_bytes()) == kept


@pytest.mark.parametrize(
    "data",
    [
        None, b"", b"[]", b"\xff", b'{"kind": "podwatch-heartbeat", "failures": 9}', b"[" * 100_000,
        b'{"kind": "podwatch-verdict", "failures": -1, "best_step": "9", "last": {"code": "65"}, "bad_hosts": [1, {}],'
        b' "not_before_wall": NaN, "attempt": {"id": 5}, "digest": ["x"], "first_failure_wall": 1e400}',
    ],
)  # fmt: skip
def test_a_document_that_cannot_be_read_lets_the_attempt_start(data: bytes | None) -> None:
    store = MemoryObjects()
    if data is not None:
        store.put(KEYS.verdict, data)
    kept = read_verdict(store, KEYS)
    assert kept == RunVerdict()
    assert at_start(kept, attempt(1), RECOVERY).end is None


def test_the_document_has_the_documented_keys_and_no_end() -> None:
    hosts = tuple(BadHost(Host(f"m{n}"), "r" * 900, 0.0, 1e9) for n in range(500))
    data = RunVerdict(bad_hosts=hosts[:64]).to_bytes()
    assert len(data) < 200_000
    assert len(RunVerdict.from_bytes(data).bad_hosts) == 64
    kept = RunVerdict(digest="digest", bad_hosts=hosts[:64])
    marked, _ = at_end(kept, FAULT, attempt(1, host=HERE), None, RECOVERY)
    assert len(marked.bad_hosts) == 64
    assert marked.bad_hosts[0].host == HERE
    assert {"digest", "last", "failures", "bad_hosts"} <= set(RunVerdict().to_json())
