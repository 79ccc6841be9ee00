"""The record beside output_dir."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podwatch.domain.errors import HostError
from podwatch.domain.run import EarlierSave, Lineage, RunRecord, StartRecord
from podwatch.domain.snapshot import Desired
from podwatch.journal import load_run_record, save_run_record
from podwatch.system.own_directories import Workspace
from tests.support.examples import examples

RECORD = RunRecord(
    run_id="bs4",
    lineage=Lineage("l2", "l1", 40, 90, 1_800_000_000.5),
    desired=Desired.STOPPED,
    last_start=StartRecord("s1", 12.5, ("uv", "run", "rl"), "/app", "u", 40, ("HOME",), (("c.toml", "ab" * 32),)),
    first_seen_wall=1.5,
    wandb={"shared": "x1"},
    earlier=(EarlierSave(45, "ab", 10.5, "l1"), EarlierSave(50, "", 11.5, "l1")),
)


def test_round_trip(tmp_path: Path) -> None:
    place = Workspace(tmp_path / "a" / "b" / "out")
    assert load_run_record(place) is None
    save_run_record(place, RECORD)
    assert load_run_record(place) == RECORD
    save_run_record(place, RunRecord("bs4", Lineage("l3")))
    assert load_run_record(place) == RunRecord("bs4", Lineage("l3"))


@settings(deadline=None, max_examples=examples(60))
@given(st.binary(max_size=200) | st.integers(0, 600))
def test_damage_never_crashes_and_keeps_the_file(tmp_path_factory: pytest.TempPathFactory, damage: bytes | int) -> None:
    place = Workspace(tmp_path_factory.mktemp("r") / "out")
    path = place.record
    save_run_record(place, RECORD)
    whole = path.read_bytes()
    path.write_bytes(damage if isinstance(damage, bytes) else whole[:damage])
    cut = path.read_bytes()
    loaded = load_run_record(place)
    if loaded is None:
        assert path.with_name("run.json.corrupt-1").read_bytes() == cut
        assert load_run_record(place) is None
    else:
        assert loaded == RECORD
    save_run_record(place, RECORD)
    assert load_run_record(place) == RECORD


def test_wrong_types_are_damage(tmp_path: Path) -> None:
    place = Workspace(tmp_path / "out")
    path = place.record
    for change in ({"desired": "flying"}, {"run_id": 3}, {"lineage": None}, {"last_start": {"argv": 1}}, {"kind": "x"}):
        save_run_record(place, RECORD)
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
        assert load_run_record(place) is None


def test_a_newer_record_is_refused_not_moved(tmp_path: Path) -> None:
    place = Workspace(tmp_path / "out")
    path = place.record
    save_run_record(place, RECORD)
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": 9}))
    with pytest.raises(HostError, match="schema 9"):
        load_run_record(place)
    assert path.exists()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HostError):
        save_run_record(Workspace(tmp_path / "file" / "out"), RECORD)
