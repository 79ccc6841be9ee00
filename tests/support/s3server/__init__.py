"""A small S3 on loopback, a process of its own: signatures checked, path and virtual-host addressing, versions,
conditions, checksums that are refused when wrong, and the differences between real services as switches (``Traits``).

Faults on demand as in tests/support/b2server. It outlives a client that is killed, and checks at every event that no
``latest.json`` lies (``violations()``).
"""

from pathlib import Path
from typing import Any, Self

from tests.support.store_server import ServerProcess, environment

KEY_ID, KEY = "AKTESTKEY0001", "s3-secret-never-to-be-seen"
BUCKET = "test-bucket"


class S3Server(ServerProcess):
    module = "tests.support.s3server"

    def __init__(self, directory: Path, *, bucket: str = BUCKET, certificate: Path | None = None) -> None:
        super().__init__(directory, bucket, certificate)
        self._traits: dict[str, Any] = {}

    def start(self) -> Self:
        super().start()
        self.add_key(KEY_ID, KEY)
        if self._traits:
            self.admin("traits", **self._traits)
        return self

    def add_key(self, access_key: str, secret: str, **restrictions: Any) -> None:
        self.admin("key", access_key=access_key, secret=secret, **restrictions)

    def traits(self, **traits: Any) -> None:
        """Make it another kind of S3; see ``state.Traits``. Kept over a restart."""
        self._traits |= traits
        self.admin("traits", **traits)

    def violations(self) -> list[str]:
        """Every moment at which a pointer lied, the present included. Must be empty."""
        return list(self.admin("state")["violations"])

    def versions(self, suffix: str = "") -> list[dict[str, Any]]:
        return [v for v in self.admin("state")["versions"] if v["key"].endswith(suffix)]

    def uploads(self) -> list[dict[str, Any]]:
        return list(self.admin("state")["uploads"])

    def environment(self) -> dict[str, str]:
        return environment(
            AWS_ACCESS_KEY_ID=KEY_ID,
            AWS_SECRET_ACCESS_KEY=KEY,
            AWS_ENDPOINT_URL_S3=self.url,
            AWS_EC2_METADATA_DISABLED="true",
        )
