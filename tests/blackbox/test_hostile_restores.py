"""Restores from a bucket that somebody else can write: what a forged checkpoint names is neither fetched nor written,
the command says so with one error, and the checkpoint before it is used.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.buckets import EARLIER, NEWEST, BarePod, Bucket, Change, copied, published_directory

pytestmark = pytest.mark.slow

HUGE = 2**70
DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with published_directory(tmp_path_factory.mktemp("published")) as made:
        yield made


@pytest.fixture
def pod(tmp_path: Path, published: Bucket) -> BarePod:
    return BarePod(tmp_path, copied(published, tmp_path / "bucket"))


def named(path: str) -> Change:
    """The last file has another name."""

    def change(document: dict[str, Any]) -> None:
        document["files"][-1]["path"] = path

    return change


NAMES = {
    "parent": "../../../outside/victim",
    "parent below a directory": "sub/../../../../outside/victim",
    "parent in the middle": "sub/../sub/.metadata",
    "absolute": "{outside}/victim",
    "backslashes": "sub\\..\\..\\evil",
    "here": "./evil",
    "empty segment": "sub//evil",
    "nothing": "",
    "a line": "a\nb",
    "nul": "a\0b",
    "escape": "a\x1b[2Jb",
    "terminal (C1)": "a\x9b2Jb",
    "right to left": "model\u202enib.exe",
    "lone surrogate": "a\ud800b",
    "too long": "a" * 300,
    "too deep": "a/" * 600 + "b",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_leads_out_or_deceives(pod: BarePod, name: str) -> None:
    path = NAMES[name].format(outside=pod.outside)
    pod.bucket.forge(named(path))
    pod.refuses()
    pod.falls_back()


@pytest.mark.parametrize("part", ["..", ".", "", "a/b", "../outside", "{outside}", "a\nb", ".hidden", "x" * 101])
def test_a_part_that_leads_out_or_deceives(pod: BarePod, part: str) -> None:
    pod.bucket.forge(lambda document: document["files"][-1].update(part=part.format(outside=pod.outside)))
    pod.refuses()
    pod.falls_back()


LINKS = {
    "parent": [("x", "../../../../outside/victim")],
    "absolute": [("x", "{outside}/victim")],
    "through another": [("sub/a", "."), ("b", "sub/a/../../../../../outside")],
    "name leads out": [("../outside/x", "victim")],
    "over a file": [(".metadata", "__0_0.distcp")],
    "a file below it": [("sub", "{outside}"), ("sub/x", "y")],
    "control characters": [("x", "a\x1b[2J")],
}


@pytest.mark.parametrize("name", LINKS)
def test_a_link_that_leads_out_or_deceives(pod: BarePod, name: str) -> None:
    links = [{"path": p, "part": "trainer", "target": t.format(outside=pod.outside)} for p, t in LINKS[name]]
    pod.bucket.forge(lambda document: document.update(symlinks=links))
    pod.refuses()
    pod.falls_back()


def lie(**fields: Any) -> Change:
    """The last file's fields."""

    def change(document: dict[str, Any]) -> None:
        document["files"][-1] |= fields

    return change


LIES: dict[str, Change] = {
    "size: one more": lambda d: lie(size=d["files"][-1]["size"] + 1)(d),
    "size: one less": lambda d: lie(size=d["files"][-1]["size"] - 1)(d),
    "size: negative": lie(size=-1),
    "size: huge": lie(size=HUGE),
    "size: a petabyte": lie(size=10**15),
    "size: words": lie(size="12"),
    "size: a fraction": lie(size=12.5),
    "mode: huge": lie(mode=HUGE),
    "time: huge": lie(mtime_ns=HUGE),
    "hash: of other bytes": lie(hashes=["sha1:" + "0" * 40]),
    "hash: of no kind that is known": lie(hashes=["md5:" + "0" * 32]),
    "hash: none": lie(hashes=[]),
    "hash: a line behind it": lie(hashes=["sha1:" + "0" * 40 + "\n"]),
    "hashes: of two pieces": lambda d: lie(hashes=d["files"][-1]["hashes"] * 2)(d),
    "piece size: none": lambda d: d.update(piece_size=0),
    "piece size: tiny": lambda d: d.update(piece_size=1),
    "one name twice": lambda d: d["files"].append(d["files"][0]),
    "a name as file and directory": lambda d: d["files"].append(d["files"][0] | {"path": d["files"][0]["path"] + "/x"}),
    "files: an object": lambda d: d.update(files={}),
    "another step": lambda d: d.update(step=EARLIER),
    "another save": lambda d: d.update(save_id="0" * 16),
    "another run": lambda d: d.update(run_id="another"),
    "another kind": lambda d: d.update(kind="podwatch-pointer"),
    "a later format": lambda d: d.update(schema_version=1000),
    "one of our own documents as a file": lambda d: d["files"][-1].update(part="intent.json", path="x"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_manifest_that_lies(pod: BarePod, name: str) -> None:
    pod.bucket.forge(LIES[name])
    pod.refuses()
    pod.falls_back()


TEXTS: dict[str, bytes] = {
    "nothing": b"",
    "a list": b"[]",
    "cut off": b'{"kind": "podwatch-manifest", ',
    "not UTF-8": b'\xff\xfe{"kind": 1}',
    "a deep list": b'{"kind": "podwatch-manifest", "schema_version": 1, "files": ' + DEEP + b"}",
    "many digits": b'{"kind": "podwatch-manifest", "schema_version": ' + b"9" * 6000 + b"}",
    "a huge count": b'{"kind": "podwatch-manifest", "schema_version": 1, "files": [' + b"[]," * (8 << 20) + b"0]}",
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_manifest_that_is_none(pod: BarePod, name: str) -> None:
    pod.bucket.forge_raw(TEXTS[name])
    pod.refuses()
    pod.falls_back()


def test_a_manifest_without_files_is_no_checkpoint(pod: BarePod) -> None:
    """It would be restored: 0 B, every size and hash verified; and the whole one before it would not be used."""
    pod.bucket.forge(lambda document: document.update(files=[]))
    pod.falls_back()


def test_a_manifest_with_one_key_twice(pod: BarePod) -> None:
    """Readers differ in which one they take: what one verified, another would use."""
    whole = pod.bucket.read(pod.bucket.manifest_name(NEWEST))
    pod.bucket.forge_raw(whole.replace(b'"run_id"', b'"step": 8, "run_id"', 1))
    pod.refuses()
    pod.falls_back()


def test_names_that_differ_in_case_or_spelling_only_stay_two_files(pod: BarePod) -> None:
    """Linux keeps them apart, and so does the store; neither replaces the other."""
    twins = ["Shard", "shard", "caf\u00e9", "cafe\u0301"]
    manifest = pod.bucket.manifest_name(NEWEST)
    like = next(f for f in pod.bucket.document(manifest)["files"] if f["part"] == "trainer")
    folder = manifest.removesuffix("manifest.json") + "trainer/"
    for path in twins:
        pod.bucket.write(folder + path, pod.bucket.read(folder + like["path"]))

    def change(document: dict[str, Any]) -> None:
        document["files"] += [like | {"path": path} for path in twins]

    pod.bucket.forge(change)
    done = pod.podwatch.command("restore", "--step", str(NEWEST), "--to", str(pod.target))
    assert done.returncode == 0, done.stderr
    found = {p.name: p.stat().st_size for p in pod.target.glob("trainer/*")}
    assert {path: found.get(path) for path in twins} == dict.fromkeys(twins, like["size"])
