"""The table of ten lines in docs/trainer.md, with a trainer that writes what it says."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.asking import status
from tests.support.rig import Rig

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "trainer.md"
TRAINER = """
import pathlib, sys, zipfile
for step in (4, 8):
    save = pathlib.Path(sys.argv[1]) / f"ckpt_{step}"
    save.mkdir(parents=True)
    for name in ("model", "optimizer"):
        with zipfile.ZipFile(save / f"{name}.pt", "w") as file:
            file.writestr(f"{name}/data.pkl", b"\\x80\\x02}.")
            file.writestr(f"{name}/version", "3")
    (save / "DONE").touch()
"""


def table() -> dict[str, Any]:
    (block,) = re.findall(r"^## A table of ten lines\n\n((?:    .*\n)+)", PAGE.read_text(), re.M)
    assert len(block.splitlines()) <= 10
    return tomllib.loads(block)


def test_the_page_describes_a_trainer_in_ten_lines(rig: Rig) -> None:
    said = table()
    subprocess.run([sys.executable, "-c", TRAINER, str(rig.output)], check=True)
    settings = {f"trainer__{key}": value for key, value in said["trainer"].items() if key != "output_dir"}
    settings |= {f"checkpoints.custom__{key}": value for key, value in said["checkpoints"]["custom"].items()}
    daemon = rig.daemon(mode="observe", **settings).start("--adopt-existing")
    daemon.wait_for(
        lambda: [s for s in status(daemon)["checkpoints"]["sets"] if s["completeness"] == "complete"][1:],
        30, "both checkpoints are complete",
    )  # fmt: skip
    plan = json.loads(daemon.command("restart", "--dry-run", "--json").stdout)
    assert plan["argv"] == [*said["trainer"]["command"], "--resume", str(rig.output / "ckpt_8")]
