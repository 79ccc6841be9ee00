"""The sums that a trainer takes itself: Megatron's ``integrity.json``, over a set that its own writer made."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from podwatch.checkpoints.hash_check import INTEGRITY, compare_own
from podwatch.checkpoints.known_checkpoints import Catalogue
from tests.support.checkpoints import ManualClock
from tests.support.golden import GOLDENS

STEP = 20


@pytest.fixture
def megatron(tmp_path: Path) -> tuple[Catalogue, Path]:
    layout = next(g for g in GOLDENS if g.name == "megatron").copy(tmp_path / "out")
    return Catalogue(layout, ManualClock(), settle=0, settle_weak=0), tmp_path / "out" / f"iter_{STEP:07d}"


def sign(directory: Path) -> None:
    """As Megatron's rank 0 does after everything else."""
    sums = {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(directory.iterdir())
        if p.is_file() and p.name != INTEGRITY
    }
    (directory / INTEGRITY).write_text(json.dumps({"algorithm": "sha256", "files": sums}, indent=2))


def test_without_sums_there_is_nothing_to_compare(megatron: tuple[Catalogue, Path]) -> None:
    catalogue, directory = megatron
    assert compare_own(catalogue.contents(STEP)) is None
    for text in (
        "{}",
        "[]",
        "not json",
        '{"files": 3}',
        '{"files": {"a": "short"}}',
        '{"algorithm": "md5", "files": {}}',
    ):
        (directory / INTEGRITY).write_text(text)
        assert compare_own(catalogue.contents(STEP)) is None, text


def test_a_flipped_bit_and_a_lost_file_are_named(megatron: tuple[Catalogue, Path]) -> None:
    catalogue, directory = megatron
    sign(directory)
    told: list[int] = []
    sound = compare_own(catalogue.contents(STEP), told.append)
    assert sound is not None
    assert sound.problems == ()
    assert sound.files == len(list(directory.iterdir())) - 1
    assert sound.size_bytes == sum(told) > 0

    shard = directory / "__0_0.distcp"
    data, before = shard.read_bytes(), shard.stat()
    middle = len(data) // 2
    shard.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    found = compare_own(catalogue.contents(STEP))
    assert found is not None
    assert found.problems == (f"checkpoint/{shard.name} differs from the hash in {INTEGRITY}",)
    shard.unlink()
    found = compare_own(catalogue.contents(STEP))
    assert found is not None
    assert found.problems == (f"checkpoint/{shard.name} is missing on this pod, but {INTEGRITY} lists it",)


def test_names_that_lead_out_are_not_followed(megatron: tuple[Catalogue, Path], tmp_path: Path) -> None:
    catalogue, directory = megatron
    (tmp_path / "secret").write_bytes(b"x")
    sums = {"../../secret": hashlib.sha256(b"x").hexdigest(), "/etc/passwd": "0" * 64}
    (directory / INTEGRITY).write_text(json.dumps({"algorithm": "sha256", "files": sums}))
    found = compare_own(catalogue.contents(STEP))
    assert found is not None
    assert len(found.problems) == 2
    assert found.size_bytes == 0
