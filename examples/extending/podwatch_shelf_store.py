"""A store in a package of its own: docs/contributing.md."""

from pathlib import Path
from urllib.parse import urlsplit

from podwatch.stores.base import ObjectStore
from podwatch.stores.credentials import Credentials
from podwatch.stores.local import LocalStore


class ShelfStore(LocalStore):
    """A directory whose file server has one clock for all pods."""

    def __init__(self, url: str, writer_id: str) -> None:
        super().__init__(Path(urlsplit(url).path), writer_id=writer_id)
        self.url = url


def open_store(url: str, credentials: Credentials | None, *, writer_id: str, connections: int = 4) -> ObjectStore:
    return ShelfStore(url, writer_id)
