"""The simulated checkpoints are whole in the eyes of podwatch and of the trainer, and neither takes a cut one."""

from pathlib import Path

import pytest

from podwatch.checkpoints.formats import safetensors
from podwatch.simulation.run_files import INDEX, load, save, tensor_bytes, write_safetensors


def test_a_saved_checkpoint_loads_and_has_its_index_last(tmp_path: Path) -> None:
    save(tmp_path, ranks=2, bytes_per_rank=200_000, seed=5)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert load(tmp_path) == sum(path.stat().st_size for path in shards)
    assert len(shards) == 2
    assert {path.name for path in tmp_path.iterdir()} == {INDEX, *(path.name for path in shards)}
    assert (tmp_path / INDEX).stat().st_mtime_ns >= max(path.stat().st_mtime_ns for path in shards)


def test_a_cut_shard_and_a_missing_index_do_not_load(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(tmp_path)
    save(tmp_path, ranks=1, bytes_per_rank=100_000, seed=1)
    shard = tmp_path / "rank_0.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match="not a whole shard"):
        load(tmp_path)


def test_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": b"123", "b": tensor_bytes(1, 5000)})
    assert safetensors.read_header(path) == safetensors.Header("", frozenset({"a", "b"}))
    assert len(tensor_bytes(1, (1 << 20) + 7)) == (1 << 20) + 7
