"""The whole daemon beside a trainer that never looks at free space, in the user's proportions: a disk of 250 GB, of
which 91 are others' and each save takes 47, so that 65 are free beside two sets. Root only (it mounts).

Scaled by 256 KiB for a GB and two seconds for a cadence of 20 minutes; `make test-disk` runs it for hundreds of saves.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.asking import published, reasons, running, status
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server
from tests.support.daemon import DaemonProcess
from tests.support.mounts import small_mount
from tests.support.rig import Rig, alive

pytestmark = pytest.mark.slow

MIB = 1 << 20
GB = 256 * 1024
DISK, OTHERS, SAVE = 250 * GB, 91 * GB, 47 * GB
SAVES = int(os.environ.get("PODWATCH_DISK_SAVES", "15"))
CADENCE = 2.0
"""Seconds from one save to the next, at least."""
TICKS = 10
"""And not before so many turns of the daemon's loop after the last one: under load both are slow."""


@contextlib.contextmanager
def ext4(mount: Path, size: int) -> Iterator[str]:
    """An ext4 image of about ``size`` usable bytes in memory, mounted at ``mount``; why not, where that is not to be
    had."""
    image = mount.with_name("image")
    with small_mount(image, size + 24 * MIB) as mounted:
        if not mounted:
            yield "mounting is not allowed here"
            return
        with (image / "ext4").open("wb") as file:
            file.truncate(size + 16 * MIB)
        mount.mkdir(parents=True, exist_ok=True)
        for command in (
            ["mkfs.ext4", "-q", "-F", "-m", "0", "-J", "size=4", str(image / "ext4")],
            ["mount", "-o", "loop", str(image / "ext4"), str(mount)],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                yield f"{command[0]}: {done.stderr.strip()}"
                return
        try:
            yield ""
        finally:
            subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.fixture
def disk(rig: Rig) -> Iterator[Path]:
    """The pod's volume with what others have on it."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small disk")
    volume = rig.output.parent
    with ext4(volume, DISK) as refused:
        if refused:
            pytest.skip(f"no small ext4: {refused}")
        fill(volume, DISK - OTHERS)
        yield volume


def fill(volume: Path, leave: int, name: str = "others") -> None:
    """So that ``leave`` bytes stay free."""
    with (volume / name).open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, room(volume) - leave)
    assert abs(room(volume) - leave) < MIB // 2


def room(volume: Path) -> int:
    figures = os.statvfs(volume)
    return figures.f_bavail * figures.f_frsize


class Writer:
    """The trainer: a process that saves, and deletes its own old sets where it is told to; see saving_process."""

    def __init__(self, rig: Rig, keep_last: int | None) -> None:
        self.out, self._report = rig.output, rig.root / "report.json"
        settings = {
            "out": str(rig.output), "report": str(self._report), "saves": SAVES, "ticks": TICKS, "size": SAVE,
            "keep_last": keep_last, "burst": 0, "links": "",
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.saving_process"],
            stdin=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        self._say(json.dumps(settings))

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def tick(self) -> None:
        self._say("")

    @property
    def report(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads(self._report.read_text()))
        return {"written": 0, "step": 0, "error": ""}

    def whole(self, step: int) -> bool:
        here = self.out / "checkpoints" / f"step_{step}"
        return (here / "trainer" / ".metadata").exists() and (here / "orchestrator").exists()

    def newest_is_there(self) -> None:
        """What was written last is there until the next one is."""
        end = time.monotonic() + 60
        assert not self.report["error"], self.report
        while (step := self.report["step"]) and not self.whole(step):
            # gone: then the next one must have been complete, and the report of it is about to come
            assert time.monotonic() < end, f"the newest complete set, step {step}, is gone"
            time.sleep(0.02)


def drive(daemon: DaemonProcess, writer: Writer, at: Callable[[int], None]) -> None:
    """Hand out ticks as the daemon turns, until all saves are written. ``at`` is told each number of saves once."""
    told, turns, handed, last = -1, 0, 0, 0.0
    while writer.process.poll() is None:
        writer.newest_is_there()
        if (written := writer.report["written"]) > told:
            told, handed, last = written, 0, time.monotonic()
            at(told)
        document = daemon.status()
        now = time.monotonic()
        turned = document is not None and document["counters"]["turns"] > turns
        if document is not None and turned and handed < TICKS and now - last >= CADENCE / TICKS:
            turns, last, handed = document["counters"]["turns"], now, handed + 1
            writer.tick()
        time.sleep(0.02)
    assert writer.process.returncode == 0, writer.report
    assert writer.report["written"] == SAVES


def steps_of(daemon: DaemonProcess, name: str, **fields: Any) -> set[int]:
    found = [e for e in daemon.events() if e["podwatch_event"] == name]
    return {e["step"] for e in found if e.get("step") and all(e.get(k) == v for k, v in fields.items())}


KEEPS_TWO = pytest.param(
    2,
    id="ext4-keeps two itself",
    marks=pytest.mark.skipif("PODWATCH_DISK_SAVES" not in os.environ, reason="with `make test-disk`"),
)


@pytest.mark.timeout(120 + 10 * SAVES)
@pytest.mark.parametrize("keep_last", [pytest.param(None, id="ext4-never deletes"), KEEPS_TWO])
def test_no_save_meets_a_full_disk_whatever_the_store_does(
    rig: Rig, disk: Path, tmp_path: Path, keep_last: int | None
) -> None:
    """The store is fast at first, then slower than the saves come, then down, then back."""
    with B2Server(tmp_path / "b2") as server:
        daemon = rig.daemon(
            {"B2_APPLICATION_KEY_ID": KEY_ID, "B2_APPLICATION_KEY": KEY, "B2_ENVIRONMENT": server.url},
            trainer__command=None, trainer__supervise="attach", trainer__save_grace=None, trainer__stop_grace=None,
            checkpoints__rescan="0.1s", checkpoints__settle="0.05s",
            disk__prune_above="85%", disk__prune_to="75%",
            sync__store=f"b2://{BUCKET}", sync__sweep="1s",
        ).start()  # fmt: skip
        daemon.wait_event("daemon-started", 20)

        def weather(written: int) -> None:
            if written == SAVES * 3 // 8:
                published(daemon, 40)
                server.pace(rate=SAVE / 4)  # bytes per second: two saves and more come while one set is sent
            elif written == SAVES * 5 // 8:
                assert server.violations() == []
                server.stop()
            elif written == SAVES * 6 // 8:
                server.start()
                server.pace()

        drive(daemon, Writer(rig, keep_last), weather)
        last = 5 * SAVES
        published(daemon, 60, step=last)
        assert server.violations() == [], "the pointer never lied"

        sent = steps_of(daemon, "published")
        unsynced = steps_of(daemon, "pruned", kind="unstored-set")
        gone = set(range(5, last + 1, 5)) - {int(p.name[5:]) for p in (rig.output / "checkpoints").glob("step_*")}
        assert gone, "the disk holds three"
        assert len(sent) >= 2
        assert not unsynced & sent, "what was in the store is not told as unsynced"
        if keep_last is None:
            surplus = steps_of(daemon, "pruned", kind="surplus-set")
            assert gone == unsynced | surplus | steps_of(daemon, "pruned", kind="stored-set"), (
                "each removal is told, as what it was"
            )
            assert not surplus & sent
            assert steps_of(daemon, "pruned", kind="stored-set") <= sent
            assert unsynced, "the store was behind, and what that cost is told"
            told = [e["level"] for e in daemon.events() if e.get("kind") == "unstored-set"]
            assert set(told) == {"warning"}
        assert status(daemon)["checkpoints"]["newest_complete_step"] == last
        assert daemon.stop() == 0


def test_training_ends_cleanly_before_a_save_that_cannot_fit(rig: Rig, disk: Path) -> None:
    """``on_full = "stop"``: others fill the disk, and nothing may go any more."""
    rig.trainer_flags = ["--size", str(6 * MIB), "--broadcast-size", "4096", "--ckpt.interval", "10"]
    rig.trainer_flags += ["--step-seconds", "0.5"]
    daemon = rig.daemon(disk__on_full="stop", disk__prune_above="85%", disk__prune_to="75%").start()
    pid = running(daemon, rig, step=10)
    rig.order(step_seconds=3.0)  # time to see it before the next save
    fill(disk, 4 * MIB, "more")
    daemon.wait_for(lambda: not alive(pid), 20, "the trainer is ended")
    daemon.wait_for(lambda: status(daemon)["training"]["state"] == "stopped", 20, "and stays so")
    found = reasons(daemon)["disk-no-room"]
    assert (found["severity"], "short" in found["summary"]) == ("critical", True), found
    assert rig.saved == [10], "the newest is there, and the next was not begun"
    assert len(rig.starts) == 1
    assert "No space left" not in daemon.command("logs").stdout
    (disk / "more").unlink()
    daemon.wait_for(lambda: "disk-no-room" not in reasons(daemon), 20, "room again")
    assert daemon.command("start").returncode == 0
    daemon.wait_for(lambda: len(rig.starts) == 2 and rig.trainer_pid, 20, "it goes on at a person's word")
    assert rig.starts[-1]["step"] == 10
