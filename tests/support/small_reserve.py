"""A journal that reserves no room on the disk."""

import pytest

from podwatch.journal import open_database


@pytest.fixture(autouse=True)
def small_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full disks are the journal's own tests; elsewhere 2 MiB per database would only cost time."""
    monkeypatch.setattr(open_database, "RESERVED_PAGES", 8)
    monkeypatch.setattr(open_database, "BALLAST_BYTES", 4096)
