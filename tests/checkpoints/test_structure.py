"""Damage per format: truncations at every point, zero tails, wrong and missing files, hostile pickles."""

import os
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podwatch.checkpoints.formats import dcp, safetensors, sandbox, torch_zip, unpickler
from podwatch.checkpoints.formats.files import check_file, has_hole
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


def seen(directory: Path) -> dict[str, dcp.Shard]:
    return {p.name: dcp.Shard(p.stat().st_size, p.stat().st_mtime_ns) for p in directory.iterdir()}


@pytest.fixture
def golden_dcp(tmp_path: Path) -> Path:
    source = GOLDEN / "dcp"
    return lay(tmp_path / "dcp", {n: (source / n).read_bytes() for n in ("__0_0.distcp", ".metadata")})


# -- real files -----------------------------------------------------------------------------------------------------


def test_files_written_by_torch_pass(golden_dcp: Path) -> None:
    verdict = dcp.check(golden_dcp, seen(golden_dcp))
    assert verdict.whole, verdict.reason
    assert verdict.save_id == "944259d7-bd56-4f7d-a1a6-e464d34b86c2"
    assert verdict.world_size == 1
    assert verdict.keys == ("model", "optim", "progress")
    assert dcp.check_records(golden_dcp) == ()
    for name in ("progress.pt", "optimizer.pt", "legacy.pt", "model.safetensors"):
        assert check_file(GOLDEN / name) == ""
    assert torch_zip.is_legacy(GOLDEN / "legacy.pt")
    assert torch_zip.read_values(GOLDEN / "progress.pt") == {"progress#": 1, "progress.step": 5}
    assert safetensors.read_header(GOLDEN / "model.safetensors").names == {"w", "b"}


@pytest.mark.parametrize("name", ["progress.pt", "optimizer.pt", "model.safetensors"])
def test_real_file_cut_anywhere_is_found(tmp_path: Path, name: str) -> None:
    data = (GOLDEN / name).read_bytes()
    target = tmp_path / name
    for length in (*range(0, len(data), 1 if LONG else 31), len(data) - 1):
        target.write_bytes(data[:length])
        assert check_file(target), f"cut at {length} of {len(data)} went unnoticed"


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
    assert not has_hole(whole)
    if sparse.stat().st_blocks * 512 >= len(data):
        pytest.skip("this filesystem has no sparse files")
    assert has_hole(sparse)


def test_index_with_unsafe_or_missing_shards(tmp_path: Path) -> None:
    path = tmp_path / "i.json"
    for text in ("{", '{"weight_map": {}}', '{"weight_map": {"w": "../x"}}', '{"weight_map": {"w": 3}}', "[]"):
        path.write_text(text)
        assert safetensors.read_index(path).problem
    path.write_text('{"weight_map": {"w": "a.safetensors", "v": "a.safetensors"}}')
    index = safetensors.read_index(path)
    assert index.shards == {"a.safetensors"}
    assert safetensors.missing_tensors(index, [safetensors.Header(names=frozenset({"w"}))]) == {"v"}


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
    directory = lay(tmp_path / "d", dcp_files(ranks=2, save_id="same"))
    name = f"__{rank}_0.distcp"
    data = (directory / name).read_bytes()
    (directory / name).write_bytes(data[: min(cut, len(data) - 1)])
    verdict = dcp.check(directory, seen(directory))
    assert not verdict.whole
    assert verdict.damaged
    assert name in verdict.reason


def test_dcp_metadata_cut_anywhere(golden_dcp: Path) -> None:
    data = (golden_dcp / ".metadata").read_bytes()
    with sandbox.session():
        for length in (*range(0, len(data), 13 if LONG else 389), len(data) - 1):
            (golden_dcp / ".metadata").write_bytes(data[:length])
            assert not dcp.check(golden_dcp, seen(golden_dcp)).whole, f"cut at {length}"


def test_dcp_zero_filled_shard_is_found_by_records(tmp_path: Path) -> None:
    directory = lay(tmp_path / "d", dcp_files(ranks=1))
    shard = directory / "__0_0.distcp"
    data = shard.read_bytes()
    stamp = (directory / ".metadata").stat().st_mtime_ns
    shard.write_bytes(data[: len(data) // 2] + b"\0" * (len(data) - len(data) // 2))
    os.utime(shard, ns=(stamp, stamp))
    assert dcp.check(directory, seen(directory)).whole, "sizes alone cannot see it"
    assert "records are not written" in dcp.check_records(directory)[0]


def test_dcp_missing_stale_unfinished_and_leftover(tmp_path: Path) -> None:
    directory = lay(tmp_path / "d", dcp_files(ranks=2))
    files = seen(directory)

    without = {n: f for n, f in files.items() if n != "__1_0.distcp"}
    assert "shard __1_0.distcp is missing" in dcp.check(directory, without).reason
    assert not dcp.check(directory, without).damaged, "a missing piece is incomplete, not damaged"

    assert "no .metadata" in dcp.check(directory, {n: f for n, f in files.items() if n != ".metadata"}).reason
    assert ".metadata.tmp" in dcp.check(directory, {**files, ".metadata.tmp": dcp.Shard(1, 1)}).reason

    late = dcp.Shard(files["__0_0.distcp"].size, files[".metadata"].mtime_ns + 2_000_000_001)
    assert "newer than .metadata" in dcp.check(directory, {**files, "__0_0.distcp": late}).reason
    early = dcp.Shard(late.size, late.mtime_ns - 1)
    assert dcp.check(directory, {**files, "__0_0.distcp": early}).whole

    more = dcp.check(directory, {**files, "__2_0.distcp": dcp.Shard(10, 1)})
    assert more.whole
    assert more.leftovers == ("__2_0.distcp",)
    assert more.world_size == 2


@pytest.mark.parametrize("name", ["/etc/passwd", "../../x.distcp", "a/../../b"])
def test_dcp_paths_that_lead_out_are_refused(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = lay(tmp_path / "d", dcp_files())
    parsed = sandbox.Parsed({"need": {name: 10}, "save_id": "x", "plain": True, "keys": []})
    monkeypatch.setattr(sandbox, "parse", lambda *_: parsed)
    verdict = dcp.check(directory, {**seen(directory), name: dcp.Shard(10, 0)})
    assert "unsafe path" in verdict.reason
    assert not verdict.whole


# -- pickles that mean harm -----------------------------------------------------------------------------------------


class _Touch:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return (os.system, (f"touch {self.path}",))


def test_a_pickle_runs_and_imports_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    directory = lay(tmp_path / "d", {".metadata": pickle.dumps(_Touch(str(mark)))})
    assert not dcp.check(directory, seen(directory)).whole
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
        directory = lay(tmp_path / "d", {".metadata": evil})
        verdict = dcp.check(directory, seen(directory))
        assert not verdict.whole
        assert verdict.damaged


def test_mutated_metadata_never_escapes(golden_dcp: Path) -> None:
    import random

    chance = random.Random(7)
    data = (golden_dcp / ".metadata").read_bytes()
    with sandbox.session():
        for _ in range(400 if LONG else 15):
            bad = bytearray(data)
            for _ in range(chance.randint(1, 3)):
                bad[chance.randrange(len(bad))] = chance.randrange(256)
            (golden_dcp / ".metadata").write_bytes(bytes(bad))
            dcp.check(golden_dcp, seen(golden_dcp))  # any verdict, but a verdict


def test_child_prints_nothing_but_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"\x80\x04\x95 garbage")
    question = f'["dcp", "{tmp_path}/bad"]\n["dcp", "{tmp_path}/absent"]\n["values", "{tmp_path}/bad"]\n'
    done = subprocess.run(
        [sys.executable, "-I", "-S", unpickler.__file__], input=question, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 3


def test_answers_are_remembered_until_the_file_changes(golden_dcp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert dcp.check(golden_dcp, seen(golden_dcp)).whole
    monkeypatch.setattr(sandbox, "_ask", lambda *_: pytest.fail("asked again"))
    assert dcp.check(golden_dcp, seen(golden_dcp)).whole


def test_an_index_is_read_once_for_its_sizes_and_its_records(golden_dcp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real = unpickler.load
    monkeypatch.setattr(unpickler, "load", lambda data: (read.append(len(data)), real(data))[1])
    index = golden_dcp / ".metadata"
    sizes = unpickler.answer("dcp", str(index))
    records = unpickler.answer("records", str(index))
    assert len(read) == 1
    spans = {n: list(zip(flat[::2], flat[1::2], strict=True)) for n, flat in records["answer"].pop("records").items()}
    assert records == sizes
    assert {n: max(o + size for o, size in found) for n, found in spans.items()} == sizes["answer"]["need"]

    index.write_bytes(b"\x80\x04N.")  # another file under the same name: nothing of the old one may be told
    assert not unpickler.answer("records", str(index))["ok"]
    assert len(read) == 2


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


def test_a_reader_that_dies_is_asked_once_more(golden_dcp: Path) -> None:
    with sandbox.session():
        assert sandbox.parse("records", golden_dcp / ".metadata").answer is not None
        sandbox._local.reader._child.kill()
        assert sandbox.parse("records", golden_dcp / ".metadata").answer is not None


def test_structural_check_of_a_large_set_is_cheap(tmp_path: Path) -> None:
    """4 sparse GB: cost must not follow size (the promise is 0.2 s for 47 GB)."""
    for number in range(40):
        head = safetensors_bytes({"w": 25_000_000}, fill=b"")
        with (tmp_path / f"m{number}.safetensors").open("wb") as file:
            file.write(head)
            file.truncate(len(head) + 100_000_000)
    began = time.process_time()
    assert all(check_file(p) == "" for p in tmp_path.iterdir())
    assert time.process_time() - began < 0.2


def test_unknown_and_vanished_files(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"anything")
    (tmp_path / "x.txt").write_bytes(b"")
    (tmp_path / "x.json").write_bytes(b'{"a": ')
    assert check_file(tmp_path / "x.bin") == ""
    assert check_file(tmp_path / "x.txt") == ""
    assert "JSON" in check_file(tmp_path / "x.json")
    with pytest.raises(FileNotFoundError):
        check_file(tmp_path / "gone.pt")


def test_deepspeed_world_size_is_read_from_the_model_states(tmp_path: Path) -> None:
    path = tmp_path / "mp_rank_00_model_states.pt"
    path.write_bytes(torch_zip_bytes({"dp_world_size": 4, "module": {"w": object}}))
    values = torch_zip.read_values(path)
    assert values is not None
    assert values["dp_world_size"] == 4


def test_maker_and_copy(tmp_path: Path) -> None:
    """Copies that keep mtimes pass as well: shutil.copytree is what a restore by hand does."""
    write_hf_step(tmp_path, 5)
    shutil.copytree(tmp_path / "checkpoint-5", tmp_path / "copy")
    assert all(check_file(p) == "" for p in (tmp_path / "copy").iterdir())
