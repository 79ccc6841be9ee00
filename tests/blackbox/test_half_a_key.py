"""Half of a B2 key, left over in the environment, does not stop a run that stores its checkpoints in a directory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("store", "code"), [("file://{root}/store", 0), ("b2://bucket", 78)])
@pytest.mark.parametrize("name", ["B2_APPLICATION_KEY", "B2_APPLICATION_KEY_ID"])
def test_only_a_store_that_needs_the_key_asks_for_the_other_half(
    tmp_path: Path, store: str, code: int, name: str
) -> None:
    (tmp_path / "store").mkdir()
    config = tmp_path / "podwatch.toml"
    config.write_text(f"""
run_id = "r"
state_dir = "{tmp_path}/state"
[trainer]
output_dir = "{tmp_path}/out"
[sync]
store = "{store.format(root=tmp_path)}"
""")
    config.chmod(0o600)
    done = subprocess.run(
        [sys.executable, "-m", "podwatch", "-c", str(config), "runs", "list"],
        capture_output=True, text=True, timeout=60, check=False,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), name: "half-of-a-key-0123456789"},
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    assert ("half of the store's key" in done.stderr) == bool(code), done.stderr
