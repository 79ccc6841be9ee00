"""Receives one range of one object over b2sdk's session, block by block, and gives up a connection that stalls.

The SDK's own downloader verifies no large object, writes directly to the final path and cannot resume.
"""

import time
from collections.abc import Callable
from typing import Any

import urllib3.exceptions
from b2sdk.v3 import B2Session
from b2sdk.v3 import exception as b2error

from podwatch.domain.errors import IntegrityError
from podwatch.stores.b2_wire import give_back, read_into
from podwatch.stores.base import Take

BLOCK = 1 << 18
"""Bytes received at once. The blocks of all connections of a core stay in its cache from the socket through the hash to
the disk."""
STALLED = 30.0
"""Seconds in which fewer than ``CRAWL`` bytes arrive: the connection counts as dead. The same time as for an upload's
block. The read timeout of b2_http ends a connection on which nothing arrives."""
CRAWL = 1 << 16


def receive(
    session: B2Session,
    url: str,
    offset: int,
    length: int,
    take: Take,
    *,
    monotonic: Callable[[], float] = time.monotonic,
) -> int:
    """Pass the bytes to ``take`` in order, in reused memory; returns the object's whole size. Exceptions of ``take``
    pass unchanged.

    Raises B2Error (transient where the connection broke; the caller continues after the bytes taken) and IntegrityError
    for an object that ends before the range does.
    """
    last = offset + length - 1
    with session.download_file_from_url(url, range_=(offset, last)) as response:
        complete = False
        try:
            total = _total(response, offset, length)
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
                        raise b2error.B2ConnectionError("the download stalled")
                    waited, moved = 0.0, 0
            complete = True
        finally:
            give_back(response, complete=complete)
    return total


def _read(response: Any, buffer: memoryview) -> int:
    try:
        count = read_into(response, buffer)
    except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
        raise b2error.B2ConnectionError(f"the download was cut off: {type(error).__name__}") from error
    if not count:
        raise b2error.B2ConnectionError("the download was cut off")
    return count


def _total(response: Any, offset: int, length: int) -> int:
    """The object's size, after checking that the answer is the requested range."""
    said = str(response.headers.get("Content-Range") or "")
    try:
        if response.status_code == 206:
            unit, _, rest = said.partition(" ")
            span, _, size = rest.partition("/")
            first, last, total = int(span.partition("-")[0]), int(span.partition("-")[2]), int(size)
            good = unit == "bytes" and first == offset
        else:  # a whole object that contains the range. Anything without B2's headers or shorter is a proxy's page
            total = int(response.headers["Content-Length"])
            ours = response.status_code == 200 and "X-Bz-File-Id" in response.headers
            good, last = ours and offset == 0 and total >= length, total - 1
    except (KeyError, ValueError):
        good = False
    if not good:
        raise b2error.B2ConnectionError("the store answers with a different range than requested")
    if total < offset + length:
        raise IntegrityError("object is shorter than recorded", where=str(response.headers.get("X-Bz-File-Name", "")))
    if last < offset + length - 1:
        raise b2error.B2ConnectionError("the store answers with a shorter range than requested")
    return total
