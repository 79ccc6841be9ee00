"""What systemd (or podwatch's own init) hears: READY after the first look, and a watchdog fed by real sensing."""

import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.rig import Rig, end_all


class Manager:
    """The receiving end of NOTIFY_SOCKET."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)
        self.heard: list[str] = []

    def listen(self) -> list[str]:
        """Everything so far, one entry per line."""
        while True:
            try:
                self.heard += self._socket.recv(65536).decode().splitlines()
            except BlockingIOError:
                return self.heard

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(tmp_path / "n")
    yield made
    made.close()


@pytest.mark.slow
def test_ready_status_and_a_watchdog_that_stops_with_the_sensing(rig: Rig, manager: Manager) -> None:
    daemon = rig.daemon({"NOTIFY_SOCKET": str(manager.path), "WATCHDOG_USEC": "2000000"}).start()
    daemon.wait_for(lambda: "READY=1" in manager.listen(), 20, "READY=1")
    ready = manager.heard.index("READY=1")
    assert any(line.startswith("STATUS=") for line in manager.heard[ready:])
    daemon.wait_event("trainer-confirmed", 30)

    def beats(seconds: float) -> int:
        before = manager.listen().count("WATCHDOG=1")
        time.sleep(seconds)
        return manager.listen().count("WATCHDOG=1") - before

    before = manager.listen().count("WATCHDOG=1")
    # About ten turns of the sensing loop in a second; four in four times what a service manager would wait for one.
    daemon.wait_for(lambda: manager.listen().count("WATCHDOG=1") >= before + 4, 8, "beats")
    with daemon.standing_still():
        assert beats(0.5) == 0, "a stopped podwatch sends nothing: the service manager will notice"
    assert daemon.process is not None
    daemon.wait_for(lambda: beats(0.3) > 0, 10, "the beats go on")

    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait_for(lambda: "RELOADING=1" in manager.listen(), 10, "RELOADING=1")
    daemon.wait_for(lambda: manager.listen().count("READY=1") == 2, 10, "READY=1 after the reload")
    daemon.stop()
    assert "STOPPING=1" in manager.listen()
    assert rig.trainer_pid, "and training goes on"
    assert not (rig.output.parent / "NOTIFY").exists()


def test_training_hears_nothing_of_the_service_manager(rig: Rig, manager: Manager) -> None:
    """Policy-written code runs inside training: it must not be able to speak for podwatch, or read its key."""
    secret = "K005-never-to-be-seen"
    environ = {"NOTIFY_SOCKET": str(manager.path), "B2_APPLICATION_KEY_ID": "id-0001", "B2_APPLICATION_KEY": secret}
    daemon = rig.daemon(environ).start()
    daemon.wait_event("trainer-confirmed", 30)
    daemon.wait_for(lambda: rig.engine_pid, 20, "the engine lives")
    for pid in (rig.trainer_pid, rig.engine_pid):
        content = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"NOTIFY_SOCKET" not in content
        assert secret.encode() not in content
    daemon.stop()
    end_all(rig.members)
    for path in rig.root.rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes(), path
