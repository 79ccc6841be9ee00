"""``podwatch demo``: break a pod on purpose and measure what podwatch does about it.

Every line of the summary is measured: from the journal's times, the trainer's own log and process list, and by reading
every stored byte back. The exit code is 0 only if all of it really happened.
"""

import contextlib
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from podwatch.config.loading import load_settings
from podwatch.domain.event import EventName
from podwatch.domain.finding import counted
from podwatch.simulation.pod import Pod, Shape, require_linux
from podwatch.simulation.verify import DemoFailed, Screen, Watching, prove_local, prove_store
from podwatch.store.keys import RunKeys

PATIENCE = 4.0
"""Factor by which a phase can exceed its usual duration: the machine can be busy."""


@dataclass
class Result:
    """Lines of the summary; ``ok`` only if every check held."""

    rows: list[tuple[str, bool, str]] = field(default_factory=list)

    def add(self, name: str, ok: bool, text: str) -> None:
        self.rows.append((name, ok, text))

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(ok for _, ok, _ in self.rows)


@dataclass
class Stage:
    """The objects that a scenario uses."""

    pod: Pod
    watching: Watching
    screen: Screen
    result: Result

    def wait(self, what: str, condition: Callable[[], bool], seconds: float) -> None:
        """Wait for a condition. ``seconds`` is the usual duration at speed 1."""
        self.watching.wait(what, condition, max(10.0, PATIENCE * self.pod.shape.seconds(seconds)))


def run(scenario: str, *, screen: Screen | None = None) -> int:
    """Run one scenario; 0 if everything in the summary really happened. Also cleans up on Ctrl-C."""
    require_linux()
    screen = screen or Screen()
    play, shape = SCENARIOS[scenario]
    root = Path(tempfile.mkdtemp(prefix="podwatch-demo-"))
    pod = Pod(root, shape)
    watching = Watching(pod, screen)
    result = Result()
    before = {number: signal.signal(number, _interrupted) for number in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGINT] = signal.getsignal(signal.SIGINT)
    try:
        _open(pod, screen, scenario)
        try:
            play(Stage(pod, watching, screen, result))
            _prove(Stage(pod, watching, screen, result))
        except DemoFailed as failure:
            result.add("demo", False, str(failure))
        _summary(screen, result)
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):  # the terminal can be gone
            screen.say("demo", "interrupted; cleaning up", "demo")
        return 130
    finally:
        for number in before:
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave processes behind
        watching.close()
        pod.destroy()
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0 if result.ok else 1


def _open(pod: Pod, screen: Screen, scenario: str) -> None:
    pod.create()
    size = f"{pod.shape.capacity_bytes / 1e6:.0f} MB"
    screen.say("demo", f"scenario {scenario}: a pod with two simulated GPUs and a disk of {size}", "demo")
    screen.say("demo", f"starting podwatch, which starts training ({pod.root})", "demo")
    pod.start_daemon()


# -- scenarios -------------------------------------------------------------------------------------------------------


def silent_death(stage: Stage) -> None:
    """The inference engine dies without a message, its server exits with 0, and the launcher ignores it."""
    _until_guarded(stage)
    died_at = _kill_engine(stage)
    _heals(stage, died_at, "silent-death")
    _goes_on(stage, died_at, pruned=True)


def hang(stage: Stage) -> None:
    """Training hangs: no step, GPUs idle, memory still held."""
    _until_guarded(stage)
    stage.screen.say("demo", "FAULT: the trainer deadlocks at its next step; memory stays allocated", "fault")
    stage.pod.order_fault("hang")
    stage.wait("the trainer took the fault", lambda: not (stage.pod.faults / "hang").exists(), 2)
    broken_at = time.time()
    _heals(stage, broken_at, "hang", seconds=20)
    _goes_on(stage, broken_at, pruned=False)


SCENARIOS: dict[str, tuple[Callable[[Stage], None], Shape]] = {
    "silent-death": (silent_death, Shape()),
    "hang": (hang, Shape(capacity_bytes=400_000_000)),
}


# -- steps of a scenario ---------------------------------------------------------------------------------------------


def _until_guarded(stage: Stage) -> None:
    """Wait until training runs, the detector is armed, and there is a checkpoint to resume from."""
    watching = stage.watching
    stage.wait("training makes steps", lambda: watching.step() is not None, 12)
    stage.wait(
        "the silent-death detector is armed",
        lambda: any("silent-death" in str(e.fields.get("detector")) for e in watching.all(EventName.DETECTOR_ARMED)),
        10,
    )
    stage.wait(
        "two checkpoints are complete and one is in the store",
        lambda: (
            len(watching.all(EventName.CHECKPOINT_COMPLETE)) >= 2 and watching.find(EventName.PUBLISHED) is not None
        ),
        15,
    )


def _kill_engine(stage: Stage) -> float:
    """Returns when, in epoch seconds."""
    pid = stage.pod.engine_pid()
    if pid is None:
        raise DemoFailed("no engine holds the inference GPU")
    step = stage.watching.step() or 0
    stage.screen.say(
        "demo",
        f"FAULT: SIGKILL to VLLM::EngineCore (pid {pid}) at step {step}; its server will exit with code 0",
        "fault",
    )
    at = time.time()
    os.kill(pid, signal.SIGKILL)
    return at


def _heals(stage: Stage, broken_at: float, kind: str, seconds: float = 10) -> None:
    watching = stage.watching
    seen = {"finding": kind, "confirmed": True}
    made = 0

    def found() -> bool:
        nonlocal made
        made = max(made, watching.step() or 0)  # the trainer continues for a moment with the batches it has
        return watching.find(EventName.FINDING_RAISED, broken_at, **seen) is not None

    stage.wait(f"podwatch detects {kind}", found, seconds)
    finding = watching.find(EventName.FINDING_RAISED, broken_at, **seen)
    detected = finding.wall - broken_at if finding else 0.0
    stage.result.add("detected", True, f"{detected:.1f} s after the fault")
    stage.wait("training is confirmed by a new step", lambda: _confirmed(stage, broken_at), 20)
    confirmed = watching.all(EventName.TRAINER_CONFIRMED, broken_at)[-1]
    resumed = watching.resumed_from()
    stage.result.add(
        "restarted",
        resumed is not None,
        f"from step {resumed}, confirmed {confirmed.wall - broken_at:.1f} s after the fault",
    )
    lost, interval = made - (resumed or 0), stage.pod.shape.interval
    stage.result.add("steps lost", 0 <= lost <= 2 * interval, f"{lost} (a checkpoint every {interval} steps)")


def _goes_on(stage: Stage, since: float, *, pruned: bool) -> None:
    """After the restart: wait for another checkpoint in the store, and for freed space where the disk is small."""
    watching = stage.watching
    healed = watching.all(EventName.TRAINER_CONFIRMED, since)[-1].wall
    stage.wait(
        "a checkpoint made after the restart is in the store",
        lambda: watching.find(EventName.PUBLISHED, healed) is not None,
        15,
    )
    if pruned:
        stage.wait("an old checkpoint is removed", lambda: bool(_whole_sets_removed(stage)), 20)


def _confirmed(stage: Stage, since: float) -> bool:
    return stage.watching.find(EventName.TRAINER_CONFIRMED, since) is not None


def _whole_sets_removed(stage: Stage) -> set[object]:
    """Steps of complete checkpoints that podwatch removed and whose files are gone from the disk."""
    pruned = {event.fields.get("step") for event in stage.watching.all(EventName.PRUNED)}
    checkpoints = stage.pod.output_dir / "checkpoints"
    return {step for step in pruned if step is not None and not (checkpoints / f"step_{step}" / "trainer").exists()}


def _prove(stage: Stage) -> None:
    """Stop podwatch (training continues, promise 5), end training, and read everything back."""
    pod, watching, result = stage.pod, stage.watching, stage.result
    complete = len({event.fields.get("step") for event in watching.all(EventName.CHECKPOINT_COMPLETE)})
    pruned = sum(int(e.fields.get("count") or 1) for e in watching.all(EventName.PRUNED))
    removed = _whole_sets_removed(stage)
    code = pod.stop_daemon()
    alive = pod.engine_pid() is not None
    result.add(
        "podwatch stopped", code == 0 and alive, f"exit code {code}, training {'continues' if alive else 'is gone'}"
    )
    settings = load_settings(pod.config, environ={}, search=False).settings
    sets, problems = prove_local(settings)
    result.add("checkpoints", bool(sets) and not problems, f"{complete} complete, {len(sets)} on the pod and sound")
    for problem in problems:
        result.add("damaged", False, problem)
    store = prove_store(pod.store, RunKeys(pod.run_id))
    saves = Counter(store.verified)  # a step that training saved again after its restart is in the store twice
    steps = ", ".join(f"{step} (twice)" if count == 2 else str(step) for step, count in saves.items())
    result.add(
        "synced",
        store.step is not None and not store.problems,
        f"latest is step {store.step}; steps {steps} verified byte by byte ({store.total_bytes / 1e6:.0f} MB)",
    )
    for problem in store.problems:
        result.add("store", False, problem)
    result.add(
        "pruned",
        removed <= set(store.verified),  # nothing goes that the store does not have
        f"{counted(pruned, 'removal')} ({counted(len(removed), 'complete checkpoint')}); disk at most"
        f" {watching.worst_used_ratio:.0%} full",
    )


def _summary(screen: Screen, result: Result) -> None:
    screen.plain("")
    for name, ok, text in result.rows:
        screen.plain(f"  {'ok  ' if ok else 'FAIL'}  {name:<14} {text}", "good" if ok else "bad")
    verdict = "everything above was measured" if result.ok else "FAILED: see the lines above that are marked FAIL"
    screen.plain(f"\n{verdict}; {screen.elapsed:.0f} s in all", "good" if result.ok else "bad")


def _interrupted(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
