"""The steps lost at a death are counted only where something other than checkpoints shows steps."""

import pytest

from podwatch.domain.snapshot import ProgressSample, ProgressSource, Snapshot, observed
from podwatch.recovery.context import Attempt


@pytest.mark.parametrize(
    ("sources", "read"),
    [
        ((ProgressSource.CHECKPOINT,), False),
        ((ProgressSource.CHECKPOINT, ProgressSource.STEP_LINE), True),
        ((ProgressSource.MARKER,), True),
    ],
)
def test_checkpoints_alone_do_not_count_steps(sources: tuple[ProgressSource, ...], read: bool) -> None:
    attempt = Attempt("s1", 0.0)
    samples = tuple(ProgressSample(source, "trainer", 5.0, 40, own=True) for source in sources)
    attempt.see(Snapshot(6.0, 6.0, progress=observed(samples, 6.0)), {}, ())
    assert attempt.last_step == 40
    assert attempt.steps_read is read
