"""A small S3 on loopback, a process of its own: signatures checked, path and virtual-host addressing, versions,
conditions, checksums that are refused when wrong, and the differences between real services as switches (``Traits``).

Faults on demand as in tests/support/b2server. It outlives a client that is killed, and checks at every event that no
``latest.json`` lies (``violations()``).
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

KEY_ID, KEY = "AKTESTKEY0001", "s3-secret-never-to-be-seen"
BUCKET = "test-bucket"


class S3Server:
    """Starts the server on a free port; ``stop`` and ``start`` again make an outage on the same port and data."""

    def __init__(self, directory: Path, *, bucket: str = BUCKET, certificate: Path | None = None) -> None:
        self.directory, self.bucket, self._certificate = directory, bucket, certificate
        self.port, self.url = 0, ""
        self._process: subprocess.Popen[str] | None = None
        self._traits: dict[str, Any] = {}

    def start(self) -> "S3Server":
        self.port = self.port or free_port()
        command = [sys.executable, "-m", "tests.support.s3server", "--port", str(self.port)]
        command += ["--dir", str(self.directory), "--bucket", self.bucket]
        if self._certificate is not None:
            command += ["--certificate", str(self._certificate)]
        root = Path(__file__).parents[3]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        assert self.url.startswith("http"), "the server did not start"
        self.port = int(self.url.rsplit(":", 1)[1])
        self.add_key(KEY_ID, KEY)
        if self._traits:
            self.admin("traits", **self._traits)
        return self

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.communicate()
            self._process = None

    def __enter__(self) -> "S3Server":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def admin(self, what: str, **body: Any) -> Any:
        import ssl

        request = urllib.request.Request(f"{self.url}/admin/{what}", json.dumps(body).encode(), method="POST")
        context = ssl._create_unverified_context() if self.url.startswith("https") else None
        with urllib.request.urlopen(request, timeout=30, context=context) as answer:
            return json.load(answer)

    def add_key(self, access_key: str, secret: str, **restrictions: Any) -> None:
        self.admin("key", access_key=access_key, secret=secret, **restrictions)

    def fault(self, ep: str, action: str, **details: Any) -> None:
        self.admin("fault", ep=ep, action=action, **details)

    def traits(self, **traits: Any) -> None:
        """Make it another kind of S3; see ``state.Traits``. Kept over a restart."""
        self._traits |= traits
        self.admin("traits", **traits)

    def pace(self, latency: float = 0.0, rate: float = 0.0) -> None:
        """Seconds before each answer, and bytes per second of each connection; 0 is no limit."""
        self.admin("pace", latency=latency, rate=rate)

    def calls(self) -> dict[str, int]:
        """How often each operation was requested, failed ones included."""
        return dict(self.admin("state")["calls"])

    def sent(self) -> int:
        """Bytes of objects that clients have downloaded."""
        return int(self.admin("state")["sent"])

    def events(self) -> list[dict[str, Any]]:
        return list(self.admin("state")["events"])

    def violations(self) -> list[str]:
        """Every moment at which a pointer lied, the present included. Must be empty."""
        return list(self.admin("state")["violations"])

    def versions(self, suffix: str = "") -> list[dict[str, Any]]:
        return [v for v in self.admin("state")["versions"] if v["key"].endswith(suffix)]

    def uploads(self) -> list[dict[str, Any]]:
        return list(self.admin("state")["uploads"])

    def environment(self) -> dict[str, str]:
        return os.environ | {
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": KEY,
            "AWS_ENDPOINT_URL_S3": self.url,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
