"""Real command lines of trainers (``command_lines.toml``): whether podwatch can pass the step of a resume, and the
command that it would start."""

import json
import os
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.asking import status
from tests.support.daemon import DaemonProcess
from tests.support.rig import Rig

pytestmark = pytest.mark.slow

ROWS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("command_lines.toml").read_text())
PROGRAMS = ("uv", "torchrun", "accelerate", "deepspeed", "trl", "axolotl", "llamafactory-cli", "srun", "docker",
            "conda", "numactl", "python", "python3", "ray")  # fmt: skip
CHECKPOINTS = {
    "hf": "checkpoint-{step}", "verl": "global_step_{step}", "skyrl": "global_step_{step}", "dcp": "step_{step}",
    "custom": "step_{step}", "lightning": "checkpoints/step={step}.ckpt",
}  # fmt: skip
"""Of one step, below output_dir."""
LEVELS = ("ok", "warn", "fail")


class Pod:
    """Programs of the names that the commands begin with, and a configuration for one row."""

    def __init__(self, root: Path, row: dict[str, Any]) -> None:
        self.root, self.row = root, row
        self.out, self.cwd, programs = root / "out", root / "app", root / "bin"
        for directory in (self.cwd, programs, *(self.out / name for name in row.get("directories", ()))):
            directory.mkdir(parents=True)
        for path, text in (
            *((programs / name, "exit 0") for name in PROGRAMS),
            (self.cwd / "train.sh", 'exec python train.py "$@"'),
            (self.cwd / "prime.sh", 'cd "$(dirname "$0")"; exec uv run rl @ config.toml --ckpt "$@"'),
            (self.cwd / "alone.sh", "exec accelerate launch run_clm.py"),
        ):
            path.write_text(f"#!/bin/sh\n{text}\n")
            path.chmod(0o755)
        for name in ("config.toml", "train.yaml"):
            (self.cwd / name).write_text("")
        self.command = self.filled(row["command"])
        self.podwatch = DaemonProcess(root / "own", self.config(f"{programs}:/usr/bin:/bin"))

    def config(self, path: str) -> str:
        trainer = {
            "layout": self.row["layout"], "output_dir": str(self.out), "cwd": str(self.cwd), "command": self.command,
            **({"resume_args": self.row["resume_args"]} if "resume_args" in self.row else {}),
        }  # fmt: skip
        lines = [f'run_id = "r"\nstate_dir = "{self.root}/own/state"\n[trainer]']
        lines += [f"{key} = {json.dumps(value)}" for key, value in trainer.items()]
        lines += [f'env = {{ PATH = "{path}" }}']
        if self.row["layout"] == "custom":
            lines += ['[checkpoints.custom]\nparts = "step_{step}"\nrequire = ["model.bin"]\nlast = "DONE"']
        return "\n".join(lines) + "\n"

    def filled(self, words: list[str], step: int = 0) -> list[str]:
        checkpoint = CHECKPOINTS.get(self.row["layout"], "").format(step=step)
        known = {"out": self.out, "cwd": self.cwd, "step": step, "ckpt": self.out / checkpoint}
        for name, value in known.items():
            words = [word.replace(f"{{{name}}}", str(value)) for word in words]
        return words

    def lines(self) -> list[tuple[str, str]]:
        """Level and text of what ``check`` says about the command and the resume."""
        done = self.podwatch.command("check", "--json")
        assert done.stdout, done.stderr
        found = [line for line in json.loads(done.stdout)["checks"] if line["name"] in ("command", "resume")]
        return [(line["level"], line["text"] if line["name"] == "resume" else "") for line in found]


@pytest.mark.parametrize("name", ROWS)
def test_what_check_says_of_a_command_line(tmp_path: Path, name: str) -> None:
    """The line that shows the command of a resume is ``ok``; its words end in a colon and the command."""
    row = ROWS[name]
    pod = Pod(tmp_path, row)
    lines = pod.lines()
    shown = [shlex.split(text.partition(": ")[2]) for level, text in lines if level == "ok" and text]
    worst = max((level for level, _ in lines), key=LEVELS.index)
    if row.get("refuses"):
        assert (shown, worst != "ok") == ([], True), lines
        return
    step = 1
    """Without a checkpoint ``check`` takes an example."""
    resumes = pod.filled(row["resumes"], step) if "resumes" in row else pod.command + pod.filled(row["adds"], step)
    assert shown == [resumes], lines
    assert worst == ("warn" if row.get("warns") else "ok"), lines


@pytest.mark.parametrize(
    "name",
    ["placeholder", "shell-with-its-arguments-and-tee", "shell-without-a-name-for-itself"],
)
def test_the_plan_of_a_restart_has_the_same_command(rig: Rig, name: str) -> None:
    """podwatch only observes, beside a checkpoint that the operator adopted."""
    row = ROWS[name]
    checkpoint = rig.output / "step_8"
    checkpoint.mkdir(parents=True)
    for file in ("model.bin", "DONE"):
        (checkpoint / file).write_bytes(b"bytes")
    custom = {"parts": "step_{step}", "require": ["model.bin"], "last": "DONE"}
    settings = {f"checkpoints.custom__{key}": value for key, value in custom.items()}
    daemon = rig.daemon(
        mode="observe", trainer__layout="custom", trainer__command=row["command"],
        trainer__resume_args=row["resume_args"], **settings,
    ).start("--adopt-existing")  # fmt: skip
    daemon.wait_for(
        lambda: [s for s in status(daemon)["checkpoints"]["sets"] if s["completeness"] == "complete"],
        30, "the checkpoint is complete",
    )  # fmt: skip
    plan = json.loads(daemon.command("restart", "--dry-run", "--json").stdout)
    words = row["resumes"] if "resumes" in row else row["command"] + row["adds"]
    assert plan["step"] == 8, plan
    assert plan["argv"] == [word.replace("{ckpt}", str(checkpoint)) for word in words]


@pytest.mark.parametrize("hostile", ["a pipe", "no text", "nested", "a script of quotes"])
def test_a_hostile_file_that_the_command_names_is_only_unknown(tmp_path: Path, hostile: str) -> None:
    row = {"layout": "hf", "command": ["python", "train.py", "--config", "hostile.json"]}
    if hostile == "a script of quotes":
        row["command"] = ["bash", "hostile.json"]
    pod = Pod(tmp_path, row)
    file = pod.cwd / "hostile.json"
    if hostile == "a pipe":
        os.mkfifo(file)
    else:
        file.write_bytes({"no text": b"\xff\0", "nested": b'{"a":' * 200_000}.get(hostile, b"'\"`$(<<A\n" * 20_000))
    assert ("ok", "") in pod.lines(), "the program itself is found"
    made = pod.podwatch.command("config", "init", "-o", str(tmp_path / "made.toml"), "--", *pod.command)
    assert made.returncode == 0, made.stderr
