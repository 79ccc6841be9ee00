"""``podwatch check`` names the old sync or clean-up script that still runs beside podwatch."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwatch.cli.check import other_programs
from podwatch.cli.check.other_programs import Ours, meddles
from podwatch.config.settings import Settings
from tests.support.rig import alive, end_all

OURS = Ours(("/app/outputs",), "beautifulsoup-rl")
SCRIPTS = {"/root/sync_to_s3.py": "BUCKET = 'beautifulsoup-rl'\n", "/root/backup-home.sh": "tar c /home\n"}


@pytest.mark.parametrize(
    ("argv", "cwd", "name"),
    [
        (["python", "/root/sync_to_s3.py", "backup-all"], "/", "sync_to_s3.py"),
        (["uv", "run", "python", "sync_to_s3.py"], "/root", "sync_to_s3.py"),
        (["/usr/bin/python3", "/usr/local/bin/b2", "sync", "/app/outputs", "b2://x"], "/", "b2"),
        (["rclone", "sync", ".", "b2:x"], "/app", "rclone"),
        (["rclone", "copy", "/app", "b2:x"], "/", "rclone"),
        (["aws", "s3", "sync", "weights", "s3://beautifulsoup-rl/run"], "/app", "aws"),
        (["bash", "-c", "while true; do b2 sync /app/outputs b2://x; sleep 60; done"], "/", "b2"),
        (["bash", "/root/cleanup-checkpoints.sh", "/app/outputs/checkpoints"], "/", "cleanup-checkpoints.sh"),
        (["sh", "-c", "*/10 * * * * cd /root && python sync_to_s3.py"], "/root", "sync_to_s3.py"),
        (["rclone", "sync", "/data", "b2:x"], "/", ""),
        (["rclone", "mount", "/", "b2:x"], "/", ""),
        (["bash", "/root/backup-home.sh"], "/", ""),
        (["sh", "-c", "cd /app/outputs && podwatch sync --wait"], "/", ""),
        (["uv", "sync", "--project", "/app"], "/app/outputs", ""),
        (["python", "async_train.py", "--output-dir", "/app/outputs"], "/", ""),
        (["python", "cleanrl.py", "/app/outputs"], "/", ""),
        (["tail", "-f", "/app/outputs/logs/trainer.log"], "/", ""),
        (["vim", "/app/outputs/sync.py"], "/", ""),
        ([], "/", ""),
    ],
)
def test_what_is_taken_for_another_tool(argv: list[str], cwd: str, name: str) -> None:
    assert meddles(argv, cwd, OURS, lambda path: SCRIPTS.get(path, "")) == name


@pytest.fixture
def script(tmp_path: Path) -> Iterator[int]:
    """It knows the directory by itself, and has a key on its command line. No child of ours: those are podwatch's."""
    path = tmp_path / "sync_checkpoints.py"
    path.write_text(f"OUTPUT = {str(tmp_path / 'outputs')!r}\nimport time\ntime.sleep(600)\n")
    shell = [*("sh", "-c", '"$@" >/dev/null & echo $!', "sh"), sys.executable, str(path), "--key", "K005secret"]
    pid = int(subprocess.run(shell, stdout=subprocess.PIPE, check=True).stdout)
    command = Path(f"/proc/{pid}/cmdline")
    while b"sync_checkpoints" not in command.read_bytes().partition(b"\0")[2]:
        time.sleep(0.01)
    yield pid
    end_all(lambda: {pid} if alive(pid) else ())


def settings(root: Path, **sync: str) -> Settings:
    (root / "outputs").mkdir(exist_ok=True)
    trainer = {"layout": "prime-rl", "output_dir": root / "outputs", "command": ["uv", "run", "rl"]}
    return Settings.model_validate({"run_id": "r", "state_dir": root / "state", "trainer": trainer, "sync": sync})


def test_a_script_that_runs_is_named_and_its_arguments_are_not(
    tmp_path: Path, script: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_programs, "_CRON", ())
    (line,) = other_programs.other_tools(settings(tmp_path, store="b2://beautifulsoup-rl"))
    assert (line.level, line.name) == ("warn", "other tools")
    assert f"sync_checkpoints.py (pid {script})" in line.text
    assert "secret" not in line.text
    assert "stop it" in line.fix
    (line,) = other_programs.other_tools(settings(tmp_path))
    assert "no store" in line.fix, "it may be the only backup"
    end_all(lambda: {script} if alive(script) else ())
    (line,) = other_programs.other_tools(settings(tmp_path))
    assert (line.level, line.fix) == ("ok", "")


def test_a_crontab_is_read_and_what_is_none_never_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cron").mkdir()
    os.mkfifo(tmp_path / "cron/pipe")
    crontab = tmp_path / "cron/root"
    crontab.write_text(f"# b2 sync {tmp_path}/outputs b2://x\n*/5 * * * * b2 sync {tmp_path}/outputs b2://x\n")
    monkeypatch.setattr(other_programs, "_CRON", (f"{tmp_path}/cron/*",))
    began = time.monotonic()
    (line,) = other_programs.other_tools(settings(tmp_path))
    assert f"b2 (in {crontab})" in line.text
    assert line.text.count("b2") == 1
    assert time.monotonic() - began < 10
