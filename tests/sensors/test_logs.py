"""Following real files by name."""

import os
from pathlib import Path

from podwatch.sensors.log_tail import READ_PER_LOOK, FileNews, Position, Sources, find, known, look, tails


class Follower:
    def __init__(self, root: Path, *globs: str, paths: tuple[Path, ...] = ()) -> None:
        self.sources = Sources(root, globs or ("**/*.log",), paths)
        self.positions: dict[str, Position] = {}
        self.news: tuple[FileNews, ...] = ()

    def look(self, *, from_end: bool = False, since: float | None = None) -> list[bytes]:
        self.news = look(self.sources, self.positions, from_end=from_end, since_wall=since)
        self.positions = known(self.news)
        return [line.text for item in self.news for line in item.lines]


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_new_lines_once_and_only_when_complete(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"one\ntw")
    follower = Follower(tmp_path)
    assert follower.look() == ["one"]
    assert follower.look() == []
    append(log, b"o\r\nthree\n")
    assert follower.look() == ["two", "three"]


def test_from_the_end_old_lines_are_for_show_only(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"old 1\nold 2\nhalf")
    follower = Follower(tmp_path)
    assert follower.look(from_end=True) == []
    assert [line.text for line in follower.news[0].old] == ["old 1", "old 2"]
    append(log, b" a line\nnew\n")
    assert follower.look() == ["new"]  # the line begun before is old


def test_a_boundary_makes_everything_up_to_now_old(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"1\n")
    follower = Follower(tmp_path)
    assert follower.look() == ["1"]
    append(log, b"2\n")
    assert follower.look(from_end=True) == []
    assert [line.text for line in follower.news[0].old] == ["2"]
    append(log, b"3\n")
    assert follower.look() == ["3"]


def test_a_file_that_came_with_the_start_is_new_even_at_the_boundary(tmp_path: Path) -> None:
    (tmp_path / "old.log").write_bytes(b"old\n")
    os.utime(tmp_path / "old.log", (1000, 1000))
    (tmp_path / "new.log").write_bytes(b"new\n")
    assert Follower(tmp_path).look(from_end=True, since=2000.0) == ["new"]


def test_truncation_and_growth_beyond_the_old_size(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"first start\n" * 10)
    follower = Follower(tmp_path)
    follower.look()
    log.write_bytes(b"again\n")
    assert follower.look() == ["again"]
    log.write_bytes(b"a third start, longer than what stood there before\n")
    assert follower.look() == ["a third start, longer than what stood there before"]


def test_replaced_under_the_same_name(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"12:00 one\n")
    follower = Follower(tmp_path)
    follower.look()
    log.unlink()
    assert follower.look() == []
    log.write_bytes(b"13:00 two\n13:00 three\n")  # most likely with the same inode number
    assert follower.look() == ["13:00 two", "13:00 three"]


def test_rotation_loses_nothing(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"one\n")
    follower = Follower(tmp_path, paths=(log,))
    assert follower.look() == ["one"]
    append(log, b"two\n")
    log.rename(tmp_path / "a.log.1")
    log.write_bytes(b"three\n")
    assert follower.look() == ["two", "three"]
    assert follower.look() == []


def test_far_behind_skips_to_the_news(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"begin\n")
    follower = Follower(tmp_path)
    follower.look()
    append(log, b"0123456789abcdef\n" * (READ_PER_LOOK // 8) + b"last\n")
    lines = follower.look()
    assert lines[-1] == "last"
    assert sum(map(len, lines)) <= READ_PER_LOOK
    assert set(lines[:-1]) == {"0123456789abcdef"}  # no half line where it went on


def test_each_file_once_and_nothing_outside(tmp_path: Path) -> None:
    root, outside = tmp_path / "out", tmp_path / "secret.log"
    (root / "attempt_1").mkdir(parents=True)
    outside.write_bytes(b"secret\n")
    (root / "attempt_1" / "trainer.log").write_bytes(b"line\n")
    (root / "latest").symlink_to("attempt_1")
    (root / "leak.log").symlink_to(outside)
    os.mkfifo(root / "fifo.log")
    follower = Follower(root, "attempt_1/*.log", "latest/*.log", "*.log")
    assert follower.look() == ["line"]
    assert [name for _, name in find(follower.sources)] == ["attempt_1/trainer.log"]


def test_a_single_path_may_be_anything_and_nothing_hangs(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "directory").mkdir()
    paths = (tmp_path / "fifo", tmp_path / "directory", tmp_path / "absent")
    follower = Follower(tmp_path, "none", paths=paths)
    assert follower.look() == []
    assert [bool(item.error) for item in follower.news] == [True, True, False]


def test_the_end_of_every_log_is_read_for_an_incident(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "inference.stdout").write_bytes(b"x" * 300_000 + b"\n\x1b[31mERROR died\x1b[0m\nno line end")
    (tmp_path / "logs" / "trainer.stdout").write_text("".join(f"line {n}\n" for n in range(1000)))
    (tmp_path / "logs" / "empty.stdout").touch()
    os.mkfifo(tmp_path / "logs" / "fifo.stdout")
    found = tails(Sources(tmp_path, ("logs/*.stdout",)))
    assert sorted(found) == ["logs/inference.stdout", "logs/trainer.stdout"]
    assert found["logs/inference.stdout"] == ("ERROR died", "no line end")
    assert found["logs/trainer.stdout"][0] == "line 600"
    assert found["logs/trainer.stdout"][-1] == "line 999"


def test_of_many_logs_those_written_last_are_read(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number}.log").write_text("x\n")
        os.utime(tmp_path / f"{number}.log", (number, number))
    assert sorted(map(int, (n.removesuffix(".log") for n in tails(Sources(tmp_path, ("*.log",)))))) == [*range(14, 30)]
