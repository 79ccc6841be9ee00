"""kill -9 of podwatch and of its upload child while saves go on and the store fails: promise 1, and nothing is sent
twice."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.asking import confirmed, published
from tests.support.daemon import DaemonProcess
from tests.support.hurry import hurry
from tests.support.processes import children
from tests.support.rig import Rig
from tests.support.stored_somewhere import Directory, Server, server, store

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("PODWATCH_UPLOAD_SEED", "1"))
ROUNDS = int(os.environ.get("PODWATCH_UPLOAD_ROUNDS", "4"))
CONNECTIONS = 2
TRAINS = ["--step-seconds", "0.1", "--ckpt.interval", "20", "--size", "11000000", "--broadcast-size", "4096"]
"""A save every two seconds, in a few parts."""


def guarded(rig: Rig, kept: Server | Directory) -> DaemonProcess:
    rig.trainer_flags = TRAINS
    daemon = rig.daemon(
        kept.environment, sync__store=kept.url, sync__part_size=kept.part, sync__connections=CONNECTIONS,
        sync__upload_gap="0s",
    )  # fmt: skip
    daemon.start()
    confirmed(daemon)
    return daemon


def upload_child(daemon: DaemonProcess) -> int:
    """0 while none lives."""
    assert daemon.process is not None
    for pid in children(daemon.process.pid):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"podwatch.store.transfer" in words:
            return pid
    return 0


def meanwhile(daemon: DaemonProcess, condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait for it; uploads get their turn like the others."""

    def asked() -> bool:
        assert daemon.process is not None
        hurry(daemon.process.pid)
        return condition()

    daemon.wait_for(asked, seconds, what)


def strike(daemon: DaemonProcess, victim: str) -> bool:
    """SIGKILL, and the next podwatch where it was podwatch. Whether the victim lived."""
    pid = upload_child(daemon)
    if victim in ("child", "both") and pid:
        os.kill(pid, signal.SIGKILL)
    if victim in ("podwatch", "both"):
        daemon.stop(signal.SIGKILL)
        daemon.start()
    return victim != "child" or pid > 0


def ends_well(rig: Rig, daemon: DaemonProcess, kept: Server | Directory) -> None:
    """Left alone, podwatch stores a save that is made from now on; training was never touched."""
    kept.clear()
    newest = rig.saved[-1]
    meanwhile(daemon, lambda: rig.saved[-1] > newest, 60, "another save")
    rig.order(wait=True)
    last = rig.saved[-1]
    published(daemon, 120, step=last)
    assert kept.violations() == []
    assert len(rig.starts) == 1


def nothing_twice(kept: Server, interruptions: int) -> None:
    """Of no save was everything sent again, and of all saves at most what was on its way at an interruption."""
    sent = kept.sent()
    assert sent
    assert [save for save, parts in sent.items() if min(parts.values()) > 1] == []
    again = {part: count - 1 for parts in sent.values() for part, count in parts.items() if count > 1}
    assert sum(again.values()) <= CONNECTIONS * interruptions, again


@pytest.mark.parametrize("kind", ["b2", "s3", "directory"])
def test_kills_at_random_moments(rig: Rig, tmp_path: Path, request: pytest.FixtureRequest, kind: str) -> None:
    chance = random.Random(f"{SEED} {kind}")
    where = request.getfixturevalue("elsewhere") if kind == "directory" else tmp_path / kind
    with store(kind, where) as kept:
        daemon = guarded(rig, kept)
        published(daemon, 60)
        interruptions = 0
        for _ in range(ROUNDS):
            faults = chance.randrange(4)
            kept.trouble(chance, faults)
            saves = len(rig.saved)
            if chance.random() < 0.7:  # an upload has surely begun
                meanwhile(daemon, lambda: upload_child(daemon) > 0, 60, "an upload")
            else:
                meanwhile(daemon, lambda n=saves: len(rig.saved) > n, 60, "a save")
            time.sleep(chance.uniform(0.0, 0.7))
            interruptions += faults + strike(daemon, chance.choice(["podwatch", "child", "both"]))
            assert kept.violations() == []
        ends_well(rig, daemon, kept)
        if isinstance(kept, Server):
            nothing_twice(kept, interruptions)
        else:
            assert kept.looks > 0


@pytest.mark.parametrize(("kind", "victim"), [("b2", "podwatch"), ("b2", "child"), ("s3", "podwatch")])
def test_kills_while_a_chosen_request_is_on_its_way(rig: Rig, tmp_path: Path, kind: str, victim: str) -> None:
    """The store carries it out after its sender is dead."""
    with server(kind, tmp_path / kind) as kept:
        daemon = guarded(rig, kept)
        published(daemon, 60)
        struck = 0
        moments = kept.pieces if victim == "child" else kept.moments
        for request, suffix in moments:
            before = kept.suffered(request)
            kept.process.fault(request, "slow", seconds=1.5, suffix=suffix)
            meanwhile(daemon, lambda r=request, n=before: kept.suffered(r) > n, 60, request)
            struck += strike(daemon, victim)
            assert kept.violations() == []
        assert struck >= 3, "the victim lived while the request was on its way"
        ends_well(rig, daemon, kept)
        nothing_twice(kept, 2 * len(moments))
