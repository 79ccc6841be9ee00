import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from podwatch.config.last_good import last_good_path, load_or_last_good, save_last_good
from podwatch.config.loading import load_settings
from podwatch.domain.errors import ConfigurationError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "p.toml"
    path.write_text(f'run_id = "r1"\nstate_dir = "{tmp_path}/state"\n[trainer]\noutput_dir = "/data/out"\n')
    path.chmod(0o644)
    return path


def break_it(file: Path, text: str = "[gpu]\nhold = oops\n") -> None:
    file.write_text(file.read_text() + text)


def test_a_broken_file_falls_back_and_says_so(file: Path) -> None:
    good = load_or_last_good(file, environ={})
    save_last_good(good)
    break_it(file)
    loaded = load_or_last_good(file, environ={"PODWATCH_GPU__HOLD": "1s"})
    assert loaded.settings.trainer == good.settings.trainer
    assert loaded.settings.gpu.hold == 1.0
    assert f"{file}:6" in loaded.refused
    save_last_good(loaded)
    assert load_or_last_good(file, environ={}).settings == good.settings


def test_a_file_that_lost_its_run_id_still_finds_its_copy(file: Path) -> None:
    save_last_good(load_settings(file, environ={}))
    file.write_text(file.read_text().replace("run_id", "rnu_id"))
    assert load_or_last_good(file, environ={}).settings.run_id == "r1"


def test_a_removed_file_falls_back(file: Path, tmp_path: Path) -> None:
    save_last_good(load_settings(file, environ={}))
    file.unlink()
    loaded = load_or_last_good(file, environ={"PODWATCH_STATE_DIR": f"{tmp_path}/state"})
    assert "does not exist" in loaded.refused


def test_without_a_copy_the_error_stands(file: Path) -> None:
    break_it(file)
    with pytest.raises(ConfigurationError, match="not valid TOML"):
        load_or_last_good(file, environ={})


def test_a_copy_of_another_file_is_not_taken(file: Path, tmp_path: Path) -> None:
    save_last_good(load_settings(file, environ={}))
    other = tmp_path / "other.toml"
    other.write_text(file.read_text() + "oops")
    other.chmod(0o644)
    with pytest.raises(ConfigurationError):
        load_or_last_good(other, environ={})


def _twice(copy: str) -> str:
    return copy.replace("{", '{"text": "",', 1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda copy: '{"path": ',
        lambda copy: "[" * 100_000,
        lambda copy: copy.replace('"path"', '"way"'),
        lambda copy: json.dumps(json.loads(copy) | {"text": 7}),
        lambda copy: json.dumps(json.loads(copy) | {"text": ["run_id"]}),
        lambda copy: json.dumps(json.loads(copy) | {"schema_version": 2}),
        lambda copy: json.dumps(json.loads(copy) | {"kind": "podwatch-manifest"}),
        _twice,
    ],
)
def test_a_damaged_copy_is_no_copy(file: Path, damage: Callable[[str], str]) -> None:
    loaded = load_settings(file, environ={})
    save_last_good(loaded)
    copy = last_good_path(loaded.settings.state_dir, "r1")
    copy.write_text(damage(copy.read_text()))
    break_it(file)
    with pytest.raises(ConfigurationError):
        load_or_last_good(file, environ={})


def test_a_file_whose_name_is_not_utf_8_has_its_copy(file: Path) -> None:
    strange = file.rename(file.with_name(os.fsdecode(b"p\xff.toml")))
    save_last_good(load_settings(strange, environ={}))
    break_it(strange)
    assert load_or_last_good(strange, environ={}).settings.run_id == "r1"


def test_the_copy_is_private(file: Path) -> None:
    loaded = load_settings(file, environ={})
    save_last_good(loaded)
    copy = last_good_path(loaded.settings.state_dir, "r1")
    assert copy.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in copy.parent.iterdir()] == [copy.name]
