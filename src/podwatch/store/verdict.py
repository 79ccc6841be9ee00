"""``verdict.json``: how the attempts of a job have ended, as the next attempt reads it. Blocking.

The document replaces itself: each attempt that holds the run writes it whole. ``domain/earlier_attempts`` has its
fields, and the rules of the job decide what they mean.
"""

import math
from dataclasses import replace

from podwatch.domain.earlier_attempts import RunVerdict
from podwatch.domain.errors import IntegrityError
from podwatch.domain.times import rfc3339
from podwatch.store.interfaces import read_or_none
from podwatch.store.keys import RunKeys
from podwatch.store.objects.base import Objects


def read_verdict(store: Objects, keys: RunKeys) -> RunVerdict:
    """The verdict; an empty one where there is none, or none that can be read: an attempt then starts. Raises
    RemoteError for trouble of the store."""
    try:
        data = read_or_none(store, keys.verdict, RunVerdict)
        found = RunVerdict() if data is None else RunVerdict.from_bytes(data, where=keys.verdict)
    except IntegrityError:
        return RunVerdict()
    return found if found.run_id in ("", keys.run_id) else RunVerdict()


def write_verdict(store: Objects, keys: RunKeys, verdict: RunVerdict, wall: float, *, until: float = math.inf) -> None:
    """Replace it. ``wall``: by the store's clock; ``until``: the boottime after which nothing is sent. Raises
    RemoteError."""
    document = replace(verdict, run_id=keys.run_id, written_at=rfc3339(wall) or "")
    store.put(keys.verdict, document.to_bytes(), until=until)
