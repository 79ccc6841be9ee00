"""The configuration changes while training runs: the difference is shown, and the running command is printed."""

import json
import signal
import tomllib

import pytest

from tests.support.asking import reasons, running, status, wait_reason
from tests.support.rig import Rig

pytestmark = pytest.mark.slow

SECRET = "s3cr3t-s3cr3t-s3cr3t"


def test_a_changed_command_is_shown_and_the_running_one_is_printed(rig: Rig) -> None:
    rig.trainer_flags = ["--max-steps", "900000"]
    daemon = rig.daemon().start()
    running(daemon, rig, step=5)
    assert "command-changed" not in reasons(daemon)

    before = daemon.config.read_text()
    launcher = status(daemon)["training"]["pid"]
    other = before.replace('"900000"', f'"800000", "--trainer.wandb.id", "WANDB_API_KEY={SECRET}"')
    assert other != before
    daemon.config.write_text("# mine\n" + other)
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGHUP)
    reason = wait_reason(daemon, "command-changed")
    assert reason["severity"] == "warning"
    assert "- --max-steps 900000" in reason["summary"]
    assert "+ --max-steps 800000" in reason["summary"]
    assert f"podwatch config init --pid {launcher}" in reason["suggestion"]
    shown = daemon.command("restart", "--dry-run")
    first = shown.stdout.splitlines()
    assert first[0].startswith("the running command (-) differs")
    assert [line.strip() for line in first[1:3]] == ["- --max-steps 900000", "+ --max-steps 800000"]
    assert SECRET not in str(status(daemon)) + shown.stdout + daemon.log.read_text()

    printed = daemon.command("config", "init", "--pid", str(launcher))
    assert printed.returncode == 0, printed.stderr
    assert SECRET not in printed.stdout
    assert tomllib.loads(printed.stdout)["trainer"]["command"] == tomllib.loads(before)["trainer"]["command"]
    daemon.config.write_text(before)
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait_for(lambda: "command-changed" not in reasons(daemon), 30, "nothing differs any more")
    assert len(rig.starts) == 1


def test_a_log_that_training_writes_is_no_configuration(rig: Rig) -> None:
    """It changes as long as training runs, and the file beside it only when the operator changes it."""
    log, config = rig.output.parent / "train.log", rig.output.parent / "more.toml"
    log.write_text("of an earlier start\n")
    config.write_text("a = 1\n")
    line = ["bash", "-o", "pipefail", "-c", '"$@" 2>&1 | tee -a train.log', "train", *rig.command(), "@", "more.toml"]
    daemon = rig.daemon(trainer__command=line).start()
    running(daemon, rig, step=5)
    assert log.stat().st_size > 100

    def changed() -> list[str]:
        plan = json.loads(daemon.command("restart", "--dry-run", "--json").stdout)
        found: list[str] = plan["changed_since_last_start"]
        return found

    assert changed() == []
    config.write_text("a = 2\n")
    assert changed() == [str(config)]
