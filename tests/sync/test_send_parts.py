"""The queue of parts: over all files at once, going on after a kill, noticing a source that changes."""

import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.stores.b2 import B2Store
from podwatch.stores.base import ObjectStore, StoredPart
from podwatch.stores.credentials import Credentials
from podwatch.stores.local import LocalStore
from podwatch.stores.part_reader import FileSource
from podwatch.sync.connections import RateLimit
from podwatch.sync.upload.child_job import JobFile, UploadJob
from podwatch.sync.upload.send_parts import Sending, SourceChanged
from podwatch.system.pinned_directories import PinnedTree
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server
from tests.support.forking import kill
from tests.sync.conftest import Run, World, until

pytestmark = pytest.mark.slow

MB = 1_000_000
PART = 5 * MB


@pytest.fixture(params=["file", "b2"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    if request.param == "file":
        yield LocalStore(tmp_path / "store", writer_id="w")
        return
    with B2Server(tmp_path / "b2") as server:
        b2 = B2Store(BUCKET, Credentials(KEY_ID, KEY, server.url), writer_id="w", connections=4)
        yield b2
        b2.close()


def write(root: Path, **sizes: int) -> dict[str, bytes]:
    root.mkdir(exist_ok=True)
    contents = {}
    for name, size in sizes.items():
        block = hashlib.sha512(name.encode()).digest()
        contents[name] = (block * (size // 64 + 1))[:size]
        (root / name).write_bytes(contents[name])
    return contents


def job_of(root: Path, names: list[str], *, part_size: int = PART, resume: dict[str, Any] | None = None) -> UploadJob:
    files = []
    for name in names:
        found = (root / name).stat()
        upload, parts = (resume or {}).get(name, ("", {}))
        files.append(
            JobFile(
                part="p", path=name, remote=f"p/{name}", key=f"run/{name}", size=found.st_size, mode=0o644,
                mtime_ns=found.st_mtime_ns, inode=found.st_ino, device=found.st_dev, upload=upload, parts=parts,
            )
        )  # fmt: skip
    return UploadJob(
        step=1, save_id="s", store="", writer_id="w", part_size=part_size, connections=4, lock="",
        roots={"p": str(root)}, files=tuple(files), pins=PinnedTree((root,)).pins(),
    )  # fmt: skip


class Heard:
    def __init__(self) -> None:
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.bytes = 0

    def say(self, kind: str, **details: Any) -> None:
        self.said.append((kind, details))

    def progress(self, count: int) -> None:
        self.bytes += count

    def count(self) -> Counter[str]:
        return Counter(kind for kind, _ in self.said)

    def objects(self) -> dict[str, dict[str, Any]]:
        return {d["remote"]: d for kind, d in self.said if kind == "object"}


def fetch(store: ObjectStore, key: str, target: Path) -> bytes:
    with target.open("w+b") as file:
        store.get_file(key, file)
    return target.read_bytes()


def test_files_of_all_sizes_go_through_one_queue(store: ObjectStore, tmp_path: Path) -> None:
    root = tmp_path / "set"
    contents = write(root, empty=0, small=1000, exact=PART, large=17 * MB, other=6 * MB)
    heard = Heard()
    Sending(job_of(root, list(contents)), store, heard.say, heard.progress).run()
    assert heard.count() == {"object": 5, "begun": 2, "part": 4 + 2}
    assert heard.bytes == sum(map(len, contents.values()))
    for name, data in contents.items():
        found = heard.objects()[f"p/{name}"]
        expected = [hashlib.sha1(data[i : i + PART]).hexdigest() for i in range(0, len(data), PART)]
        assert (found["size"], found["parts_sha1"]) == (len(data), expected)
        assert fetch(store, f"run/{name}", tmp_path / "back") == data


def test_only_missing_parts_are_sent(store: ObjectStore, tmp_path: Path) -> None:
    root = tmp_path / "set"
    data = write(root, large=17 * MB)["large"]
    job = job_of(root, ["large"])
    upload = store.begin_large("run/large", len(data))
    descriptor = os.open(root / "large", os.O_RDONLY)
    note = store.put_part(upload, 3, FileSource(descriptor), 2 * PART, PART).note
    os.close(descriptor)
    heard = Heard()
    job = job_of(root, ["large"], resume={"large": (upload.id, {3: note})})
    Sending(job, store, heard.say, heard.progress).run()
    assert heard.count() == {"part": 3, "object": 1}, "begun anew, or part 3 sent again"
    assert heard.bytes == len(data)
    assert fetch(store, "run/large", tmp_path / "back") == data


@pytest.mark.parametrize("change", ["other part size", "a part we did not send", "unknown upload"])
def test_what_does_not_fit_is_sent_anew(store: ObjectStore, tmp_path: Path, change: str) -> None:
    root = tmp_path / "set"
    data = write(root, large=12 * MB)["large"]
    descriptor = os.open(root / "large", os.O_RDONLY)
    upload = store.begin_large("run/large", len(data))
    store.put_part(upload, 1, FileSource(descriptor), 0, 6 * MB if change == "other part size" else PART)
    os.close(descriptor)
    known = {1: hashlib.sha1(b"else").hexdigest()} if change == "a part we did not send" else {}
    if change == "unknown upload":
        store.cancel_large(upload)
    heard = Heard()
    Sending(job_of(root, ["large"], resume={"large": (upload.id, known)}), store, heard.say, heard.progress).run()
    assert heard.count() == {"begun": 1, "part": 3, "object": 1}
    assert fetch(store, "run/large", tmp_path / "back") == data
    assert list(store.unfinished("run/")) == [], "the old one was given up"


@pytest.mark.parametrize("same", [True, False])
def test_a_file_whose_ctime_is_another_is_compared_by_hash(store: ObjectStore, tmp_path: Path, same: bool) -> None:
    """Size and mtime can be set, as restoring tools do; a mere link changes the ctime just the same."""
    root = tmp_path / "set"
    data = write(root, large=17 * MB)["large"]
    path = root / "large"
    descriptor = os.open(path, os.O_RDONLY)
    upload = store.begin_large("run/large", len(data))
    note = store.put_part(upload, 3, FileSource(descriptor), 2 * PART, PART).note
    begun = os.fstat(descriptor)
    os.close(descriptor)
    time.sleep(0.01)  # the clock that ctime is taken from turns every 4 ms
    if same:
        os.link(path, tmp_path / "link")
    else:
        data = data[: 2 * PART] + bytes(PART) + data[3 * PART :]
        path.write_bytes(data)
        os.utime(path, ns=(begun.st_atime_ns, begun.st_mtime_ns))
    job = job_of(root, ["large"], resume={"large": (upload.id, {3: note})})
    job = replace(job, files=tuple(replace(f, ctime_ns=begun.st_ctime_ns) for f in job.files))
    heard = Heard()
    Sending(job, store, heard.say, heard.progress).run()
    assert heard.count() == ({"part": 3, "object": 1} if same else {"begun": 1, "part": 4, "object": 1})
    assert fetch(store, "run/large", tmp_path / "back") == data
    assert list(store.unfinished("run/")) == []


def test_a_finish_whose_answer_was_lost_is_found(tmp_path: Path) -> None:
    root = tmp_path / "set"
    data = write(root, large=12 * MB)["large"]
    with B2Server(tmp_path / "b2") as server:
        store = B2Store(BUCKET, Credentials(KEY_ID, KEY, server.url), writer_id="w")
        first = Heard()
        Sending(job_of(root, ["large"]), store, first.say, first.progress).run()
        upload = next(d["upload"] for kind, d in first.said if kind == "begun")
        notes = {d["number"]: d["note"] for kind, d in first.said if kind == "part"}
        again = Heard()
        Sending(job_of(root, ["large"], resume={"large": (upload, notes)}), store, again.say, again.progress).run()
        assert again.count() == {"object": 1}
        assert again.objects()["p/large"]["file_id"] == upload
        sent = [StoredPart.noted(notes[n], 0) for n in sorted(notes)]
        assert again.objects()["p/large"]["parts_sha1"] == [part.sha1 for part in sent]
        assert again.bytes == len(data)
        assert len(server.versions("large")) == 1
        store.close()


@pytest.mark.parametrize("how", ["written", "replaced", "deleted", "shorter", "swapped for a link"])
def test_a_source_that_changes_voids_the_set(tmp_path: Path, how: str) -> None:
    root = tmp_path / "set"
    write(root, large=17 * MB)
    job = job_of(root, ["large"])
    store = LocalStore(tmp_path / "store", writer_id="w")

    path, once = root / "large", threading.Lock()

    def progress(_: int) -> None:
        if not once.acquire(blocking=False):
            return
        if how == "written":
            with path.open("r+b") as file:
                file.write(b"new")
        elif how == "shorter":
            os.truncate(path, 100)
        else:
            path.rename(root / "away")
            if how == "replaced":
                path.write_bytes(b"x" * 17 * MB)
            elif how == "swapped for a link":
                path.symlink_to("away")

    heard = Heard()
    with pytest.raises(SourceChanged):
        Sending(job, store, heard.say, progress).run()
    assert "object" not in heard.count()
    assert store.stat("run/large") is None


async def test_a_killed_upload_goes_on_where_it_was(b2: World, run: Run) -> None:
    assert b2.server is not None
    b2.write_set(5, size=45 * MB)
    b2.scan()
    b2.server.fault("b2_upload_part", "slow", seconds=20, skip=4, count=100)
    syncer = await run(b2)
    save_id = b2.catalogue.sets[0].save_id

    def parts() -> int:
        return sum(len(u.parts) for u in b2.journal.begun(5, save_id).values())

    await until(lambda: parts() >= 4 and syncer._sender.running is not None)
    assert syncer._sender.running is not None
    assert syncer._sender.running.pid is not None
    kill(syncer._sender.running.pid)
    known = parts()
    b2.server.admin("clear")
    await until(lambda: syncer.status().last_step == 5)
    assert b2.violations() == []
    sent = sum(e["ep"] == "b2_upload_part" for e in b2.server.events())
    whole = 9  # 45 MB in parts of 5 MB
    assert whole <= sent <= whole + 4, f"at most one part per connection is sent again ({known} were known)"
    assert b2.journal.begun() == {}


async def test_an_abandoned_upload_is_given_up_in_the_store(b2: World, run: Run) -> None:
    assert b2.server is not None
    b2.write_set(5, size=45 * MB)
    b2.scan()
    b2.server.fault("b2_upload_part", "slow", seconds=0.3, count=100)
    syncer = await run(b2)
    await until(lambda: any(u.parts for u in b2.journal.begun().values()))
    await syncer.abandon(5)
    await until(lambda: not b2.journal.begun())
    store = b2.store()
    assert list(store.unfinished(b2.keys.root)) == []
    store.close()


# -- rate


class Ticking:
    """Time passes only in a sleep."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float, /) -> None:
        self.now += seconds


@given(counts=st.lists(st.integers(1, 10_000_000), min_size=1, max_size=50), rate=st.floats(1e5, 1e9))
def test_the_rate_is_kept(counts: list[int], rate: float) -> None:
    ticks = Ticking()
    limit = RateLimit(rate, ticks)
    for count in counts:
        limit.take(count)
    assert sum(counts) <= rate * (ticks.now + 0.25) * 1.0001 + 1
    assert ticks.now <= sum(counts) / rate + 1e-6


def test_no_limit_never_waits() -> None:
    ticks = Ticking()
    RateLimit(0, ticks).take(1 << 40)
    assert ticks.now == 0.0
