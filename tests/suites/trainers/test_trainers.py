"""Real trainers under a real podwatch, killed again and again: no whole checkpoint is passed over, and the final
weights are those of a run that nobody touched.

HF Trainer promises the latter with ``resume_from_checkpoint`` (random states, data order), Lightning from a checkpoint
at the end of an epoch without shuffling, accelerate and DCP for what the script hands to them: see programs/.

PODWATCH_TRAINERS_SEEDS (default 1) says how many seeds are tried, PODWATCH_TRAINERS_SEED the first one: when and in
which order training is hit.
"""

import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.suites.trainers.blows import DECK, GAP, HEADER, Blow, Recovery, recovered
from tests.suites.trainers.guarded import PATIENCE, GuardedTraining, Untouched
from tests.suites.trainers.kinds import INTERVAL, TRAINERS, Trainer
from tests.support.nvml import NoCompiler, build_nvml

torch = pytest.importorskip("torch", reason="needs torch and the trainers: run it with `make test-trainers`")
for library in ("transformers", "accelerate", "lightning"):
    pytest.importorskip(library, reason="needs the trainers: run it with `make test-trainers`")

FIRST = int(os.environ.get("PODWATCH_TRAINERS_SEED") or "1")
SEEDS = range(FIRST, FIRST + int(os.environ.get("PODWATCH_TRAINERS_SEEDS") or "1"))
STEPS = INTERVAL * (3 * len(DECK) + 2)
"""So many pass while something is waited for that the run does not end before the last blow."""


@pytest.fixture
def store() -> Iterator[Path | None]:
    """On a file system of its own, where there is one."""
    shm = Path("/dev/shm")
    if not shm.is_dir():
        yield None
        return
    directory = Path(tempfile.mkdtemp(dir=shm, prefix="podwatch-trainers-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest, store: Path | None) -> Iterator[GuardedTraining]:
    try:
        library = build_nvml(tmp_path / "nvml")
    except NoCompiler as missing:
        pytest.skip(str(missing))
    trainer: Trainer = request.param
    # With one checkpoint on the disk, the store is where a wrong choice would fetch an older one from.
    made = GuardedTraining(tmp_path / "guarded", library, trainer, STEPS, store if "limit 1" in trainer.name else None)
    yield made
    made.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("run", TRAINERS, indirect=True, ids=lambda t: t.name.replace(", ", "-").replace(" ", "_"))
def test_every_death_is_continued_from_the_newest_whole_checkpoint(
    run: GuardedTraining, seed: int, tmp_path: Path
) -> None:
    table: list[Recovery] = []
    dice = random.Random(f"{seed} {run.trainer.name}")
    reference = Untouched(tmp_path, run.trainer, STEPS)
    try:
        wreak(run, table, dice)
        ends_well(run, reference.weights())
        judge_can_say_no(run.trainer, reference.output, tmp_path / "cut")
    finally:
        reference.close()
        print(f"{run.trainer.name}: a save every {INTERVAL} steps; again: PODWATCH_TRAINERS_SEED={seed}")
        print(HEADER, *(row.line() for row in table), sep="\n")


def wreak(run: GuardedTraining, table: list[Recovery], dice: random.Random) -> None:
    run.daemon.start()
    run.wait(run.steps_made, "the first step")
    run.wait_confirmed(0)
    for number, name in enumerate(dice.sample(list(DECK), len(DECK)), 1):
        before, made = run.starts()[-1], run.steps_made()
        gap = dice.randint(*GAP)
        run.wait(lambda goal=made + gap: run.steps_made() >= goal and run.pid, f"step {made + gap}")
        events = len(run.daemon.events())
        blow = Blow(name)
        table.append(Recovery(number, blow))
        DECK[name](run, dice, blow)
        table[-1] = recovered(run, blow, number, before, events)
        alone(run)
        assert run.daemon.process is not None
        assert run.daemon.process.poll() is None, f"podwatch ended by itself\n{run.daemon.tail()}"


def alone(run: GuardedTraining) -> None:
    double = run.control / "double"
    assert not double.exists(), f"two trainers at once: {double.read_text()}"


def ends_well(run: GuardedTraining, reference: Path) -> None:
    run.quick()
    run.daemon.wait_for(lambda: run.ended, PATIENCE, "the end of the run")
    run.daemon.wait_event("trainer-finished", 60)
    if run.store is not None:
        run.daemon.wait_event("published", 60)
    want = torch.load(reference, weights_only=True)
    got = torch.load(run.output / "final.pt", weights_only=True)
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want), "the weights differ from an uninterrupted run's"
    assert run.steps_made() == STEPS
    run.daemon.stop()
    end = time.monotonic() + 60
    while run.members() and time.monotonic() < end:
        time.sleep(0.05)
    assert not run.members(), f"orphans: {run.members()}"
    alone(run)
    names = {event["podwatch_event"] for event in run.daemon.events()}
    assert not names & {"gave-up", "stepped-back"}, names


def judge_can_say_no(trainer: Trainer, output: Path, scratch: Path) -> None:
    """What the library loads is whole; with its largest file cut in half, or under another step, it is not."""
    found = trainer.found(output / trainer.below)
    step, path = max(found.items())
    assert trainer.whole(path, step)
    assert not trainer.whole(path, step + 1)
    scratch.mkdir()
    shutil.copytree(path, scratch / path.name) if path.is_dir() else shutil.copy(path, scratch)
    files = [p for p in (scratch / path.name, *(scratch / path.name).glob("*")) if p.is_file()]
    largest = max(files, key=lambda p: p.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    assert not trainer.whole(scratch / path.name, step)
