"""The file of the page's plots: nothing in it can break the page, and it does not grow."""

import json
import os
from pathlib import Path

import pytest

from podwatch.recording import last_day as last_day_module
from podwatch.recording.last_day import DAY, Moment, append, from_line, last_day, to_line

NOW = 1_769_832_000.0
FULL = Moment(
    NOW, "training", True, ((0, 70 << 30, 80 << 30), (1, 0, 80 << 30)), (6 * 10**11, 10**12), 47 * 10**9, 85,
    NOW - 12.3, 0.25, -1.5,
)  # fmt: skip


@pytest.mark.parametrize("moment", [FULL, Moment(NOW, "down"), Moment(NOW, "training", step=0, reward=0.0)])
def test_a_line_reads_back(moment: Moment) -> None:
    assert from_line(to_line(moment)) == moment


def test_what_was_written_is_read_and_older_than_a_day_is_not(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    append(path, [Moment(NOW - DAY - 1, "stopped"), Moment(NOW - 60, "training")])
    append(path, [FULL, Moment(NOW + 60, "training")])
    assert last_day(path, NOW) == (Moment(NOW - 60, "training"), FULL)
    assert path.stat().st_mode & 0o777 == 0o600


def test_torn_and_foreign_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    line = to_line(FULL)
    foreign = [
        "",
        "{}",
        "[]",
        "null",
        '{"at":1}',
        '{"at":"x","state":"down"}',
        '{"at":1e999,"state":"down"}',
        '{"at":1,"state":"a","gpus":[1]}',
    ]
    path.write_bytes("\n".join([*foreign, line, "x" * 20_000]).encode() + b"\n\xff\n" + line[:40].encode())
    append(path, [Moment(NOW, "down")])  # after a torn line
    assert last_day(path, NOW) == (FULL, Moment(NOW, "down"))


def test_no_file_and_a_link_are_no_history(tmp_path: Path) -> None:
    assert last_day(tmp_path / "none", NOW) == ()
    (tmp_path / "secret").write_text(to_line(FULL))
    (tmp_path / "history.jsonl").symlink_to(tmp_path / "secret")
    assert last_day(tmp_path / "history.jsonl", NOW) == ()
    with pytest.raises(OSError, match="symbolic"):
        append(tmp_path / "history.jsonl", [FULL])


def test_the_file_does_not_grow_and_keeps_the_last_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "history.jsonl"
    monkeypatch.setattr(last_day_module, "MAX_BYTES", 80_000)
    for hour in range(50):
        append(path, [Moment(NOW + 60 * m, "training", step=m) for m in range(60 * hour, 60 * hour + 60)])
        assert path.stat().st_size < 90_000
    found = [moment.step for moment in last_day(path, NOW + 60 * 2999)]
    assert found == list(range(3000 - len(found), 3000))
    assert len(found) > 800, "half of the size is kept, or a day"
    assert [p.name for p in tmp_path.iterdir()] == ["history.jsonl"]


def test_a_disk_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = os.statvfs(tmp_path)
    small = os.statvfs_result((*full[:4], 1, *full[5:]))
    monkeypatch.setattr(last_day_module.os, "statvfs", lambda _: small)
    with pytest.raises(OSError, match="are free"):
        append(tmp_path / "history.jsonl", [FULL])
    assert not (tmp_path / "history.jsonl").exists()


def test_a_line_is_json_for_other_programs() -> None:
    assert json.loads(to_line(Moment(NOW, "down"))) == {"at": NOW, "state": "down"}


@pytest.mark.parametrize("ahead", [86_400.0 * 365, pytest.param(3 * 86_400.0, marks=pytest.mark.slow)])
def test_entries_of_a_clock_that_was_ahead_never_drop_the_real_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    path = tmp_path / "history.jsonl"
    monkeypatch.setattr(last_day_module, "MAX_BYTES", 20_000)
    append(path, [Moment(NOW + ahead, "down"), Moment(NOW, "training", step=0)])
    for minute in range(1, 700):
        append(path, [Moment(NOW + 60 * minute, "training", step=minute)])
        found = last_day(path, NOW + 60 * minute)
        assert found[-1].step == minute
        assert len(found) > min(minute, 150), "the file was shortened to less than half of its size"
    assert path.stat().st_size < 21_000
    assert f'"t":{NOW + ahead}' not in path.read_text()


def test_a_file_that_is_shortened_while_the_clock_is_ahead_keeps_its_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "history.jsonl"
    append(path, [Moment(NOW + 60 * minute, "training", step=minute) for minute in range(1000)])
    monkeypatch.setattr(last_day_module, "MAX_BYTES", 30_000)
    append(path, [Moment(NOW + 365 * 86_400, "down")])
    assert len(last_day(path, NOW + 60 * 999)) > 200
