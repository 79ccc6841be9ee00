"""The notify protocol over real sockets."""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwatch.system.sd_notify import NullNotifier, SocketNotifier, make_notifier, watchdog_seconds


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.settimeout(10)
        if request.param == "path":
            address = str(tmp_path / "notify")
            listener.bind(address)
        else:
            address = f"@podwatch-test-{os.getpid()}-{time.monotonic_ns()}"
            listener.bind("\0" + address[1:])
        yield listener, address


def test_messages(manager: tuple[socket.socket, str]) -> None:
    listener, address = manager
    notifier = make_notifier({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "2500000", "WATCHDOG_PID": str(os.getpid())})
    assert notifier.watchdog_seconds == 2.5

    def heard() -> str:
        return listener.recv(4096).decode()

    notifier.ready("guarding\nstep 80")
    assert heard() == "READY=1\nSTATUS=guarding step 80"
    notifier.status("x")
    assert heard() == "STATUS=x"
    before = time.monotonic_ns() // 1000
    notifier.reloading()
    first, second = heard().split("\n")
    assert first == "RELOADING=1"
    assert before <= int(second.removeprefix("MONOTONIC_USEC=")) <= time.monotonic_ns() // 1000
    notifier.watchdog()
    assert heard() == "WATCHDOG=1"
    notifier.extend_timeout(1.5)
    assert heard() == "EXTEND_TIMEOUT_USEC=1500000"
    notifier.stopping("bye")
    assert heard() == "STOPPING=1\nSTATUS=bye"
    notifier.close()


def test_a_dead_manager_is_tolerated(tmp_path: Path) -> None:
    notifier = SocketNotifier(str(tmp_path / "nobody"))
    notifier.ready()
    notifier.watchdog()
    notifier.close()
    notifier.watchdog()
    assert notifier.failures == 3


def test_a_full_manager_does_not_block(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "n"))
        notifier = SocketNotifier(str(tmp_path / "n"))
        started = time.monotonic()
        for _ in range(5000):
            notifier.watchdog()
        assert time.monotonic() - started < 10
        assert notifier.failures > 0
        notifier.close()


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "relative"}, {"NOTIFY_SOCKET": "/"}])
def test_no_manager(environ: dict[str, str]) -> None:
    notifier = make_notifier(environ)
    assert isinstance(notifier, NullNotifier)
    notifier.ready()
    notifier.close()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "junk"}, None),
        ({"WATCHDOG_USEC": "1000000"}, 1.0),
        ({"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}, None),
    ],
)
def test_watchdog_interval(environ: dict[str, str], expected: float | None) -> None:
    assert watchdog_seconds(environ) == expected
