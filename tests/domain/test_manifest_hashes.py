"""Two hashes of each part: SHA-1 always, XXH3 where podwatch knew it."""

import json

import pytest

from podwatch.domain.errors import IntegrityError
from podwatch.domain.manifest import Manifest, ManifestFile
from podwatch.stores.base import StoredPart, recognized

SHA1, XXH3 = ("a" * 40, "b" * 40), ("c" * 32, "d" * 32)


def manifest(*fast: str) -> Manifest:
    file = ManifestFile("t/a", "t", 150, 1, 0o644, "run/a", "id", SHA1, fast)
    return Manifest("run", "line", 1, "s", "custom", "now", "w", 100, 150, (file,))


def test_both_are_kept() -> None:
    read = Manifest.from_bytes(manifest(*XXH3).to_bytes())
    assert read == manifest(*XXH3)
    assert [read.files[0].recorded(n) for n in (0, 1)] == [("xxh3", "c" * 32), ("xxh3", "d" * 32)]
    assert read.files[0].recorded(1, slow=True) == ("sha1", "b" * 40)


def test_one_of_an_older_podwatch_is_read_and_written_as_it_was() -> None:
    data = manifest().to_bytes()
    assert b"xxh3" not in data
    read = Manifest.from_bytes(data)
    assert read.to_bytes() == data, "its SHA-1 is in the pointer"
    assert read.files[0].recorded(1) == ("sha1", "b" * 40)


@pytest.mark.parametrize("wrong", [["c" * 32], ["c" * 32, "D" * 32], ["c" * 32, ""], ["c" * 32, 7], "cd", None])
def test_what_no_podwatch_writes_is_refused(wrong: object) -> None:
    document = json.loads(manifest(*XXH3).to_bytes())
    document["files"][0]["parts_xxh3"] = wrong
    with pytest.raises(IntegrityError, match="malformed"):
        Manifest.from_bytes(json.dumps(document).encode())


@pytest.mark.parametrize("etag", ["", "e tag"])
@pytest.mark.parametrize("xxh3", ["", "c" * 32])
def test_a_note_names_the_part(etag: str, xxh3: str) -> None:
    part = StoredPart(7, "a" * 40, etag, xxh3)
    assert StoredPart.noted(part.note, 7) == part


def test_a_note_of_an_older_podwatch() -> None:
    assert StoredPart.noted("a" * 40 + " etag", 7) == StoredPart(7, "a" * 40, "etag")
    assert StoredPart.noted("a" * 40, 7) == StoredPart(7, "a" * 40)


def test_a_listed_part_gets_its_xxh3_from_the_journal_only_for_the_same_bytes() -> None:
    known = {1: StoredPart(7, "a" * 40, "", "c" * 32), 2: StoredPart(7, "a" * 40, "", "c" * 32)}
    listed = {1: StoredPart(7, "a" * 40), 2: StoredPart(7, "b" * 40), 3: StoredPart(7, "a" * 40)}
    assert {n: part.xxh3 for n, part in recognized(listed, known).items()} == {1: "c" * 32, 2: "", 3: ""}
