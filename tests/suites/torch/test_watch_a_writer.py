"""A real torch writer saves hundreds of times while the real catalogue and watcher look on: no set is ever called
complete before its writer had finished it, and each that is left is found."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from podwatch.checkpoints.file_events import Watcher
from podwatch.checkpoints.formats import unpickler
from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.checkpoints.shapes import Site
from podwatch.checkpoints.trainer import all_trainers
from podwatch.checkpoints.trainers import layout_of
from podwatch.domain.errors import HostError
from podwatch.system.clock import SystemClock
from tests.drivers.checkpoints import one_reader

pytest.importorskip("torch", reason="needs torch: run it with `make test-torch`")
pytestmark = pytest.mark.timeout(300)

SAVES = int(os.environ.get("PODWATCH_SAVES", "120"))
PROGRAM = Path(__file__).with_name("saving_writer.py")
SETTLE = 0.12
"""Seconds; far below the default, and below the writer's longest pauses, so that only the rules stand in the way."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """A complete set seen for the first time: between ``before`` and ``after`` podwatch called it that."""

    step: int
    save_id: str
    before: float
    after: float
    sizes: dict[str, int] | None
    save_token: str


class Observer:
    def __init__(self, kind: str, out: Path) -> None:
        self.layout = layout_of(all_trainers()[kind], Site(out))
        self.catalogue = Catalogue(
            self.layout, SystemClock(), settle=SETTLE, settle_tracker=SETTLE, settle_weak=2 * SETTLE
        )
        self.woken = threading.Event()
        self.watcher = Watcher(self.catalogue.watch_dirs, self.woken.set, debounce=0.01)
        self.seen: dict[tuple[int, str], Sighting] = {}
        self.rescans = 0

    def look(self) -> None:
        before = time.monotonic()
        sets = self.catalogue.rescan()
        after = time.monotonic()
        self.rescans += 1
        for found in sets:
            if found.complete and (found.step, found.save_id) not in self.seen:
                assert found.save_id
                sizes, token = self.contents(found.step, found.save_id)
                self.seen[found.step, found.save_id] = Sighting(found.step, found.save_id, before, after, sizes, token)
        self.watcher.refresh()

    def contents(self, step: int, save_id: str) -> tuple[dict[str, int] | None, str]:
        """What lies there if it is still the same save; the writer may be at it again, or may have deleted it."""
        try:
            contents = self.catalogue.contents(step)
        except HostError:
            return None, ""
        if contents.set.save_id != save_id:
            return None, ""
        part = contents.parts[0]
        index = part.part.path / ".metadata"
        answer = unpickler.dcp_index(index.read_bytes()) if index.exists() else {}
        return {f.path: f.size for f in contents.files}, str(answer.get("save_id", ""))


@pytest.mark.parametrize(("kind", "layout"), [("dcp", "dcp"), ("hf", "hf")])
def test_never_complete_before_its_writer_had_finished(kind: str, layout: str, tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    out.mkdir()
    writer = subprocess.Popen([sys.executable, str(PROGRAM), kind, str(out), str(log), str(SAVES), "7"])
    observer = Observer(layout, out)
    observer.watcher.start()
    try:
        with one_reader():
            while writer.poll() is None:
                observer.woken.wait(0.03)
                observer.woken.clear()
                observer.look()
            assert writer.returncode == 0
            told = [json.loads(line) for line in log.read_text().splitlines()]
            left = told[-1]["left"]
            limit = time.monotonic() + 60
            while [s.step for s in observer.catalogue.sets if s.complete] != left and time.monotonic() < limit:
                time.sleep(SETTLE)
                observer.look()
            assert [s.step for s in observer.catalogue.sets if s.complete] == left
    finally:
        writer.kill()
        writer.wait()
        observer.watcher.stop()
    saves = pair(told)
    assert len(saves) == SAVES
    assert len({s["step"] for s in saves}) < SAVES, "no step was saved twice"
    assert len(left) < len({s["step"] for s in saves}), "no step was deleted"
    for sighting in observer.seen.values():
        check(sighting, saves)
    # Of each set that is left the last save was seen; of the rest as many as stood still long enough.
    for step in left:
        last = max((s for s in saves if s["step"] == step), key=lambda s: s["end"])
        assert any(s.step == step and s.before >= last["begin"] for s in observer.seen.values()), step
    assert len(observer.seen) > SAVES / 10, f"{len(observer.seen)} sightings in {observer.rescans} rescans"


def pair(told: list[dict[str, object]]) -> list[dict[str, object]]:
    """One record per save: begin, end, sizes."""
    begun = {e["number"]: e for e in told if e["event"] == "begin"}
    return [
        {"step": e["step"], "begin": begun[e["number"]]["t"], "end": e["t"], "sizes": e["sizes"]}
        for e in told
        if e["event"] == "end"
    ]


def check(sighting: Sighting, saves: list[dict[str, object]]) -> None:
    mine = [s for s in saves if s["step"] == sighting.step]
    finished = [s for s in mine if s["end"] <= sighting.after]
    assert finished, f"{sighting} before any save of it had ended"
    running = [s for s in mine if s["begin"] < sighting.before and s["end"] > sighting.after]
    assert not running, f"{sighting} while {running[0]} was being written"
    if sighting.sizes is not None:
        own = [s for s in finished if {n: z for n, z in s["sizes"].items() if n in sighting.sizes} == sighting.sizes]
        assert own, f"{sighting} has the content of no finished save: {finished[-1]['sizes']}"
