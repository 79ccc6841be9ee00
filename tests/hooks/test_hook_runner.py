"""The hooks of one daemon over a real journal and real commands; a daemon's end is a new ``Hooks`` over its journal."""

import asyncio
import json
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from podwatch.config.loading import load_text
from podwatch.domain.errors import HostError
from podwatch.domain.event import Event, EventName
from podwatch.domain.finding import Severity
from podwatch.hooks import hook_runner
from podwatch.hooks.occasions import INTERRUPTED_AT_MOST
from podwatch.journal import AsyncJournal, Journal
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import SystemClock

RECORD = "import json,sys; d=json.load(sys.stdin); open(sys.argv[1],'a').write(json.dumps(d)+chr(10))"


class Clock(SystemClock):
    """Backoff takes no time."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0.0 if seconds >= 5 else seconds)


async def checkpoint(step: int | None) -> Mapping[str, Any]:
    return {} if step is None else {"checkpoint": f"/out/step_{step}"}


class Pod:
    """``journal`` is on disk, as a SIGKILL leaves it."""

    def __init__(self, root: Path, toml: str) -> None:
        self.root, self.seen = root, root / "seen"
        (root / "state").mkdir(exist_ok=True)
        text = f'run_id = "r1"\n[trainer]\noutput_dir = "{root}/out"\n{toml}'
        self.settings = load_text(text, None, environ={}).settings
        self.events: list[Event] = []

    @asynccontextmanager
    async def hooks(self) -> AsyncIterator["Running"]:
        journal = AsyncJournal(Journal.open(self.root / "state" / "journal.sqlite"))
        hooks = hook_runner.Hooks(
            hook_runner.Desk(
                self.settings,
                journal,
                Clock(),
                self.events.append,
                checkpoint,
                self.root / "state",
                "",
                Worker("hooks"),
            )
        )
        await hooks.load()
        hooks.start()
        try:
            yield Running(hooks, journal)
        finally:
            await hooks.stop(5.0)
            await journal.close()

    def ran(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.seen.read_text().splitlines()] if self.seen.exists() else []


class Running:
    def __init__(self, hooks: hook_runner.Hooks, journal: AsyncJournal) -> None:
        self.hooks, self.journal = hooks, journal

    async def running(self) -> list[object]:
        """What the state of the hook says that runs."""
        kept = await self.journal.run(Journal.learned, hook_runner.key_of("eval"))
        return kept["running"]

    def emit(self, name: EventName, **fields: str | int | bool | None) -> None:
        event = Event(name, time.time(), "said", fields=fields)
        self.journal.post(Journal.add_event, event)
        self.hooks.event(event)

    def saved(self, *steps: int) -> None:
        for step in steps:
            self.emit(EventName.CHECKPOINT_COMPLETE, step=step, save_id=f"s{step}")


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        await asyncio.sleep(0.02)


def table(command: list[str], on: str = '"checkpoint"', more: str = "") -> str:
    return f'[[hooks]]\nname = "eval"\non = [{on}]\ncommand = {json.dumps(command)}\n{more}\n'


def recording(root: Path, on: str = '"checkpoint"', more: str = "") -> str:
    return table([sys.executable, "-c", RECORD, str(root / "seen")], on, f'cwd = "{root}"\n{more}')


def gated(root: Path, on: str = '"checkpoint"', more: str = "") -> str:
    """It records its document, then waits for the file ``gate``."""
    script = f"cat >> {root}/seen; while [ ! -e {root}/gate ]; do sleep 0.05; done"
    return table(["/bin/sh", "-c", script], on, f'cwd = "{root}"\n{more}')


def test_it_runs_with_the_document_and_reports_its_result(tmp_path: Path) -> None:
    pod = Pod(tmp_path, recording(tmp_path))

    async def main() -> None:
        async with pod.hooks() as now:
            now.saved(5)
            await until(lambda: pod.events)
            assert await now.running() == []

    asyncio.run(main())
    document, event = pod.ran()[0], pod.events[0]
    assert (document["id"], document["event"], document["step"]) == ("checkpoint:5:s5", "checkpoint", 5)
    assert (document["checkpoint"], document["run_id"], document["attempt"]) == ("/out/step_5", "r1", 1)
    about = {name: document[name] for name in ("parts", "weights", "convert", "size_bytes")}
    assert about == {"parts": {}, "weights": None, "convert": "", "size_bytes": None}, "as where nothing is known"
    assert event.name is EventName.HOOK_DONE
    assert (event.fields["exit_code"], event.fields["hook"], event.fields["step"]) == (0, "eval", 5)
    assert float(event.fields["seconds"] or 0) > 0


def test_the_end_of_a_run_waits_for_what_was_reported_and_each_event_is_taken_once(tmp_path: Path) -> None:
    pod = Pod(tmp_path, gated(tmp_path, more="coalesce = false"))

    async def main() -> None:
        async with pod.hooks() as now:
            now.saved(5, 10)
            assert await asyncio.gather(*(now.hooks.owed() for _ in range(5))) == ["the hook eval"] * 5
            await until(pod.seen.exists)
            assert await now.hooks.owed()
            (tmp_path / "gate").touch()
            await until(lambda: len(pod.events) == 2)
            await asyncio.sleep(0.1)
            assert await now.hooks.owed() == ""

    asyncio.run(main())
    assert [event.fields["step"] for event in pod.events] == [5, 10]


def test_an_end_that_cannot_be_recorded_is_recorded_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the next podwatch repeats a run that came to its end, or says that it was interrupted."""
    pod = Pod(tmp_path, recording(tmp_path))
    real, calls = Journal.record, []

    def record(journal: Journal, key: str, value: Any) -> None:
        calls.append(value)
        if len(calls) == 3:  # a new hook is recorded, then the run, then its end
            raise HostError("the disk is away")
        real(journal, key, value)

    monkeypatch.setattr(Journal, "record", record)

    async def main() -> None:
        async with pod.hooks() as now:
            now.saved(5)
            await until(lambda: len(calls) >= 4)
            kept = await now.journal.run(Journal.learned, hook_runner.key_of("eval"))
            assert (kept["running"], kept["done"]) == ([], ["checkpoint:5:s5"])
            now.saved(10)
            assert await now.hooks.owed(), "the end of a run waits again, once the state can be recorded"
            await until(lambda: len(pod.events) == 2)

    asyncio.run(main())
    assert len(pod.ran()) == 2


@pytest.mark.slow
def test_a_slow_hook_runs_the_newest_only_or_each_as_configured(tmp_path: Path) -> None:
    for coalesce, steps, skipped in ((True, [5, 20], 2), (False, [5, 10, 15, 20], 0)):
        root = tmp_path / str(coalesce)
        root.mkdir()
        pod = Pod(root, gated(root, more=f"coalesce = {json.dumps(coalesce)}"))

        async def main(pod: Pod = pod, root: Path = root, steps: list[int] = steps) -> None:
            async with pod.hooks() as now:
                now.saved(5)
                await until(pod.ran)
                now.saved(10, 15, 20)
                (root / "gate").touch()
                await until(lambda: len(pod.events) == len(steps))

        asyncio.run(main())
        assert [d["step"] for d in pod.ran()] == steps
        assert pod.ran()[-1]["skipped"] == skipped


def test_a_failure_is_retried_with_the_same_id_and_lasting_failure_is_a_finding(tmp_path: Path) -> None:
    script = f"cat >> {tmp_path}/seen; [ -e {tmp_path}/well ] || exit 4"
    pod = Pod(tmp_path, table(["/bin/sh", "-c", script], more=f'cwd = "{tmp_path}"\nretries = 1'))

    async def main() -> None:
        async with pod.hooks() as now:
            now.saved(5)
            await until(lambda: len(pod.events) == 2)
            assert now.hooks.findings(0.0) == ()
            now.saved(10)
            await until(lambda: now.hooks.findings(0.0))
        async with pod.hooks() as now:  # the next podwatch knows it
            (finding,) = now.hooks.findings(0.0)
            assert (finding.severity, finding.subject) == (Severity.WARNING, "eval")
            assert "exit code 4" in finding.summary
            (tmp_path / "well").touch()
            now.saved(15)
            await until(lambda: len(pod.events) == 5)
            await until(lambda: not now.hooks.findings(0.0))

    asyncio.run(main())
    assert [(d["step"], d["attempt"]) for d in pod.ran()] == [(5, 1), (5, 2), (10, 1), (10, 2), (15, 1)]
    assert pod.events[0].fields["retry_in_seconds"] == 10.0
    assert "retry_in_seconds" not in pod.events[1].fields


def kill(root: Path) -> Path:
    """The state as a SIGKILL at this moment leaves it, for the next podwatch."""
    after = root.with_name(f"{root.name}-after")
    shutil.copytree(root / "state", after / "state")
    return after


def killed_in_the_middle(tmp_path: Path, on: str, event: EventName, **fields: str | int | None) -> list[dict[str, Any]]:
    """The documents that a podwatch gives the hook after one was killed while it ran."""
    root = tmp_path / "pod"
    root.mkdir()
    pod = Pod(root, gated(root, on))
    found: list[Path] = []

    async def until_killed() -> None:
        async with pod.hooks() as now:
            now.emit(event, **fields)
            await until(pod.ran)
            found.append(kill(root))

    asyncio.run(until_killed())
    after = Pod(found[0], recording(found[0], on))

    async def next_podwatch() -> None:
        async with after.hooks() as now:
            now.emit(EventName.CHECKPOINT_COMPLETE, step=99, save_id="s99")
            await until(lambda: any(e.fields["step"] == 99 for e in after.events))

    asyncio.run(next_podwatch())
    return [d for d in after.ran() if d["step"] != 99]


def test_a_kill_in_the_middle_at_least_once(tmp_path: Path) -> None:
    on = '"published", "checkpoint"'
    (again,) = killed_in_the_middle(tmp_path, on, EventName.PUBLISHED, step=5, generation=1, seq=3)
    assert (again["id"], again["step"]) == ("published:1:3", 5)


def test_a_kill_in_the_middle_at_most_once(tmp_path: Path) -> None:
    assert killed_in_the_middle(tmp_path, '"incident", "checkpoint"', EventName.INCIDENT_OPENED, incident=1) == []


@pytest.mark.slow
def test_what_was_pending_at_a_kill_runs_and_what_had_run_does_not(tmp_path: Path) -> None:
    root = tmp_path / "pod"
    root.mkdir()
    pod = Pod(root, gated(root, more="coalesce = false"))
    found: list[Path] = []

    async def until_killed() -> None:
        async with pod.hooks() as now:
            (root / "gate").touch()
            now.saved(5)
            await until(lambda: pod.events)
            (root / "gate").unlink()
            now.saved(10, 15)
            await until(lambda: len(pod.ran()) == 2)
            found.append(kill(root))

    asyncio.run(until_killed())
    after = Pod(found[0], recording(found[0], more="coalesce = false"))

    async def next_podwatch() -> None:
        async with after.hooks() as now:
            now.saved(15, 20)  # 15 is reported again: it may have been killed before it was recorded
            await until(lambda: len(after.events) == 3)

    asyncio.run(next_podwatch())
    assert sorted(d["step"] for d in after.ran()) == [10, 15, 20]


@pytest.mark.slow
def test_a_hook_that_is_interrupted_again_and_again_is_given_up(tmp_path: Path) -> None:
    root = tmp_path / "pod0"
    root.mkdir()
    pod = Pod(root, gated(root))

    async def interrupted(pod: Pod, *steps: int) -> None:
        async with pod.hooks() as now:
            before = len(pod.ran())
            now.saved(*steps)
            await until(lambda: len(pod.ran()) > before)

    asyncio.run(interrupted(pod, 5))
    for _ in range(INTERRUPTED_AT_MOST):
        asyncio.run(interrupted(pod))

    async def last() -> None:
        async with pod.hooks() as now:
            await until(lambda: any(e.name is EventName.HOOK_FAILED for e in pod.events))
            assert await now.running() == []

    asyncio.run(last())
    assert "not run again" in pod.events[-1].message


def test_a_new_hook_does_not_run_for_the_past_and_a_removed_one_leaves_nothing(tmp_path: Path) -> None:
    async def past(pod: Pod) -> None:
        async with pod.hooks() as now:
            now.saved(5)
            await until(pod.ran)

    asyncio.run(past(Pod(tmp_path, gated(tmp_path))))

    async def present() -> None:
        other = Pod(tmp_path, recording(tmp_path).replace('"eval"', '"other"'))
        async with other.hooks() as now:
            now.saved(10)
            await until(lambda: other.events)
        assert [d["step"] for d in other.ran()][1:] == [10]

    asyncio.run(present())


@pytest.mark.slow
def test_at_a_preemption_only_its_own_hook_runs_and_within_its_time(tmp_path: Path) -> None:
    slow = gated(tmp_path)
    quick = recording(tmp_path, '"preempted"').replace('"eval"', '"bye"')
    hanging = table(["/bin/sleep", "600"], '"preempted"', f'cwd = "{tmp_path}"').replace('"eval"', '"hangs"')
    pod = Pod(tmp_path, slow + quick + hanging)

    async def main() -> float:
        async with pod.hooks() as now:
            now.saved(5)
            await until(pod.ran)
            now.emit(EventName.DAEMON_STOPPING, preempted=True)
            began = time.monotonic()
            await now.hooks.stop(3.0)
            return time.monotonic() - began

    assert asyncio.run(main()) < 30
    assert [d["event"] for d in pod.ran()] == ["checkpoint", "preempted"]
