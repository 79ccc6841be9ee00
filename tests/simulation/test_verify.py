"""The demo's proof must fail when something is wrong, else its summary is worth nothing."""

from pathlib import Path

import pytest

from podwatch.simulation.verify import prove_store
from podwatch.store.keys import RunKeys
from podwatch.store.objects.directory import DirectoryObjects
from tests.support.stored_save import Shelf

KEYS = RunKeys("demo")
CONTENT = bytes(range(256)) * 10


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    """Step 5 in a store, in pieces."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.bin").write_bytes(CONTENT)
    made = Shelf(lambda: DirectoryObjects(tmp_path / "store"), KEYS, piece_size=1000)
    made.save(5, {"trainer": source})
    return made


def test_a_whole_store_is_proved(shelf: Shelf, tmp_path: Path) -> None:
    shelf.save(10, {"trainer": tmp_path / "source"})
    proof = prove_store(tmp_path / "store", KEYS)
    assert (proof.step, proof.verified, proof.problems) == (10, (5, 10), ())
    assert proof.total_bytes == 2 * len(CONTENT)


def test_an_empty_store_proves_nothing(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    assert len(prove_store(tmp_path / "store", KEYS).problems) == 2
    assert prove_store(tmp_path / "absent", KEYS).problems != ()


@pytest.mark.parametrize("change", [b"", b"x" * 1000, CONTENT[:999]])
def test_a_changed_byte_is_found(shelf: Shelf, tmp_path: Path, change: bytes) -> None:
    name = shelf.names(5)[1]
    (tmp_path / "store" / shelf.folder(5) / name).write_bytes(change)
    proof = prove_store(tmp_path / "store", KEYS)
    assert proof.verified == ()
    assert any(name in problem for problem in proof.problems)
    assert {p.partition(" names")[0] for p in proof.problems[1:]} == {"the newest pointer", "latest.json"}


def test_a_pointer_to_nothing_is_found(shelf: Shelf, tmp_path: Path) -> None:
    manifest = shelf.put[5]
    shelf.point(manifest, manifest.to_bytes() + b" ")
    proof = prove_store(tmp_path / "store", KEYS)
    assert (proof.verified, len(proof.problems)) == ((5,), 2), "another manifest than the one that is there"
    shelf.remove_save(5)
    assert prove_store(tmp_path / "store", KEYS).verified == ()
