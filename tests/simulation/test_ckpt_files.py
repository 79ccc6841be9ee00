"""The files made without torch must pass the checks that real files pass, and fail them when cut."""

from pathlib import Path

import pytest

from podwatch.checkpoints.formats import safetensors, torch_zip
from podwatch.simulation.run_files import read_dcp, tensor_bytes, write_dcp, write_safetensors, write_torch_zip
from tests.drivers.checkpoints import Inspection, judge, open_layout, values_in_torch_file


@pytest.fixture
def step(tmp_path: Path) -> Path:
    (tmp_path / "step_5").mkdir()
    return tmp_path / "step_5"


def verdict(directory: Path) -> Inspection:
    found = judge(open_layout("dcp", directory.parent), 5)
    assert found is not None
    return found


def test_a_dcp_directory_is_whole(step: Path) -> None:
    save_id = write_dcp(step, ranks=2, bytes_per_rank=200_000, seed=5)
    found = verdict(step)
    assert (found.whole, found.reason, found.save_token, found.world_size) == (True, "", save_id, 2)
    assert read_dcp(step) == sum(path.stat().st_size for path in step.glob("__*"))


def test_a_cut_shard_is_seen_and_does_not_load(step: Path) -> None:
    write_dcp(step, ranks=1, bytes_per_rank=100_000, seed=1)
    shard = step / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert not verdict(step).whole
    with pytest.raises(ValueError, match="not a whole checkpoint shard"):
        read_dcp(step)


def test_without_metadata_nothing_loads(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no \.metadata"):
        read_dcp(tmp_path)


def test_two_saves_of_a_step_differ_only_by_their_id(tmp_path: Path) -> None:
    first = write_dcp(tmp_path, ranks=1, bytes_per_rank=50_000, seed=3)
    content = (tmp_path / "__0_0.distcp").read_bytes()
    assert write_dcp(tmp_path, ranks=1, bytes_per_rank=50_000, seed=3) != first
    assert len((tmp_path / "__0_0.distcp").read_bytes()) == len(content)
    assert not (tmp_path / ".metadata.tmp").exists()


def test_progress_files_can_be_read_without_torch(tmp_path: Path) -> None:
    path = tmp_path / "progress.pt"
    write_torch_zip(path, {"progress": {"step": 40, "name": "x"}})
    assert torch_zip.check(path) == ""
    assert values_in_torch_file(path) == {"progress#": 2, "progress.step": 40, "progress.name": "x"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["progress.pt"]


def test_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": b"123", "b": tensor_bytes(1, 5000)})
    assert safetensors.read_header(path) == safetensors.Header("", frozenset({"a", "b"}))
    assert len(tensor_bytes(1, (1 << 20) + 7)) == (1 << 20) + 7
