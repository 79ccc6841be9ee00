"""Where quarantine and trash go: found out by trying a rename."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwatch.domain.errors import HostError
from podwatch.system.own_directories import Workspace


def test_beside_the_output_directory(tmp_path: Path) -> None:
    output = tmp_path / "outputs"
    output.mkdir()
    workspace = Workspace(output).probe()
    assert not workspace.use_inside
    assert workspace.trash == tmp_path / ".podwatch" / "outputs" / "user" / "trash"
    assert workspace.trash.is_dir()
    assert workspace.quarantine.is_dir()
    assert workspace.staging.is_dir()
    assert list(output.iterdir()) == []
    assert Workspace(output).probe() == workspace


def test_an_output_directory_that_does_not_exist_yet(tmp_path: Path) -> None:
    output = tmp_path / "a" / "b" / "outputs"
    workspace = Workspace(output).probe()
    assert not workspace.use_inside
    assert workspace.trash.is_dir()
    assert not output.exists()
    assert sorted(p.name for p in (tmp_path / "a" / "b").iterdir()) == [".podwatch"]


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    output = tmp_path / "outputs"
    output.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "none", output], capture_output=True).returncode:
        pytest.skip("mounting needs root and CAP_SYS_ADMIN")
    yield output
    subprocess.run(["umount", "-l", output], check=True)


def test_a_mount_of_its_own_sets_aside_inside(mounted: Path) -> None:
    workspace = Workspace(mounted).probe()
    assert workspace.use_inside
    assert workspace.trash == mounted / ".podwatch" / "trash"
    assert workspace.trash.is_dir()
    assert workspace.run_copy.parent == mounted.parent / ".podwatch" / "outputs"
    assert workspace.run_copy.parent.is_dir()


def test_a_file_in_the_way_says_what_and_where(tmp_path: Path) -> None:
    (tmp_path / ".podwatch").write_text("")
    with pytest.raises(HostError) as caught:
        Workspace(tmp_path / "outputs").probe()
    assert str(tmp_path / ".podwatch" / "outputs") in str(caught.value)
