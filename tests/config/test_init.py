"""A current directory that was deleted."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from podwatch.cli.root import cli
from podwatch.domain.errors import HostError

# -- a current directory that was deleted ------------------------------------------------------------------------------


@pytest.fixture
def gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The parent of the deleted current directory, with a usable ``p.toml``."""
    (tmp_path / "deleted").mkdir()
    monkeypatch.chdir(tmp_path / "deleted")
    (tmp_path / "deleted").rmdir()
    for name, text in {
        "p.env": "B2_APPLICATION_KEY_ID=a\nB2_APPLICATION_KEY=b\n",
        "p.toml": f'run_id = "r1"\nstate_dir = "{tmp_path}/state"\n[trainer]\noutput_dir = "{tmp_path}/out"\n'
        f'layout = "hf"\nenv_file = "{tmp_path}/p.env"\n[sync]\nstore = "file://{tmp_path}/store"\n',
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    (tmp_path / "store").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        "run -- python train.py",
        "run --job -- python train.py",
        "bootstrap file://{tmp}/store r1 --dir x",
        "bootstrap file://{tmp}/store r1 --dir {tmp}/b --allow x",
        "-c x.toml install",
        "-c {tmp}/p.toml restore --to x",
        "-c {tmp}/p.toml runs restore r1 --to x",
    ],
)
def test_a_current_directory_that_was_deleted_is_named_with_the_fix(gone: Path, words: str) -> None:
    result = CliRunner().invoke(cli, words.format(tmp=gone, pid=os.getpid()).split())
    assert isinstance(result.exception, HostError), (result.output, result.exception)
    assert "the current directory was deleted" in str(result.exception)
    assert "`cd " in str(result.exception)
    assert sorted(path.name for path in gone.iterdir()) == ["p.env", "p.toml", "store"], "nothing was written"


@pytest.mark.parametrize("words", ["store ls", "runs list", "config show"])
def test_a_command_that_names_all_files_absolutely_needs_no_current_directory(gone: Path, words: str) -> None:
    result = CliRunner().invoke(cli, ["-c", f"{gone}/p.toml", *words.split()])
    assert result.exit_code == 0, (result.output, result.exception)
