"""`podwatch config adopt`, against real processes: what runs is written, secrets and resume flags are not."""

import contextlib
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from podwatch.cli.config import config

FILE = """\
# my run
run_id = "r1"   # the name

[trainer]       # what runs
output_dir = "/data/out"
layout = "prime-rl"
command = [
  "uv", "run", "rl",   # as the README says
]
cwd = "/old"    # moved since

[gpu]
inference = [0] # the first card
"""


@contextlib.contextmanager
def running(tmp_path: Path, *arguments: str, **env: str) -> Iterator[int]:
    """`python .../rl ARGUMENTS` in a directory of its own; its pid."""
    cwd = tmp_path / "app"
    cwd.mkdir(exist_ok=True)
    program = tmp_path / "rl"
    program.write_text("import sys, time\nprint('up', flush=True)\ntime.sleep(600)\n")
    process = subprocess.Popen(
        [sys.executable, str(program), *arguments], cwd=cwd, stdout=subprocess.PIPE,
        env={"PATH": os.environ["PATH"], **env},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"up\n"
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "podwatch.toml"
    file.write_text(FILE)
    file.chmod(0o640)
    return file


def adopt(path: Path, pid: int, *arguments: str) -> Result:
    return CliRunner().invoke(config, ["adopt", "-c", str(path), "--pid", str(pid), *arguments])


def trainer_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads(path.read_text())["trainer"]
    return found


def test_what_runs_is_written_and_everything_else_stays(path: Path, tmp_path: Path) -> None:
    before = path.stat()
    env = {"WANDB_MODE": "offline", "WANDB_API_KEY": "hush-1-hush", "EDITOR": "vi", "WANDB_RUN_ID": "abc"}
    with running(tmp_path, "--max-steps", "99", "--ckpt.resume-step", "40", **env) as pid:
        shown = adopt(path, pid, "--dry-run")
        assert shown.exit_code == 0, shown.output
        assert path.read_text() == FILE
        assert "+cwd" in shown.output
        assert "--max-steps" in shown.output
        result = adopt(path, pid)
        assert result.exit_code == 0, result.output
        assert (
            adopt(path, pid)
            .output.splitlines()[-1]
            .endswith(f"already has the command of pid {pid}: nothing to change")
        )
    found = trainer_of(path)
    assert found["command"] == [sys.executable, str(tmp_path / "rl"), "--max-steps", "99"]
    assert found["cwd"] == str(tmp_path / "app")
    assert found["env"]["WANDB_MODE"] == "offline"
    assert not found["env"].keys() & {"EDITOR", "WANDB_API_KEY", "WANDB_RUN_ID"}
    text = path.read_text()
    for comment in (
        "# my run",
        "# the name",
        "# what runs",
        "# as the README says",
        "# moved since",
        "# the first card",
    ):
        assert comment in text
    assert {k: v for k, v in tomllib.loads(text).items() if k != "trainer"} == {
        "run_id": "r1", "gpu": {"inference": [0]},
    }  # fmt: skip
    assert "removed from the command: --ckpt.resume-step 40" in result.output
    assert "WANDB_API_KEY" in result.output
    assert "hush" not in result.output + text + shown.output
    after = path.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert [p.name for p in tmp_path.iterdir() if "podwatch.toml" in p.name] == ["podwatch.toml"]


@pytest.mark.root
def test_owner_and_link_stay(path: Path, tmp_path: Path) -> None:
    os.chown(path, 0, 12345)
    link = tmp_path / "etc.toml"
    link.symlink_to(path)
    with running(tmp_path, "--max-steps", "99") as pid:
        assert adopt(link, pid).exit_code == 0
    assert link.is_symlink()
    assert (path.stat().st_uid, path.stat().st_gid, path.stat().st_mode & 0o777) == (0, 12345, 0o640)


@pytest.mark.root
def test_what_another_user_runs_is_not_adopted(path: Path) -> None:
    """Else that user would choose what podwatch runs as root."""
    process = subprocess.Popen(["/bin/sleep", "600"], user=12345)
    try:
        result = adopt(path, process.pid)
        assert "runs as uid 12345" in str(result.exception)
    finally:
        process.kill()
        process.wait()
    assert path.read_text() == FILE


def test_an_environment_in_a_table_of_its_own_stays_there(path: Path, tmp_path: Path) -> None:
    path.write_text(FILE + '\n[trainer.env]\nWANDB_MODE = "online" # mine\nOTHER = "x"\n')
    with running(tmp_path, "--max-steps", "99", WANDB_MODE="offline") as pid:
        assert adopt(path, pid).exit_code == 0
    assert 'WANDB_MODE = "offline" # mine\nOTHER = "x"' in path.read_text()


@pytest.mark.parametrize(
    "arguments",
    [("--wandb.api-key", "abcdef123456"), ("--hf-token=abcdef123456",), ("--x", "hf_abcdefghijklmnopqrstuv"),
     ("--store", "https://me:abcdef123456@host/x")],
)  # fmt: skip
def test_a_secret_argument_goes_nowhere(path: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with running(tmp_path, *arguments) as pid:
        for extra in ((), ("--dry-run",)):
            result = adopt(path, pid, *extra)
            assert result.exit_code != 0
            said = f"{result.output} {result.exception}"
            assert "looks like a secret" in said
            assert "env_file" in said
            assert "abcdef123456" not in said
            assert "hf_abc" not in said
    assert path.read_text() == FILE


@pytest.mark.parametrize(
    "broken",
    [
        'run_id = "r1"\ntrainer = { output_dir = "/data/out" }\n',
        'run_id = "r1"\n[trainer]\noutput_dir = "/data/out"\nunknown_key = 1\n',
    ],
)
def test_what_cannot_be_done_well_is_not_done(path: Path, tmp_path: Path, broken: str) -> None:
    path.write_text(broken)
    with running(tmp_path, "--max-steps", "99") as pid:
        assert adopt(path, pid).exit_code != 0
    assert path.read_text() == broken


def test_placeholders_of_our_own_start_are_not_thrown_away(path: Path, tmp_path: Path) -> None:
    path.write_text(FILE.replace('"rl",', '"rl", "{resume_args}",'))
    before = path.read_text()
    with running(tmp_path, "--max-steps", "99", PODWATCH_START_ID="s1") as pid:
        result = adopt(path, pid)
    assert "placeholders" in str(result.exception)
    assert path.read_text() == before


def test_flags_of_one_start_of_ours_are_left_out(path: Path, tmp_path: Path) -> None:
    words = ("--trainer.wandb.id", "abc", "--max-steps", "99", "--ckpt.resume-step=5")
    with running(tmp_path, *words, PODWATCH_START_ID="s1", WANDB_MODE="offline") as pid:
        result = adopt(path, pid, "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    assert (answer["changed"], answer["dry_run"]) == (True, False)
    assert answer["removed_flags"] == ["--ckpt.resume-step=5", "--trainer.wandb.id", "abc"]
    assert trainer_of(path)["command"][2:] == ["--max-steps", "99"]
    assert "env" not in trainer_of(path), "its environment came from the configuration"


@pytest.mark.parametrize(
    ("layout", "resume_args", "words", "kept"),
    [
        ("prime-rl", "", "--resume out/dir --lr 1", "out/dir --lr 1"),
        ("hf", "", "--resume --lr 1", "--lr 1"),
        ("hf", "", "--resume out/dir --lr 1", "--resume out/dir --lr 1"),
        ("hf", '["--resume", "{checkpoint}"]', "--resume out/c-4 --lr 1", "--lr 1"),
        ("hf", '["--from", "{step}"]', "--from 4 --lr 1", "--from 4 --lr 1"),
        ("hf", "", "--resume_from_checkpoint --lr 1", "--lr 1"),
    ],
)
def test_only_a_value_is_removed_with_its_flag(
    path: Path, tmp_path: Path, layout: str, resume_args: str, words: str, kept: str
) -> None:
    added = f"resume_args = {resume_args}\n" if resume_args else ""
    path.write_text(FILE.replace('layout = "prime-rl"\n', f'layout = "{layout}"\n{added}'))
    with running(tmp_path, *words.split()) as pid:
        result = adopt(path, pid)
    assert result.exit_code == 0, (result.output, result.exception)
    assert trainer_of(path)["command"][2:] == kept.split()
    assert ("left in the command: --resume out/dir" in result.output) is ("--resume" in kept.split())


def test_the_step_that_podwatch_gave_is_no_part_of_the_command(path: Path, tmp_path: Path) -> None:
    path.write_text(FILE.replace('"prime-rl"\n', '"hf"\nresume_args = ["--from", "{step}"]\n'))
    with running(tmp_path, "--lr", "1", "--from", "4", PODWATCH_START_ID="s1") as pid:
        assert adopt(path, pid).exit_code == 0
    assert trainer_of(path)["command"][2:] == ["--lr", "1"]


def test_a_title_is_no_command(path: Path) -> None:
    """setproctitle replaces the arguments: nothing is left to be written."""
    process = subprocess.Popen(["PRIME-RL::Launcher"], executable="/bin/cat", stdin=subprocess.PIPE)
    try:
        while b"PRIME" not in Path(f"/proc/{process.pid}/cmdline").read_bytes():
            time.sleep(0.001)  # between fork and exec it has no command line
        result = adopt(path, process.pid)
        assert "title" in str(result.exception)
    finally:
        process.communicate()
    assert path.read_text() == FILE
