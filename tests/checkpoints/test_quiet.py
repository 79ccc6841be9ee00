"""Quiet times, read leases against real writers, and what this kernel can tell."""

import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwatch.checkpoints.layouts.base import Marker
from podwatch.checkpoints.settle_time import Held, SettleTimes, held_open, probe
from tests.checkpoints.leases import told

needs_leases = pytest.mark.skipif(sys.platform != "linux", reason="read leases are Linux's")


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """Where no open waits for a disk, if there is such a place: ext4 truncates only once its journal has room."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else tmp_path) as name:
        yield Path(name)


def test_windows_by_strength_and_doubled_where_changes_show_late() -> None:
    windows = SettleTimes(5.0, 15.0, 60.0)
    assert [windows.need(m, slow=False) for m in (Marker.COMMIT, Marker.LAST_FILE, Marker.NONE)] == [5, 15, 60]
    assert [windows.need(m, slow=True) for m in (Marker.COMMIT, Marker.LAST_FILE, Marker.NONE)] == [10, 30, 120]
    assert windows.longest(slow=True) == 120


def test_capabilities_are_found_by_trying_and_leave_nothing(tmp_path: Path) -> None:
    found = next((f for f in (probe(tmp_path) for _ in range(30)) if f.leases is not None), probe(tmp_path))
    assert found.filesystem
    assert not found.slow
    assert (found.holes, found.leases, found.inotify) == (True, True, True)
    assert list(tmp_path.iterdir()) == []
    nowhere = probe(tmp_path / "not" / "there")
    assert (nowhere.holes, nowhere.leases) == (None, None)


@needs_leases
def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    """Some devices do something when they are opened. Seen by a FIFO: its writer waits for one who opens it."""
    fifo = tmp_path / "model.bin"
    os.mkfifo(fifo)
    writer = threading.Thread(target=lambda: fifo.open("wb").close(), daemon=True)
    writer.start()
    assert held_open([fifo])[0] is Held.UNKNOWN
    writer.join(0.5)
    assert writer.is_alive()
    os.close(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK))
    writer.join()


@needs_leases
def test_a_writer_in_another_process_is_seen(tmp_path: Path) -> None:
    path, other = tmp_path / "model.bin", tmp_path / "done.bin"
    other.write_bytes(b"done")
    code = f"f = open({str(path)!r}, 'wb'); f.write(b'x'); f.flush(); print('open', flush=True); input()"
    writer = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.readline()
    try:
        assert told([other, path]) == (Held.YES, str(path))
    finally:
        writer.communicate(b"\n")
    assert told([other, path]) == (Held.NO, "")
    assert told([tmp_path / "gone"]) == (Held.NO, "")


@needs_leases
def test_a_mapped_file_is_seen_after_its_descriptor_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "mapped"
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
    try:
        assert told([path])[0] is Held.YES
    finally:
        mapped.close()


@needs_leases
def test_a_writers_open_is_not_held_up(in_memory: Path) -> None:
    """The danger of leases: an open for writing waits while one is held (facts/systemd.md). Ours last microseconds."""
    paths = [in_memory / str(n) for n in range(64)]
    for path in paths:
        path.write_bytes(b"x")
    ending = threading.Event()
    answers: set[Held] = set()

    def ask() -> None:
        while not ending.is_set():
            answers.add(held_open(paths)[0])

    thread = threading.Thread(target=ask)
    thread.start()
    longest, end = 0.0, time.monotonic() + 1.0
    try:
        while time.monotonic() < end:
            for path in paths:
                began = time.monotonic()
                os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))
                longest = max(longest, time.monotonic() - began)
    finally:
        ending.set()
        thread.join()
    assert answers - {Held.UNKNOWN} or told(paths)[0] is Held.NO, "leases are to be had there"
    assert longest < 10, f"an open took {longest:.3f} s: as if a lease were kept"
