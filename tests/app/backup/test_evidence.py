"""Configuration, ends of logs and incident bundles as they are stored: bounded, and without a secret."""

import io
import os
import tarfile
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.app.backup.evidence import MOST_LOGS, LogEnds, bundles, configs
from podwatch.domain.safe_names import check_relative_path
from podwatch.domain.secrets import register
from podwatch.sensors.log_tail import Sources
from podwatch.store.evidence import (
    KEEP,
    KEEP_SECONDS,
    READ,
    Evidence,
    EvidenceKeeper,
    configuration,
    plain_name,
    stale_evidence,
)
from podwatch.store.objects.errors import StoreOutage, StoreRefused
from tests.support.memory_objects import KEYS, MemoryItem, MemoryObjects

SECRET = "s3cr3t-value-of-this-pod"
LOG_BYTES = 4000


def logs(root: Path, pattern: str) -> list[Evidence]:
    return LogEnds(LOG_BYTES).read(Sources(root, (pattern,)), "h")


@given(
    st.lists(
        st.one_of(
            st.text(alphabet="abc\n", max_size=60).map(lambda t: ("more", t)),
            st.text(alphabet="xyz\n", max_size=200).map(lambda t: ("again", t)),
        ),
        max_size=12,
    )
)
def test_a_log_that_is_read_bit_by_bit_is_read_whole(moves: list[tuple[str, str]]) -> None:
    """However it grows: a tail of what a fresh reader sees, or the same."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        path, ends, written = root / "a.log", LogEnds(100), ""
        path.write_text("")
        for move, text in moves:
            if move == "more":
                with path.open("a") as file:
                    file.write(text)
                written += text
            else:
                path.unlink()
                path.write_text(text)
                written = text
            os.utime(path, (time.time() + 3600,) * 2)  # still being written, however long this takes
            (found,) = ends.read(Sources(root, ("a.log",)), "h")
            whole = written.rpartition("\n")[0] + "\n" if "\n" in written else ""
            data = found.data.decode()
            assert len(data) <= 100
            assert whole.endswith(data)
            assert len(whole) >= 100 or data == whole


def test_a_last_line_without_an_end_is_shown_once_it_is_still(tmp_path: Path) -> None:
    path, ends = tmp_path / "a.log", LogEnds(LOG_BYTES)
    path.write_text("whole\nWANDB_API_KEY=abc")
    os.utime(path, (time.time() + 3600,) * 2)
    source = Sources(tmp_path, ("a.log",))
    assert ends.read(source, "h")[0].data == b"whole\n"
    os.utime(path, (time.time() - 10, time.time() - 10))
    assert ends.read(source, "h")[0].data == b"whole\nWANDB_API_KEY=[removed]"
    path.write_text("whole\nWANDB_API_KEY=abcdefghij\nmore\n")
    assert ends.read(source, "h")[0].data == b"whole\nWANDB_API_KEY=[removed]\nmore\n"
    path.write_text("whole\nWANDB_API_KEY=abcdefghij\nplain-value-1\n")
    assert ends.read(source, "h")[0].data == b"whole\nWANDB_API_KEY=[removed]\nplain-value-1\n"
    register("plain-value-1")
    assert ends.read(source, "h")[0].data == b"whole\nWANDB_API_KEY=[removed]\n[removed]\n"


def test_a_log_is_bounded_and_begins_with_a_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("".join(f"line {n} WANDB_API_KEY={SECRET}\n" for n in range(10_000)))
    (found,) = logs(tmp_path, "*.log")
    lines = found.data.decode().splitlines()
    assert LOG_BYTES / 2 < len(found.data) <= LOG_BYTES
    assert lines[-1] == "line 9999 WANDB_API_KEY=[removed]"
    assert all(line.startswith("line ") for line in lines)
    assert SECRET.encode() not in found.data


def test_a_rotated_log_brings_its_predecessor(tmp_path: Path) -> None:
    (tmp_path / "a.log.1").write_text("x" * 9000 + "\nbefore\n")
    (tmp_path / "a.log").write_text("after\n")
    (found,) = logs(tmp_path, "a.log")
    assert found.data == b"before\nafter\n"
    (tmp_path / "a.log.1").unlink()
    (tmp_path / "a.log.1").symlink_to("/etc/passwd")
    (found,) = logs(tmp_path, "a.log")
    assert found.data == b"after\n"


def test_no_more_than_so_many_logs_and_only_files(tmp_path: Path) -> None:
    for number in range(MOST_LOGS + 5):
        path = tmp_path / f"{number:02}.log"
        path.write_text("x\n")
        os.utime(path, (number, number))
    os.mkfifo(tmp_path / "pipe.log")
    (tmp_path / "link.log").symlink_to("/etc/passwd")
    found = logs(tmp_path, "*.log")
    assert sorted(one.name for one in found) == [f"h__{n:02}.log" for n in range(5, MOST_LOGS + 5)]


def test_a_file_that_looks_like_a_key_is_no_configuration(tmp_path: Path) -> None:
    names = {"rl.toml": 0o644, ".env": 0o644, "prod.env": 0o644, "private.toml": 0o600, "id.pem": 0o644, "big": 0o644}
    for name, mode in names.items():
        (tmp_path / name).write_bytes(b"x" * (2 << 20) if name == "big" else b"a = 1")
        (tmp_path / name).chmod(mode)
    (tmp_path / "binary").write_bytes(b"\0\1")
    found = configs([str(tmp_path / n) for n in (*names, "binary", "absent")])
    assert [one.name.partition("-")[2] for one in found] == ["rl.toml"]


def test_a_configuration_is_scrubbed_and_named_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "rl.toml"
    path.write_text(f'WANDB_API_KEY = "{SECRET}"\n')
    (first,) = configs([str(path)])
    assert SECRET.encode() not in first.data
    path.write_text("lr = 2\n")
    (second,) = configs([str(path)])
    assert first.name != second.name, "each version stays"


def test_bundles_that_are_no_bundles(tmp_path: Path) -> None:
    assert bundles(tmp_path / "absent", (), 0.0) == []
    (tmp_path / ".3.partial").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("/etc")
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "link").symlink_to("/etc/passwd")
    (tmp_path / "7" / "log").write_text(f"WANDB_API_KEY={SECRET}\n")
    (found,) = bundles(tmp_path, (), 0.0)
    assert found.name.endswith("-7.tar.gz")
    with tarfile.open(fileobj=io.BytesIO(found.data)) as archive:
        assert archive.getnames() == ["log"]
        member = archive.extractfile("log")
        assert member is not None
        assert SECRET.encode() not in member.read()
    assert bundles(tmp_path, {found.name}, 0.0) == []
    assert bundles(tmp_path, (), time.time() + 60) == []


@given(st.text(max_size=300))
def test_any_name_becomes_a_safe_one(text: str) -> None:
    name = plain_name(text)
    assert check_relative_path(name) == name
    assert "/" not in name
    assert not name.startswith(".")
    assert name.isascii()


# -- in the store


def log(data: bytes) -> Evidence:
    return Evidence("logs", "h__a.log", data, fixed=False)


def test_only_what_changed_is_sent() -> None:
    store = MemoryObjects()
    keeper = EvidenceKeeper(store, KEYS)
    config = configuration("rl.toml", "lr = 1\n")
    assert keeper.put([log(b"a"), config]) == 2
    assert keeper.put([log(b"a"), config]) == 0
    assert keeper.put([log(b"ab"), config]) == 1
    assert EvidenceKeeper(store, KEYS).put([log(b"ab"), config]) == 1, "a fixed name is not sent again by the next life"
    assert store.data[KEYS.evidence("logs") + "h__a.log"][0] == b"ab"


def test_of_each_kind_the_newest_stay_and_what_the_current_start_needs() -> None:
    store = MemoryObjects()
    names = [f"{number:03}-x.toml" for number in range(KEEP["config"] + 10)]
    for name in names:
        store.wall += 1.0
        store.put(KEYS.evidence("config") + name, b"x")
    store.put(KEYS.evidence("config") + "foreign/x", b"x")
    for name in READ:
        store.put(KEYS.evidence("config") + name, b"x")
        store.data[KEYS.evidence("config") + name] = (b"x", 1.0)
    store.put(KEYS.evidence("logs") + "one", b"x")
    assert EvidenceKeeper(store, KEYS).tidy({names[3]}) > 0
    left = [key.removeprefix(KEYS.evidence("config")) for key in store.data if key.startswith(KEYS.evidence("config"))]
    assert names[3] in left
    assert names[4] not in left
    assert set(names[-KEEP["config"] + 1 :]) <= set(left)
    assert "foreign/x" in left, "not a name of ours"
    assert set(READ) <= set(left), "they are read as long as the run exists"
    assert KEYS.evidence("logs") + "one" in store.data


def test_what_is_old_goes_but_never_the_last() -> None:
    items = [MemoryItem("new", 1, 1e9), MemoryItem("old", 1, 1e9 - KEEP_SECONDS - 1)]
    assert stale_evidence(items, 1e9, 9) == ["old"]
    assert stale_evidence(items[1:], 1e9, 9) == []


def test_a_key_that_cannot_delete_is_no_error_but_an_outage_is() -> None:
    store = MemoryObjects()
    for number in range(KEEP["logs"] + 2):
        store.put(KEYS.evidence("logs") + f"{number:03}", b"x")

    def fail(error: Exception) -> None:
        def before(operation: str, _key: str) -> None:
            if operation == "delete":
                raise error

        store.before = before

    fail(StoreRefused("permission", "no", where="", fix=""))
    assert EvidenceKeeper(store, KEYS).tidy() == 0
    fail(StoreOutage("away", where=""))
    with pytest.raises(StoreOutage):
        EvidenceKeeper(store, KEYS).tidy()
