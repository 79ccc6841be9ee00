"""podwatch with an HTTP password: one that cannot be used never removes the guard, and shows nothing either."""

import base64
import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.support.daemon import DaemonProcess
from tests.support.rig import Rig

pytestmark = pytest.mark.slow
PASSWORD = "correct-horse-battery-staple"


def answer(daemon: DaemonProcess, path: str, password: str = "") -> int:
    url = json.loads(next(daemon.runtime.glob("*/endpoint.json")).read_text())["http_url"]
    basic = base64.b64encode(f"me:{password}".encode()).decode()
    request = urllib.request.Request(url + path, headers={"Authorization": f"Basic {basic}"} if password else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as got:
            return int(got.status)
    except urllib.error.HTTPError as error:
        return error.code


def status(daemon: DaemonProcess) -> dict:
    """Over the control socket: HTTP asks for the password."""
    done = daemon.command("status", "--json")
    return json.loads(done.stdout) if done.returncode in (0, 1, 2) else {}


def test_a_password_that_cannot_be_used_and_one_that_can(rig: Rig, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(PASSWORD)
    file.chmod(0o644)
    daemon = rig.daemon(http__password_file=str(file)).start()
    daemon.wait_for(lambda: status(daemon).get("training", {}).get("alive"), 30, "it guards")
    said = [event["event"] for event in daemon.events() if "read by other users" in event["event"]]
    assert said
    assert "chmod 600" in said[0]
    assert (answer(daemon, "/livez"), answer(daemon, "/"), answer(daemon, "/status", PASSWORD)) == (200, 401, 401)
    checked = daemon.command("check")
    assert "read by other users" in checked.stdout + checked.stderr

    assert daemon.stop() == 0
    file.chmod(0o600)
    daemon.start()
    daemon.wait_for(lambda: status(daemon).get("running"), 30, "it runs again")
    assert (answer(daemon, "/livez"), answer(daemon, "/"), answer(daemon, "/status")) == (200, 401, 401)
    assert (answer(daemon, "/", PASSWORD), answer(daemon, "/status", PASSWORD)) == (200, 200)
    assert PASSWORD not in daemon.log.read_text()
