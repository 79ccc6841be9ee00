"""podwatch without a network, and podwatch stopped for longer than a sensor may be silent."""

import contextlib
import signal
import socket
import time
import urllib.error
import urllib.request

import pytest

from tests.support.asking import confirmed, guards_without_store, status, wait_reason
from tests.support.b2server import KEY, KEY_ID
from tests.support.rig import Rig

pytestmark = pytest.mark.slow


def test_no_network(rig: Rig) -> None:
    with socket.socket() as closed:  # bound and never listening: refused, and nobody else can get the port meanwhile
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        environ = {"B2_APPLICATION_KEY_ID": KEY_ID, "B2_APPLICATION_KEY": KEY, "B2_ENVIRONMENT": url}
        daemon = rig.daemon(environ, sync__store="b2://test-bucket", gpu__poll="0.3s", gpu__hold="1s").start()
        daemon.wait_for(daemon.status, 20, "an answer")
        guards_without_store(rig, daemon, "store cannot be reached")


def test_a_podwatch_that_was_stopped_by_a_signal(rig: Rig) -> None:
    """podwatch is stopped for longer than a sensor may be silent: not live meanwhile, then said, and nothing killed."""
    daemon = rig.daemon(hang__floor="20s", hang__k=2.0).start()
    confirmed(daemon)
    pid, process = rig.trainer_pid, daemon.process
    assert process is not None
    live = status(daemon)["daemon"]["http_url"] + "/livez"
    time.sleep(1.0)
    process.send_signal(signal.SIGSTOP)
    try:
        with contextlib.suppress(TimeoutError, urllib.error.URLError):
            urllib.request.urlopen(live, timeout=1)
            raise AssertionError("a loop that stands still says that it is live")
        time.sleep(32)
    finally:
        process.send_signal(signal.SIGCONT)
    told = wait_reason(daemon, "loop-stalled")
    assert "observed nothing for 3" in told["summary"], told
    with urllib.request.urlopen(live, timeout=30) as answer:
        assert answer.status == 200
    assert (rig.trainer_pid, len(rig.starts)) == (pid, 1)
    assert not any(e["podwatch_event"] == "incident-opened" for e in daemon.events())
    replayed = daemon.command("replay").stdout
    assert "loop-stalled: podwatch observed nothing for 3" in replayed, replayed
    assert "would have restarted 0 times" in replayed, replayed
