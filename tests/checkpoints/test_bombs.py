"""Files that claim to be huge cost nothing."""

import struct
from pathlib import Path

import pytest

from tests.drivers.checkpoints import index_problem, torch_file_problem
from tests.support.checkpoints import torch_zip_bytes

pytestmark = pytest.mark.slow


def test_a_zip_of_millions_of_entries_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "optimizer.pt"
    sound = torch_zip_bytes({"a": 1})
    end64 = b"PK\x06\x06" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, 5_000_000, 5_000_000, 1, 1)
    locator = b"PK\x06\x07" + struct.pack("<IQI", 0, len(sound) - 22, 1)
    path.write_bytes(sound[:-22] + end64 + locator + sound[-22:])
    assert "claims more than" in torch_file_problem(path)
    path.write_bytes(sound)
    assert torch_file_problem(path) == ""


def test_an_index_of_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    assert "too large for an index" in index_problem(path)
