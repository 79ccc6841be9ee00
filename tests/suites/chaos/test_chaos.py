"""The chaos run: kills of every kind at random moments, and the weights of a run that nobody touched.

PODWATCH_CHAOS_KILLS (default 13: each kind once) and PODWATCH_CHAOS_SEED say how many and which; `make chaos N=50`.
"""

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.suites.chaos.guarded_run import INTERVAL, PATIENCE, GuardedRun, Uninterrupted
from tests.suites.chaos.kills import DECK, HEADER, Blow, Recovery, recovered
from tests.support.nvml import NoCompiler, build_nvml

torch = pytest.importorskip("torch", reason="needs torch: run it with `make chaos`")

KILLS = int(os.environ.get("PODWATCH_CHAOS_KILLS") or len(DECK))
SEED = int(os.environ.get("PODWATCH_CHAOS_SEED") or "1")
GAP = (2, INTERVAL + 3)
"""Steps made after a recovery before the next kill."""
STEPS = 20 * KILLS + 3 * INTERVAL
"""So many pass while a recovery is waited for that the run does not end before the last kill."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[GuardedRun]:
    try:
        library = build_nvml(tmp_path / "nvml")
    except NoCompiler as missing:
        pytest.skip(str(missing))
    made = GuardedRun(tmp_path / "guarded", library, "AB"[SEED % 2], STEPS)
    yield made
    made.close()


def deck(dice: random.Random) -> list[str]:
    names: list[str] = []
    while len(names) < KILLS:
        names += dice.sample(list(DECK), len(DECK))
    return names[:KILLS]


@pytest.mark.timeout(300 + 180 * KILLS)
def test_chaos(run: GuardedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table: list[Recovery] = []
    reference = Uninterrupted(tmp_path, run.variant, STEPS)
    try:
        wreak(run, table, random.Random(SEED))
        ends_well(run, reference.weights(PATIENCE + STEPS))
    except BaseException:
        with capsys.disabled():
            print(f"\nchaos FAILED: make chaos N={KILLS} SEED={SEED}, layout {run.variant}")
            print(HEADER, *(row.line() for row in table), sep="\n")
        raise
    finally:
        reference.close()
    with capsys.disabled():
        print(f"\nchaos: seed {SEED}, {KILLS} kills, layout {run.variant}, a save every {INTERVAL} steps")
        print(HEADER, *(row.line() for row in table), summary(table), sep="\n")


def wreak(run: GuardedRun, table: list[Recovery], dice: random.Random) -> None:
    run.daemon.start()
    run.wait_event("trainer-confirmed")
    run.wait_step(INTERVAL + 1)  # the first checkpoint: from here on nothing may be lost but an interval
    run.wait_event("detector-armed", detector="silent-death:gpu0")
    for number, name in enumerate(deck(dice), 1):
        run.wait_step(run.finished_steps() + dice.randint(*GAP))
        seen, before = len(run.events()), run.starts()
        blow = Blow(name)
        table.append(Recovery(number, blow))
        DECK[name](run, dice, blow)
        table[-1] = recovered(run, blow, number, seen)
        if name == "training while the store is away":
            run.store_back()
        assert not run.ended, f"the run ended before all kills: STEPS is too small for this machine ({STEPS})"
        if not blow.at:
            assert run.starts() == before, f"training was restarted without need after: {name}"
            assert run.pid("trainer"), f"training is gone after: {name}"
        assert not (run.control / "double").exists(), (run.control / "double").read_text()
        assert run.daemon.process is not None
        assert run.daemon.process.poll() is None, f"podwatch ended by itself\n{run.daemon.tail()}"


def ends_well(run: GuardedRun, reference: Path) -> None:
    run.wait(lambda: run.ended, "the end of the run", PATIENCE + STEPS)
    run.wait_event("trainer-finished")
    want = torch.load(reference, weights_only=True)
    got = torch.load(run.output / "final.pt", weights_only=True)
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want), "the weights differ from an uninterrupted run's"
    run.wait_event("published", step=STEPS)
    assert not (run.control / "double").exists(), (run.control / "double").read_text()
    run.daemon.stop()
    end = time.monotonic() + 60
    while run.members() and time.monotonic() < end:
        time.sleep(0.05)
    assert not run.members(), f"orphans: {run.members()}"
    assert not [*run.lies, *run.store.violations()]
    log = run.daemon.log.read_text(errors="replace")
    assert "Traceback" not in log, run.daemon.tail(80)
    names = {e["podwatch_event"] for e in run.events()}
    assert not names & {"gave-up", "checkpoint-damaged", "stepped-back"}, names


def summary(table: list[Recovery]) -> str:
    rows = [row for row in table if row.started is not None and row.detected is not None]
    lost = [row.lost for row in rows]
    return (
        f"{len(rows)} restarts: {sum(lost)} steps lost, {max(lost)} at most at once; the final weights are those of an"
        f" uninterrupted run, bit for bit"
    )
