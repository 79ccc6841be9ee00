"""A really full file system (a small tmpfs): what happens is remembered, and is on the disk once there is room."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwatch.domain.errors import HostError
from podwatch.domain.event import Event, EventName
from podwatch.journal import Journal

LIBC = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """6 MiB of tmpfs; skipped where mounting is not allowed."""
    target = tmp_path / "small"
    target.mkdir()
    if LIBC.mount(b"tmpfs", os.fsencode(target), b"tmpfs", 0, b"size=6m") != 0:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield target
    LIBC.umount2(os.fsencode(target), 2)


def fill(directory: Path) -> None:
    with (directory / "filler").open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                pass
    stats = os.statvfs(directory)
    assert stats.f_bavail == 0


def note(n: int) -> Event:
    return Event(EventName.PRUNED, float(n), f"number {n}")


def test_what_happens_meanwhile_is_known_and_comes_to_the_disk(small: Path) -> None:
    path = small / "j.sqlite"
    journal = Journal.open_for_guard(path)
    journal.add_event(note(0))
    journal.learn("known", "before")
    old = journal.open_incident("hang", "before")
    fill(small)
    for n in range(1, 1001):
        assert journal.add_event(note(n)).id > 0
    journal.learn("known", "meanwhile")
    journal.update_incident(old.id, closed_wall=5.0)
    assert journal.obstacle is not None
    assert not journal.obstacle.blank
    assert "no space left" in journal.obstacle.what
    assert journal.dropped == 0
    assert len(journal.events()) == 1000
    assert journal.events(after_id=1)[0].message == "number 1"
    with pytest.raises(HostError, match="no space left"):
        journal.return_to_disk()
    with pytest.raises(HostError, match="cannot be recorded now"):
        journal.record("hook:a", {})
    assert journal.add_event(note(1001)).id > 0, "a return that failed changes nothing"
    (small / "filler").unlink()
    journal.return_to_disk()
    journal.record("hook:a", {"n": 1})
    journal.close()
    again = Journal.open(path)
    assert [e.message for e in again.events(limit=2000)] == [f"number {n}" for n in range(1002)]
    assert again.learned("known") == "meanwhile"
    assert [i.closed_wall for i in again.incidents()] == [5.0]
    again.close()


def test_a_full_disk_at_the_first_start_is_a_clear_error(small: Path) -> None:
    fill(small)
    with pytest.raises(HostError, match="no space left"):
        Journal.open(small / "j.sqlite")
