"""MIG, ECC, throttling and XID events over the real pynvml, and XIDs from two sources in one inbox."""

import pytest

from podwatch.domain.snapshot import GpuSample
from podwatch.sensors.gpu import NvmlReader
from podwatch.sensors.gpu_child import EVERY
from podwatch.sensors.xid import KEPT, XidInbox
from podwatch.system.clock import SystemClock
from tests.support.clock import ManualClock
from tests.support.nvml import NvmlWorld

HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, HW_BRAKE, POWER_CAP, IDLE = 8, 32, 64, 128, 4, 1


@pytest.fixture
def inbox() -> XidInbox:
    return XidInbox(SystemClock())


@pytest.fixture
def reader(world: NvmlWorld, inbox: XidInbox) -> NvmlReader:
    reader = NvmlReader(inbox)
    yield reader  # type: ignore[misc]
    reader.close()


def round_of(reader: NvmlReader) -> tuple[GpuSample, ...]:
    """As many looks as it takes until every device was asked anew."""
    for _ in range(EVERY):
        samples = reader.read()
    return samples


def test_a_healthy_device_says_so_in_the_first_look(reader: NvmlReader) -> None:
    first = reader.read()[0]
    assert (first.mig, first.ecc_uncorrected, first.throttled) == (False, 0, ())


def test_what_changes_is_seen_within_one_round(reader: NvmlReader, world: NvmlWorld) -> None:
    reader.read()
    world.set_ecc(1, 3)
    world.set_mig(0)
    world.throttle(1, HW_SLOWDOWN | HW_THERMAL | POWER_CAP | IDLE)
    first, second = round_of(reader)
    assert (first.mig, second.mig) == (True, False)
    assert (first.ecc_uncorrected, second.ecc_uncorrected) == (0, 3)
    assert (first.throttled, second.throttled) == ((), ("hw-thermal",))


@pytest.mark.parametrize(
    ("bits", "reasons"),
    [
        (POWER_CAP | IDLE, ()),  # how a GPU is run, no fault
        (HW_BRAKE | HW_SLOWDOWN, ("hw-power-brake",)),
        (SW_THERMAL, ("sw-thermal",)),
        (HW_SLOWDOWN, ("hw-slowdown",)),
        (HW_THERMAL | HW_BRAKE | SW_THERMAL, ("hw-thermal", "hw-power-brake", "sw-thermal")),
    ],
)
def test_only_faults_count_as_throttling(world: NvmlWorld, bits: int, reasons: tuple[str, ...]) -> None:
    world.throttle(0, bits)
    reader = NvmlReader()
    assert reader.read()[0].throttled == reasons
    reader.close()


def test_what_a_device_does_not_have_is_unknown_and_asked_once(world: NvmlWorld, inbox: XidInbox) -> None:
    world.not_supported(0, "ecc", "mig", "reasons", "events", "pci")
    reader = NvmlReader(inbox)
    sample = reader.read()[0]
    assert (sample.ecc_uncorrected, sample.mig, sample.throttled) == (None, False, ())
    assert not inbox.watched  # one device of two would be silent
    world.not_supported(0)
    assert round_of(reader)[0].ecc_uncorrected is None
    reader.close()


def test_memory_is_asked_every_time_and_health_is_not(reader: NvmlReader, world: NvmlWorld) -> None:
    reader.read()
    world.set_memory(0, 7)
    world.set_ecc(0, 7)
    sample = reader.read()[0]
    assert (sample.memory_used_bytes, sample.ecc_uncorrected) == (7, 0)


def test_events_arrive_with_their_gpu(reader: NvmlReader, world: NvmlWorld, inbox: XidInbox) -> None:
    reader.read()
    assert inbox.watched
    assert inbox.newest() == ()
    world.xid(1, 79)
    world.xid(0, 31)
    reader.read()
    assert [(event.gpu, event.code) for event in inbox.newest()] == [(1, 79), (0, 31)]
    reader.read()
    assert len(inbox.newest()) == 2


def test_events_are_read_again_by_the_next_child(reader: NvmlReader, world: NvmlWorld, inbox: XidInbox) -> None:
    reader.read()
    reader.close()
    assert not inbox.watched
    reader.read()
    assert inbox.watched
    world.xid(0, 48)
    reader.read()
    assert [event.code for event in inbox.newest()] == [48]


def test_without_events_nobody_watches(world: NvmlWorld, inbox: XidInbox) -> None:
    world.not_supported(0, "events")
    world.not_supported(1, "events")
    reader = NvmlReader(inbox)
    world.xid(0, 79)
    reader.read()
    assert not inbox.watched
    assert inbox.newest() == ()
    reader.close()


def test_one_fault_told_repeatedly_is_one() -> None:
    clock = ManualClock()
    inbox = XidInbox(clock)
    for gpu in (1, 1, 0, 1):
        inbox.add(gpu, 79)
    assert [(event.gpu, event.code) for event in inbox.newest()] == [(1, 79), (0, 79)]
    clock.advance(60.0)
    inbox.add(1, 79)
    assert len(inbox.newest()) == 3


def test_the_inbox_is_bounded() -> None:
    inbox = XidInbox(ManualClock())
    for code in range(3 * KEPT):
        inbox.add(0, code)
    assert [event.code for event in inbox.newest()] == list(range(2 * KEPT, 3 * KEPT))


def test_the_number_of_its_device_file_is_told_and_may_differ(world: NvmlWorld) -> None:
    world.set_minors(6, 3)
    again = NvmlReader()
    try:
        assert [g.minor for g in again.read()] == [6, 3]
    finally:
        again.close()
