"""The directory of the evaluations: who can enter it, and what is deleted in it."""

import os
import pwd
from pathlib import Path

import pytest

from podwatch.domain.errors import HostError
from podwatch.hooks.evaluation_files import clean, make, remove

root_only = pytest.mark.root


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@root_only
def test_a_user_enters_and_writes_to_output_only(tmp_path: Path) -> None:
    place, user = tmp_path / "shared" / "ours", pwd.getpwnam("nobody")
    make(place, 5, "")
    assert [mode(place), mode(place / "step-5")] == [0o700, 0o700]
    work = make(place, 5, "nobody")  # the setting is new
    assert [mode(path) for path in (place, work, work / "checkpoint")] == [0o711, 0o711, 0o711]
    owners = [path.stat().st_uid for path in (place, work, work / "checkpoint", work / "output")]
    assert owners == [0, 0, 0, user.pw_uid]


@root_only
def test_nothing_is_deleted_in_a_directory_of_another_user(tmp_path: Path) -> None:
    place = tmp_path / "podwatch-evaluation-r1"
    (place / "step-5").mkdir(parents=True)
    os.chown(place, pwd.getpwnam("nobody").pw_uid, -1)
    for attempt in (lambda: make(place, 5, ""), lambda: remove(place, 5), lambda: clean(place)):
        with pytest.raises(HostError, match="another user"):
            attempt()
    assert (place / "step-5").is_dir()


@root_only
def test_no_link_of_another_user_on_the_way_is_followed(tmp_path: Path) -> None:
    home, roots = tmp_path / "home", tmp_path / "roots"
    (roots / "podwatch-evaluation-r1" / "step-5").mkdir(parents=True)
    home.mkdir()
    (home / "evaluations").symlink_to(roots)
    for path in (home, home / "evaluations"):
        os.chown(path, pwd.getpwnam("nobody").pw_uid, -1, follow_symlinks=False)
    place = home / "evaluations" / "podwatch-evaluation-r1"
    for attempt in (lambda: make(place, 5, ""), lambda: remove(place, 5), lambda: clean(place)):
        with pytest.raises(HostError, match="another user could replace"):
            attempt()
    with pytest.raises(HostError, match="another user could replace"):
        make(home / "not" / "there" / "yet", 5, "")
    assert (roots / "podwatch-evaluation-r1" / "step-5").is_dir()
    assert not (home / "not").exists()


def test_an_unknown_user_is_an_error_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="no-such-user"):
        make(tmp_path / "ours", 5, "no-such-user")
    assert not (tmp_path / "ours").exists()


def test_a_link_that_an_evaluation_left_is_removed_and_not_followed(tmp_path: Path) -> None:
    place, kept = tmp_path / "ours", tmp_path / "kept"
    kept.mkdir()
    (kept / "weights").write_text("kept")
    output = make(place, 5, "") / "output"
    (output / "link").symlink_to(kept)
    (output / "deep").mkdir()
    (place / "step-7").symlink_to(kept)
    (place / "other").mkdir()
    clean(place)
    assert [path.name for path in place.iterdir()] == ["other"]
    assert (kept / "weights").read_text() == "kept"
