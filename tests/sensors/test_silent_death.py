"""The silent-death detector over the real pynvml on the stand-in; tests/suites/gpu runs the same on a real card."""

from podwatch.domain.finding import Agreement, Verdict
from podwatch.sensors.gpu import GpuSensor
from podwatch.sensors.nvml import NvmlReader
from podwatch.system.clock import SystemClock
from tests.support.detecting import watch_a_death
from tests.support.nvml import GIB, NvmlWorld


async def test_a_silent_death_is_found_through_nvml(world: NvmlWorld) -> None:
    world.set_memory(0, 40 * GIB)
    alive = True

    def kill() -> None:
        nonlocal alive
        alive = False
        world.set_memory(0, 0)

    sensor = GpuSensor(NvmlReader(), SystemClock(), 0.2, 5.0)
    await sensor.start()
    try:
        while not sensor.latest().ok:
            await SystemClock().sleep(0.02)
        finding, seconds = await watch_a_death(sensor, 0, lambda: alive, kill, held_bytes=40 * GIB)
    finally:
        await sensor.stop()
    assert finding.verdict is Verdict.RESTART
    assert any(e.agreement is Agreement.AGREES for e in finding.evidence)
    assert 2.0 <= seconds < 6.0, "not before the hold is over, and soon after"
