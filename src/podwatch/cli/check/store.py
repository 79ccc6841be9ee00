"""Check the store: reachable, a key with the needed capabilities, and fast enough for the saves."""

import math
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from statistics import median

from podwatch.cli.check.report import Line, Sets, in_time
from podwatch.cli.offline import store_access
from podwatch.config.settings import Settings
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.times import size, span
from podwatch.store.keys import RunKeys
from podwatch.store.objects.base import Checked, Objects
from podwatch.store.objects.directory import is_on_file_system_of
from podwatch.store.objects.open import open_objects, parse_url

SKEW_SECONDS = 120.0
"""Ages in `status`, and the watch over another pod's heartbeat, tolerate this skew."""
PIECE_BYTES = 8 << 20
PIECES = 4
"""32 MiB in total: enough to measure an uplink of 300 MB/s, and only seconds on a slow one."""


def store(settings: Settings, throughput: bool, sets: Sets) -> Iterator[Line]:
    url = settings.sync.store
    if not url:
        yield Line(
            "store", "warn", "NOT BACKED UP: no store is configured", "set [sync] store: a bucket or another disk"
        )
        return
    place = parse_url(url)
    if place.path is not None and is_on_file_system_of(url, settings.trainer.output_dir):
        yield Line("store", "fail", f"{url} is on the filesystem of output_dir", "use another disk, or a bucket")
        return
    keys = RunKeys(settings.run_id, place.prefix)
    opened = open_objects(url, store_access(settings), connections=PIECES)
    try:
        checked = in_time(lambda: opened.check(keys.root), seconds=60.0)
        yield Line("store", "ok", f"{opened.url} is usable{_refuses(checked)}")
        for warning in checked.warnings:
            yield Line("store", "warn", warning, "see docs/sync.md")
        if checked.skew is not None:
            yield _clock(checked.skew)
        if throughput:
            yield from _throughput(opened, keys, sets())
    except TimeoutError:
        fix = "check the network; without a store podwatch still guards training, but uploads nothing"
        yield Line("store", "fail", f"{opened.url} does not answer", fix)
    finally:
        opened.close()


_HASHES = {"sha1": "SHA-1", "sha256": "SHA-256", "md5": "MD5"}


def _refuses(checked: Checked) -> str:
    """What a wrong hash did; empty where it was stored, which is one of the warnings."""
    name = _HASHES.get(checked.verifies, checked.verifies)
    return f": it refuses data with a wrong {name}" if name else ""


def _clock(skew: float) -> Line:
    """``skew``: seconds that this machine's clock is ahead of the store's."""
    if abs(skew) > SKEW_SECONDS:
        text = f"this machine's clock is {span(abs(skew))} {'ahead of' if skew > 0 else 'behind'} the store's"
        return Line("clock", "warn", text, "set it (chronyd, ntpdate); else podwatch misjudges ages and leases")
    return Line("clock", "ok", "this machine's clock matches the store's")


def _throughput(opened: Objects, keys: RunKeys, sets: tuple[CheckpointSet, ...]) -> Iterator[Line]:
    from podwatch.domain.checkpoint import newest_complete

    rate = in_time(lambda: measure(opened, keys.tmp), seconds=300.0)
    newest = newest_complete(sets)
    gap = _save_gap(sorted(s.changed_wall for s in sets if s.complete))
    if newest is None or gap is None:
        why = "there is no checkpoint yet" if newest is None else "the time between two saves is not known yet"
        yield Line("throughput", "ok", f"measured {size(rate)}/s; nothing to compare with: {why}")
        return
    yield verdict(rate, newest.size_bytes, gap)


def verdict(rate: float, size_bytes: int, gap: float) -> Line:
    """The result for a measured ``rate`` (bytes per second) and a save of ``size_bytes`` every ``gap`` seconds."""
    need = size_bytes / gap
    if rate >= need:
        return Line("throughput", "ok", f"saves need {size(need)}/s, measured {size(rate)}/s")
    nth = math.ceil(need / rate)
    ordinal = {2: "second", 3: "third"}.get(nth, f"{nth}th")
    text = f"saves need {size(need)}/s, measured {size(rate)}/s: only every {ordinal} save reaches the store"
    return Line("throughput", "warn", text, "save less often, or accept that the other saves exist on this pod only")


def measure(opened: Objects, prefix: str) -> float:
    """Bytes per second of a parallel upload of a few probe objects, which are deleted again. RemoteError."""
    data = secrets.token_bytes(PIECE_BYTES)
    first, *names = (f"{prefix}{secrets.token_hex(8)}-{n}" for n in range(PIECES + 1))
    try:
        with ThreadPoolExecutor(PIECES) as pool:
            opened.put(first, data[:1024])  # the first call authorizes
            began = time.monotonic()
            for sent in [pool.submit(opened.put, name, data) for name in names]:
                sent.result()
            took = time.monotonic() - began
    finally:
        opened.delete([first, *names])
    return PIECES * PIECE_BYTES / max(took, 1e-6)


def _save_gap(walls: list[float]) -> float | None:
    """Seconds between two saves, by the checkpoints on this pod."""
    gaps = [later - earlier for earlier, later in pairwise(walls) if later > earlier]
    return median(gaps) if gaps else None
