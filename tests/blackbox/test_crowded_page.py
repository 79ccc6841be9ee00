"""/livez answers whatever other clients do: what it does not answer, an orchestrator ends."""

import contextlib
import json
import socket
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest

from tests.support.asking import status
from tests.support.daemon import DaemonProcess
from tests.support.rig import Rig

pytestmark = pytest.mark.slow

CROWD = 80
ASKED = b"GET /status HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 400


def address(daemon: DaemonProcess) -> tuple[str, int]:
    endpoint = json.loads(next(daemon.runtime.glob("*/endpoint.json")).read_text())
    url = urllib.parse.urlsplit(endpoint["http_url"])
    assert url.hostname
    assert url.port
    return url.hostname, url.port


def slow_reader(place: tuple[str, int]) -> socket.socket:
    """A client that asks for more than fits on the way, and reads none of it."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(place)
    connection.setblocking(False)
    with contextlib.suppress(OSError):
        connection.send(ASKED)
    return connection


def livez(place: tuple[str, int]) -> int:
    try:
        with urllib.request.urlopen(f"http://{place[0]}:{place[1]}/livez", timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_livez_is_answered_beside_slow_readers(rig: Rig) -> None:
    daemon = rig.daemon().start()
    status(daemon)
    place = address(daemon)
    with contextlib.ExitStack() as crowd:
        for _ in range(CROWD):
            crowd.enter_context(contextlib.closing(slow_reader(place)))
        time.sleep(2)  # they are read, and wait for their answers
        answers = [livez(place) for _ in range(10)]
        assert set(answers) <= {200, 503}, "503: the machine is so busy that a turn took too long"
        daemon.wait_for(lambda: livez(place) == 200, 60, "a turn in time")
