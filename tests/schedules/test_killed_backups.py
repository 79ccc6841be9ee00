"""kill -9 of a real backup before and after each kind of request to a real store that fails now and then: the newest
pointer never lies, the newest save is never lost, and the next life finishes what was begun."""

import os
import random
from functools import partial
from pathlib import Path

import pytest

from podwatch.store.inventory import Inventory
from tests.app.backup.backup_world import World
from tests.support.backup_lives import aims, live
from tests.support.forking import in_child
from tests.support.stored_somewhere import store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SEED = int(os.environ.get("PODWATCH_BACKUP_SEED", "1"))
KILLS = int(os.environ.get("PODWATCH_BACKUP_KILLS", "9"))


def newest_step(inventory: Inventory) -> int:
    return -1 if inventory.newest is None else inventory.newest.step


@pytest.mark.parametrize("kind", ["directory", "b2", "s3"])
def test_kills_at_each_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    chance, killed, last = random.Random(f"{SEED} {kind}"), 0, -1
    with store(kind, tmp_path / "store") as kept:
        for name, value in kept.environment.items():
            monkeypatch.setenv(name, value)
        pod = tmp_path / "pod"
        for aim in aims(chance, KILLS):
            kept.trouble(chance, chance.choice([0, 0, 1, 2]))
            code = in_child(partial(live, pod, kept.url, aim))
            assert code in (0, -9), aim
            killed += code == -9
            kept.clear()
            assert kept.violations() == [], aim
            now = newest_step(World(pod, kept.url).inventory())
            assert now >= last, f"the newest save is lost: {aim}"
            last = now
        assert killed >= KILLS // 2, "the aims are reached"
        assert in_child(partial(live, pod, kept.url, None)) == 0
        world = World(pod, kept.url)
        found = world.inventory()
        assert newest_step(found) == max(int(path.name[5:]) for path in (pod / "out" / "checkpoints").glob("step_*"))
        assert (world.links(), world.lists(), found.unfinished) == ([], [], ())
        assert len(found.saves) == 1, "what was replaced is gone"
        assert kept.violations() == []
        print(f"{kind}: {killed} kills of {KILLS}, newest step {last}")
