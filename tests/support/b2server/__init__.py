"""A small Backblaze B2 on loopback (native API v4, v3, and v1 as rclone speaks it), a process of its own, with faults
on demand.

It outlives a client that is killed, and checks at every event that no ``latest.json`` lies (``violations()``).
"""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from podwatch.simulation.pod import free_port

KEY_ID, KEY = "key0000000001", "secret-never-to-be-seen"
BUCKET = "test-bucket"


class B2Server:
    """Starts the server on a free port; ``stop`` and ``start`` again make an outage on the same port and data."""

    def __init__(self, directory: Path, *, bucket: str = BUCKET) -> None:
        self.directory, self.bucket = directory, bucket
        self.port, self.url = 0, ""
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> "B2Server":
        self.port = self.port or free_port()
        command = [sys.executable, "-m", "tests.support.b2server", "--port", str(self.port)]
        command += ["--dir", str(self.directory), "--bucket", self.bucket]
        root = Path(__file__).parents[3]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        assert self.url.startswith("http://"), "the server did not start"
        self.port = int(self.url.rsplit(":", 1)[1])
        self.add_key(KEY_ID, KEY)
        return self

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.communicate()
            self._process = None

    def __enter__(self) -> "B2Server":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def admin(self, what: str, **body: Any) -> Any:
        request = urllib.request.Request(f"{self.url}/admin/{what}", json.dumps(body).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def add_key(self, key_id: str, key: str, **restrictions: Any) -> None:
        self.admin("key", key_id=key_id, key=key, **restrictions)

    def fault(self, ep: str, action: str, **details: Any) -> None:
        self.admin("fault", ep=ep, action=action, **details)

    def pace(self, latency: float = 0.0, rate: float = 0.0) -> None:
        """Seconds before each answer, and bytes per second of each connection; 0 is no limit."""
        self.admin("pace", latency=latency, rate=rate)

    def calls(self) -> dict[str, int]:
        """How often each call was made, failed ones included."""
        return dict(self.admin("state")["calls"])

    def classes(self) -> dict[str, int]:
        """Calls by the class they are billed as: A, B, C."""
        return dict(self.admin("state")["classes"])

    def sent(self) -> int:
        """Bytes of objects that clients have downloaded."""
        return int(self.admin("state")["sent"])

    def events(self) -> list[dict[str, Any]]:
        return list(self.admin("state")["events"])

    def violations(self) -> list[str]:
        """Every moment at which a pointer lied, the present included. Must be empty."""
        return list(self.admin("violations")["violations"])

    def versions(self, suffix: str = "") -> list[dict[str, Any]]:
        return [v for v in self.admin("versions")["versions"] if v["name"].endswith(suffix)]

    def environment(self) -> dict[str, str]:
        return os.environ | {"B2_APPLICATION_KEY_ID": KEY_ID, "B2_APPLICATION_KEY": KEY, "B2_ENVIRONMENT": self.url}
