"""A small Backblaze B2 on loopback (native API v4, v3, and v1 as rclone speaks it), a process of its own, with faults
on demand.

It outlives a client that is killed, and checks at every event that no ``latest.json`` lies (``violations()``).
"""

from pathlib import Path
from typing import Any, Self

from tests.support.store_server import ServerProcess, environment

KEY_ID, KEY = "key0000000001", "secret-never-to-be-seen"
BUCKET = "test-bucket"


class B2Server(ServerProcess):
    module = "tests.support.b2server"

    def __init__(self, directory: Path, *, bucket: str = BUCKET) -> None:
        super().__init__(directory, bucket)

    def start(self) -> Self:
        super().start()
        self.add_key(KEY_ID, KEY)
        return self

    def add_key(self, key_id: str, key: str, **restrictions: Any) -> None:
        self.admin("key", key_id=key_id, key=key, **restrictions)

    def classes(self) -> dict[str, int]:
        """Calls by the class they are billed as: A, B, C."""
        return dict(self.admin("state")["classes"])

    def violations(self) -> list[str]:
        """Every moment at which a pointer lied, the present included. Must be empty."""
        return list(self.admin("violations")["violations"])

    def versions(self, suffix: str = "") -> list[dict[str, Any]]:
        return [v for v in self.admin("versions")["versions"] if v["name"].endswith(suffix)]

    def objects(self, beginning: str = "") -> dict[str, bytes]:
        """Name -> content of what a client could download now."""
        newest = {v["name"]: v for v in self.versions() if v["action"] != "start" and v["name"].startswith(beginning)}
        bodies = self.directory / "body"
        return {name: (bodies / v["file_id"]).read_bytes() for name, v in newest.items() if v["action"] == "upload"}

    def environment(self) -> dict[str, str]:
        return environment(B2_APPLICATION_KEY_ID=KEY_ID, B2_APPLICATION_KEY=KEY, B2_ENVIRONMENT=self.url)
