"""What files of the trainer name is known after each look, and kept from removal."""

import threading
from pathlib import Path

from podwatch.checkpoints.catalogue import Catalogue
from podwatch.checkpoints.layouts import KINDS
from podwatch.checkpoints.layouts.base import Site
from podwatch.daemon.guarding import Guarding
from podwatch.system.clock import SystemClock
from podwatch.system.threads import Worker
from tests.support.layout_makers import run
from tests.support.layout_makers.core import TRACKER, verl_fsdp


async def test_the_trainers_own_pins_are_read_with_every_look(tmp_path: Path) -> None:
    run(verl_fsdp(tmp_path, 10))
    layout, clock, worker = KINDS["verl"].make(Site(tmp_path)), SystemClock(), Worker("looks")
    refuse, refreshed = False, list[str]()

    def named() -> dict[int, str]:
        if refuse:
            raise PermissionError(13, "Permission denied")
        return dict(layout.pinned())

    guarding = Guarding(
        catalogue=Catalogue(layout, clock, settle=0.0, settle_weak=0.0),
        worker=worker,
        clock=clock,
        rescan=10.0,
        emit=lambda _event: None,
        uploads=None,
        make_room=lambda: None,
        refresh_watches=lambda: refreshed.append(threading.current_thread().name),
        named=named,
    )
    try:
        assert [s.step for s in await guarding.look()] == [10]
        assert guarding.named == {10: f"named by {TRACKER}"}
        assert refreshed == ["podwatch-looks"], "never on the loop: the trainer's disk may hang"
        refuse = True
        await guarding.look()
        assert "Permission denied" in guarding.blind
        assert guarding.named == {10: f"named by {TRACKER}"}
    finally:
        worker.close()
