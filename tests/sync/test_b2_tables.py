"""Resumed uploads: each row of the table of states that a store can be in, with the outcome one wants.

Rows A (same file), E (other part size, found in the store) and G (finish happened, answer lost) are in
test_send_parts.py.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from podwatch.journal.upload_records import BegunUpload
from podwatch.policy.store_retention import ABANDONED_SECONDS, abandoned_uploads
from podwatch.stores.b2 import B2Store
from podwatch.stores.credentials import Credentials
from podwatch.sync.upload.child_job import UploadJob, taken_up
from podwatch.sync.upload.send_parts import Sending, SourceChanged
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server
from tests.sync.conftest import QUICK
from tests.sync.test_send_parts import MB, PART, Heard, fetch, job_of, write

pytestmark = pytest.mark.slow

SIZE = 38 * MB  # eight parts


class Killed(Exception):  # noqa: N818
    pass


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[B2Server]:
    with B2Server(tmp_path_factory.mktemp("b2")) as running:
        yield running


def open_store(server: B2Server, writer_id: str = "w") -> B2Store:
    return B2Store(BUCKET, Credentials(KEY_ID, KEY, server.url), writer_id=writer_id, connections=2, retry=QUICK)


class Half:
    """An upload that ended after some of its parts, with what the journal knows of it."""

    def __init__(self, server: B2Server, root: Path) -> None:
        write(root, large=SIZE)
        self.root, self.job = root, replace(job_of(root, ["large"]), connections=1)
        said = Heard()

        def stop(count: int) -> None:
            said.progress(count)
            if said.bytes > 4 * PART + MB:
                raise Killed

        store = open_store(server)
        with pytest.raises(Killed):
            Sending(self.job, store, said.say, stop).run()
        store.close()
        file = self.job.files[0]
        upload = next(str(d["upload"]) for kind, d in said.said if kind == "begun")
        hashes = {int(d["number"]): str(d["note"]) for kind, d in said.said if kind == "part"}
        assert sorted(hashes) == [1, 2, 3, 4]
        self.record = BegunUpload(
            path=file.remote, upload=upload, key=file.key, part_size=PART, size=file.size, mtime_ns=file.mtime_ns,
            inode=file.inode, device=file.device, parts=hashes,
        )  # fmt: skip

    def again(self, part_size: int = PART) -> UploadJob:
        """As the next podwatch would ask for it."""
        job = job_of(self.root, ["large"], part_size=part_size)
        return replace(job, files=taken_up(job.files, {self.record.path: self.record}, part_size))


def finish(server: B2Server, job: UploadJob, tmp_path: Path, writer_id: str = "w") -> Heard:
    """Send the rest; what is in the store then must be what is on disk now, and what was told."""
    heard, store = Heard(), open_store(server, writer_id)
    Sending(job, store, heard.say, heard.progress).run()
    found = heard.objects()["p/large"]
    data = fetch(store, "run/large", tmp_path / "back")
    size = job.part_size
    assert data == (Path(job.roots["p"]) / "large").read_bytes()
    assert found["parts_sha1"] == [hashlib.sha1(data[i : i + size]).hexdigest() for i in range(0, len(data), size)]
    store.close()
    return heard


@pytest.fixture
def half(server: B2Server, tmp_path: Path) -> Iterator[Half]:
    made = Half(server, tmp_path / "set")
    yield made
    store = open_store(server)
    for left in store.unfinished("run/"):
        store.cancel_large(left.upload)
    for version in store.versions("run/"):
        store.delete(version)
    store.close()


@pytest.mark.parametrize("part", [1, 7], ids=["B: one that was sent", "C: one that was not"])
def test_a_part_changed_locally_means_all_anew(server: B2Server, half: Half, tmp_path: Path, part: int) -> None:
    with (half.root / "large").open("r+b") as file:
        file.seek((part - 1) * PART + 17)
        file.write(b"changed")
    heard = finish(server, half.again(), tmp_path)
    assert heard.count() == {"begun": 1, "part": 8, "object": 1}
    store = open_store(server)
    left = list(store.unfinished("run/"))
    assert [u.id for u in left] == [half.record.upload]
    late = left[0].started_wall + ABANDONED_SECONDS + 1
    assert [x.identifier for x in abandoned_uploads(left, set(), late)] == [half.record.upload], "the sweep takes it"
    store.close()


def test_a_part_changed_after_the_job_was_made_voids_it(server: B2Server, half: Half) -> None:
    job = half.again()
    with (half.root / "large").open("r+b") as file:
        file.seek(6 * PART)
        file.write(b"changed")
    store = open_store(server)
    with pytest.raises(SourceChanged):
        Sending(job, store, Heard().say, lambda _: None).run()
    assert store.stat("run/large") is None
    store.close()


def test_d_another_writer_sends_only_what_is_missing(server: B2Server, half: Half, tmp_path: Path) -> None:
    heard = finish(server, half.again(), tmp_path, writer_id="another-podwatch")
    assert heard.count() == {"part": 4, "object": 1}
    assert heard.bytes == SIZE


def test_e_another_part_size_begins_anew_and_the_rest_is_swept(server: B2Server, half: Half, tmp_path: Path) -> None:
    heard = finish(server, half.again(part_size=8 * MB), tmp_path)
    assert heard.count() == {"begun": 1, "part": 5, "object": 1}
    store = open_store(server)
    assert [u.id for u in store.unfinished("run/")] == [half.record.upload]
    store.close()


def test_a_damaged_part_in_the_store_is_noticed_before_the_finish(server: B2Server, half: Half, tmp_path: Path) -> None:
    """The store's list says another hash than the journal: nothing of that upload is used."""
    part = server.directory / "part" / f"{half.record.upload}.2"
    part.write_bytes(os.urandom(PART))
    heard = finish(server, half.again(), tmp_path)
    assert heard.count() == {"begun": 1, "part": 8, "object": 1}
    assert not [v for v in server.versions("run/large") if v["action"] == "start"], "the damaged one was given up"


def test_parts_the_journal_did_not_hear_of_are_used(server: B2Server, half: Half, tmp_path: Path) -> None:
    """Killed between the store's answer and the journal: the store's own list counts."""
    known = {n: h for n, h in half.record.parts.items() if n < 3}
    half.record = replace(half.record, parts=known)
    assert finish(server, half.again(), tmp_path).count() == {"part": 4, "object": 1}
