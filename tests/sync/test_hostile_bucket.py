"""A bucket that somebody else can write to: whatever lies there is refused clearly, or restored exactly; nothing is
written beside, memory stays bounded. What a single wrong field does is in test_restore.py; here are the tricks."""

import asyncio
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from podwatch.domain.errors import HostError, IntegrityError, PodwatchError, RemoteError
from podwatch.domain.manifest import ManifestSymlink, Pointer, sha1_hex
from podwatch.domain.safe_links import check_links
from podwatch.domain.safe_names import check_relative_path
from podwatch.sync.inventory import inventory
from podwatch.sync.verify_stored import verify_save
from tests.support.hurry import hurrying
from tests.sync.conftest import Run, World
from tests.sync.test_restore import fresh, rewrite, set_file, tree

pytestmark = pytest.mark.slow

DEEP = b'{"kind": "podwatch-latest", "schema_version": 1, "x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
EXTREMES = [10**19, 2**63, -(10**19), 10**300]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with step 10 in it, published once."""
    root = tmp_path_factory.mktemp("template")
    world = World(root / "pod", f"file://{root}/store")

    async def publish_one() -> None:
        syncer = world.syncer()
        await syncer.start()
        world.write_set(10, size=1000)
        world.scan()
        await syncer.sync_now()
        await syncer.stop()

    with hurrying():  # a module's fixture is made before each test's own
        asyncio.run(publish_one())
    world.journal.close()
    return root / "store"


@pytest.fixture
def bucket(local: World, tmp_path: Path, template: Path) -> World:
    shutil.copytree(template, tmp_path / "store", symlinks=True)
    return local


def put_raw(world: World, key: str, data: bytes) -> None:
    store = world.store()
    store.put_bytes(key, data)
    store.close()


def point_at(world: World, data: bytes) -> None:
    """``data`` as the newest save's manifest, with a pointer that fits it."""
    pointer = world.pointer()
    assert pointer is not None
    store = world.store()
    stored = store.put_bytes(pointer.manifest_key, data)
    lied = replace(pointer, manifest_file_id=stored.file_id, manifest_sha1=sha1_hex(data), manifest_size=len(data))
    store.put_bytes(world.keys.latest, lied.to_bytes())
    store.close()


def files_of(directory: Path) -> list[Path]:
    return [p for p in sorted(directory.rglob("*")) if p.is_file() and "state" not in p.parts]


def refused(world: World) -> str:
    """Restore and ls refuse with an error of ours, and write nothing. Returns what they said."""
    pod = fresh(world)
    before = files_of(world.directory.parent)
    with pytest.raises((RemoteError, HostError)) as caught:
        pod.restorer().fetch()
    assert files_of(world.directory.parent) == before
    pod.journal.close()
    store = world.store()
    saves, problem = inventory(store, world.keys)
    said = [problem, *(s.problem for s in saves), *(r for s in saves for r in verify_save(store, s))]
    store.close()
    text = str(caught.value) + " ".join(said)
    assert len(text) < 20_000, "an attacker's text is cut short"
    assert not any(ord(c) < 32 and c != "\n" for c in text), "and cannot play with the terminal"
    return text


POINTERS: dict[str, bytes] = {
    "deep nesting": DEEP,
    "cut off": b'{"kind": "podwatch-latest", ',
    "not utf-8": b'\xff\xfe{"kind": 1}',
    "empty": b"",
    "a list": b"[]",
    "huge": b'{"x": "' + b"a" * (2 << 20) + b'"}',
    "a number of many digits": b'{"kind": "podwatch-latest", "schema_version": ' + b"9" * 6000 + b"}",
}


@pytest.mark.parametrize("name", POINTERS)
def test_a_pointer_that_is_none(bucket: World, name: str) -> None:
    put_raw(bucket, bucket.keys.latest, POINTERS[name])
    pod = fresh(bucket)
    assert pod.restorer().fetch().step == 10, "found by its manifest"
    pod.journal.close()
    store = bucket.store()
    assert inventory(store, bucket.keys)[1], "ls says that the pointer is damaged"
    store.close()


POINTER: dict[str, Any] = {
    "schema_version": 1, "kind": "podwatch-latest", "generation": 1, "seq": 1, "run_id": "run", "lineage": "l",
    "step": 1, "writer_id": "w", "created_at": "", "manifest_sha1": "0" * 40, "manifest_size": 1, "total_bytes": 1,
}  # fmt: skip


@pytest.mark.parametrize("number", EXTREMES)
@pytest.mark.parametrize("field", ["generation", "seq", "step", "manifest_size", "total_bytes"])
def test_numbers_no_pointer_has(field: str, number: int) -> None:
    assert Pointer.from_bytes(json.dumps(POINTER).encode()).step == 1
    with pytest.raises(IntegrityError):
        Pointer.from_bytes(json.dumps(POINTER | {field: number}).encode())


@pytest.mark.parametrize("number", EXTREMES)
@pytest.mark.parametrize("field", ["size", "mtime_ns", "mode"])
def test_numbers_no_file_has(bucket: World, field: str, number: int) -> None:
    rewrite(bucket, set_file(**{field: number}))
    refused(bucket)


@pytest.mark.parametrize("document", [{"kind": "podwatch-manifest", "x": 0}, {}])
def test_a_deep_manifest(bucket: World, document: dict[str, Any]) -> None:
    text = json.dumps({**document, "schema_version": 1, "files": []}).encode()
    point_at(bucket, text.replace(b"[]", b"[" * 100_000 + b"]" * 100_000))
    assert "manifest.json" in refused(bucket)


def test_a_key_that_is_there_twice_is_refused(bucket: World) -> None:
    """Readers differ in which one they take: what one verified, another would use."""
    pointer = bucket.pointer()
    assert pointer is not None
    store = bucket.store()
    data = store.get_bytes(pointer.manifest_key)
    store.close()
    assert data is not None
    point_at(bucket, data.replace(b'"run_id"', b'"step": 10, "run_id"', 1))
    assert "twice" in refused(bucket)


TRICKS = {
    "lone surrogate": "checkpoint/a\ud800b",
    "escaped byte": "checkpoint/a\udc80b",
    "right to left": "checkpoint/model\u202enib.exe",
    "isolate": "checkpoint/a\u2066b",
    "terminal (C1)": "checkpoint/a\u009b2Jb",
    "escape": "checkpoint/a\x1b[2Jb",
    "line": "checkpoint/a\nb",
    "line separator": "checkpoint/a\u2028b",
    "too long a segment": "checkpoint/" + "a" * 300,
}


@pytest.mark.parametrize("name", TRICKS)
def test_names_that_deceive(bucket: World, name: str) -> None:
    pointer = bucket.pointer()
    assert pointer is not None
    key = bucket.keys.save(10, pointer.save_id) + TRICKS[name]
    rewrite(bucket, set_file(path=TRICKS[name], key=key))
    refused(bucket)


@pytest.mark.parametrize("target", ["a\ud800", "a\x1b[2J", "a\u202eb", "a" * 5000])
def test_links_that_deceive(target: str) -> None:
    with pytest.raises(IntegrityError):
        check_links([], [ManifestSymlink("part/link", "part", target)])


WAYS_OUT = {
    "through another link": [("a", "sub"), ("b", "a/../../../../../etc/passwd")],
    "a link to a link's directory": [("sub/up", ".."), ("out", "sub/up/../../..")],
    "absolute, at the end of a chain": [("a", "b"), ("b", "/etc/passwd")],
    "a loop": [("a", "b"), ("b", "a")],
}


@pytest.mark.parametrize("name", WAYS_OUT)
def test_links_through_links(bucket: World, name: str) -> None:
    """Each target looks harmless; together they reach a file of the pod's."""
    links = [{"path": f"checkpoint/{p}", "part": "checkpoint", "target": t} for p, t in WAYS_OUT[name]]
    rewrite(bucket, lambda doc: doc.update(symlinks=links))
    assert "link" in refused(bucket)


async def test_two_spellings_of_one_name_stay_two_files(local: World, run: Run) -> None:
    """NFC and NFD look alike; Linux keeps them apart, and so does the store."""
    root = local.write_set(10, size=1000)
    (root / "caf\u00e9").write_text("composed")
    (root / "cafe\u0301").write_text("decomposed")
    syncer = await run(local)
    local.scan()
    await syncer.sync_now()
    pod = fresh(local)
    pod.restorer().fetch()
    assert tree(pod.output / "checkpoints" / "step_10") == tree(root)
    pod.journal.close()


@pytest.mark.parametrize("path", ["a\u00a0b", "caf\u00e9", "\u6a21\u578b.bin", "a b", "\U0001f600"])
def test_honest_names_are_fine(path: str) -> None:
    assert check_relative_path(path) == path


MANY = """
import resource, sys
from podwatch.domain.errors import IntegrityError
from podwatch.domain.manifest import Manifest
size = 60 << 20
text = {
    "empty lists": b"[" + b"[]," * (size // 3) + b"0]",
    "one text": b'"' + b"a" * size + b'"',
}[sys.argv[1]]
doc = b'{"kind": "podwatch-manifest", "schema_version": 1, "files": ' + text + b"}"
del text
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    Manifest.from_bytes(doc)
except IntegrityError:
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.parametrize("kind", ["empty lists", "one text"])
def test_much_json_takes_little_memory(kind: str) -> None:
    done = subprocess.run([sys.executable, "-c", MANY, kind], capture_output=True, text=True, check=True, timeout=50)
    assert int(done.stdout) < 300, "MiB beside the 60 MiB of the document"


def test_more_than_a_manifest_can_be_is_not_even_read(bucket: World) -> None:
    point_at(bucket, b"[" * (100 << 20))
    assert "larger than any valid one" in refused(bucket)


async def test_publishing_over_a_pointer_nobody_understands_stops(bucket: World, run: Run) -> None:
    put_raw(bucket, bucket.keys.latest, DEEP)
    syncer = await run(bucket)
    bucket.write_set(15, size=1000)
    bucket.scan()
    with pytest.raises(PodwatchError):
        await syncer.sync_now()
    store = bucket.store()
    assert store.get_bytes(bucket.keys.latest) == DEEP, "it is not written over"
    store.close()


def test_a_hash_with_a_line_behind_it_is_none() -> None:
    with pytest.raises(IntegrityError):
        Pointer.from_bytes(json.dumps(POINTER | {"manifest_sha1": "0" * 40 + "\n"}).encode())
