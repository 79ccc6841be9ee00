"""Stores one file in one call, part after part."""

import contextlib
from typing import BinaryIO

from podwatch.domain.errors import RemoteError
from podwatch.stores.base import ObjectStore, Progress, StoredObject
from podwatch.stores.part_reader import StreamSource, part_spans


def put_file(
    store: ObjectStore, key: str, stream: BinaryIO, size: int, *, part_size: int, progress: Progress | None = None
) -> StoredObject:
    """Store ``size`` bytes of a seekable stream. Cancels the upload when it fails."""
    source = StreamSource(stream)
    if size <= part_size:
        return store.put_small(key, source, size, progress)
    upload = store.begin_large(key, size)
    try:
        parts = [
            store.put_part(upload, number, source, offset, length, progress)
            for number, (offset, length) in enumerate(part_spans(size, part_size), 1)
        ]
        return store.finish_large(upload, parts, size)
    except BaseException:
        with contextlib.suppress(RemoteError):  # a sweep finds it later; the error that led here matters more
            store.cancel_large(upload)
        raise
