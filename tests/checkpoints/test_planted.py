"""What T puts in the place of a checkpoint's file, before or after it was seen: a FIFO must not block the daemon, and a
link must not make it read what T may not."""

import io
import os
import pickle
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.drivers.checkpoints import READERS, answer_about, legacy_torch_magic, one_reader
from tests.support.other_users import T, as_root, enterable, own

SECRET = b'{"weight_map": {"secret": "secret"}, "best_model_checkpoint": "checkpoint-7", "files": {}, "iteration": 1}'


@pytest.fixture
def place(tmp_path: Path) -> Path:
    enterable(tmp_path)
    place = tmp_path / "home" / "checkpoint-5"
    place.mkdir(parents=True)
    return place


def outcomes(read: Callable[[Path], object], path: Path, contents: Iterable[None] = (None,)) -> list[str]:
    """What it said of each content, within a few seconds; a thread, because one that hangs cannot be stopped."""
    said: list[str] = []

    def run() -> None:
        with one_reader():
            for _ in contents:
                try:
                    said.append(repr(read(path)))
                except Exception as error:
                    said.append(repr(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it hangs"
    return said


@pytest.mark.parametrize("name", READERS)
def test_a_fifo_blocks_nobody(place: Path, name: str) -> None:
    file, read = READERS[name]
    os.mkfifo(place / file)
    assert outcomes(read, place / file)


def contents(file: Path) -> Iterator[None]:
    """The same file with very different contents, one after the other: each reader tells at least two of them apart."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("x/data.pkl", pickle.dumps({"secret": 7}))
    kinds = (SECRET, b"", b"x = 1\n", b"7\n", pickle.dumps({"a": 1}), packed.getvalue(), legacy_torch_magic() * 9)
    for kind in kinds:
        file.write_bytes(kind)
        yield
    file.write_bytes(b"")
    os.truncate(file, 1 << 20)  # nothing but a hole
    yield


@pytest.mark.parametrize("name", READERS)
@as_root
def test_a_link_to_what_is_roots_tells_nothing_of_it(place: Path, tmp_path: Path, name: str) -> None:
    file, read = READERS[name]
    (tmp_path / "plain" / place.name).mkdir(parents=True)
    plain = tmp_path / "plain" / place.name / file
    told_apart = outcomes(read, plain, contents(plain))
    assert len(set(told_apart)) > 1, "the reader can tell"
    secret = tmp_path / "secret"
    (place / file).symlink_to(secret)
    own(tmp_path / "home", T)
    said = outcomes(read, place / file, contents(secret))
    assert (len(said), len(set(said))) == (len(told_apart), 1)


@pytest.mark.parametrize("what", ["pipe", "link", "another file"])
def test_a_child_that_reads_gets_the_very_file_that_was_listed(place: Path, what: str) -> None:
    """Exchanged after it was listed: no evidence about the checkpoint, or that it is being written; never whole."""
    path = place / ".metadata"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "link":
        path.symlink_to("/etc/passwd")
    else:
        path.write_bytes(b"no pickle")
    said, reason = answer_about(path)
    assert said in ("unknown", "not complete", "damaged")
    assert reason
