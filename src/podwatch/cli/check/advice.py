"""Advice about the save interval, the uplink and the disk, from what podwatch has measured of this run on this pod."""

import shutil
from collections.abc import Iterator

from podwatch.cli.check.report import Line, Sets, in_time, nearest
from podwatch.config.settings import Settings


def advice(settings: Settings, all_sets: Sets) -> Iterator[Line]:
    """Nothing before podwatch has measured the run: the numbers come from its journal."""
    from podwatch.daemon.components import LEARNED
    from podwatch.detection.learned import Learned
    from podwatch.domain.checkpoint import newest_complete
    from podwatch.journal.journal import Journal
    from podwatch.policy.advice import Measured, advise, upload_rate
    from podwatch.policy.cost_totals import account
    from podwatch.policy.time_ledger import LEDGER_KEY, Use, from_dict

    path = settings.state_dir / settings.run_id / "journal.sqlite"
    if not path.exists():
        return
    journal = Journal.open(path, read_only=True)
    try:
        kept, ledger = journal.learned(LEARNED), journal.learned(LEDGER_KEY)
        rate, uploads = upload_rate(journal.events(limit=5000))
    finally:
        journal.close()
    learned = Learned.from_dict(kept) if isinstance(kept, dict) else Learned()
    spent = from_dict(ledger.get("ledger")) if isinstance(ledger, dict) else None
    totals = None if spent is None else account(spent, spent.at)
    sets = all_sets()
    newest = newest_complete(sets)
    there = nearest(settings.trainer.checkpoint_dir or settings.trainer.output_dir)
    free = in_time(lambda: shutil.disk_usage(there)).free
    ours = sum(found.size_bytes for found in sets)
    if settings.disk.capacity:
        free = max(0, min(free, settings.disk.capacity - ours))
    measured = Measured(
        save_seconds=learned.median_save_seconds,
        saves=len(learned.save_seconds),
        gap_seconds=learned.median_save_gap_seconds,
        step_seconds=learned.median_step_seconds,
        failures=0 if totals is None else totals.failures,
        training_seconds=0.0 if totals is None else totals.seconds[Use.TRAINING],
        save_bytes=None if newest is None else newest.size_bytes,
        upload_rate=rate,
        uploads=uploads,
        room_bytes=None if newest is None else free + ours,
    )
    for text in advise(measured):
        yield Line("advice", "ok", text)
