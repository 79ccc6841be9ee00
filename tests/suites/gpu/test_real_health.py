"""Health of a real card: that the driver answers these questions, or says that it does not know them."""

from podwatch.sensors.gpu import NvmlReader
from podwatch.sensors.xid import XidInbox
from podwatch.system.clock import SystemClock

REASONS = {"hw-thermal", "hw-power-brake", "sw-thermal", "hw-slowdown"}


def test_health_of_every_card() -> None:
    inbox = XidInbox(SystemClock())
    reader = NvmlReader(inbox)
    try:
        for sample in reader.read():
            assert sample.ecc_uncorrected is None or sample.ecc_uncorrected >= 0
            assert set(sample.throttled) <= REASONS
            print(sample.index, sample.mig, sample.ecc_uncorrected, sample.throttled, "xids watched:", inbox.watched)
        assert inbox.newest() == ()
    finally:
        reader.close()
    assert not inbox.watched
