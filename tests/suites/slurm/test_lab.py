"""What Slurm does with exit codes and signals, with a stand-in for podwatch: the laboratory itself, and the script of
docs/jobs.md for sites without RequeueExit."""

import re
import textwrap
from collections.abc import Iterator

import pytest

from tests.suites.engines.stand_in import StandIn
from tests.suites.slurm.lab import MISSING, REPO, Lab

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(bool(MISSING), reason=MISSING)]
EXAMPLES = REPO / "examples" / "engines"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    made = Lab()
    try:
        yield made.start()
    finally:
        made.close()


@pytest.fixture(scope="module")
def plain() -> Iterator[Lab]:
    """A cluster whose administrator set neither RequeueExit nor RequeueExitHold."""
    made = Lab(requeue=False)
    try:
        yield made.start()
    finally:
        made.close()


def test_codes_decide(lab: Lab) -> None:
    """86 is restarted, 65 is held, 0 completes; and a job that moves finds an empty disk."""
    code = 'test -z "$SLURM_RESTART_COUNT" && { touch disk/here; exit 86; }; ls disk; exit 65'
    here = [f"--chdir={lab.root}", "--open-mode=append"]
    number = lab.submit(*here, f"--output={lab.root}/jobs/codes.out", "-w", "n1", "--wrap", code)
    lab.wait_state(number, "SPECIAL_EXIT", 60)
    assert lab.job(number)["Restarts"] == "2", "one for 86, one into the hold"
    lab.run("scancel", str(number))
    lab.wait(lab.idle, 20, "nothing is left on the nodes")
    done = lab.submit(*here, f"--output={lab.root}/jobs/other.out", "-w", "n2", "--wrap", "ls disk; hostname")
    lab.wait_state(done, "COMPLETED", 30)
    assert (lab.root / "jobs/codes.out").read_text().split() == ["here"]
    assert (lab.root / "jobs/other.out").read_text().split() == ["n2"]


class Successors:
    """An example with the last lines that a page gives for sites without RequeueExit."""

    def __init__(self, lab: Lab, name: str, page: str = "jobs.md", example: str = "slurm.sbatch") -> None:
        self.lab, self.directory, self.example = lab, lab.root / "jobs" / name, example
        self.podwatch = StandIn(self.directory / "stand-in")
        page = (REPO / "docs" / page).read_text()
        blocks = re.findall(r"^ +code=\$\?\n.*?exit \$code\n", page, flags=re.M | re.S)
        (found,) = [block for block in blocks if "sbatch" in block]
        head, _, _ = (EXAMPLES / example).read_text().rpartition("exit $?")
        (self.directory / example).write_text(head + textwrap.dedent(found))

    def submit(self, codes: str) -> int:
        self.podwatch.ends_with(codes)
        where = [f"--chdir={self.directory}", f"--output={self.directory}/%j.out"]
        script = str(self.directory / self.example)
        return self.lab.submit(*where, script, environ={"PATH": f"{self.podwatch.bin}:{self.lab.environ['PATH']}"})

    def jobs(self) -> list[dict[str, str]]:
        """All jobs of this directory, oldest first."""
        text = self.lab.run("scontrol", "show", "job", "-o")
        found = [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in text.splitlines()]
        return [job for job in found if job.get("WorkDir") == str(self.directory)]


def test_a_successor_runs_on_the_other_node(plain: Lab) -> None:
    run = Successors(plain, "successor")
    run.submit("86 0")
    plain.wait(
        lambda: len(run.jobs()) == 2 and run.jobs()[-1]["JobState"] == "COMPLETED", 60, "the successor completes"
    )
    assert [(job["JobState"], job["BatchHost"]) for job in run.jobs()] == [("FAILED", "n1"), ("COMPLETED", "n2")]


def test_a_job_of_two_nodes_has_a_successor(plain: Lab) -> None:
    run = Successors(plain, "two-nodes", "nodes.md", "slurm-nodes.sbatch")
    first = run.submit("wait wait 0 0")
    plain.wait(lambda: len(run.podwatch.starts) == 2, 60, "both nodes have their handlers for signals")
    plain.run("scancel", "--signal=TERM", str(first))  # for the steps: both end with 86
    plain.wait(
        lambda: len(run.jobs()) == 2 and run.jobs()[-1]["JobState"] == "COMPLETED", 60, "the successor completes"
    )
    assert [(job["JobState"], job["NumNodes"]) for job in run.jobs()] == [("FAILED", "2"), ("COMPLETED", "2")]
    assert len(run.podwatch.starts) == 4


def test_a_typo_has_no_successor(plain: Lab) -> None:
    run = Successors(plain, "typo")
    plain.wait_state(run.submit("65"), "FAILED", 30)
    plain.wait(plain.idle, 20, "nothing is left on the nodes")
    assert [job["ExitCode"] for job in run.jobs()] == ["65:0"]


def test_a_preempted_job_has_a_successor_and_a_cancelled_one_has_none(plain: Lab) -> None:
    run = Successors(plain, "stopped")
    first = run.submit("wait wait")
    run.podwatch.wait_started()
    higher = plain.submit("-p", "high", "-w", "n1", f"--output={run.directory}/high.out", "--wrap", "sleep 600")
    plain.wait(lambda: len(run.podwatch.starts) == 2, 60, "the successor runs")
    assert [job["JobState"] for job in run.jobs() if job["JobId"] == str(first)] == ["FAILED"]
    second = int(run.jobs()[-1]["JobId"])
    assert plain.job(second)["BatchHost"] == "n2"
    told = len(run.podwatch.signals)
    plain.run("scancel", str(second), str(higher))
    plain.wait_state(second, "CANCELLED", 40)
    plain.wait(plain.idle, 40, "nothing is left on the nodes")
    assert len(run.jobs()) == 2
    assert len(run.podwatch.signals) > told, "podwatch got SIGTERM, too"
