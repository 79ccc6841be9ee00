"""Evaluations over a real journal and real commands; what is around them is a ``Site`` of plain values."""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from podwatch.config.loading import load_text
from podwatch.domain.errors import HostError, UsageError
from podwatch.domain.event import Event, EventName
from podwatch.domain.snapshot import Desired
from podwatch.hooks import evaluation, evaluations_due, evaluations_in_one_stop
from podwatch.hooks.evaluation import Evaluations, Room
from podwatch.hooks.evaluations_due import Result, Target
from podwatch.hooks.evaluations_in_one_stop import Batch, NoRoom
from podwatch.hooks.hook_runner import Desk
from podwatch.journal import AsyncJournal, Journal
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import SystemClock

pytestmark = pytest.mark.slow

GB = 10**9


class Site:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.on_pod: dict[int, str] = {}
        self.in_store: dict[int, str] = {}
        self.free_bytes = 100 * GB
        self.written: int | None = None
        """The step that is being written."""
        self.pinned: tuple[int, str] | None = None
        self.weights = True
        self.desired = Desired.RUNNING
        self.refused = ""
        self.visible: str | None = "0,1"
        self.post: Callable[[Event], None] = lambda event: None
        self.log: list[str] = []
        """What happened to training, and what was fetched, in order."""
        self.fetching: Callable[[int], Awaitable[None]] | None = None
        self.stops: Callable[[Batch], Awaitable[tuple[bool, str]]] | None = None

    async def here(self, target: Target) -> tuple[str, Mapping[str, Any]] | None:
        save = self.on_pod.get(target.step)
        return None if save is None else (save, self._about(str(self.root / f"step_{target.step}")))

    def _about(self, path: str) -> dict[str, Any]:
        weights = path if self.weights else None
        return {
            "checkpoint": path,
            "weights": weights,
            "layout": "hf",
            "convert": "merge CHECKPOINT TARGET",
            "note": "",
        }

    async def fetch(self, step: int, to: Path) -> tuple[str, Mapping[str, Any]]:
        if self.fetching is not None:
            await self.fetching(step)
        self.log.append(f"fetched {step}")
        (to / "part").mkdir()
        return self.in_store[step], self._about(str(to / "part"))

    def stored(self) -> Sequence[tuple[int, str]]:
        return list(self.in_store.items())

    def local(self) -> Sequence[tuple[int, str]]:
        return list(self.on_pod.items())

    async def room(self) -> Room:
        return Room(self.free_bytes, 10 * GB)

    async def newest(self) -> int | None:
        return max(self.on_pod, default=None) if self.written is None else self.written

    def stop_refused(self) -> str:
        return self.refused

    async def training_gpus(self) -> str | None:
        return self.visible

    async def with_training_stopped(self, batch: Batch) -> tuple[bool, str]:
        """As recovery does it (tests/recovery/test_evaluating.py)."""
        self.log.append(f"stop for {batch.title}")
        answer = (True, "") if self.stops is None else await self.stops(batch)
        if answer == (True, ""):
            await batch.run()
        self.log.append("start")
        self.post(Event(EventName.TRAINER_STARTING, time.time(), "", fields={"start_id": "x", "step": 10**6}))
        return answer

    async def keep_best(self, result: Result | None, text: str) -> None:
        self.pinned = None if result is None else (result.step, text)


class Pod:
    def __init__(self, root: Path, command: Sequence[str], **more: Any) -> None:
        self.root = root
        (root / "state").mkdir(exist_ok=True)
        table = {"command": list(command), "cwd": str(root), "every_saves": 1, "metric": "acc", **more}
        lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in table.items())
        text = f'run_id = "r1"\n[trainer]\noutput_dir = "{root}/out"\n[evaluation]\n{lines}\n'
        self.settings = load_text(text, None, environ={}).settings
        self.events: list[Event] = []
        self.site = Site(root)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Running"]:
        journal = AsyncJournal(Journal.open(self.root / "state" / "journal.sqlite"))
        desk = Desk(
            self.settings,
            journal,
            SystemClock(),
            self.events.append,
            None,
            self.root / "state",
            "",
            Worker("test"),  # type: ignore[arg-type]
        )
        now = Running(self, Evaluations(desk, self.site), journal)
        self.site.post = now.post
        await now.evaluations.load()
        now.evaluations.start()
        try:
            yield now
        finally:
            await now.evaluations.stop()
            await journal.close()

    def named(self, name: EventName) -> list[Event]:
        return [event for event in self.events if event.name is name]


class Running:
    def __init__(self, pod: Pod, evaluations: Evaluations, journal: AsyncJournal) -> None:
        self.pod, self.evaluations, self.journal = pod, evaluations, journal

    def saved(self, *steps: int) -> None:
        for step in steps:
            self.pod.site.on_pod[step] = f"s{step}"
            fields = {"step": step, "save_id": f"s{step}"}
            self.post(Event(EventName.CHECKPOINT_COMPLETE, time.time(), "", fields=fields))  # type: ignore[arg-type]

    def post(self, event: Event) -> None:
        self.journal.post(Journal.add_event, event)
        self.evaluations.event(event)


async def until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        await asyncio.sleep(0.02)


def script(text: str) -> list[str]:
    return [sys.executable, "-S", "-c", text, "{checkpoint}", "{output}", "{step}"]


ACCURACY = "import json,sys; json.dump({'acc': float(sys.argv[3])}, open(sys.argv[2] + '/results.json', 'w'))"


def test_results_and_the_best(tmp_path: Path) -> None:
    pod = Pod(tmp_path, script(ACCURACY.replace("float(sys.argv[3])", "{'5': 0.5, '10': 0.9, '15': 0.6}[sys.argv[3]]")))

    async def main() -> None:
        async with pod.running() as now:
            for number, step in enumerate((5, 10, 15), start=1):
                now.saved(step)
                await until(lambda number=number: len(pod.named(EventName.EVALUATION_DONE)) == number)
            assert now.evaluations.best_text() == "acc 0.9 at step 10"

    asyncio.run(main())
    assert pod.site.pinned == (10, "best evaluation: acc 0.9")
    assert list((tmp_path / "state" / "evaluation").iterdir()) == [], "outputs are deleted"

    async def later() -> None:
        async with pod.running() as now:
            assert [(r.step, r.metrics) for r in now.evaluations.table] == [
                (5, {"acc": 0.5}), (10, {"acc": 0.9}), (15, {"acc": 0.6}),
            ]  # fmt: skip

    asyncio.run(later())


def test_results_as_lm_eval_writes_them_and_on_the_last_line(tmp_path: Path) -> None:
    deep = "import os,sys,json; d=sys.argv[2]+'/model'; os.mkdir(d); "
    deep += "json.dump({'acc': 1}, open(d+'/results_2026.json','w'))"
    line = "print('loading'); print('{\"acc\": 0.25}')"
    for number, (text, value) in enumerate(((deep, 1.0), (line, 0.25))):
        root = tmp_path / str(number)
        root.mkdir()
        pod = Pod(root, script(text))

        async def main(pod: Pod = pod) -> None:
            async with pod.running() as now:
                now.saved(5)
                await until(lambda: pod.events and pod.events[-1].name is not EventName.EVALUATION_STARTED)

        asyncio.run(main())
        (done,) = pod.named(EventName.EVALUATION_DONE)
        assert done.fields["value"] == value


FAILURES = {
    "crashes": ("import os; os.abort()", "SIGABRT"),
    "exits": ("print('no such model'); raise SystemExit(3)", "exit code 3: no such model"),
    "writes nothing": ("pass", "wrote no JSON"),
    "writes no JSON": ("import sys; open(sys.argv[2] + '/results.json', 'w').write('{')", "cannot read its results"),
    "links elsewhere": ("import os,sys; os.symlink('/etc/passwd', sys.argv[2] + '/results.json')", "wrote no JSON"),
    "a pipe": ("import os,sys; os.mkfifo(sys.argv[2] + '/results.json')", "wrote no JSON"),
    "too large": ("import sys; open(sys.argv[2] + '/results.json', 'w').truncate(1 << 30)", "is larger than"),
}


@pytest.mark.parametrize("how", FAILURES)
def test_an_evaluation_that_fails(tmp_path: Path, how: str) -> None:
    text, why = FAILURES[how]
    pod = Pod(tmp_path, script(text))

    async def main() -> None:
        async with pod.running() as now:
            now.saved(5)
            await until(lambda: pod.named(EventName.EVALUATION_FAILED))
            assert now.evaluations.findings(0.0) == ()
            now.saved(10)
            await until(lambda: now.evaluations.findings(0.0))

    asyncio.run(main())
    assert why in pod.named(EventName.EVALUATION_FAILED)[0].message
    assert pod.site.pinned is None


def test_one_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    text = (
        "import os,sys,time\nif os.fork() == 0: os.setsid()\nopen(sys.argv[1] + '.pid', 'a').write(f'{os.getpid()} ')\n"
    )
    pod = Pod(tmp_path, script(text + "time.sleep(600)"), timeout="2s")

    async def main() -> None:
        async with pod.running() as now:
            now.saved(5)
            await until(lambda: pod.named(EventName.EVALUATION_FAILED))

    asyncio.run(main())
    assert "no end within 2 s" in pod.events[-1].message
    pids = (tmp_path / "step_5.pid").read_text().split()
    assert pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_one_that_fills_the_disk_is_ended_and_its_files_are_deleted(tmp_path: Path) -> None:
    """Here the disk only reports that it is nearly full."""
    text = "import sys,time; open(sys.argv[2] + '/big', 'w').write('x' * 100000); time.sleep(600)"
    pod = Pod(tmp_path, script(text))
    output = tmp_path / "state" / "evaluation" / "step-5" / "output" / "big"

    async def main() -> None:
        async with pod.running() as now:
            now.saved(5)
            await until(output.exists)
            pod.site.free_bytes = 9 * GB
            await until(lambda: pod.named(EventName.EVALUATION_FAILED))
            await until(lambda: not output.exists())
            now.saved(10)  # and none starts before there is room
            await until(lambda: len(pod.named(EventName.EVALUATION_FAILED)) == 2)
            pod.site.free_bytes = 100 * GB

    asyncio.run(main())
    assert "it left 9" in pod.named(EventName.EVALUATION_FAILED)[0].message
    assert len(pod.named(EventName.EVALUATION_STARTED)) == 1


def test_a_checkpoint_without_weights_names_the_conversion(tmp_path: Path) -> None:
    pod = Pod(tmp_path, ["echo", "{weights}"])
    pod.site.weights = False

    async def main() -> None:
        async with pod.running() as now:
            now.saved(5)
            await until(lambda: pod.named(EventName.EVALUATION_FAILED))

    asyncio.run(main())
    assert "merge CHECKPOINT TARGET" in pod.events[-1].message


def test_requests_for_local_and_stored_checkpoints(tmp_path: Path) -> None:
    pod = Pod(tmp_path, script(ACCURACY), every_saves=0)
    pod.site.in_store = {3: "old", 5: "s5"}

    async def main() -> None:
        async with pod.running() as now:
            now.saved(5)
            with pytest.raises(UsageError, match="step 4"):
                await now.evaluations.request([4, 5])
            assert [t.step for t in await now.evaluations.request(None)] == [3, 5]
            await until(lambda: len(pod.named(EventName.EVALUATION_DONE)) == 2)
            await now.evaluations.request([5])  # again
            await until(lambda: len(pod.named(EventName.EVALUATION_DONE)) == 3)

    asyncio.run(main())
    sources = [
        (e.fields["step"], e.fields["save_id"], e.fields["source"]) for e in pod.named(EventName.EVALUATION_DONE)
    ]
    assert sources == [(3, "old", "store"), (5, "s5", "local"), (5, "s5", "local")]


def test_killed_in_the_middle_it_runs_again(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    wait = (
        f"import os,time\nopen('{tmp_path}/ran','a').write('x')\nwhile not os.path.exists('{gate}'): time.sleep(0.05)\n"
    )
    pod = Pod(tmp_path, script(wait + ACCURACY))

    async def main() -> None:
        async with pod.running() as now:
            now.saved(5)
            await until((tmp_path / "ran").exists)
        assert not pod.named(EventName.EVALUATION_DONE)
        gate.touch()
        async with pod.running():
            await until(lambda: pod.named(EventName.EVALUATION_DONE))

    asyncio.run(main())
    assert (tmp_path / "ran").read_text() == "xx"


def test_beside_training_it_sees_no_gpu(tmp_path: Path) -> None:
    show = "import os,json; print(json.dumps({'acc': len(os.environ['CUDA_VISIBLE_DEVICES'])}))"
    pod = Pod(tmp_path, script(show))

    async def main() -> None:
        async with pod.running() as now:
            now.saved(5)
            await until(lambda: pod.named(EventName.EVALUATION_DONE))

    asyncio.run(main())
    assert pod.named(EventName.EVALUATION_DONE)[0].fields["value"] == 0


def test_the_checkpoint_is_marked_as_read_while_it_runs(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    wait = f"import os,time\nwhile not os.path.exists('{gate}'): time.sleep(0.05)\n"
    pod = Pod(tmp_path, script(wait + ACCURACY))

    async def main() -> None:
        async with pod.running() as now:
            assert now.evaluations.reading == frozenset()
            now.saved(5)
            await until(lambda: pod.named(EventName.EVALUATION_STARTED))
            assert now.evaluations.reading == {5}
            gate.touch()
            await until(lambda: pod.named(EventName.EVALUATION_DONE))
            await until(lambda: not now.evaluations.reading)

    asyncio.run(main())


def test_what_else_lies_in_the_configured_directory_stays(tmp_path: Path) -> None:
    """Some trainers name their checkpoints step-5, too."""
    shared = tmp_path / "shared"
    (shared / "step-5").mkdir(parents=True)
    (shared / "step-5" / "weights").write_text("kept")
    pod = Pod(tmp_path, script(ACCURACY), dir=str(shared))

    async def main() -> None:
        async with pod.running() as now:
            now.saved(5)
            await until(lambda: pod.named(EventName.EVALUATION_DONE))

    asyncio.run(main())
    asyncio.run(main())
    assert (shared / "step-5" / "weights").read_text() == "kept"
    assert list((shared / "podwatch-evaluation-r1").iterdir()) == []


def test_a_link_in_its_place_leads_nowhere(tmp_path: Path) -> None:
    """Whoever may write to the configured directory must not choose what podwatch deletes."""
    victim, shared = tmp_path / "victim", tmp_path / "shared"
    (victim / "step-5").mkdir(parents=True)
    (victim / "step-5" / "weights").write_text("kept")
    shared.mkdir()
    (shared / "podwatch-evaluation-r1").symlink_to(victim)
    pod = Pod(tmp_path, script(ACCURACY), dir=str(shared))

    async def main() -> None:
        async with pod.running() as now:
            now.saved(5)
            await until(lambda: pod.named(EventName.EVALUATION_FAILED))

    asyncio.run(main())
    assert (victim / "step-5" / "weights").read_text() == "kept"
    assert sorted(p.name for p in (victim / "step-5").iterdir()) == ["weights"]


# -- training stops for it -------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluations_in_one_stop, "TURN_SECONDS", 0.05)
    monkeypatch.setattr(evaluations_in_one_stop, "AGAIN_SECONDS", 0.05)


def stopping(root: Path, text: str = ACCURACY, **more: Any) -> Pod:
    return Pod(root, script(text), gpus="stop-training", **more)


@pytest.mark.usefixtures("quick")
def test_training_stops_after_the_save_and_the_evaluation_sees_its_gpus(tmp_path: Path) -> None:
    seen = f"import os; open('{tmp_path}/seen','a').write(str(os.environ.get('CUDA_VISIBLE_DEVICES')) + '|'); "
    pod = stopping(tmp_path, seen + ACCURACY)

    async def main() -> None:
        async with pod.running() as now:
            for number, (step, visible) in enumerate(((5, "0,1"), (10, None)), start=1):
                pod.site.visible = visible
                now.saved(step)
                await until(lambda number=number: len(pod.named(EventName.EVALUATION_DONE)) == number)
            await until(lambda: len(pod.site.log) == 4)
            assert now.evaluations.reading == frozenset()

    asyncio.run(main())
    assert pod.site.log == ["stop for step 5", "start", "stop for step 10", "start"]
    assert (tmp_path / "seen").read_text() == f"0,1|{os.environ.get('CUDA_VISIBLE_DEVICES')}|"
    (first, _) = pod.named(EventName.EVALUATION_STARTED)
    assert (first.fields["stopped"], first.message) == (True, "evaluating step 5 on training's GPUs")


@pytest.mark.usefixtures("quick")
def test_stored_ones_are_fetched_before_the_stop_which_all_of_them_share(tmp_path: Path) -> None:
    pod = stopping(tmp_path, every_saves=0)
    pod.site.in_store = {3: "s3", 4: "s4"}

    async def main() -> None:
        async with pod.running() as now:
            pod.site.on_pod[5] = "s5"
            await now.evaluations.request([3, 4, 5])
            assert now.evaluations.when == "podwatch stops training for it after the next save"
            await until(lambda: pod.site.log == ["fetched 3", "fetched 4"])
            assert not pod.events, "no save ended yet"
            now.saved(10)
            await until(lambda: len(pod.named(EventName.EVALUATION_DONE)) == 3)
            await until(lambda: pod.site.log[-1] == "start")
            place = now.evaluations.place
            await until(lambda: list(place.iterdir()) == [])

    asyncio.run(main())
    assert pod.site.log == ["fetched 3", "fetched 4", "stop for step 3, 4, 5", "start"]
    assert [e.fields["source"] for e in pod.named(EventName.EVALUATION_DONE)] == ["store", "store", "local"]


@pytest.mark.usefixtures("quick")
def test_only_as_many_are_fetched_as_the_disk_has_room_for(tmp_path: Path) -> None:
    pod = stopping(tmp_path, every_saves=0)
    pod.site.in_store = {3: "s3", 4: "s4"}

    async def one_at_a_time(step: int) -> None:
        if any(pod.site.log) and pod.site.log[-1].startswith("fetched"):
            raise NoRoom("no space")

    async def main() -> None:
        pod.site.fetching = one_at_a_time
        async with pod.running() as now:
            await now.evaluations.request(None)
            await until(lambda: pod.site.log == ["fetched 3"])
            now.saved(10)
            await until(lambda: pod.site.log[-1] == "fetched 4")
            now.saved(15)
            await until(lambda: len(pod.named(EventName.EVALUATION_DONE)) == 2)

    asyncio.run(main())
    assert not pod.named(EventName.EVALUATION_FAILED)


@pytest.mark.usefixtures("quick")
def test_one_that_cannot_be_fetched_stops_no_training(tmp_path: Path) -> None:
    pod = stopping(tmp_path, every_saves=0)
    pod.site.in_store = {3: "s3"}

    async def fails(step: int) -> None:
        raise HostError("the store does not answer")

    async def main() -> None:
        pod.site.fetching = fails
        async with pod.running() as now:
            await now.evaluations.request([3])
            await until(lambda: pod.named(EventName.EVALUATION_FAILED))
            now.saved(10)
            await asyncio.sleep(0.5)
            assert now.evaluations.state.waiting == ()

    asyncio.run(main())
    assert pod.site.log == []
    assert "the store does not answer" in pod.events[-1].message


@pytest.mark.usefixtures("quick")
def test_while_training_cannot_be_stopped_it_waits_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "HELD_SECONDS", -1.0)
    pod = stopping(tmp_path)
    pod.site.refused = "training runs on several nodes"

    async def main() -> None:
        async with pod.running() as now:
            now.saved(5)
            await until(lambda: now.evaluations.findings(time.monotonic()))
            (finding,) = now.evaluations.findings(time.monotonic())
            assert finding.summary.endswith("to evaluate step 5: training runs on several nodes")
            assert now.evaluations.when.endswith("now: training runs on several nodes")
            pod.site.refused = ""
            await until(lambda: pod.named(EventName.EVALUATION_DONE))
            assert now.evaluations.findings(time.monotonic()) == ()

    asyncio.run(main())


@pytest.mark.usefixtures("quick")
def test_none_begins_after_the_time_limit_and_the_rest_waits_for_the_next_save(tmp_path: Path) -> None:
    pod = stopping(tmp_path, "import time; time.sleep(1.5)\n" + ACCURACY, every_saves=0, timeout="1.2s")

    async def main() -> None:
        async with pod.running() as now:
            for step in (5, 10):
                pod.site.on_pod[step] = f"s{step}"
            await now.evaluations.request([5, 10])
            now.saved(20)
            await until(lambda: pod.site.log[-1:] == ["start"])
            assert [t.step for t in now.evaluations.state.waiting] == [10]
            assert now.evaluations.state.waiting[0].interrupted == 0, "it had not begun"

    asyncio.run(main())
    (failed,) = pod.named(EventName.EVALUATION_FAILED)
    assert "no end within 1.2 s" in failed.message


@pytest.mark.usefixtures("quick")
def test_a_stop_in_vain_is_repeated_at_most_so_often(tmp_path: Path) -> None:
    pod = stopping(tmp_path, every_saves=0)

    async def held(batch: Batch) -> tuple[bool, str]:
        return True, "the GPUs are not free: gpu0 holds 60.0 GiB"

    async def main() -> None:
        pod.site.stops = held
        async with pod.running() as now:
            pod.site.on_pod[5] = "s5"
            await now.evaluations.request([5])
            for number in range(3):
                now.saved(10 + number)
                await until(lambda number=number: pod.site.log.count("start") > number)
            await until(lambda: not now.evaluations.state.waiting)
            await until(lambda: "too often" in pod.events[-1].message)

    asyncio.run(main())
    assert pod.site.log.count("start") == 3
    assert "gpu0 holds 60.0 GiB" in pod.named(EventName.EVALUATION_FAILED)[0].message


@pytest.mark.usefixtures("quick")
def test_an_interrupted_one_is_repeated_after_a_later_save(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    wait = (
        f"import os,time\nopen('{tmp_path}/ran','a').write('x')\nwhile not os.path.exists('{gate}'): time.sleep(0.05)\n"
    )
    pod = stopping(tmp_path, wait + ACCURACY, every_saves=0)

    async def cut(batch: Batch) -> tuple[bool, str]:
        if gate.exists():
            return True, ""
        task = asyncio.ensure_future(batch.run())
        await until((tmp_path / "ran").exists)
        task.cancel()
        await asyncio.wait([task])
        gate.touch()
        return True, "podwatch interrupted it"

    async def main() -> None:
        pod.site.stops = cut
        async with pod.running() as now:
            pod.site.on_pod[5] = "s5"
            await now.evaluations.request([5])
            now.saved(10)
            await until(lambda: pod.site.log[-1:] == ["start"])
            now.saved(15)
            await until(lambda: pod.named(EventName.EVALUATION_DONE))

    asyncio.run(main())
    assert (tmp_path / "ran").read_text() == "xx"
    (failed,) = pod.named(EventName.EVALUATION_FAILED)
    assert (failed.fields["step"], failed.fields["interrupted"]) == (5, True)


@pytest.mark.usefixtures("quick")
def test_no_error_of_it_reaches_recovery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pod = stopping(tmp_path, every_saves=0)

    async def broken(one: object) -> None:
        raise OSError("the disk is gone")

    async def main() -> None:
        pod.site.training_gpus = broken.__get__(pod.site)  # type: ignore[method-assign]
        async with pod.running() as now:
            pod.site.on_pod[5] = "s5"
            await now.evaluations.request([5])
            for number in range(evaluations_due.INTERRUPTED_AT_MOST):
                now.saved(10 + number)
                await until(lambda number=number: pod.site.log.count("start") > number)
            await until(lambda: not now.evaluations.state.waiting)

    asyncio.run(main())
    assert pod.site.log.count("start") == 3, "and it stops training no more for this one"


@pytest.mark.usefixtures("quick")
def test_once_training_is_finished_it_runs_without_a_save(tmp_path: Path) -> None:
    pod = stopping(tmp_path, every_saves=0, at_end=True)

    async def main() -> None:
        async with pod.running() as now:
            now.saved(5)
            pod.site.desired = Desired.FINISHED
            now.post(Event(EventName.TRAINER_FINISHED, time.time(), ""))
            await until(lambda: pod.named(EventName.EVALUATION_DONE))

    asyncio.run(main())
    assert pod.site.log == ["stop for step 5", "start"]


@pytest.mark.usefixtures("quick")
def test_one_that_is_examined_again_is_waited_for_and_one_that_is_gone_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen after podwatch was killed: the checkpoint was complete again a second later."""
    pod = stopping(tmp_path, every_saves=0)

    async def nowhere(step: int) -> None:
        raise HostError(f"step {step} is not on this pod, and no store is configured")

    async def main() -> None:
        async with pod.running() as now:
            pod.site.on_pod[5] = "s5"
            await now.evaluations.request([5])
            del pod.site.on_pod[5]
            now.saved(10)
            await asyncio.sleep(0.5)
            assert now.evaluations.state.waiting
            pod.site.on_pod[5] = "s5"
            await until(lambda: pod.named(EventName.EVALUATION_DONE))
            await now.evaluations.request([10])
            del pod.site.on_pod[10]
            pod.site.fetching = nowhere
            monkeypatch.setattr(evaluations_in_one_stop, "MISSING_SECONDS", 0.3)
            await until(lambda: pod.named(EventName.EVALUATION_FAILED))

    asyncio.run(main())
