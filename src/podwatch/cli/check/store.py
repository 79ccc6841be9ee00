"""Check the store: reachable, a key with the needed capabilities, and fast enough for the saves."""

import math
import secrets
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from statistics import median

from podwatch.cli.check.report import Line, Sets, in_time
from podwatch.cli.offline import credentials
from podwatch.client.times_and_sizes import size, span
from podwatch.config.settings import Settings
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.stores.base import ObjectStore, StoredObject
from podwatch.stores.open_store import open_store, same_filesystem
from podwatch.stores.s3_features import Features
from podwatch.sync.upload.child_job import keys_for

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
    if same_filesystem(url, settings.trainer.output_dir):
        yield Line("store", "fail", f"{url} is on the filesystem of output_dir", "use another disk, or a bucket")
        return
    opened = open_store(url, credentials(settings), writer_id="check", connections=PIECES)
    try:
        warnings = in_time(opened.check, seconds=60.0)
        yield Line("store", "ok", f"{opened.url} is usable")
        if found := found_out(opened.features):
            yield Line("store", "ok", found)
        for warning in warnings:
            yield Line("store", "warn", warning, "see docs/sync.md")
        if opened.clock_skew is not None:
            yield _clock(opened.clock_skew)
        if throughput:
            yield from _throughput(settings, opened, sets())
    except TimeoutError:
        fix = "check the network; without a store podwatch still guards training, but uploads nothing"
        yield Line("store", "fail", f"{opened.url} does not answer", fix)
    finally:
        opened.close()


_CHECKS = {"sha1": "SHA-1", "sha256": "SHA-256", "md5": "MD5"}


def found_out(features: Mapping[str, object]) -> str:
    """What trying the store out showed, in one line; empty for a store where there is nothing to find out."""
    if "part_checks" not in features:
        return ""
    known = Features.from_json(features)
    if known is None:
        return ""
    checks = ", ".join(_CHECKS[check] for check in known.part_checks) or "no checksum"
    parts = [f"it refuses wrong data by {checks}"]
    parts += ["its ETag is the MD5 of the data"] if known.etag_md5 else []
    works = known.create and known.replace
    parts.append("conditional writes work" if works else "no conditional writes (docs/two-pods.md)")
    parts.append("it keeps versions" if known.versioned else "no versions")
    return f"tried out at {features.get('endpoint')}: {'; '.join(parts)}"


def _clock(skew: float) -> Line:
    """``skew``: seconds that this machine's clock is ahead of the store's."""
    if abs(skew) > SKEW_SECONDS:
        text = f"this machine's clock is {span(abs(skew))} {'ahead of' if skew > 0 else 'behind'} the store's"
        return Line("clock", "warn", text, "set it (chronyd, ntpdate); else podwatch misjudges ages and leases")
    return Line("clock", "ok", "this machine's clock matches the store's")


def _throughput(settings: Settings, opened: ObjectStore, sets: tuple[CheckpointSet, ...]) -> Iterator[Line]:
    from podwatch.domain.checkpoint import newest_complete

    rate = in_time(lambda: measure(opened, keys_for(settings.sync.store, settings.run_id).measurements), seconds=300.0)
    newest = newest_complete(sets)
    gap = _save_gap(settings, sorted(s.changed_wall for s in sets if s.complete))
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


def measure(opened: ObjectStore, prefix: str) -> float:
    """Bytes per second of a parallel upload of a few probe objects, which are deleted again. RemoteError."""
    name, data = f"{prefix}{secrets.token_hex(8)}", secrets.token_bytes(PIECE_BYTES)
    written: list[StoredObject] = []
    try:
        with ThreadPoolExecutor(PIECES) as pool:
            opened.put_bytes(f"{name}-0", data[:1024])  # the first call authorizes
            began = time.monotonic()
            for sent in [pool.submit(opened.put_bytes, f"{name}-{n}", data) for n in range(1, PIECES + 1)]:
                written.append(sent.result())
            took = time.monotonic() - began
    finally:
        for there in opened.versions(f"{name}-"):
            opened.delete(there)
    return PIECES * PIECE_BYTES / max(took, 1e-6)


def _save_gap(settings: Settings, walls: list[float]) -> float | None:
    """Seconds between two saves: learned, else from the checkpoints on this pod."""
    from podwatch.daemon.components import LEARNED
    from podwatch.detection.learned import Learned
    from podwatch.journal.journal import Journal

    path = settings.state_dir / settings.run_id / "journal.sqlite"
    if path.exists():
        journal = Journal.open(path, read_only=True)
        try:
            kept = journal.learned(LEARNED)
        finally:
            journal.close()
        learned = (Learned.kept(kept) or Learned()).median_save_gap_seconds
        if learned:
            return learned
    gaps = [later - earlier for earlier, later in pairwise(walls) if later > earlier]
    return median(gaps) if gaps else None
