"""The whole daemon on a disk without a byte: state, events and status go on, and it frees space."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.asking import reasons, says, status
from tests.support.checkpoints import dcp_operations, finish, orchestrator_operations
from tests.support.daemon import DaemonProcess
from tests.support.mounts import small_mount
from tests.support.rig import Rig

pytestmark = pytest.mark.slow

MIB = 1 << 20


@pytest.fixture
def full(rig: Rig) -> Iterator[Rig]:
    """Checkpoints and podwatch's own state share a small disk, as on a pod with one volume."""
    with small_mount(rig.output.parent, 64 * MIB) as mounted:
        if not mounted:
            pytest.skip("mounting a tmpfs is not allowed here")
        yield rig


def save(rig: Rig, step: int) -> None:
    here = rig.output / "checkpoints" / f"step_{step}"
    finish(orchestrator_operations(here / "orchestrator", step, "B"))
    finish(dcp_operations(here / "trainer", 6 * MIB, 1, ""))


def there(rig: Rig) -> list[int]:
    return sorted(int(p.name[5:]) for p in (rig.output / "checkpoints").glob("step_*"))


def fill(daemon: DaemonProcess, directory: Path, name: str) -> None:
    """To the last byte. The daemon stands still meanwhile: it would free some again."""
    with daemon.standing_still(), (directory / name).open("ab", buffering=0) as file:
        for size in (MIB, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                pass
        assert os.statvfs(directory).f_bavail == 0


def test_at_a_hundred_percent_it_frees_space_says_so_and_comes_back(full: Rig) -> None:
    rig = full
    daemon = rig.daemon(
        state_dir=str(rig.output.parent / "state"), trainer__command=None, trainer__supervise="attach",
        disk__prune_above="85%", disk__prune_to="75%",
    ).start()  # fmt: skip
    daemon.wait_event("daemon-started", 20)
    for step in (5, 10, 15):
        save(rig, step)
    daemon.wait_event("checkpoint-complete", 20, step=15)
    daemon.wait_for(lambda: status(daemon)["disk"]["next_save_bytes"], 10, "the size of a save is known")
    fill(daemon, rig.output.parent, "others")
    daemon.wait_for(lambda: there(rig) == [15], 20, "what is not in the store goes, the newest stays")
    told = daemon.wait_event("pruned", 10, step=10)
    assert "the next save does not fit; no store is configured" in told["event"]

    fill(daemon, rig.output.parent, "more")  # nothing may go any more

    def no_room() -> dict[str, Any] | None:  # the first look may have come in the middle of the filling
        found = reasons(daemon).get("disk-no-room")
        return found if found and "0 B are free" in found["summary"] else None

    found = daemon.wait_for(no_room, 20, "the finding")
    assert found["severity"] == "critical"
    assert "the next save needs" in found["summary"]
    says(daemon, 2)
    assert "newest complete" in daemon.command("prune", "--dry-run").stdout
    assert daemon.command("checkpoints", "pin", "15").returncode == 0

    daemon.stop(signal.SIGKILL)
    seen = len(daemon.events())
    daemon.start()
    daemon.wait_event("daemon-started", 20, after=seen)
    daemon.wait_for(lambda: reasons(daemon).get("disk-no-room"), 20, "the finding, after a start on a full disk")
    assert there(rig) == [15]
    assert "pinned" in daemon.command("prune", "--dry-run").stdout + daemon.command("checkpoints").stdout
    (rig.output.parent / "more").unlink()
    (rig.output.parent / "others").unlink()
    daemon.wait_for(lambda: "disk-no-room" not in reasons(daemon), 20, "room again")
    assert daemon.stop() == 0
