"""The GPUs: there, and empty of foreign memory before a start."""

from collections.abc import Iterator
from dataclasses import dataclass

from podwatch.cli.doctoring.common import DEADLINE_SECONDS, Line, in_time
from podwatch.client.times import gib
from podwatch.config.settings import Settings


@dataclass(frozen=True, slots=True)
class Gpu:
    """Bytes by NVML index. ``problem``: why its memory cannot be read; the figures are 0 then."""

    index: int
    name: str
    used: int
    total: int
    problem: str = ""


def read_gpus(seconds: float = DEADLINE_SECONDS) -> list[Gpu]:
    """Every GPU that NVML lists. Raises ReaderUnavailable with the reason, TimeoutError when a call hangs for
    ``seconds``. A library that hangs while loading is reported at half of that."""
    from podwatch.sensors.nvml import look_once

    samples = in_time(lambda: look_once(seconds / 2), seconds=seconds)
    return [
        Gpu(gpu.index, gpu.name, gpu.memory_used_bytes or 0, gpu.memory_total_bytes or 0, gpu.detail) for gpu in samples
    ]


def gpus(settings: Settings, running: str) -> Iterator[Line]:
    """``running`` says in words what trains here now; empty where nothing does."""
    wanted = sorted({*settings.gpu.inference, *settings.gpu.trainer})
    try:
        devices = {gpu.index: gpu for gpu in read_gpus()}
    except TimeoutError:
        yield Line("gpu", "fail", "NVML does not answer", "the driver hangs: look at dmesg; the pod may need a reboot")
        return
    except Exception as error:
        fix = "install the NVIDIA driver, or run where the GPUs are; without NVML a silent death cannot be seen"
        yield Line("gpu", "fail" if wanted else "warn", f"NVML cannot be used: {error}", fix)
        return
    for index in wanted:
        if index not in devices:
            known = ", ".join(map(str, devices)) or "none"
            yield Line("gpu", "fail", f"GPU {index} is configured but not here (here: {known})", "correct [gpu]")
    for index, gpu in devices.items():
        if gpu.problem:
            fix = "without its memory a silent death on it cannot be seen: see whether nvidia-smi shows it"
            yield Line("gpu", "fail" if index in wanted else "warn", f"GPU {index}: {gpu.name}, {gpu.problem}", fix)
            continue
        text = f"GPU {index}: {gpu.name}, {gib(gpu.used)} of {gib(gpu.total)} used"
        if running or (wanted and index not in wanted) or gpu.used <= settings.gpu.release_margin:
            yield Line("gpu", "ok", text)
        else:
            # As recovery judges before a start: more than this above an empty card is somebody's.
            fix = "`podwatch clean --gpu` lists who holds it; a start waits until it is free"
            level = "fail" if wanted else "warn"
            yield Line("gpu", level, f"{text}, and no training of this run is running", fix)
    if devices and not settings.gpu.inference:
        fix = "set gpu.inference to the GPUs that hold the inference engine"
        yield Line("gpu", "warn", "no inference GPU is named: silent death by memory is not watched", fix)
