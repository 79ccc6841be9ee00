"""verdict.json on a real store: asked before training starts, complete before the job ends, never in the way."""

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from podwatch.app.ask_and_record_attempts import JobVerdicts, VerdictFile, digest
from podwatch.config.settings import RecoverySettings, Settings
from podwatch.domain.earlier_attempts import Host
from podwatch.domain.engine_and_attempt import Instance
from podwatch.domain.event import Event
from podwatch.domain.run_state import RunState
from podwatch.job.exit_code import Blame, JobEnd, Outcome, judge
from podwatch.job.judge_earlier_attempts import Attempt
from podwatch.store.keys import RunKeys
from podwatch.store.objects.b2 import B2Access, B2Objects
from podwatch.store.objects.base import DOCUMENT, Objects, Retry
from podwatch.store.objects.directory import DirectoryObjects
from podwatch.system.clock import SystemClock
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server
from tests.support.starts import guarded

TYPO = JobEnd(Outcome.GAVE_UP, "unknown argument --lrr", Blame.COMMAND)
FAULT = JobEnd(Outcome.GAVE_UP, "XID 79 on GPU 0", Blame.MACHINE)
CRASH = JobEnd(Outcome.GAVE_UP, "it ended with code 1", Blame.UNKNOWN)


@dataclass
class Here:
    """One attempt on one machine."""

    number: int
    machine: str = ""
    command: str = "digest"
    trains: bool = False
    step: int | None = None

    def describe(self, now: float) -> Attempt:
        host = Host(self.machine or f"m{self.number}")
        who = Instance("slurm", "77", str(self.number))
        return Attempt(f"process-{self.number}", self.command, host, now, who, f"node-{self.number}")

    @property
    def training(self) -> Any:
        """As recovery's context shows it."""
        return self

    @property
    def handle(self) -> object | None:
        return self if self.trains else None

    @property
    def run(self) -> RunState:
        return RunState("run", starts=guarded("line"))

    @property
    def attempt(self) -> SimpleNamespace | None:
        return None if self.step is None else SimpleNamespace(made_step=True, last_step=self.step)


@dataclass
class Job:
    """Attempt after attempt on one store, each with an empty disk."""

    url: str
    server: B2Server | None
    events: list[Event] = field(default_factory=list)
    recovery: RecoverySettings = field(default_factory=lambda: RecoverySettings(backoff_min=0.0))
    keys: RunKeys = field(default_factory=lambda: RunKeys("run", "prefix"))
    number: int = 0

    def store(self) -> Objects:
        if self.server is None:
            return DirectoryObjects(Path(self.url))
        access = B2Access(KEY_ID, KEY, self.server.url)
        return B2Objects(BUCKET, access, connections=1, retry=Retry(attempts=2, base=0.01, cap=0.02))

    def next(self, **here: object) -> tuple[JobVerdicts, Here]:
        self.number += 1
        found = Here(self.number, **here)  # type: ignore[arg-type]
        file = VerdictFile(self.store, self.keys, SystemClock())
        return JobVerdicts(file, found, found.training, SystemClock(), self.recovery, self.events.append), found

    async def run(self, end: JobEnd, step: int | None = None, **here: object) -> int:
        """A whole attempt; its exit code."""
        verdicts, found = self.next(**here)
        refused = await verdicts.forbids()
        if refused is None:
            found.trains, found.step = True, step
            await verdicts.update()
            refused = await verdicts.keep(end)
        verdicts.close()
        return int(judge(refused).code)

    def document(self) -> dict[str, object]:
        store = self.store()
        data = store.read(self.keys.verdict)
        store.close()
        found: dict[str, object] = json.loads(data)
        return found


@pytest.fixture(params=["directory", "b2"])
def job(request: pytest.FixtureRequest, tmp_path: Path):
    if request.param == "directory":
        (tmp_path / "store").mkdir()
        yield Job(str(tmp_path / "store"), None)
        return
    with B2Server(tmp_path / "b2") as server:
        yield Job("", server)


async def test_the_next_attempt_learns_of_a_65_and_a_new_command_clears_it(job: Job) -> None:
    assert await job.run(TYPO) == 65
    assert await job.run(CRASH) == 65, "refused: it never trained"
    document = job.document()
    assert (document["kind"], document["run_id"]) == ("podwatch-verdict", "run")
    last = document["last"]
    assert isinstance(last, dict)
    assert (last["code"], last["outcome"], last["host"]) == (65, "gave-up", "node-1")
    assert last["instance"] == {"provider": "slurm", "id": "77", "attempt": "1", "node": "", "label": ""}
    assert await job.run(JobEnd(Outcome.FINISHED), 9, command="fixed") == 0
    assert await job.run(CRASH, command="fixed") == 0, "finished before"
    assert job.events == []


async def test_the_machine_of_another_node_is_refused_and_counted_in_the_store(job: Job) -> None:
    there = Host("m-there", "n2")
    first, found = job.next()
    assert await first.forbids() is None
    found.trains = True
    await first.update()
    await first.keep(replace(FAULT, broken=(there,)))
    first.close()
    second, _ = job.next()
    assert await second.forbids() is None, "its own machine is good"
    refused = await second.forbids_hosts({"node 1 (n2)": there, "node 2 (n3)": Host("m-other", "n3")})
    assert refused is not None
    await second.keep(refused)
    second.close()
    (bad,) = job.document()["bad_hosts"]  # type: ignore[misc]
    assert (bad["host"]["node"], bad["refusals"]) == ("n2", 1)
    assert job.document()["failures"] == 1, "a refusal is no failure"


async def test_a_bad_host_is_left_and_the_other_machine_trains(job: Job) -> None:
    assert await job.run(FAULT, machine="bad") == 86
    verdicts, _ = job.next(machine="bad")
    refused = await verdicts.forbids()
    assert refused is not None
    assert refused.outcome is Outcome.BAD_HOST
    verdicts.close()
    assert await job.run(JobEnd(Outcome.FINISHED), 9, machine="good") == 0


async def test_endless_86_ends(job: Job) -> None:
    codes = [await job.run(CRASH) for _ in range(5)]
    assert codes == [86, 86, 86, 86, 65]


async def test_a_killed_attempt_counts_unless_it_made_progress(job: Job) -> None:
    verdicts, here = job.next()
    assert await verdicts.forbids() is None
    here.trains = True
    await verdicts.update()
    verdicts.close()  # SIGKILL: nothing more is written
    verdicts, here = job.next()
    assert await verdicts.forbids() is None
    here.trains = True
    await verdicts.update()
    assert job.document()["failures"] == 1
    here.step = 3
    await verdicts.update()
    verdicts.close()
    assert (job.document()["failures"], job.document()["best_step"]) == (0, 3)
    assert await job.run(JobEnd(Outcome.PREEMPTED)) == 86
    assert (job.document()["failures"], job.document()["attempt"]) == (0, None)


async def test_a_stop_is_known_to_the_next_attempt_although_the_machine_died_while_it_stored(job: Job) -> None:
    stop = JobEnd(Outcome.STOPPED, "podwatch stop-training")
    verdicts, here = job.next()
    assert await verdicts.forbids() is None
    here.trains = True
    await verdicts.update()
    here.trains = False
    await verdicts.foretell(stop)
    here.trains = True  # an operator has started it again
    await verdicts.update()
    assert job.document()["last"] is None
    here.trains = False
    await verdicts.foretell(stop)
    verdicts.close()  # SIGKILL
    assert await job.run(JobEnd(Outcome.PREEMPTED)) == 65


async def test_an_attempt_that_never_holds_the_run_leaves_the_record_of_the_one_that_does(job: Job) -> None:
    """Started by mistake, with another command, while the run trains on another pod."""
    holder, here = job.next()
    assert await holder.forbids() is None
    here.trains, here.step = True, 3
    await holder.update()
    before = job.document()
    assert await job.run(JobEnd(Outcome.SUPERSEDED), command="digest") == 86
    other, _ = job.next(command="another")
    assert await other.forbids() is None
    held = JobEnd(Outcome.HELD, "pod n1 trains it")
    assert await other.keep(held) == held
    other.close()
    assert job.document()["digest"] == before["digest"]
    assert job.document()["best_step"] == 3
    assert await holder.keep(JobEnd(Outcome.FINISHED)) == JobEnd(Outcome.FINISHED)
    holder.close()


async def test_a_look_in_progress_never_overwrites_the_end(job: Job) -> None:
    verdicts, here = job.next()
    assert await verdicts.forbids() is None
    here.trains = True
    await asyncio.gather(verdicts.update(), verdicts.keep(TYPO), verdicts.update())
    await verdicts.update()
    verdicts.close()
    assert job.document()["attempt"] is None
    assert await job.run(CRASH) == 65


async def test_a_store_that_does_not_answer_lets_it_start_and_end_and_says_so(tmp_path: Path) -> None:
    with B2Server(tmp_path / "b2") as server:
        job = Job("", server)
        assert await job.run(TYPO) == 65
    began = time.monotonic()
    assert await job.run(CRASH) == 86, "the server is gone"
    assert time.monotonic() - began < 10
    texts = [event.message for event in job.events]
    assert "cannot read from the store how earlier attempts of this job ended" in texts[0]
    assert "training starts" in texts[0]
    assert any("the next attempt does not know of this one" in text for text in texts)


async def test_a_store_that_hangs_delays_nothing_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podwatch.app.ask_and_record_attempts.ANSWER_SECONDS", 0.2)
    os.mkfifo(tmp_path / "pipe")

    class Hanging(DirectoryObjects):
        def read(self, key: str, limit: int = DOCUMENT) -> bytes:
            return (tmp_path / "pipe").read_bytes()  # nobody ever writes into it

    said: list[Event] = []
    file = VerdictFile(lambda: Hanging(tmp_path), RunKeys("run"), SystemClock())
    here = Here(1)
    verdicts = JobVerdicts(file, here, here.training, SystemClock(), RecoverySettings(), said.append)
    began = time.monotonic()
    assert await verdicts.forbids() is None
    assert await verdicts.keep(CRASH) == CRASH
    assert time.monotonic() - began < 3
    assert said
    verdicts.close()
    (tmp_path / "pipe").write_bytes(b"")  # lets the thread end


@pytest.mark.slow
def test_it_is_whole_or_absent_wherever_the_process_is_killed(tmp_path: Path) -> None:
    """A process that writes verdicts without end is killed again and again: what is read is always one of them."""
    (tmp_path / "store").mkdir()
    program = f"""
import itertools, sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from podwatch.app.ask_and_record_attempts import VerdictFile
from podwatch.domain.earlier_attempts import RunVerdict
from podwatch.store.keys import RunKeys
from podwatch.store.objects.directory import DirectoryObjects
from podwatch.system.clock import SystemClock
from tests.support.starts import guarded
file = VerdictFile(lambda: DirectoryObjects(Path({str(tmp_path / "store")!r})), RunKeys("run"), SystemClock())
for number in itertools.count(1):
    file.write(RunVerdict(digest="d", failures=number))
    print(number, flush=True)
"""
    file = VerdictFile(lambda: DirectoryObjects(tmp_path / "store"), RunKeys("run"), SystemClock())
    for wait in (1, 2, 5):
        writer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        said = [int(writer.stdout.readline()) for _ in range(wait)]
        writer.kill()
        writer.communicate()
        assert file.read()[0].failures >= said[-1]


def settings(tmp_path: Path, **changes: object) -> Settings:
    trainer = {"layout": "torchtitan", "output_dir": str(tmp_path / "out"), "cwd": str(tmp_path)}
    trainer["command"] = ["python", "train.py", "--config", "run.toml", "--out", str(tmp_path / "out")]  # type: ignore[assignment]
    return Settings.model_validate(
        {"run_id": "run", "state_dir": str(tmp_path / "state"), "trainer": trainer | changes}
    )


def test_the_digest_follows_command_files_and_environment_and_not_the_place(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for place in (here, there):
        place.mkdir()
        (place / "train.py").write_text("pass")
        (place / "run.toml").write_text("lr = 1")
        (place / "key.env").write_text("TOKEN=a")
        (place / "key.env").chmod(0o600)
    assert digest(settings(here)) == digest(settings(there)), "a requeued job may have another scratch directory"
    before = digest(settings(here))
    (here / "run.toml").write_text("lr = 2")
    changed = digest(settings(here))
    assert changed != before
    (here / "train.py").write_text("print()")
    assert digest(settings(here)) != changed, "the program itself"
    with_key = digest(settings(there, env_file=str(there / "key.env")))
    (there / "key.env").write_text("TOKEN=b")
    assert digest(settings(there, env_file=str(there / "key.env"))) != with_key
    assert digest(settings(there, env={"A": "1"})) != digest(settings(there))
    assert digest(settings(there, startup_patience="2h")) != digest(settings(there))
    assert digest(settings(there).model_copy(update={"state_dir": tmp_path})) == digest(settings(there))
