"""``podwatch quarantine`` without a daemon: list what a restart set aside, and put it back."""

import os
import subprocess
from pathlib import Path

import pytest

from podwatch.recovery import quarantine
from podwatch.system.own_directories import Workspace
from tests.support import warm

pytestmark = pytest.mark.slow


def podwatch(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return warm.podwatch("-c", str(config), "quarantine", *arguments, env=os.environ)


def test_what_was_set_aside_is_listed_and_comes_back(tmp_path: Path) -> None:
    output = tmp_path / "outputs"
    ahead = output / "checkpoints" / "step_15"
    ahead.mkdir(parents=True)
    (ahead / "file").write_text("kept")
    config = tmp_path / "podwatch.toml"
    config.write_text(
        f'run_id = "r"\nstate_dir = "{tmp_path}/state"\n[trainer]\nlayout = "hf"\noutput_dir = "{output}"\n'
    )
    workspace = Workspace(output).probe()
    data = quarantine.plan([ahead], step=10, steps={15: "complete"}, lineage="a", wall=1.0, number=7)
    quarantine.carry_out(workspace, data)
    assert not ahead.exists()

    listed = podwatch(config, "list")
    assert listed.returncode == 0, listed.stderr
    assert "7 " in listed.stdout
    assert "step 15 (complete)" in listed.stdout
    assert "from step 10" in listed.stdout

    back = podwatch(config, "return", "7")
    assert back.returncode == 0, back.stderr
    assert (ahead / "file").read_text() == "kept"
    assert podwatch(config, "list").stdout.strip() == "the quarantine is empty"

    again = podwatch(config, "return", "7")
    assert again.returncode == 69
    assert "there is no quarantine 7" in again.stderr
