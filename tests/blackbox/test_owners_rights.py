"""podwatch is root, and the output directory is another user's: podwatch works there with that user's rights only, and
says with which command owners that are mixed are repaired (promise 9)."""

import os
import re
import subprocess

import pytest

from tests.support.asking import running, status
from tests.support.other_users import T, enterable
from tests.support.rig import Rig

pytestmark = [pytest.mark.slow, pytest.mark.root]


def test_what_is_moved_away_belongs_to_the_user_and_mixed_owners_are_named(rig: Rig) -> None:
    enterable(rig.output)
    daemon = rig.daemon().start()
    running(daemon, rig, step=10)
    assert daemon.command("stop-training").returncode == 0
    daemon.wait_event("trainer-stopped", 30)
    daemon.stop()
    users = rig.output.parent / ".podwatch" / rig.output.name / "user"

    os.chown(rig.output, T, T)  # what training wrote is root's
    command = f"chown -R 0 {rig.output} {users}"
    checked = daemon.command("check")
    assert command in checked.stdout, checked.stdout
    daemon.start()
    status(daemon)
    assert daemon.command("start", "--step", "5").returncode in (0, 75)
    daemon.wait_for(lambda: command in str(status(daemon)), 30, "the blocked row names the command")
    assert not list(users.glob("quarantine/[0-9]*/*step_10")), "root moved nothing for the user"
    daemon.stop()

    subprocess.run(re.sub("-R 0", f"-R {T}", command).split(), check=True)
    assert "chown" not in daemon.command("check").stdout
    daemon.start()
    status(daemon)
    daemon.command("start", "--step", "5")
    daemon.wait_for(lambda: list(users.glob("quarantine/[0-9]*/*step_10")), 30, "what is ahead is in quarantine")
    assert {p.stat().st_uid for p in users.rglob("*")} == {T}
    assert {p.stat().st_uid for p in users.parent.iterdir() if p != users} == {0}
