"""The demo's proof must fail when something is wrong, else its summary is worth nothing."""

import hashlib
import io
from dataclasses import replace
from pathlib import Path

import pytest

from podwatch.domain.manifest import Keys, Manifest, ManifestFile, Pointer
from podwatch.simulation.verify import prove_store
from podwatch.stores.local import LocalStore
from tests.support.put_file import put_file

KEYS = Keys("demo")
PART = 1000


def sha1(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


def publish(root: Path, step: int) -> None:
    store = LocalStore(root, writer_id="w")
    content = bytes(range(256)) * 10
    key = KEYS.data(step, "s1", "trainer/a.bin")
    stored = put_file(store, key, io.BytesIO(content), len(content), part_size=PART)
    file = ManifestFile("trainer/a.bin", "trainer", len(content), 1, 0o644, key, "", stored.parts_sha1)
    manifest = Manifest(
        run_id="demo",
        lineage="l",
        step=step,
        save_id="s1",
        layout="prime-rl",
        created_at="2026-01-01T00:00:00Z",
        writer_id="w",
        part_size=PART,
        total_bytes=len(content),
        files=(file,),
    )
    raw = manifest.to_bytes()
    store.put_bytes(KEYS.manifest(step, "s1"), raw)
    pointer = Pointer(
        generation=1,
        seq=step,
        run_id="demo",
        lineage="l",
        step=step,
        writer_id="w",
        created_at="2026-01-01T00:00:00Z",
        save_id="s1",
        manifest_key=KEYS.manifest(step, "s1"),
        manifest_sha1=sha1(raw),
        manifest_size=len(raw),
    )
    store.put_bytes(KEYS.latest, pointer.to_bytes())
    store.close()


def test_a_whole_store_is_proved(tmp_path: Path) -> None:
    publish(tmp_path, 5)
    publish(tmp_path, 10)
    proof = prove_store(tmp_path, KEYS)
    assert (proof.step, proof.verified, proof.problems) == (10, (5, 10), ())
    assert proof.total_bytes == 5120


def test_an_empty_store_proves_nothing(tmp_path: Path) -> None:
    assert prove_store(tmp_path, KEYS).problems == ("no latest.json in the store",)


@pytest.mark.parametrize("change", [b"", b"x" * 2560, bytes(range(256)) * 10 + b"x"])
def test_a_changed_byte_is_found(tmp_path: Path, change: bytes) -> None:
    publish(tmp_path, 5)
    (tmp_path / KEYS.data(5, "s1", "trainer/a.bin")).write_bytes(change)
    proof = prove_store(tmp_path, KEYS)
    assert any("a.bin" in problem for problem in proof.problems)
    assert "latest.json names an incomplete checkpoint" in proof.problems


def test_a_pointer_to_nothing_is_found(tmp_path: Path) -> None:
    publish(tmp_path, 5)
    raw = Pointer.from_bytes((tmp_path / KEYS.latest).read_bytes())
    (tmp_path / KEYS.latest).write_bytes(replace(raw, step=10).to_bytes())
    assert prove_store(tmp_path, KEYS).problems == ("latest.json names step 10, which has no complete manifest",)
    (tmp_path / KEYS.manifest(5, "s1")).unlink()
    assert prove_store(tmp_path, KEYS).problems != ()
