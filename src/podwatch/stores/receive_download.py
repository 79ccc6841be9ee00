"""Receives one range of one object, block by block, and gives up a connection that stalls.

b2sdk's own downloader verifies no large object, writes directly to the final path and cannot resume.
"""

import time
from collections.abc import Callable
from typing import Any

from podwatch.domain.errors import IntegrityError
from podwatch.stores.base import Take
from podwatch.stores.http_transfer import WireBroken, give_back, read_into

BLOCK = 1 << 20
"""Bytes received at once. Against 256 KiB: 7 % less CPU for a large restore, 7 MiB more memory
(benchmarks/transfers.md)."""
STALLED = 30.0
"""Seconds in which fewer than ``CRAWL`` bytes arrive: the connection counts as dead. The same time as for an upload's
block. The read timeout of the session ends a connection on which nothing arrives."""
CRAWL = 1 << 16


def receive(
    response: Any,
    offset: int,
    length: int,
    take: Take,
    *,
    mark: str,
    where: str,
    monotonic: Callable[[], float] = time.monotonic,
) -> int:
    """Pass the bytes of the answer to ``take`` in order, in reused memory; returns the object's whole size. Exceptions
    of ``take`` pass unchanged. The answer is closed, or its connection kept.

    ``mark``: a header that the store sends with every object; an answer without it is a proxy's. Raises OSError (the
    connection broke: the caller continues after the bytes taken), WireBroken for an answer that is not the range, and
    IntegrityError for an object that ends before the range does.
    """
    complete = False
    try:
        total = _total(response, offset, length, mark, where)
        buffer = memoryview(bytearray(min(BLOCK, length)))
        left, waited, moved = length, 0.0, 0
        while left:
            began = monotonic()
            count = _read(response, buffer[:left])
            waited, moved = waited + monotonic() - began, moved + count
            take(buffer[:count])
            left -= count
            if left and waited > STALLED:
                if moved < CRAWL:
                    raise WireBroken("the download stalled")
                waited, moved = 0.0, 0
        complete = True
    finally:
        give_back(response, complete=complete)
    return total


def _read(response: Any, buffer: memoryview) -> int:
    try:
        count = read_into(response, buffer)
    except Exception as error:  # of this wire, or of the library where a proxy is on the way
        raise WireBroken(f"the download was cut off: {type(error).__name__}") from error
    if not count:
        raise WireBroken("the download was cut off")
    return count


def _total(response: Any, offset: int, length: int, mark: str, where: str) -> int:
    """The object's size, after checking that the answer is the requested range."""
    said = str(response.headers.get("Content-Range") or "")
    ours = response.status_code in (200, 206) and mark in response.headers
    try:
        if said:  # with 206, or with 200 (rclone serve s3)
            unit, _, rest = said.partition(" ")
            span, _, size = rest.partition("/")
            first, last, total = int(span.partition("-")[0]), int(span.partition("-")[2]), int(size)
            good = unit == "bytes" and first == offset and (response.status_code == 206 or ours)
        else:  # a whole object that contains the range; without the store's headers, or shorter, it is a proxy's page
            total = int(response.headers["Content-Length"])
            good, last = ours and response.status_code == 200 and offset == 0 and total >= length, total - 1
    except (KeyError, ValueError):
        good = False
    if not good:
        raise WireBroken("the store answers with a different range than requested")
    if total < offset + length:
        raise IntegrityError("object is shorter than recorded", where=where)
    if last < offset + length - 1:
        raise WireBroken("the store answers with a shorter range than requested")
    return total
