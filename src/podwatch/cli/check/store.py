"""Check the store: reachable, and a key with the needed capabilities."""

from collections.abc import Iterator

from podwatch.cli.check.report import Line
from podwatch.cli.offline import store_access
from podwatch.config.settings import Settings
from podwatch.domain.times import span
from podwatch.store.keys import RunKeys
from podwatch.store.objects.base import Checked
from podwatch.store.objects.directory import is_on_file_system_of
from podwatch.store.objects.open import open_objects, parse_url
from podwatch.system.blocking_calls import in_time

SKEW_SECONDS = 120.0
"""Ages in `status`, and the watch over another pod's heartbeat, tolerate this skew."""


def store(settings: Settings) -> Iterator[Line]:
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
    opened = open_objects(url, store_access(settings), connections=1)
    try:
        checked = in_time(lambda: opened.check(keys.root), seconds=60.0)
        yield Line("store", "ok", f"{opened.url} is usable{_refuses(checked)}")
        for warning in checked.warnings:
            yield Line("store", "warn", warning, "see docs/store.md")
        if checked.skew is not None:
            yield _clock(checked.skew)
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
