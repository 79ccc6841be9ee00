"""Which processes are of this run: nothing that another user says decides it."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.asking import running, status
from tests.support.rig import Rig, alive
from tests.support.strangers import UID, needs_root

pytestmark = [pytest.mark.slow]


@contextlib.contextmanager
def stranger(*command: str, **environ: str) -> Iterator[int]:
    """A process of a user without rights; its pid."""
    as_stranger = ["setpriv", "--reuid", str(UID), "--regid", str(UID), "--clear-groups"]
    environ = {"PATH": os.environ["PATH"], **environ}
    process = subprocess.Popen([*as_stranger, *command], cwd="/", env=environ, start_new_session=True)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def start_id(rig: Rig) -> str:
    pairs = Path(f"/proc/{rig.trainer_pid}/environ").read_bytes().split(b"\0")
    return next(pair.partition(b"=")[2].decode() for pair in pairs if pair.startswith(b"PODWATCH_START_ID="))


@needs_root
def test_another_users_process_with_the_mark_of_our_start_holds_nothing_up(rig: Rig) -> None:
    daemon = rig.daemon().start()
    running(daemon, rig, step=5)
    seen = len(daemon.events())
    with stranger("sleep", "987", PODWATCH_START_ID=start_id(rig), PODWATCH_RUN=rig.run_id) as pid:
        rig.kill("trainer")

        def decided() -> str:
            names = {event["podwatch_event"] for event in daemon.events()[seen:]}
            blocked = status(daemon)["training"]["state"] == "blocked"
            return "restarted" if "trainer-started" in names else "blocked" if blocked else ""

        assert daemon.wait_for(decided, 60, "a restart, or none") == "restarted"
        assert alive(pid)
        daemon.wait_event("trainer-confirmed", 60, after=seen)
