"""podwatch's directory follows prime-rl's run directory."""

from dataclasses import replace
from pathlib import Path

import pytest

from podwatch.daemon.moved_output_dir import take_along
from podwatch.domain.run import Lineage, RunRecord
from podwatch.domain.snapshot import Desired
from podwatch.journal.run_record_file import load_run_record, save_run_record
from podwatch.system.own_directories import Workspace

RECORD = RunRecord("run-1", Lineage("line-1", "line-0", 40), desired=Desired.STOPPED, first_seen_wall=5.0)


@pytest.fixture
def old(tmp_path: Path) -> Workspace:
    """An installation whose output_dir is prime-rl's, with something in quarantine."""
    workspace = Workspace(tmp_path / "outputs")
    workspace.output_dir.mkdir()
    workspace = workspace.probe()
    save_run_record(workspace, RECORD)
    (workspace.quarantine / "q1").mkdir()
    return workspace


@pytest.mark.parametrize("probed", [False, True])
def test_record_and_quarantine_move(old: Workspace, probed: bool) -> None:
    new = Workspace(old.output_dir / "one")
    if probed:  # a start before this version made the new directories, with nothing in them
        new = new.probe()
    said: list[str] = []
    take_along("run-1", "prime-rl", new.output_dir, said.append)
    assert load_run_record(new) == RECORD
    assert (new.outside / "quarantine" / "q1").is_dir()
    assert not old.outside.exists()
    assert len(said) == 1
    assert str(new.outside) in said[0]
    take_along("run-1", "prime-rl", new.output_dir, said.append)
    assert len(said) == 1


def test_a_directory_in_use_is_not_replaced(old: Workspace) -> None:
    """The record is copied, what both have in quarantine stays where it is."""
    new = Workspace(old.output_dir / "one").probe()
    (new.quarantine / "q9").mkdir()
    said: list[str] = []
    take_along("run-1", "prime-rl", new.output_dir, said.append)
    assert load_run_record(new) == RECORD
    assert load_run_record(old) is None
    assert (new.quarantine / "q9").is_dir()
    assert (old.quarantine / "q1").is_dir()
    assert str(old.outside) in said[0]


@pytest.mark.parametrize("why", ["another run", "another layout", "own record", "link", "nothing"])
def test_what_is_not_ours_is_left_alone(old: Workspace, why: str, tmp_path: Path) -> None:
    new = Workspace(old.output_dir / "one")
    mine = replace(RECORD, lineage=Lineage("line-9"))
    if why == "own record":
        save_run_record(new, mine)
    if why == "link":
        old.outside.rename(tmp_path / "elsewhere")
        old.outside.symlink_to(tmp_path / "elsewhere")
    if why == "nothing":
        old.record.unlink()
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    said: list[str] = []
    run = "run-2" if why == "another run" else "run-1"
    take_along(run, "hf" if why == "another layout" else "prime-rl", new.output_dir, said.append)
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before
    assert said == []
    if why == "own record":
        assert load_run_record(new) == mine
