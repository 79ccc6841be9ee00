"""Checkpoints of another run in output_dir: neither resumed from nor uploaded, until an operator adopts them."""

import os
from pathlib import Path

import pytest

from tests.support.asking import wait_reason
from tests.support.checkpoints import write_prime_rl_step
from tests.support.rig import Rig

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("attaching")]


def test_what_another_run_left_is_not_published_as_this_one(rig: Rig, elsewhere: Path) -> None:
    """Seen: refused for the resume, yet uploaded, published, and counted as this run's after a restart of podwatch."""
    write_prime_rl_step(rig.output, 5)
    for path in rig.output.rglob("*"):
        os.utime(path, (1_700_000_000, 1_700_000_000))
    daemon = rig.daemon(sync__store=f"file://{elsewhere}").start()
    for _ in range(2):
        wait_reason(daemon, "foreign-checkpoints")
        for arguments in ((), ("--wait",)):
            done = daemon.command("sync", *arguments)
            assert done.returncode != 0
            assert "no complete checkpoint yet" in done.stderr
        assert not list(elsewhere.rglob("manifest.json"))
        assert not rig.starts
        daemon.stop()
        daemon.start()
