"""Ends a rented machine: real commands, a real journal, and servers that speak the providers' calls."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from podwatch.app.end_pod import GONE_SECONDS, PAUSES, PodEnd, PodEnder
from podwatch.app.settings_in_force import Configuration
from podwatch.app.shutdown import Exit
from podwatch.config.settings import EndPodSettings, Policies, Settings, TrainerSettings
from podwatch.domain.event import Event
from podwatch.domain.finding import FindingKind
from podwatch.domain.run import StartRecord
from podwatch.domain.run_state import RunState
from podwatch.domain.snapshot import Desired
from podwatch.job.exit_code import Outcome
from podwatch.journal import AsyncJournal, Journal
from podwatch.recovery.context import Notes
from podwatch.recovery.state import Phase
from tests.support.clock import AutoClock
from tests.support.provider import Provider, provider_server
from tests.support.starts import guarded

pytestmark = pytest.mark.slow

RECIPE = str(Path(__file__).parents[2] / "examples/providers/end_pod.py")
DONE = PodEnd(Outcome.FINISHED, "finished:line:start-1", stored=True)
UNSTORED = PodEnd(Outcome.FINISHED, "finished:line:start-1", stored=False)


@pytest.fixture
def provider() -> Iterator[Provider]:
    with provider_server() as found:
        yield found


@dataclass
class Pod:
    """A plain pod. ``provider``: its machine is gone, and podwatch with it, when that says so."""

    directory: Path
    settings: EndPodSettings
    environ: dict[str, str]
    provider: Provider | None = None
    trains: bool = False
    started: Path | None = None
    """Exists once an operator has started training again."""
    paused: bool = False
    start_id: str = "start-1"
    desired: Desired = Desired.FINISHED
    phase: Phase = Phase.FINISHED
    leaving: Exit = field(default_factory=Exit)
    clock: AutoClock = field(default_factory=AutoClock)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.journal = AsyncJournal(Journal.open(self.directory / "journal.sqlite"))
        self.notes = Notes(self.clock)
        self.tools = SimpleNamespace(journal=self.journal, clock=self.clock, emit=self.events.append)

    @property
    def context(self) -> "Pod":
        """As recovery's."""
        return self

    @property
    def handle(self) -> object | None:
        gone = self.provider is not None and self.provider.state != "running"
        return self if self.trains or gone or (self.started is not None and self.started.exists()) else None

    @property
    def run(self) -> RunState:
        return RunState("run", starts=guarded("line"), last_start=StartRecord(self.start_id, 1.0, (), ""))

    async def end(self, end: PodEnd, recheck: Callable[[], Awaitable[bool]] | None = None) -> None:
        trainer = TrainerSettings(output_dir=self.directory)
        config = Configuration(Settings(run_id="run", trainer=trainer, end_pod=self.settings), Policies(), ())
        await PodEnder(config, self, self.leaving, self.environ).end(end, recheck)  # type: ignore[arg-type]

    @property
    def texts(self) -> str:
        return "\n".join(event.message for event in self.events)


def pod(tmp_path: Path, provider: Provider | None, *command: str, env_file: Path | None = None, **environ: str) -> Pod:
    settings = EndPodSettings(command=command, env_file=env_file)
    return Pod(tmp_path, settings, {"PATH": os.environ["PATH"], **environ}, provider)


def vast(tmp_path: Path, provider: Provider, key: str = "pod-key") -> Pod:
    known = {"CONTAINER_ID": "123", "CONTAINER_API_KEY": key, "VAST_URL": provider.url}
    return pod(tmp_path, provider, sys.executable, RECIPE, "vast", **known)


@pytest.mark.parametrize(("end", "state"), [(DONE, "destroyed"), (UNSTORED, "stopped")], ids=("stored", "not stored"))
@pytest.mark.parametrize("name", ["vast", "runpod", "url"])
async def test_each_recipe_ends_its_machine(
    tmp_path: Path, provider: Provider, name: str, end: PodEnd, state: str
) -> None:
    env_file = tmp_path / "end.env"
    env_file.write_text(
        f"VAST_URL={provider.url}\nCONTAINER_ID=123\nCONTAINER_API_KEY=pod-key\n"
        f"RUNPOD_API_URL={provider.url}/v2\nRUNPOD_POD_ID=abc\nRUNPOD_API_KEY=pod-key\n"
        f"END_POD_URL={provider.url}/hook\nEND_POD_TOKEN=pod-key\n"
    )
    env_file.chmod(0o600)
    here = pod(tmp_path, provider, sys.executable, RECIPE, name, env_file=env_file)
    await here.end(end)
    assert (provider.state, len(provider.calls)) == (state, 1)
    assert here.notes.all == ()
    assert "pod-key" not in here.texts


async def test_a_refusal_and_an_empty_answer_are_tried_again(tmp_path: Path, provider: Provider) -> None:
    provider.answers = [(429, "slow down"), (200, ""), (500, "oops"), (200, '{"success": false, "msg": "busy"}')]
    here = vast(tmp_path, provider)
    await here.end(DONE)
    assert (provider.state, len(provider.calls)) == ("destroyed", 5)
    for part in ("429", "does not confirm", "500", "busy", "try 5 of 5"):
        assert part in here.texts


async def test_it_is_tried_at_most_n_times_also_across_restarts_and_then_reported(
    tmp_path: Path, provider: Provider
) -> None:
    here = vast(tmp_path, provider, key="wrong")
    await here.end(DONE)
    assert (provider.state, len(provider.calls)) == ("running", 5)
    (finding,) = here.notes.all
    assert (finding.kind, str(finding.severity)) == (FindingKind.POD_NOT_ENDED, "critical")
    assert "401" in finding.summary
    assert "billed" in finding.suggestion
    again = vast(tmp_path, provider)
    await again.end(DONE)
    assert len(provider.calls) == 5, "podwatch restarted: the tries are used up"
    assert again.notes.all[0].kind is FindingKind.POD_NOT_ENDED
    again.start_id = "start-2"
    await again.end(PodEnd(Outcome.FINISHED, "finished:line:start-2", stored=True))
    assert provider.state == "destroyed", "an operator trained on, and it finished again: another end"


async def test_a_command_that_changes_nothing_is_repeated_after_a_while(tmp_path: Path) -> None:
    log = tmp_path / "log"
    here = pod(tmp_path, None, "sh", "-c", f"echo $PODWATCH_OUTCOME $PODWATCH_STORED $PODWATCH_RUN_ID >> {log}")
    began = here.clock.monotonic()
    await here.end(DONE)
    assert log.read_text().splitlines() == ["finished yes run"] * 5
    assert here.clock.monotonic() - began >= 5 * GONE_SECONDS
    assert "still runs 3 min later" in here.notes.all[0].summary


async def test_an_operators_start_prevents_it_and_ends_the_tries(tmp_path: Path, provider: Provider) -> None:
    here = vast(tmp_path, provider, key="wrong")
    here.trains = True
    await here.end(DONE)
    assert provider.calls == []
    flag = tmp_path / "started"
    here = pod(tmp_path, None, "sh", "-c", f"touch {flag}; exit 1")
    here.started = flag
    await here.end(DONE)
    assert here.notes.all == ()
    assert here.texts.count("try ") == 1


async def test_a_pause_delays_it_and_what_is_stored_then_counts(tmp_path: Path) -> None:
    log = tmp_path / "log"
    here = pod(tmp_path, None, "sh", "-c", f"echo $PODWATCH_STORED >> {log}")
    here.settings = here.settings.model_copy(update={"tries": 1})
    here.paused, looked = True, []

    async def recheck() -> bool:
        looked.append(here.paused)
        return False

    ending = asyncio.create_task(here.end(DONE, recheck))
    while here.clock.monotonic() < 1_300:
        await asyncio.sleep(0)
    assert not log.exists()
    assert "`podwatch unpause`" in here.leaving.waits_for
    assert here.texts.count("`podwatch unpause`") == 1
    here.paused = False
    await ending
    assert (log.read_text().split(), looked) == (["no"], [False]), "another checkpoint was pinned meanwhile"
    assert here.leaving.waits_for == ""
    assert here.notes.all[0].kind is FindingKind.POD_NOT_ENDED


async def test_an_operators_start_during_a_pause_prevents_it(tmp_path: Path, provider: Provider) -> None:
    here = vast(tmp_path, provider)
    here.paused = True
    ending = asyncio.create_task(here.end(DONE))
    while here.clock.monotonic() < 1_060:
        await asyncio.sleep(0)
    here.trains = True
    await ending
    here.paused = False
    assert (provider.calls, here.notes.all, here.leaving.waits_for) == ([], (), "")


async def test_a_try_is_counted_before_it_runs(tmp_path: Path) -> None:
    """podwatch is killed by the end of its machine in the middle of the command: that was a try."""
    seen = tmp_path / "seen"
    program = (
        "import sqlite3, sys\n"
        f"db = sqlite3.connect('file:{tmp_path}/journal.sqlite?mode=ro', uri=True)\n"
        "rows = db.execute(\"select value from learned where key = 'end-pod'\").fetchone()\n"
        "import json\n"
        f"open({str(seen)!r}, 'a').write(f'{{json.loads(rows[0])[\"tries\"]}} ')\n"
    )
    here = pod(tmp_path, None, sys.executable, "-c", program)
    here.settings = here.settings.model_copy(update={"tries": 2})
    await here.end(DONE)
    assert seen.read_text() == "1 2 "


async def test_a_command_that_hangs_is_killed_and_one_that_is_missing_is_named(tmp_path: Path) -> None:
    here = pod(tmp_path, None, "sleep", "60")
    here.settings = here.settings.model_copy(update={"timeout": 0.1, "tries": 1})
    await here.end(DONE)
    assert "no end within 0 s" in here.notes.all[0].summary
    missing = pod(tmp_path, None, "/no/such/program")
    missing.phase = Phase.GAVE_UP
    await missing.end(PodEnd(Outcome.GAVE_UP, "gave-up:line:start-1", stored=True))
    assert "/no/such/program" in missing.notes.all[0].summary
    assert missing.clock.monotonic() >= sum(PAUSES)


async def test_the_stores_key_is_not_passed_on_and_a_stop_ends_no_machine(tmp_path: Path) -> None:
    log = tmp_path / "log"
    here = pod(
        tmp_path, None, "sh", "-c", f"env > {log}",
        B2_APPLICATION_KEY="secret", PODWATCH_SYNC__STORE="b2://x", RUNPOD_POD_ID="abc",
    )  # fmt: skip
    here.settings = here.settings.model_copy(update={"tries": 1})
    for outcome in set(Outcome) - {Outcome.FINISHED, Outcome.GAVE_UP, Outcome.SUPERSEDED}:
        await here.end(PodEnd(outcome, "x", stored=True))
        assert not log.exists()
    await here.end(DONE)
    environment = log.read_text()
    assert "RUNPOD_POD_ID=abc" in environment
    assert "B2_" not in environment
    assert "PODWATCH_SYNC" not in environment


async def test_a_recipe_without_its_variables_says_which(tmp_path: Path) -> None:
    here = pod(tmp_path, None, sys.executable, RECIPE, "vast", CONTAINER_ID="123")
    here.settings = here.settings.model_copy(update={"tries": 1})
    await here.end(DONE)
    assert "CONTAINER_API_KEY is not set: put it into the file of [end_pod] env_file" in here.notes.all[0].summary
