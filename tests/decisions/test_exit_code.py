"""The exit code of every end of a run: one test for each code that an engine acts on."""

from dataclasses import asdict

import pytest

from podwatch.domain.errors import ExitCode
from podwatch.job.exit_code import Blame, JobEnd, Outcome, Situation, blame, ended, judge, of_error, withdrawn
from podwatch.store.uploads import PINNED


def test_0_only_for_a_finished_run_whose_checkpoint_is_stored() -> None:
    """0 ends a job for good in every engine, so no other end has it."""
    verdict = judge(JobEnd(Outcome.FINISHED, "step 100 of 100"))
    assert (verdict.code, verdict.outcome) == (ExitCode.OK, Outcome.FINISHED)
    for outcome in set(Outcome) - {Outcome.FINISHED}:
        for whose in Blame:
            for error in (None, *ExitCode):
                assert judge(JobEnd(outcome, blame=whose, error=error)).code != 0, (outcome, whose, error)


@pytest.mark.parametrize("error", [ExitCode.USAGE])
def test_64_for_a_command_line_that_is_wrong_everywhere(error: ExitCode) -> None:
    assert judge(of_error(int(error), "no such option")).code == 64


def test_without_an_engine_an_operator_reads_the_sentence() -> None:
    for outcome in Outcome:
        end = JobEnd(outcome, "the reason")
        assert judge(end, job=False).code == judge(end).code
        if outcome in (Outcome.STOPPED, Outcome.GAVE_UP, Outcome.SUPERSEDED, Outcome.HELD, Outcome.BLOCKED):
            assert "job" not in judge(end, job=False).sentence
    assert "`podwatch start`" in judge(JobEnd(Outcome.STOPPED), job=False).sentence


def test_65_for_a_command_at_fault_an_operator_and_an_earlier_verdict() -> None:
    typo = judge(JobEnd(Outcome.GAVE_UP, "unknown argument", Blame.COMMAND))
    assert typo.code == 65
    assert "Do not run the job again" in typo.sentence
    stopped = judge(JobEnd(Outcome.STOPPED, "podwatch stop-training"))
    assert (stopped.code, stopped.outcome) == (65, Outcome.STOPPED)
    assert "--retry" in stopped.sentence
    assert judge(JobEnd(Outcome.REFUSED, "the command failed twice")).code == 65
    assert judge(JobEnd(Outcome.BLOCKED, "the world size differs", Blame.COMMAND)).code == 65


def test_69_for_a_finished_run_that_is_not_stored_names_the_rest() -> None:
    verdict = judge(JobEnd(Outcome.FINISHED, "step 100", unstored=("the checkpoint of step 100", "its optional parts")))
    assert (verdict.code, verdict.outcome) == (69, Outcome.FINISHED)
    assert "the checkpoint of step 100, its optional parts" in verdict.sentence
    assert "run `podwatch sync --wait`" in verdict.sentence
    pinned = judge(JobEnd(Outcome.FINISHED, "step 100", unstored=(f"{PINNED}40",)))
    assert (pinned.code, "step 40" in pinned.sentence) == (69, True)
    assert "`podwatch sync --step N --wait`" in pinned.sentence, "without --step it stores only the newest"


def test_69_and_75_of_podwatch_itself_become_86() -> None:
    """Retried inside; an engine knows no "try again later", and another machine may have a store or a GPU."""
    for code in (ExitCode.UNAVAILABLE, ExitCode.TRY_AGAIN, ExitCode.FAILED):
        assert judge(of_error(int(code), "no GPU")).code == 86
    assert judge(of_error(-9, "podwatch was killed")).code == 86
    assert judge(of_error(139, "")).code == 86, "a code that podwatch does not know"


def test_77_for_a_permission() -> None:
    assert judge(of_error(77, "the store refuses the key")).code == 77


def test_78_for_podwatchs_configuration() -> None:
    assert judge(of_error(78, "unknown key")).code == 78


@pytest.mark.parametrize(
    "end",
    [
        JobEnd(Outcome.GAVE_UP, "an XID", Blame.MACHINE),
        JobEnd(Outcome.GAVE_UP, "5 failures in 2.1 h", Blame.UNKNOWN),
        JobEnd(Outcome.PREEMPTED, "the engine ended the job (SIGTERM)"),
        JobEnd(Outcome.SUPERSEDED, "pod b has taken this run over"),
        JobEnd(Outcome.HELD, "pod b trains this run"),
        JobEnd(Outcome.BLOCKED, "GPU 0 is held by pid 7"),
        JobEnd(Outcome.BAD_HOST, "GPU-1234 had an XID an hour ago"),
    ],
    ids=lambda end: f"{end.outcome}-{end.blame}",
)
def test_86_runs_the_job_again(end: JobEnd) -> None:
    verdict = judge(end)
    assert verdict.code == 86
    assert end.reason in verdict.sentence
    assert "again" in verdict.sentence


def test_a_command_is_to_blame_where_it_never_worked_and_the_machine_is_well() -> None:
    assert blame(deterministic="unknown argument", machine="", ever_worked=False) is Blame.COMMAND
    assert blame(deterministic="", machine="", ever_worked=False) is Blame.COMMAND
    assert blame(deterministic="", machine="an XID", ever_worked=False) is Blame.MACHINE
    assert blame(deterministic="", machine="a CUDA error", ever_worked=True) is Blame.MACHINE
    assert blame(deterministic="", machine="", ever_worked=True) is Blame.UNKNOWN
    assert blame(deterministic="unknown argument", machine="", ever_worked=True) is Blame.COMMAND


def test_a_verdict_is_one_json_shape() -> None:
    said = asdict(judge(JobEnd(Outcome.GAVE_UP, "an XID", Blame.MACHINE)).document)
    assert said == {
        "outcome": "gave-up",
        "exit_code": 86,
        "blame": "machine",
        "summary": "podwatch gave up: an XID. Run the job again, preferably on another machine.",
    }


# -- when a job has ended --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (Situation(), None),
        (Situation(finished=True), Outcome.FINISHED),
        (Situation(finished=True, settled=False), None),
        (Situation(stopped=True), Outcome.STOPPED),
        (Situation(gave_up=True, blame=Blame.COMMAND), Outcome.GAVE_UP),
        (Situation(gave_up=True, settled=False), None),  # the next try in an hour
        (Situation(held=True, settled=False, waited=899), None),
        (Situation(held=True, settled=False, waited=900), Outcome.HELD),
        (Situation(held=True, stopped=True, waited=10), Outcome.STOPPED),  # an operator does not wait for the other pod
        (Situation(superseded=True, stopped=True, waited=10), None),
        (Situation(superseded=True, waited=10), None),
        (Situation(superseded=True, waited=901), Outcome.SUPERSEDED),
        (Situation(superseded=True, finished=True), Outcome.FINISHED),
        (Situation(blocked=True, settled=False, waited=899), None),
        (Situation(blocked=True, settled=False, waited=900), Outcome.BLOCKED),
        (Situation(blocked=True, waited=5), None),
        (Situation(blocked=True, waited=15), Outcome.BLOCKED),
        (Situation(blocked=True, paused=True, waited=5000), None),
        (Situation(unanswered=True, waited=15), None),
        (Situation(unanswered=True, settled=False, waited=899), None),
        (Situation(unanswered=True, waited=900), Outcome.BLOCKED),
        (Situation(unanswered=True, settled=False, waited=900), Outcome.BLOCKED),
        (Situation(unanswered=True, paused=True, waited=5000), None),
        (Situation(unanswered=True, stopped=True), Outcome.STOPPED),
        (Situation(unanswered=True, gave_up=True, settled=False, waited=10), None),
    ],
)
def test_the_end_of_a_job(now: Situation, expected: Outcome | None) -> None:
    end = ended(now, 900)
    assert (end.outcome if end is not None else None) is expected


def test_a_start_that_only_an_operator_can_decide_is_the_commands_fault() -> None:
    decided, waiting = (
        ended(Situation(blocked=True, waited=15), 900),
        Situation(blocked=True, settled=False, waited=900),
    )
    assert decided is not None
    assert judge(decided).code == 65
    unknown = ended(Situation(unanswered=True, waited=900, why="the store does not answer"), 900)
    assert unknown is not None
    assert judge(unknown).code == 86
    assert "Another pod" not in judge(unknown).sentence
    assert "the store does not answer" in judge(unknown).sentence
    other = ended(waiting, 900)
    assert other is not None
    assert judge(other).code == 86, "GPU memory that is held here is free on another machine"


@pytest.mark.parametrize(
    ("concluded", "now", "expected"),
    [
        (Outcome.FINISHED, Situation(finished=True, settled=False), False),  # recovery looks for trainers
        (Outcome.STOPPED, Situation(stopped=True, settled=False), False),
        (Outcome.GAVE_UP, Situation(gave_up=True, settled=False), False),
        (Outcome.FINISHED, Situation(settled=False), True),  # an operator's start
        (Outcome.FINISHED, Situation(), True),
        (Outcome.GAVE_UP, Situation(paused=True, settled=False), True),
        (Outcome.FINISHED, Situation(stopped=True, settled=False), True),
    ],
)
def test_an_end_is_said_once(concluded: Outcome, now: Situation, expected: bool) -> None:
    assert withdrawn(concluded, now, 900) is expected
