"""What `podwatch check` says of the training command."""

import json
import os
import subprocess
import sys
from pathlib import Path

CONFIG = """
run_id = "r"
state_dir = "{root}/state"
[trainer]
layout = "{layout}"
output_dir = "{root}/outputs"
cwd = "{root}"
command = {command}
"""
OLD_PRIME_RL = ["rl", "@", "rl.toml", "--ckpt.interval", "5"]


def check(root: Path, layout: str, *command: str) -> list[dict[str, str]]:
    config = root / "podwatch.toml"
    config.write_text(CONFIG.format(root=root, layout=layout, command=json.dumps(command)))
    config.chmod(0o600)
    (root / "rl.toml").touch()
    done = subprocess.run(
        [sys.executable, "-m", "podwatch", "-c", str(config), "check", "--json"],
        cwd=root, env={"PATH": os.environ["PATH"], "HOME": str(root)},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    lines: list[dict[str, str]] = json.loads(done.stdout)["checks"]
    return lines


def test_a_fix_that_says_set_it_to_has_the_setting_beside_it(tmp_path: Path) -> None:
    """Without a checkpoint and without prime-rl's source, nothing shows which flag resumes this version."""
    lines = check(tmp_path, "prime-rl", *OLD_PRIME_RL)
    said = [line for line in lines if "set it to" in line["fix"]]
    assert said, lines
    for line in said:
        assert "trainer." in line["text"] or "[trainer]" in line["text"], line


def test_an_older_prime_rl_needs_no_name_of_the_run(tmp_path: Path) -> None:
    """The directory of its orchestrator below output_dir is no run of its own."""
    for half in ("run_default/checkpoints/step_5/orchestrator", "checkpoints/step_5/trainer"):
        (tmp_path / "outputs" / half).mkdir(parents=True)
    lines = check(tmp_path, "prime-rl", *OLD_PRIME_RL, "--ckpt.resume-step", "5")
    assert [line for line in lines if line["name"] == "run.name"] == []


def test_a_newer_prime_rl_without_one_does(tmp_path: Path) -> None:
    (tmp_path / "outputs" / "brave-name" / "checkpoints" / "step_5" / "trainer").mkdir(parents=True)
    lines = check(tmp_path, "prime-rl", *OLD_PRIME_RL)
    assert [line["level"] for line in lines if line["name"] == "run.name"] == ["fail"]


def test_a_trainer_of_hugging_face_that_saves_nothing_is_named(tmp_path: Path) -> None:
    for words, levels in ((("--save_strategy", "no"), ["fail"]), (("--save_strategy=steps",), []), ((), [])):
        lines = check(tmp_path, "hf", sys.executable, "train.py", *words)
        assert [line["level"] for line in lines if line["name"] == "saves"] == levels, lines
