"""What a restart would fail on is known before the first death."""

from pathlib import Path
from typing import Any

import pytest

from podwatch.app.own_findings import concern_findings
from podwatch.checkpoints.trainers import make_layout, restart_concerns
from podwatch.config.settings import Settings
from podwatch.domain.finding import FindingKind


def about(tmp_path: Path, layout: str, command: list[str], **trainer: Any) -> list[str]:
    values = {
        "layout": layout,
        "output_dir": str(tmp_path / "out"),
        "command": command,
        "cwd": str(tmp_path),
        **trainer,
    }
    settings = Settings.model_validate({"run_id": "r", "trainer": values})
    found = concern_findings(restart_concerns(settings, make_layout(settings)), since=0.0)
    assert all(f.suggestion for f in found)
    return [str(f.kind) for f in found]


@pytest.mark.parametrize("layout", ["accelerate", "lightning", "dcp"])
@pytest.mark.parametrize(
    ("resume", "known"),
    [("auto", False), (["--resume", "{checkpoint}"], True), ("none", True), ([], False)],
)
def test_a_library_needs_resume_args(tmp_path: Path, layout: str, resume: Any, known: bool) -> None:
    found = about(tmp_path, layout, ["python", "train.py"], resume_args=resume)
    assert found == ([] if known else [FindingKind.RESTART_IMPOSSIBLE])


def test_what_the_command_itself_says_is_enough(tmp_path: Path) -> None:
    assert about(tmp_path, "dcp", ["python", "train.py", "--from", "{checkpoint}"]) == []
    assert about(tmp_path, "lightning", ["python", "main.py", "fit", "--config", "x.yaml"]) == []
    assert about(tmp_path, "accelerate", []) == []


def test_a_value_that_is_no_path_does_not_keep_podwatch_from_starting(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('output_dir = "a\\u0000b"\n[run]\nname = "one\\u0000"\n[ckpt]\ninterval = 5\n')
    assert about(tmp_path, "prime-rl", ["uv", "run", "rl", "@", "x.toml", "--clean"]) == [
        FindingKind.RESTART_IMPOSSIBLE
    ]


def test_prime_rl_that_saves_nothing(tmp_path: Path) -> None:
    command = ["uv", "run", "rl", "@", "x.toml"]
    assert about(tmp_path, "prime-rl", command) == [FindingKind.SAVES_NOTHING]
    assert about(tmp_path, "prime-rl", [*command, "--ckpt", "--ckpt.interval", "5"]) == [], "its version is not known"
