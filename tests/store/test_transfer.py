"""The child that moves pieces, real: there and back on every kind of store, killed, with sources and names that lie."""

import contextlib
import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from podwatch.domain.checkpoint import FileEntry, SymlinkEntry
from podwatch.domain.errors import HostError, IntegrityError, SaveGone
from podwatch.store.keys import Piece, pieces
from podwatch.store.objects.b2 import B2Access
from podwatch.store.objects.base import ObjectInfo, Objects
from podwatch.store.objects.directory import DirectoryObjects
from podwatch.store.objects.errors import StoreOutage, StoreRefused
from podwatch.store.objects.open import open_objects
from podwatch.store.objects.s3 import S3Access
from podwatch.store.transfer.job import SentPiece, TransferJob, read_sent, stored_pieces
from podwatch.store.transfer.lanes import RateLimit, Report
from podwatch.store.transfer.send import Sending, SourceChanged, SourceForeign
from podwatch.store.transfer.start import Transfer
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server
from tests.support.s3server import KEY as S3_KEY
from tests.support.s3server import KEY_ID as S3_KEY_ID
from tests.support.s3server import S3Server

MIB = 1 << 20
PIECE = 2 * MIB
FOLDER = "run/save/"
NAMES = {"model/shard0.bin": 5 * MIB + 7, "model/ä b+c.bin": PIECE, ".metadata": 100, "empty": 0, "deep/er/x": 1}


@dataclass
class Rig:
    """A save on a pod, a store, and a place to restore it to."""

    home: Path
    url: str
    access: B2Access | S3Access | None
    server: Any = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    kill_after: int = 0
    """Pieces after which the child is killed."""

    @property
    def source(self) -> Path:
        return self.home / "source"

    @property
    def target(self) -> Path:
        return self.home / "target"

    @property
    def sent(self) -> Path:
        return self.home / "sent"

    def files(self) -> tuple[FileEntry, ...]:
        found = []
        for name in NAMES:
            status = (self.source / name).lstat()
            mode = status.st_mode & 0o777
            found.append(
                FileEntry(name, "trainer", status.st_size, status.st_mtime_ns, mode, status.st_ino, status.st_dev)
            )
        return tuple(found)

    def pieces(self) -> tuple[Piece, ...]:
        return tuple(pieces(self.files(), PIECE))

    def store(self) -> Objects:
        return open_objects(self.url, self.access)

    def stored(self) -> tuple[str, ...]:
        store = self.store()
        listing = {item.key.removeprefix(FOLDER): item for item in store.list(FOLDER)}
        store.close()
        return stored_pieces(self.files(), PIECE, read_sent(self.sent), listing)

    def hashed(self) -> tuple[FileEntry, ...]:
        """The files with the hashes that were sent."""
        sent, hashes = read_sent(self.sent), dict[int, tuple[str, ...]]()
        for piece in self.pieces():
            hashes[piece.file] = (*hashes.get(piece.file, ()), sent[piece.name].hash)
        return tuple(replace(file, hashes=hashes[number]) for number, file in enumerate(self.files()))

    @contextlib.contextmanager
    def job(self, root: Path, **more: Any) -> Iterator[TransferJob]:
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield TransferJob(
                **{
                    "store": self.url,
                    "folder": FOLDER,
                    "files": self.files(),
                    "piece_size": PIECE,
                    "roots": {"trainer": descriptor},
                    "sent": str(self.sent),
                    "connections": 4,
                    **more,
                }
            )
        finally:
            os.close(descriptor)

    def send(self, started: Callable[[Transfer], object] = id, **more: Any) -> None:
        with self.job(self.source, **{"direction": "send", "done": self.stored(), **more}) as job:
            self._run(job, started)

    def fetch(self, started: Callable[[Transfer], object] = id, **more: Any) -> None:
        self.target.mkdir(exist_ok=True)
        with self.job(self.target, **{"direction": "fetch", "files": self.hashed(), **more}) as job:
            self._run(job, started)

    def _run(self, job: TransferJob, started: Callable[[Transfer], object]) -> None:
        transfer = Transfer(job)
        started(transfer)
        self.messages.clear()

        def hear(message: dict[str, Any]) -> None:
            self.messages.append(message)
            if self.done() and self.done() == self.kill_after:
                transfer.kill()

        transfer.run(self.access, hear)

    def done(self) -> int:
        return sum(message.get("type") == "piece" for message in self.messages)

    def same(self) -> None:
        for name in NAMES:
            there, here = self.target / name, self.source / name
            assert there.read_bytes() == here.read_bytes(), name
            assert (there.stat().st_mode, there.stat().st_mtime_ns) == (here.stat().st_mode, here.stat().st_mtime_ns)


@pytest.fixture(params=["file", "b2", "s3"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    for name, size in NAMES.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size))
        path.chmod(0o640)
        os.utime(path, ns=(1, 1_700_000_000_123_456_789))
    if request.param == "file":
        (tmp_path / "store").mkdir()  # the daemon makes it; one that vanished is an outage
        yield Rig(tmp_path, f"file://{tmp_path}/store", None)
    elif request.param == "b2":
        with B2Server(tmp_path / "b2") as b2:
            yield Rig(tmp_path, f"b2://{BUCKET}", B2Access(KEY_ID, KEY, b2.url), b2)
    else:
        with S3Server(tmp_path / "s3") as s3:
            yield Rig(tmp_path, "s3://test-bucket", S3Access(S3_KEY_ID, S3_KEY, endpoint=s3.url), s3)


def when_uploading(rig: Rig, act: Callable[[], object]) -> Callable[[Transfer], object]:
    """Act as soon as the first piece is under way."""
    before = rig.server.calls().get("b2_upload_file", 0)

    def watch(_: Transfer) -> None:
        def wait() -> None:
            while rig.server.calls().get("b2_upload_file", 0) == before:
                time.sleep(0.02)
            act()

        threading.Thread(target=wait, daemon=True).start()

    return watch


only = pytest.mark.parametrize("rig", ["b2"], indirect=True)


def test_there_and_back(rig: Rig) -> None:
    rig.send()
    assert set(rig.stored()) == {piece.name for piece in rig.pieces()}
    assert {m["name"] for m in rig.messages if m["type"] == "piece"} == set(rig.stored())
    rig.fetch(links=(SymlinkEntry("model/latest", "trainer", "shard0.bin"),))
    rig.same()
    assert (rig.target / "model/latest").readlink() == Path("shard0.bin")
    rig.fetch()
    assert not (rig.target / "model/latest").exists(), "what the job does not name is removed from staging"
    rig.same()


def test_a_killed_send_continues(rig: Rig) -> None:
    for count in (1, 2):
        rig.kill_after = count
        with pytest.raises(HostError, match="stopped"):
            rig.send(connections=1, rate=10e6)
    before = rig.stored()
    assert len(before) >= 3
    rig.kill_after = 0
    rig.send()
    again = {m["name"] for m in rig.messages if m["type"] == "piece"}
    assert not again & set(before), "what counts is not sent again"
    assert set(rig.stored()) == {piece.name for piece in rig.pieces()}
    rig.fetch()
    rig.same()


@only
def test_a_killed_fetch_continues(rig: Rig) -> None:
    rig.send()
    rig.kill_after = 2
    with pytest.raises(HostError, match="stopped"):
        rig.fetch(connections=1, rate=10e6)
    rig.kill_after = 0
    done = {m["name"] for m in rig.messages if m["type"] == "piece"}
    assert len(done) >= 2
    before = rig.server.sent()
    rig.fetch()
    rig.same()
    whole, kept = sum(NAMES.values()), sum(piece.size for piece in rig.pieces() if piece.name in done)
    assert rig.server.sent() - before <= whole - kept


@only
def test_a_source_that_changed_voids_the_save(rig: Rig) -> None:
    files = rig.files()
    shard = rig.source / "model/shard0.bin"
    shard.write_bytes(os.urandom(5 * MIB + 7))
    with pytest.raises(SourceChanged):
        rig.send(files=files)
    with pytest.raises(SourceChanged):
        rig.send(when_uploading(rig, lambda: shard.write_bytes(b"short")), connections=1, rate=4e6)
    shard.unlink()
    shard.symlink_to("/etc/passwd")
    with pytest.raises(SourceChanged):
        rig.send(files=files)


@only
def test_a_piece_that_changes_on_its_way(rig: Rig) -> None:
    """The store refuses its hash; the save is void, and no outage is reported."""
    shard = rig.source / "model/shard0.bin"
    with pytest.raises(SourceChanged):
        rig.send(when_uploading(rig, lambda: shard.write_bytes(os.urandom(5 * MIB + 7))), connections=1, rate=4e6)


@pytest.mark.parametrize("rig", ["file"], indirect=True)
def test_no_piece_of_a_changed_file_is_noted(rig: Rig) -> None:
    """Else a kill before the end of the file would leave old and new bytes that all count as sent."""

    class Changing(DirectoryObjects):
        def put(self, key: str, source: Any, hashes: Any = None) -> None:
            super().put(key, source, hashes)
            (rig.source / "model/shard0.bin").write_bytes(os.urandom(5 * MIB + 7))

    made = rig.job(rig.source, direction="send", files=rig.files()[:1], connections=1)
    with made as job, pytest.raises(SourceChanged):
        Sending(job, Changing(rig.home / "store"), Report(dict)).run()
    assert read_sent(rig.sent) == {}


@only
def test_one_upload_runs_at_a_time(rig: Rig) -> None:
    """The child of a podwatch that was killed may still be ending."""
    lock = os.open(rig.home, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    sending = threading.Thread(target=rig.send)
    sending.start()
    time.sleep(1.5)
    assert (sending.is_alive(), rig.done()) == (True, 0)
    os.close(lock)
    sending.join()
    assert len(rig.stored()) == len(rig.pieces())


@only
def test_a_replaced_file_is_seen_at_its_end(rig: Rig) -> None:
    """The open file stays as it was; its name refers to another one by then."""
    shard = rig.source / "model/shard0.bin"

    def swap() -> None:
        (rig.source / "new").write_bytes(b"x")
        (rig.source / "new").rename(shard)

    with pytest.raises(SourceChanged):
        rig.send(when_uploading(rig, swap), connections=1, rate=4e6)


@only
@pytest.mark.root
def test_a_hard_link_to_another_users_file_is_not_sent(rig: Rig) -> None:
    foreign = rig.home / "foreign"
    foreign.write_bytes(b"secret")
    os.chown(foreign, 54321, 54321)
    (rig.source / "empty").unlink()
    (rig.source / "empty").hardlink_to(foreign)
    with pytest.raises(SourceForeign, match="54321"):
        rig.send(owners=(1000,))
    assert not [v for v in rig.server.versions() if "empty" in v["name"]]


@only
def test_what_the_store_lost_or_damaged(rig: Rig) -> None:
    rig.send()
    store = rig.store()
    key = next(piece.name for piece in rig.pieces() if piece.size == PIECE)
    version = next(v for v in rig.server.versions(FOLDER + key))
    rig.server.admin("damage", file_id=version["file_id"], at=1000)
    with pytest.raises(IntegrityError, match="recorded hash"):
        rig.fetch()
    store.delete([FOLDER + key])
    with pytest.raises(SaveGone):
        rig.fetch()
    assert set(rig.stored()) == {piece.name for piece in rig.pieces()} - {key}
    rig.send()
    rig.fetch()
    rig.same()
    store.close()


@only
@pytest.mark.parametrize(
    "links",
    [
        (SymlinkEntry("out", "trainer", "/etc"),),
        (SymlinkEntry("out", "trainer", "../../.."),),
        (SymlinkEntry("a", "trainer", "b"), SymlinkEntry("a/x", "trainer", "y")),
    ],
)
def test_hostile_links(rig: Rig, links: tuple[SymlinkEntry, ...]) -> None:
    rig.send()
    with pytest.raises(IntegrityError):
        rig.fetch(links=links)
    assert list(rig.target.iterdir()) == []


@only
@pytest.mark.parametrize("path", ["../out", "/etc/x", "a//b", "a/../../b", "a\0b", "\u202egnp"])
def test_hostile_names(rig: Rig, path: str) -> None:
    rig.send()
    files = (replace(rig.hashed()[0], path=path), *rig.hashed()[1:])
    with pytest.raises(IntegrityError, match="unsafe"):
        rig.fetch(files=files)
    assert sorted(p.name for p in rig.home.iterdir()) == ["b2", "sent", "source", "target"]
    assert list(rig.target.iterdir()) == []


@only
def test_hashes_that_do_not_fit(rig: Rig) -> None:
    rig.send()
    first, *others = rig.hashed()
    for wrong in ((), ("md4:00", *first.hashes[1:])):
        with pytest.raises(IntegrityError, match="no known kind"):
            rig.fetch(files=(replace(first, hashes=wrong), *others))
    for wrong in (first.hashes[1:], (*first.hashes, first.hashes[0])):
        with pytest.raises(ValueError, match="objects"):
            tuple(pieces([replace(first, hashes=wrong)], PIECE))


@only
def test_what_lies_in_staging_is_not_trusted(rig: Rig) -> None:
    rig.send()
    outside = rig.home / "outside"
    outside.write_bytes(b"as it was")
    (rig.target / "model").mkdir(parents=True)
    (rig.target / "model/shard0.bin").symlink_to(outside)
    (rig.target / ".metadata").hardlink_to(outside)
    (rig.target / "deep").write_bytes(b"a file where a directory belongs")
    (rig.target / "empty").mkdir()
    rig.fetch()
    rig.same()
    assert outside.read_bytes() == b"as it was"


@only
def test_no_room(rig: Rig) -> None:
    rig.send()
    first, *others = rig.hashed()
    with pytest.raises(HostError, match="disk space"):
        rig.fetch(files=(replace(first, size=1 << 60, hashes=first.hashes[:1]), *others), piece_size=1 << 60)


@only
def test_a_refusal_and_an_outage_reach_the_parent(rig: Rig) -> None:
    rig.server.fault("b2_upload_file", "status", status=403, code="storage_cap_exceeded", count=9)
    with pytest.raises(StoreRefused) as caught:
        rig.send()
    assert caught.value.kind == "cap"
    rig.server.admin("clear")
    rig.access = B2Access(KEY_ID, "another-secret", rig.server.url)
    with rig.job(rig.source, direction="send") as job, \
            pytest.raises(StoreRefused) as caught:  # fmt: skip
        Transfer(job).run(rig.access, print)
    assert (caught.value.kind, "another-secret" in str(caught.value)) == ("key", False)


def test_it_ends_when_its_input_closes(tmp_path: Path) -> None:
    for job in (b"", b'{"half": '):
        child = subprocess.Popen(
            [sys.executable, "-I", "-m", "podwatch.store.transfer", str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert child.stdin is not None
        child.stdin.write(job)
        child.stdin.close()
        assert child.wait(20) == 1


@only
def test_a_child_whose_parent_is_gone_ends(rig: Rig) -> None:
    rig.server.fault("b2_upload_file", "hang", seconds=60, count=9)
    pids: list[int] = []

    def watch(transfer: Transfer) -> None:
        def close() -> None:
            while transfer.pid is None or not rig.server.calls().get("b2_upload_file"):
                time.sleep(0.05)
            pids.append(transfer.pid)
            command = Path(f"/proc/{transfer.pid}/cmdline").read_bytes()
            assert KEY.encode() not in command + Path(f"/proc/{transfer.pid}/environ").read_bytes()
            assert transfer._process is not None
            assert transfer._process.stdin is not None
            transfer._process.stdin.close()

        threading.Thread(target=close, daemon=True).start()

    began = time.monotonic()
    with pytest.raises(HostError, match="ended early"):
        rig.send(watch)
    assert time.monotonic() - began < 20
    assert pids


@only
def test_nice_and_rate(rig: Rig) -> None:
    nice: list[int] = []

    def watch(transfer: Transfer) -> None:
        def look() -> None:
            while not rig.server.calls().get("b2_upload_file"):
                time.sleep(0.05)
            nice.append(os.getpriority(os.PRIO_PROCESS, transfer.pid or 0))

        threading.Thread(target=look, daemon=True).start()

    began = time.monotonic()
    rig.send(watch, nice=15, rate=3e6)
    assert nice == [15]
    assert time.monotonic() - began > sum(NAMES.values()) / 3e6 - 0.5


# -- decisions -------------------------------------------------------------------------------------------------------


def test_a_piece_counts_if_its_line_and_the_listing_agree(tmp_path: Path) -> None:
    file = FileEntry("x", "trainer", 10, 5, inode=7, device=8)
    a, b = (piece.name for piece in pieces([file], 6))
    line = SentPiece(a, "sha1:00", 6, file.identity)
    listing = {a: ObjectInfo(a, 6, 0.0), b: ObjectInfo(b, 4, 0.0)}

    def counts(sent: SentPiece, listed: dict[str, ObjectInfo]) -> bool:
        return stored_pieces((file,), 6, {sent.name: sent}, listed) == (a,)

    assert counts(line, listing)
    assert not counts(line, {b: listing[b]})
    assert not counts(line, {a: ObjectInfo(a, 5, 0.0)})
    assert not counts(replace(line, size=5), listing)
    assert not counts(line, {a: ObjectInfo(a, 6, 0.0, "", "sha1:" + "9" * 40)}), "somebody's bytes"
    assert counts(replace(line, hash="sha256:1"), {a: ObjectInfo(a, 6, 0.0, "", "sha1:1")}), "not comparable"
    for changed in ((9, 7, 10, 5), (8, 9, 10, 5), (8, 7, 11, 5), (8, 7, 10, 6)):
        assert not counts(replace(line, identity=changed), listing)
    path = tmp_path / "sent"
    assert read_sent(path) == {}
    path.write_bytes(b"garbage\n[1]\n" + line.to_line() + replace(line, name=b).to_line()[:-1])
    assert read_sent(path) == {a: line}, "what a kill tore is sent again"


def test_the_rate_limit_counts_over_all_threads() -> None:
    now, slept = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    limit = RateLimit(100.0, lambda: now[0], sleep)
    for _ in range(10):
        limit.take(50)
    assert 4.5 <= now[0] <= 5.0
    free = RateLimit(0.0, lambda: now[0], sleep)
    slept.clear()
    free.take(1 << 40)
    assert slept == []


def test_outages_are_told_apart() -> None:
    from podwatch.store.transfer.__main__ import explain
    from podwatch.store.transfer.start import _raised

    for error in (
        StoreOutage("x", where="w"), StoreRefused("cap", "x", where="w", fix="f"), SaveGone("x"), IntegrityError("x"),
        SourceChanged("x"), SourceForeign("x"), HostError("x"), OSError(28, "No space left on device"),
    ):  # fmt: skip
        again = _raised(explain(error))
        assert type(again) is type(error)
