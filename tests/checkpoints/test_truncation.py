"""Real sets with one thing broken: a file cut anywhere, missing, zero from the middle on, or of another save.

What a check without hashes cannot see is written down here, file by file: a new file that nobody checks fails a test.
"""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drivers.checkpoints import Inspection, Layout, catalogue_of, judge, one_reader
from tests.support.checkpoints import ManualClock
from tests.support.golden import LONG, SOME, Golden, files_of

pytestmark = pytest.mark.slow

each = pytest.mark.parametrize("golden", SOME, ids=lambda g: g.name)

NOT_NEEDED = re.compile(
    r"""(?:.*/)?generation_config\.json | training_args\.bin | zero_to_(?:fp32|torch)\.py
    | (?:^|.*/)config\.json                  # of the model: a resume has it from elsewhere
    | rng_state(?:_\d+)?\.pth                # its absence is only logged by the Trainer
    """,
    re.VERBOSE,
)
"""May be missing: no resume needs it."""
UNASKED = {
    "hf-deepspeed": r"model\.safetensors",  # the weights are in the model states
    "verl": r"(?:actor|critic)/fsdp_config\.json",  # the world size stands in every name too
    # No index tells what there is; of these the learned file set knows (the next test but one).
    "accelerate": r"custom_checkpoint_\d+\.pkl|scheduler\.bin",
    # Arrays are found through a compressed tree in the manifest: what lacks is seen by the hashes of the upload only.
    "orbax": r".*/(?:d/[0-9a-f]{32}|_METADATA|_sharding|process_0|commit_success\.txt)|\d+/_CHECKPOINT_METADATA",
}
"""May be missing as far as a structural look can tell, by fixture."""
NO_STRUCTURE = re.compile(
    r"""zero_to_(?:fp32|torch)\.py | STABLE
    | .*/d/[0-9a-f]{32}                      # OCDBT data: found by the hash taken during upload
    | .*/(?:_sharding|array_metadatas/.*) | (?:.*/)?commit_success\.txt
    """,
    re.VERBOSE,
)
"""Cut off or filled with zeros, it cannot be told from a sound one."""
ZEROES_UNSEEN = re.compile(r".*\.safetensors|.*manifest\.ocdbt")
"""Zeros that were really written (no hole): header and size are right."""


@pytest.fixture(autouse=True)
def reader() -> Iterator[None]:
    with one_reader():
        yield


@pytest.fixture
def broken(golden: Golden, tmp_path: Path) -> tuple[Layout, Path, int]:
    """The finished run and its newest step; every file of it is put back between two damages."""
    out = tmp_path / "out"
    return golden.copy(out), out, golden.steps[-1]


def inside(golden: Golden, out: Path, path: Path) -> str:
    relative = str(path.relative_to(out))
    return re.sub(r"^(?:.*/)?(?:checkpoint-\d+|global_step_?\d+|step[_-]\d+|iter_\d+|checkpoint_\d+)/", "", relative)


def offsets(path: Path) -> list[int]:
    """Nothing, one byte, the edges of headers, the middle, all but one byte."""
    size = path.stat().st_size
    edges = {0, 1, size // 2, size - 1}
    if LONG:
        edges |= {4, 7, 8, 9, 10, 29, 30, 63, 64, 65, size - 2, size - 21, size - 22, size - 23, size // 4, size - 64}
        with path.open("rb") as file:
            edges.add(8 + int.from_bytes(file.read(8), "little"))  # the end of a safetensors header
    return sorted(e for e in edges if 0 <= e < size)


def refused(verdict: Inspection | None) -> bool:
    return verdict is None or not verdict.whole


class Damage:
    """Changes one file and puts it back, times included."""

    def __init__(self, path: Path) -> None:
        self.path, self.data, self.status = path, path.read_bytes(), path.stat()

    def write(self, data: bytes) -> None:
        self.path.write_bytes(data)
        self.keep_time()

    def keep_time(self, shift_ns: int = 0) -> None:
        stamp = self.status.st_mtime_ns + shift_ns
        os.utime(self.path, ns=(stamp, stamp))

    def undo(self) -> None:
        self.path.write_bytes(self.data)
        self.keep_time()


@each
def test_a_file_cut_anywhere(golden: Golden, broken: tuple[Layout, Path, int]) -> None:
    layout, out, step = broken
    seen = 0
    for path in files_of(layout, step):
        damage, name = Damage(path), inside(golden, out, path)
        for offset in offsets(path):
            damage.write(damage.data[:offset])
            verdict = judge(layout, step)
            if not NO_STRUCTURE.fullmatch(name) and damage.data[offset:] not in (b"\n", b"\r\n"):
                assert refused(verdict), f"{name} cut at {offset} of {len(damage.data)}"
                if verdict is not None and path.name not in verdict.reason:
                    assert path.parent.name in verdict.reason or "step" in verdict.reason, (name, verdict.reason)
                seen += 1
        damage.undo()
    verdict = judge(layout, step)
    assert verdict is not None
    assert verdict.whole, verdict.reason
    assert seen


@each
def test_a_file_that_is_missing(golden: Golden, broken: tuple[Layout, Path, int]) -> None:
    layout, out, step = broken
    for path in files_of(layout, step):
        damage, name = Damage(path), inside(golden, out, path)
        path.unlink()
        verdict = judge(layout, step)
        optional = NOT_NEEDED.fullmatch(name) or re.fullmatch(UNASKED.get(golden.name, r"(?!)"), name)
        assert optional or refused(verdict), f"without {name}"
        damage.undo()
    verdict = judge(layout, step)
    assert verdict is not None
    assert verdict.whole


@each
def test_zeros_from_the_middle_on(golden: Golden, broken: tuple[Layout, Path, int]) -> None:
    """A lost page cache after a power cut: full size, zeros. The deep look finds it wherever a format lets it."""
    layout, out, step = broken
    catalogue = catalogue_of(layout, ManualClock(), settle=5, settle_weak=60)
    assert catalogue.verify(step) == ()
    for path in files_of(layout, step):
        damage, name = Damage(path), inside(golden, out, path)
        if len(damage.data) < 2 or NO_STRUCTURE.fullmatch(name) or ZEROES_UNSEEN.fullmatch(name):
            continue
        half = len(damage.data) // 2
        damage.write(damage.data[:half] + bytes(len(damage.data) - half))
        reasons = catalogue.verify(step)
        assert reasons or name.endswith(".txt"), name
        damage.undo()
    assert catalogue.verify(step) == ()


@each
def test_a_file_of_another_save(golden: Golden, broken: tuple[Layout, Path, int]) -> None:
    """A newer file among older ones means that the set is being rewritten; an older one makes it another set."""
    layout, out, step = broken
    if len(golden.steps) < 2:
        return
    clock = ManualClock()
    clock.advance(100_000)

    def save_id() -> str:
        catalogue = catalogue_of(layout, clock, settle=5, settle_weak=60)
        catalogue.rescan()
        return next((s.save_id for s in catalogue.rescan() if s.step == step), "")

    original = save_id()
    assert original
    files = files_of(layout, step)
    for path in files if LONG else files[:2]:
        damage, name = Damage(path), inside(golden, out, path)
        damage.path.write_bytes(damage.data)
        damage.keep_time(-7_000 * 10**9)
        assert save_id() != original, f"{name} is of an earlier save"
        damage.undo()
    assert save_id() == original


@each
def test_a_file_that_is_newer_than_what_is_written_last(golden: Golden, broken: tuple[Layout, Path, int]) -> None:
    layout, out, step = broken
    if not golden.marked or golden.name in UNORDERED:
        return
    exempt = re.compile(LATER.get(golden.name, r"(?!)"))
    last = max(files_of(layout, step), key=lambda p: p.stat().st_mtime_ns)
    for path in files_of(layout, step):
        damage, name = Damage(path), inside(golden, out, path)
        if path == last or NOT_NEEDED.fullmatch(name) or exempt.fullmatch(name):
            continue
        damage.keep_time(7_000 * 10**9)
        assert refused(judge(layout, step)), f"{name} is newer than everything else"
        damage.undo()


UNORDERED = ("orbax", "lightning")
"""The whole is renamed at the end: times inside say nothing."""
LATER = {
    # The orchestrator and the trainer save apart from each other.
    "prime-rl:a": r"STABLE|.*progress\.pt",
    "prime-rl:b": r".*progress\.pt",
    # Rank 0 writes the marker without waiting for the other ranks (the recorded orders show it).
    "hf-deepspeed": r"latest|global_step\d+/.*|trainer_state\.json",
    "deepspeed": r".*_rank_.*",
    "deepspeed-zero3": r".*_rank_.*",
    "openrlhf": r".*_rank_.*",
}
"""Files that may be newer than the marker."""


@each
def test_a_half_removed_set(golden: Golden, broken: tuple[Layout, Path, int]) -> None:
    """The trainer's own rotation in progress: files vanish one after the other under our eyes."""
    layout, out, step = broken
    clock = ManualClock()
    catalogue = catalogue_of(layout, clock, settle=5, settle_weak=60)
    catalogue.rescan()
    clock.advance(10_000)
    assert any(s.step == step and s.complete for s in catalogue.rescan())
    for path in files_of(layout, step):
        path.unlink()
        name = inside(golden, out, path)
        found = next((s for s in catalogue.rescan() if s.step == step), None)
        blind = NOT_NEEDED.fullmatch(name) or re.fullmatch(UNASKED.get(golden.name, r"(?!)"), name)
        assert blind or found is None or not found.complete, name
    for part in [p for p in out.rglob("*") if p.is_dir() and golden.belongs(step, str(p.relative_to(out)))]:
        shutil.rmtree(part, ignore_errors=True)
    assert all(s.step != step or not s.complete for s in catalogue.rescan())


@pytest.mark.skipif(LONG, reason="all are here")
def test_the_other_fixtures() -> None:
    pytest.skip("the other fixtures: PODWATCH_LONG_TESTS=1, as `make test-torch` does")
