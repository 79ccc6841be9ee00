"""What podwatch reads back from its state directory, cut off at every length or filled with zeros: never an error and
never half of the truth. The supervisor's program has tests of its own (tests/trainer/test_supervisor_program.py)."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from podwatch.config.last_good import last_good_path, load_last_good, save_last_good
from podwatch.config.loading import load_settings
from podwatch.system.endpoint import own_endpoint, read_endpoint, write_endpoint
from podwatch.trainer.supervisor_files import read_end, read_exit, read_record, read_result

RECORD = {
    "version": 1, "run_id": "r", "start_id": "s1", "boot_id": "b", "pid_namespace": 4026531836, "supervisor": 10,
    "supervisor_ticks": 11, "pid": 12, "ticks": 13, "argv": ["python", "train.py"], "cwd": "/", "user": "",
    "output_dir": "/out", "log": "/log", "step": None, "started_wall": 1.5, "warnings": [],
}  # fmt: skip
EXIT = {"start_id": "s1", "code": 3, "signal": None, "at_wall": 1.5, "stopped": False, "at_boot": 2.5}


def damaged(whole: bytes) -> list[bytes]:
    """Every prefix that lacks something, alone and filled up with zeros as after a power cut."""
    end = len(whole.rstrip())
    return [piece for n in range(end) for piece in (whole[:n], whole[:n].ljust(len(whole), b"\0"))]


@pytest.mark.parametrize(
    ("name", "content", "read"),
    [
        ("record.json", RECORD, read_record),
        ("exit-s1.json", EXIT, lambda directory: read_exit(directory, "s1")),
        ("exit-s1.json", EXIT, lambda directory: read_end(directory, "s1")),
        ("result-s1.json", {"ok": True, "pid": 12, "warnings": []}, lambda directory: read_result(directory, "s1")),
    ],
)
def test_what_the_supervisor_left(
    tmp_path: Path, name: str, content: dict[str, object], read: Callable[[Path], object]
) -> None:
    whole = json.dumps(content).encode()
    (tmp_path / name).write_bytes(whole)
    assert read(tmp_path) is not None
    for piece in damaged(whole):
        (tmp_path / name).write_bytes(piece)
        assert read(tmp_path) is None, piece


def test_the_endpoint(tmp_path: Path) -> None:
    write_endpoint(tmp_path, own_endpoint("r", started_wall=1.0, http_url="http://127.0.0.1:9477"))
    file = tmp_path / "endpoint.json"
    whole = file.read_bytes()
    assert read_endpoint(tmp_path) is not None
    for piece in damaged(whole):
        file.write_bytes(piece)
        assert read_endpoint(tmp_path) is None


def test_the_last_good_configuration(tmp_path: Path) -> None:
    config = tmp_path / "podwatch.toml"
    config.write_text(f'run_id = "r"\nstate_dir = "{tmp_path}/state"\n[trainer]\noutput_dir = "{tmp_path}/out"\n')
    config.chmod(0o600)
    save_last_good(load_settings(config, environ={}))
    copy = last_good_path(tmp_path / "state", "r")
    whole = copy.read_bytes()
    assert load_last_good(config, environ={}) is not None
    for piece in damaged(whole):
        copy.write_bytes(piece)
        assert load_last_good(config, environ={}) is None
    assert [p.name for p in copy.parent.iterdir()] == [copy.name]
