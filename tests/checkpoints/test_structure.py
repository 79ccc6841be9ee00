"""Damage per format: truncations at every point, zero tails, wrong and missing files, hostile pickles."""

import os
import pickle
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podwatch.checkpoints.formats import safetensors, torch_zip, unpickler
from tests.drivers.checkpoints import Inspection, file_problem, judge, one_reader, open_layout, values_in_torch_file
from tests.support.checkpoints import dcp_files, safetensors_bytes, torch_zip_bytes, write_hf_step

GOLDEN = Path(__file__).parent / "golden"
LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
FUZZ = settings(
    deadline=None, max_examples=600 if LONG else 30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def lay(directory: Path, files: dict[str, bytes]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)
    return directory


def verdict(directory: Path) -> Inspection:
    """On a directory called ``step_5``."""
    found = judge(open_layout("dcp", directory.parent), 5)
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def reader() -> Iterator[None]:
    with one_reader():
        yield


@pytest.fixture
def golden_dcp(tmp_path: Path) -> Path:
    source = GOLDEN / "dcp"
    return lay(tmp_path / "dcp" / "step_5", {n: (source / n).read_bytes() for n in ("__0_0.distcp", ".metadata")})


# -- real files -----------------------------------------------------------------------------------------------------


def test_files_written_by_torch_pass(golden_dcp: Path) -> None:
    found = verdict(golden_dcp)
    assert found.whole, found.reason
    assert found.save_token == "944259d7-bd56-4f7d-a1a6-e464d34b86c2"
    assert found.world_size == 1
    for name in ("progress.pt", "optimizer.pt", "legacy.pt", "model.safetensors"):
        assert file_problem(GOLDEN / name) == ""
    assert torch_zip.is_legacy(GOLDEN / "legacy.pt")
    assert values_in_torch_file(GOLDEN / "progress.pt") == {"progress#": 1, "progress.step": 5}
    assert safetensors.read_header(GOLDEN / "model.safetensors").names == {"w", "b"}


@pytest.mark.parametrize("name", ["progress.pt", "optimizer.pt", "model.safetensors"])
def test_real_file_cut_anywhere_is_found(tmp_path: Path, name: str) -> None:
    data = (GOLDEN / name).read_bytes()
    target = tmp_path / name
    for length in (*range(0, len(data), 1 if LONG else 31), len(data) - 1):
        target.write_bytes(data[:length])
        assert file_problem(target), f"cut at {length} of {len(data)} went unnoticed"


# -- safetensors ----------------------------------------------------------------------------------------------------


@FUZZ
@given(cut=st.integers(0, 2000), extra=st.binary(min_size=1, max_size=50))
def test_safetensors_of_wrong_length(tmp_path: Path, cut: int, extra: bytes) -> None:
    data = safetensors_bytes({"a": 300, "b": 50})
    path = tmp_path / "m.safetensors"
    path.write_bytes(data[: min(cut, len(data) - 1)])
    assert safetensors.read_header(path).problem
    path.write_bytes(data + extra)
    assert safetensors.read_header(path).problem
    path.write_bytes(data)
    assert safetensors.read_header(path).problem == ""


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"not json",
        b'{"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 15]}}',
        b'{"w": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}',
        b'{"w": {"dtype": "F32", "shape": [4], "data_offsets": [4, 20]}}',
        b'{"w": {"dtype": "F32", "shape": [4]}}',
        b'{"w": 5}',
    ],
)
def test_safetensors_with_a_lying_header(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 16)
    assert safetensors.read_header(path).problem


def test_huge_header_length_is_refused_without_reading(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    assert "does not fit" in safetensors.read_header(path).problem


def test_preallocated_file_has_a_hole_and_a_finished_one_none(tmp_path: Path) -> None:
    data = safetensors_bytes({"w": 1_000_000})
    whole, sparse = tmp_path / "whole", tmp_path / "sparse"
    whole.write_bytes(data)
    with sparse.open("wb") as file:
        file.write(data[:4096])
        file.truncate(len(data))
    if sparse.stat().st_blocks * 512 >= len(data):
        pytest.skip("this filesystem has no sparse files")
    for path, hole in ((whole, False), (sparse, True)):
        directory = lay(tmp_path / f"of-{path.name}" / "step_5", dcp_files())
        shutil.move(path, directory / "model.safetensors")
        assert bool(verdict(directory).hole) is hole


def test_index_with_unsafe_or_missing_shards(tmp_path: Path) -> None:
    path = tmp_path / "i.json"
    for text in ("{", '{"weight_map": {}}', '{"weight_map": {"w": "../x"}}', '{"weight_map": {"w": 3}}', "[]"):
        path.write_text(text)
        assert safetensors.read_index(path).problem
    path.write_text('{"weight_map": {"w": "a.safetensors", "v": "a.safetensors"}}')
    index = safetensors.read_index(path)
    assert index.shards == {"a.safetensors"}


# -- torch zip ------------------------------------------------------------------------------------------------------


@FUZZ
@given(point=st.integers(0, 5000), tail=st.sampled_from(["cut", "zeros"]))
def test_torch_zip_cut_or_zero_filled(tmp_path: Path, point: int, tail: str) -> None:
    data = torch_zip_bytes({"a": 1}, (b"\x07" * 900, b"\x08" * 700))
    point = min(point, len(data) - 1)
    lost = b"" if tail == "cut" else b"\0" * (len(data) - point)
    path = tmp_path / "x.pt"
    path.write_bytes(data[:point] + lost)
    if path.read_bytes() != data:
        assert torch_zip.check(path)


def test_zip_that_is_not_torch(tmp_path: Path) -> None:
    import zipfile

    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme", "hello")
    assert "data.pkl" in torch_zip.check(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"x" * 1000)
    assert "compressed" in torch_zip.check(path)
    path.write_bytes(b"")
    assert torch_zip.check(path) == "is empty"
    path.write_bytes(b"\x7fELF" + b"x" * 100)
    assert "signature" in torch_zip.check(path)


# -- DCP ------------------------------------------------------------------------------------------------------------


@settings(FUZZ, max_examples=200 if LONG else 10)
@given(rank=st.integers(0, 1), cut=st.integers(0, 9000))
def test_dcp_shard_cut_anywhere(tmp_path: Path, rank: int, cut: int) -> None:
    directory = lay(tmp_path / "d" / "step_5", dcp_files(ranks=2, save_id="same"))
    name = f"__{rank}_0.distcp"
    data = (directory / name).read_bytes()
    (directory / name).write_bytes(data[: min(cut, len(data) - 1)])
    os.utime(directory / ".metadata")
    found = verdict(directory)
    assert not found.whole
    assert found.damaged
    assert name in found.reason


def test_dcp_metadata_cut_anywhere(golden_dcp: Path) -> None:
    data = (golden_dcp / ".metadata").read_bytes()
    for length in (*range(0, len(data), 13 if LONG else 389), len(data) - 1):
        (golden_dcp / ".metadata").write_bytes(data[:length])
        assert not verdict(golden_dcp).whole, f"cut at {length}"


def test_dcp_zero_filled_shard_is_found_by_records(tmp_path: Path) -> None:
    directory = lay(tmp_path / "d" / "step_5", dcp_files(ranks=1))
    shard = directory / "__0_0.distcp"
    data = shard.read_bytes()
    stamp = (directory / ".metadata").stat().st_mtime_ns
    shard.write_bytes(data[: len(data) // 2] + b"\0" * (len(data) - len(data) // 2))
    os.utime(shard, ns=(stamp, stamp))
    assert "records that are not written" in verdict(directory).reason, "sizes alone cannot see it"


def test_dcp_missing_stale_unfinished_and_leftover(tmp_path: Path) -> None:
    directory = lay(tmp_path / "d" / "step_5", dcp_files(ranks=2))
    shard, index, stamp = directory / "__1_0.distcp", directory / ".metadata", time.time_ns()

    def at(path: Path, after_ns: int) -> None:
        os.utime(path, ns=(stamp + after_ns, stamp + after_ns))

    for path in directory.iterdir():
        at(path, 0)
    for path in (shard, index):
        aside = path.rename(tmp_path / "aside")
        assert f"{path.name} is missing" in verdict(directory).reason
        assert not verdict(directory).damaged, "a missing piece is incomplete, not damaged"
        aside.rename(path)
    (directory / ".metadata.tmp").touch()
    assert ".metadata.tmp" in verdict(directory).reason
    (directory / ".metadata.tmp").unlink()
    at(shard, 2_000_000_001)
    assert "newer than .metadata" in verdict(directory).reason
    at(shard, 2_000_000_000)
    assert verdict(directory).whole
    (directory / "__2_0.distcp").write_bytes(b"of an earlier save")
    at(directory / "__2_0.distcp", -10)
    found = verdict(directory)
    assert found.whole
    assert found.leftovers == ("checkpoint/__2_0.distcp",)
    assert found.world_size == 2


@pytest.mark.parametrize("name", ["/etc/passwd", "../../x.distcp", "a/../../b"])
def test_dcp_paths_that_lead_out_are_refused(tmp_path: Path, name: str) -> None:
    """They are no files of the checkpoint, whatever exists there."""
    directory = lay(tmp_path / "d" / "step_5", dcp_files())
    (tmp_path / "x.distcp").write_bytes(bytes(4096))
    index = (directory / ".metadata").read_bytes()
    old = b"__0_0.distcp"
    assert index.count(old) > 0
    length = len(name)
    (directory / ".metadata").write_bytes(
        index.replace(len(old).to_bytes(1, "little") + old, length.to_bytes(1, "little") + name.encode())
    )
    assert not verdict(directory).whole


# -- pickles that mean harm -----------------------------------------------------------------------------------------


class _Touch:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return (os.system, (f"touch {self.path}",))


def test_a_pickle_runs_and_imports_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    directory = lay(tmp_path / "d" / "step_5", {".metadata": pickle.dumps(_Touch(str(mark)))})
    assert not verdict(directory).whole
    assert not mark.exists()
    unpickler.load(pickle.dumps(_Touch(str(mark))))
    assert not mark.exists()


def test_giant_allocation_stays_in_the_child(tmp_path: Path) -> None:
    # BINBYTES8 asking for 1 EiB, a long of 2 GiB, and a memo index that would make a list of 16 GiB.
    for evil in (
        b"\x80\x04\x8e" + (1 << 60).to_bytes(8, "little"),
        b"\x80\x04\x8b\xff\xff\xff\x7f",
        b"\x80\x04Nr\xff\xff\xff\x7f.",
    ):
        directory = lay(tmp_path / "d" / "step_5", {".metadata": evil})
        assert not verdict(directory).whole


def test_mutated_metadata_never_escapes(golden_dcp: Path) -> None:
    import random

    chance = random.Random(7)
    data = (golden_dcp / ".metadata").read_bytes()
    for _ in range(400 if LONG else 15):
        bad = bytearray(data)
        for _ in range(chance.randint(1, 3)):
            bad[chance.randrange(len(bad))] = chance.randrange(256)
        (golden_dcp / ".metadata").write_bytes(bytes(bad))
        verdict(golden_dcp)  # any verdict, but a verdict


def test_each_record_must_begin_and_end_as_torch_writes_it(tmp_path: Path) -> None:
    whole = b"PK\x03\x04" + bytes(30) + b"PK\x05\x06" + bytes(18)
    size = len(whole)
    path = tmp_path / "shard"
    path.write_bytes(whole * 2 + bytes(7) + whole + bytes(size) + b"PK\x03\x04" + bytes(size - 4))
    spans = [(0, size), (size, size), (2 * size + 7, size), (3 * size + 7, size), (4 * size + 7, size), (5 * size, 9)]
    with path.open("rb") as file:
        assert torch_zip.bad_records(file.fileno(), spans) == [3 * size + 7, 4 * size + 7, 5 * size]
        assert torch_zip.bad_records(file.fileno(), [(0, size - 1), (size, size)]) == [0]
        assert torch_zip.bad_records(file.fileno(), [(6 * size, size)]) == [6 * size]  # beyond its end


def test_structural_check_of_a_large_set_is_cheap(tmp_path: Path) -> None:
    """4 sparse GB: cost must not follow size (the promise is 0.2 s for 47 GB)."""
    for number in range(40):
        head = safetensors_bytes({"w": 25_000_000}, fill=b"")
        with (tmp_path / f"m{number}.safetensors").open("wb") as file:
            file.write(head)
            file.truncate(len(head) + 100_000_000)
    began = time.process_time()
    assert all(file_problem(p) == "" for p in tmp_path.iterdir())
    assert time.process_time() - began < 0.2


def test_unknown_and_vanished_files(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"anything")
    (tmp_path / "x.txt").write_bytes(b"")
    (tmp_path / "x.json").write_bytes(b'{"a": ')
    assert file_problem(tmp_path / "x.bin") == ""
    assert file_problem(tmp_path / "x.txt") == ""
    assert "JSON" in file_problem(tmp_path / "x.json")


def test_deepspeed_world_size_is_read_from_the_model_states(tmp_path: Path) -> None:
    path = tmp_path / "mp_rank_00_model_states.pt"
    path.write_bytes(torch_zip_bytes({"dp_world_size": 4, "module": {"w": object}}))
    values = values_in_torch_file(path)
    assert values is not None
    assert values["dp_world_size"] == 4


def test_maker_and_copy(tmp_path: Path) -> None:
    """Copies that keep mtimes pass as well: shutil.copytree is what a restore by hand does."""
    write_hf_step(tmp_path, 5)
    shutil.copytree(tmp_path / "checkpoint-5", tmp_path / "copy")
    assert all(file_problem(p) == "" for p in (tmp_path / "copy").iterdir())
