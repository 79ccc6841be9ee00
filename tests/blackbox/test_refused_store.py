"""A store that refuses for good must not let a paid pod wait for ever; a trainer that runs keeps its guard."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.asking import wait_reason
from tests.support.b2server import KEY_ID, B2Server
from tests.support.daemon import DaemonProcess
from tests.support.rig import Rig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("attaching")]


REFUSAL_WAIT = 2
"""Seconds that a pod without training waits for a store that refuses it."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[B2Server]:
    with B2Server(tmp_path / "b2") as running:
        yield running


@pytest.fixture
def refused(server: B2Server, rig: Rig) -> DaemonProcess:
    environ = {"B2_APPLICATION_KEY_ID": KEY_ID, "B2_APPLICATION_KEY": "wrong", "B2_ENVIRONMENT": server.url}
    return rig.daemon(environ, sync__store="b2://test-bucket", sync__refusal_wait=f"{REFUSAL_WAIT}s")


def test_a_new_pod_ends_with_77_and_says_why(rig: Rig, refused: DaemonProcess) -> None:
    refused.start()
    last = refused.wait_event("daemon-stopping", 90)
    for words in ("store refuses the key", "podwatch run --fresh"):
        assert words in last["event"]
    assert refused.process is not None
    assert refused.process.wait(60) == 77
    assert not rig.starts


def refusals(server: B2Server) -> int:
    return server.calls().get("b2_authorize_account", 0)


def stays(daemon: DaemonProcess, server: B2Server) -> None:
    """Refused for longer than a pod without training would wait for."""
    seen, end = refusals(server), time.monotonic() + 4 * REFUSAL_WAIT
    daemon.wait_for(lambda: time.monotonic() > end and refusals(server) > seen + 1, 120, "it is refused again")
    assert daemon.process is not None
    assert daemon.process.poll() is None
    assert wait_reason(daemon, "store-unavailable")["severity"] == "critical"


def test_run_fresh_starts_without_asking_and_the_guard_stays(
    rig: Rig, refused: DaemonProcess, server: B2Server
) -> None:
    refused.start("--fresh")
    refused.wait_for(lambda: rig.trainer_pid, 60, "training starts")
    stays(refused, server)


def test_a_trainer_that_runs_keeps_its_guard(rig: Rig, refused: DaemonProcess, server: B2Server) -> None:
    rig.start_by_hand()
    refused.start()
    refused.wait_event("trainer-attached", 60)
    stays(refused, server)
    assert len(rig.starts) == 1
