"""The child that inspects: what kills it, makes it wait or confuses it is unknown, and it ends with its parent."""

import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwatch.checkpoints.inspection import Inspection, InspectionOutcome
from podwatch.checkpoints.inspector import Inspector
from podwatch.checkpoints.records import RecordedFile
from podwatch.checkpoints.trainer import all_trainers
from tests.support.checkpoints import torch_zip_bytes
from tests.support.layout_makers import core, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shared() -> Iterator[Inspector]:
    with Inspector() as found:
        yield found


@pytest.fixture
def save(tmp_path: Path) -> Path:
    run(core.hf(tmp_path, 10))
    return tmp_path / "checkpoint-10"


def inspect(inspector: Inspector, directory: Path) -> Inspection:
    return inspector.inspect(all_trainers()["hf"].facts, 10, {"checkpoint": directory}, files_of(directory))


def files_of(directory: Path) -> list[RecordedFile]:
    found = [(p.relative_to(directory).as_posix(), p.stat()) for p in sorted(directory.rglob("*")) if p.is_file()]
    return [RecordedFile("checkpoint", name, s.st_size, s.st_mtime_ns) for name, s in found]


def test_the_four_outcomes(save: Path, shared: Inspector) -> None:
    assert inspect(shared, save).outcome is InspectionOutcome.WHOLE
    scheduler = (save / "scheduler.pt").read_bytes()
    status = (save / "scheduler.pt").stat()
    (save / "scheduler.pt").write_bytes(scheduler[:-30])
    os.utime(save / "scheduler.pt", ns=(status.st_atime_ns, status.st_mtime_ns))
    found = inspect(shared, save)
    assert (found.outcome, "scheduler.pt" in found.reason) == (InspectionOutcome.DAMAGED, True)
    (save / "scheduler.pt").unlink()
    found = inspect(shared, save)
    assert (found.outcome, "scheduler.pt" in found.reason) == (InspectionOutcome.NOT_COMPLETE, True)
    with Inspector(deadline=0.0) as hurried:
        assert inspect(hurried, save).outcome is InspectionOutcome.UNKNOWN


def test_a_killed_child_is_unknown_and_the_next_question_has_a_new_one(save: Path) -> None:
    with Inspector() as inspector:
        assert inspect(inspector, save).whole
        child = inspector._own.child
        assert child is not None
        os.kill(child.pid, signal.SIGSTOP)
        inspector._deadline = 0.2
        assert inspect(inspector, save).outcome is InspectionOutcome.UNKNOWN
        assert child.poll() is not None, "a child that hangs is killed"
        inspector._deadline = 60.0
        assert inspect(inspector, save).whole


def test_exactly_the_files_that_were_listed(save: Path, shared: Inspector) -> None:
    """One that changed, vanished or became something else since is no evidence for the list."""
    files, parts, table = files_of(save), {"checkpoint": save}, all_trainers()["hf"].facts
    os.utime(save / "optimizer.pt", (1, 1))
    assert "changed" in shared.inspect(table, 10, parts, files).reason
    (save / "optimizer.pt").unlink()
    assert "vanished" in shared.inspect(table, 10, parts, files).reason
    (save / "optimizer.pt").symlink_to("/etc/passwd")
    assert shared.inspect(table, 10, parts, files).outcome is InspectionOutcome.UNKNOWN


def test_the_child_ends_when_its_stdin_closes() -> None:
    child = subprocess.Popen(
        [sys.executable, "-I", "-m", "podwatch.checkpoints.inspect_child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(json.dumps({"values": "/nowhere"}).encode() + b"\n")
    child.stdin.flush()
    assert json.loads(child.stdout.readline())["outcome"] == "unknown"
    child.stdin.close()
    assert child.wait(30) == 0
    child.stdout.close()


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch /tmp/podwatch-was-here",)


def hostile() -> dict[str, tuple[str, bytes]]:
    sound = torch_zip_bytes({"a": 1})
    end64 = b"PK\x06\x06" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, 5_000_000, 5_000_000, 1, 1)
    locator = b"PK\x06\x07" + struct.pack("<IQI", 0, len(sound) - 22, 1)
    return {
        "a pickle that runs a command": ("optimizer_0/.metadata", pickle.dumps(Evil())),
        "a pickle that asks for 2 GB": ("optimizer_0/.metadata", b"\x80\x04\x8e" + struct.pack("<Q", 1 << 31)),
        "a pickle of nested tuples": ("optimizer_0/.metadata", b"\x80\x04" + b")" + b"\x85" * 1_000_000 + b"."),
        "a zip of millions of entries": ("scheduler.pt", sound[:-22] + end64 + locator + sound[-22:]),
        "JSON nested without end": ("trainer_state.json", b"[" * 200_000),
        "a huge header": ("model-00001-of-00002.safetensors", struct.pack("<Q", 1 << 40) + b"{}"),
        "an index that leads out": (
            "model.safetensors.index.json",
            json.dumps({"weight_map": {"w": "../../etc/passwd"}}).encode(),
        ),
    }


@pytest.mark.parametrize("kind", sorted(hostile()))
def test_a_hostile_file_harms_nothing(kind: str, save: Path, shared: Inspector) -> None:
    name, data = hostile()[kind]
    (save / name).parent.mkdir(exist_ok=True)
    (save / name).write_bytes(data)
    os.utime(save / name, (1, 1))
    began = time.monotonic()
    found = inspect(shared, save)
    assert not found.whole
    assert found.reason
    assert time.monotonic() - began < 60
    assert not Path("/tmp/podwatch-was-here").exists()


def test_a_sparse_file_of_a_terabyte_is_not_read(save: Path, shared: Inspector) -> None:
    with (save / "model.safetensors.index.json").open("r+b") as file:
        file.truncate(1 << 40)
    os.utime(save / "model.safetensors.index.json", (1, 1))
    assert not inspect(shared, save).whole
