"""When uploads are called slower than the saves."""

import pytest

from podwatch.store.uploads import uploads_behind


def test_skipped_checkpoints_and_an_upload_that_takes_longer_than_a_save() -> None:
    assert uploads_behind(2, 1300.0, 420.0)


@pytest.mark.parametrize(
    ("skipped", "upload", "save"),
    [(0, 1300.0, 420.0), (1, 1300.0, 420.0), (9, 400.0, 420.0), (9, 50.0, 1.0), (9, None, 420.0), (9, 1300.0, None)],
    ids=["all stored", "one skipped", "quick uploads", "quick saves", "no upload", "no saves"],
)
def test_it_is_not_called_so_without_need(skipped: int, upload: float | None, save: float | None) -> None:
    assert not uploads_behind(skipped, upload, save)
