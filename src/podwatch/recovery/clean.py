"""``podwatch clean`` without a daemon."""

from podwatch.recovery.observe import read_run, recall, replace_other_run
from podwatch.recovery.perform import Cleaned
from podwatch.recovery.recovery import Recovery


async def clean_alone(recovery: Recovery) -> Cleaned:
    """The caller holds the daemon's lock. Replaces the record of another run, of which nothing is left here. Raises
    Busy while something trains here."""
    await read_run(recovery.context)
    await recovery.requests.refuse_while_running()
    await replace_other_run(recovery.context)
    await recall(recovery.context)
    return await recovery.performer.clean()
