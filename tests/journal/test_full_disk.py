"""A really full filesystem (a small tmpfs): records still get through on the reserved room."""

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
    """12 MiB of tmpfs; skipped where mounting is not allowed."""
    target = tmp_path / "small"
    target.mkdir()
    if LIBC.mount(b"tmpfs", os.fsencode(target), b"tmpfs", 0, b"size=12m") != 0:
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


def test_writes_go_on_at_zero_bytes_free(small: Path) -> None:
    journal = Journal.open(small / "j.sqlite")
    fill(small)
    for n in range(1000):
        journal.record("hook:a", {"n": n})
        journal.record("hook:a", {"n": n, "done": True})
        assert journal.add_event(note(n)).id > 0
    assert journal.dropped == 0
    journal.close()


def test_a_restart_at_zero_bytes_free_still_writes(small: Path) -> None:
    journal = Journal.open(small / "j.sqlite")
    journal.add_event(note(0))
    journal.close()
    fill(small)
    again = Journal.open(small / "j.sqlite")
    assert again.rebuilt == ""
    assert len(again.events()) == 1
    for n in range(200):
        again.record("end-pod", {"n": n})
    again.close()


def test_a_full_disk_and_no_ballast_still_opens_what_is_there(small: Path) -> None:
    journal = Journal.open(small / "j.sqlite")
    journal.record("end-pod", {"n": 1})
    journal.close()
    (small / "j.sqlite.ballast").unlink()
    (small / "j.sqlite-shm").write_bytes(b"")
    spare = small / "spare"
    spare.write_bytes(b"x" * 64 * 1024)
    fill(small)
    spare.unlink()
    again = Journal.open(small / "j.sqlite")
    assert again.learned("end-pod") == {"n": 1}
    again.close()


def test_when_even_the_reserve_is_used_up_events_are_counted_and_records_refused(small: Path) -> None:
    journal = Journal.open(small / "j.sqlite")
    fill(small)
    padding = "x" * 200_000
    refused = False
    for n in range(100):
        try:
            journal.record(f"padding {n}", padding)
        except HostError as error:
            refused = "no space left" in str(error)
            fill(small)
            if journal.add_event(Event(EventName.PRUNED, 1.0, padding)).id == 0:
                break
    assert refused
    assert journal.dropped > 0
    # An incident may need a page less than the event that found no room.
    assert any(journal.open_incident("hang", padding).id == 0 for _ in range(10))
    (small / "filler").unlink()
    journal.record("again", padding)
    journal.close()


def test_a_full_disk_at_the_first_start_is_a_clear_error(small: Path) -> None:
    fill(small)
    with pytest.raises(HostError, match="no space left"):
        Journal.open(small / "j.sqlite")
