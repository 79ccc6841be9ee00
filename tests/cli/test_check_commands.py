"""``podwatch check`` and the operator's own commands: what their ends mean, and that none can hold it up."""

import sys
from pathlib import Path

import pytest

from podwatch.cli.check import operator_commands
from podwatch.cli.check.report import Line
from podwatch.config.loading import load_settings
from podwatch.config.settings import Settings
from podwatch.domain.secrets import scrub


def settings(tmp: Path, **table: object) -> Settings:
    return Settings.model_validate(
        {"run_id": "r", "state_dir": str(tmp / "state"), "trainer": {"output_dir": str(tmp / "out")}, **table}
    )


def check(tmp: Path, code: str, **more: object) -> Line:
    table = {"name": "model", "on": ("check",), "command": (sys.executable, "-I", "-c", code), **more}
    (line,) = operator_commands.checks(settings(tmp, hooks=(table,)))
    return line


@pytest.mark.parametrize(
    ("code", "level", "text"),
    [
        ("print('noise'); print('the model loads')", "ok", "the model loads"),
        ("print('no tool template'); raise SystemExit(10)", "warn", "no tool template"),
        ("raise SystemExit('no tokenizer')", "fail", "no tokenizer"),
        ("import os; os.kill(os.getpid(), 9)", "fail", "SIGKILL"),
        ("pass", "ok", "exit code 0"),
    ],
)
def test_how_a_check_ends_is_its_result(tmp_path: Path, code: str, level: str, text: str) -> None:
    line = check(tmp_path, code)
    assert (line.name, line.level) == ("model", level), line
    assert text in line.text


def test_a_check_that_hangs_ends_at_its_time_limit_with_everything_it_started(tmp_path: Path) -> None:
    pidfile = tmp_path / "pid"
    code = (
        "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600']);"
        f" open({str(pidfile)!r}, 'w').write(str(p.pid)); time.sleep(600)"
    )
    line = check(tmp_path, code, timeout="1s")
    assert line.level == "fail"
    assert "1 s" in line.text
    stat = Path(f"/proc/{pidfile.read_text()}/stat") if pidfile.exists() else None
    assert stat is None or not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_a_program_that_is_missing_is_named_with_its_table(tmp_path: Path) -> None:
    table = {"name": "gone", "on": ("check",), "command": ("/nowhere/at-all",)}
    (line,) = operator_commands.checks(settings(tmp_path, hooks=(table,)))
    assert line.level == "fail"
    assert "/nowhere/at-all" in line.text
    assert "[[hooks]] gone" in line.fix


def test_a_secret_in_the_command_of_a_hook_or_a_check_is_never_shown(tmp_path: Path) -> None:
    for on in ("checkpoint", "check"):
        secret = f"hunter2-{on}-{'x' * 20}"
        file = tmp_path / f"{on}.toml"
        file.write_text(
            f'run_id = "r"\n[trainer]\noutput_dir = "{tmp_path}"\n[[hooks]]\nname = "a"\non = ["{on}"]\n'
            f'command = ["curl", "--token", "{secret}"]\n'
        )
        load_settings(file, environ={})
        assert secret not in scrub(f"the server answered: {secret} is wrong")
