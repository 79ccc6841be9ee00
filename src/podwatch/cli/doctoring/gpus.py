"""Check the GPUs: present, and free before a start."""

from collections.abc import Iterator
from dataclasses import dataclass

from podwatch.cli.doctoring.common import DEADLINE_SECONDS, Line, in_time
from podwatch.client.times import gib
from podwatch.config.settings import Settings


@dataclass(frozen=True, slots=True)
class Gpu:
    """Memory in bytes. ``problem``: why it cannot be read; then both values are 0."""

    index: int
    name: str
    used: int
    total: int
    problem: str = ""


def read_gpus(seconds: float = DEADLINE_SECONDS) -> list[Gpu]:
    """Every GPU that NVML lists. ReaderUnavailable with the reason; TimeoutError if a call hangs for ``seconds`` (half
    of that while the library loads)."""
    from podwatch.sensors.nvml import look_once

    samples = in_time(lambda: look_once(seconds / 2), seconds=seconds)
    return [
        Gpu(gpu.index, gpu.name, gpu.memory_used_bytes or 0, gpu.memory_total_bytes or 0, gpu.detail) for gpu in samples
    ]


def gpus(settings: Settings, running: str) -> Iterator[Line]:
    """``running``: the running training as text; empty if there is none."""
    wanted = sorted({*settings.gpu.inference, *settings.gpu.trainer})
    try:
        devices = {gpu.index: gpu for gpu in read_gpus()}
    except TimeoutError:
        yield Line("gpu", "fail", "NVML does not answer: the driver hangs", "read dmesg; if that fails, reboot the pod")
        return
    except Exception as error:
        fix = "install the NVIDIA driver, or run podwatch on the GPU machine; it needs NVML to detect a silent death"
        yield Line("gpu", "fail" if wanted else "warn", f"cannot use NVML: {error}", fix)
        return
    for index in wanted:
        if index not in devices:
            known = ", ".join(map(str, devices)) or "none"
            yield Line("gpu", "fail", f"GPU {index} of [gpu] not found (this machine has: {known})", "correct [gpu]")
    for index, gpu in devices.items():
        if gpu.problem:
            fix = "check whether nvidia-smi shows its memory; podwatch needs it to detect a silent death"
            yield Line("gpu", "fail" if index in wanted else "warn", f"GPU {index}: {gpu.name}, {gpu.problem}", fix)
            continue
        text = f"GPU {index}: {gpu.name}, {gib(gpu.used)} of {gib(gpu.total)} used"
        if running or (wanted and index not in wanted) or gpu.used <= settings.gpu.release_margin:
            yield Line("gpu", "ok", text)
        else:
            # The same threshold as recovery before a start.
            fix = "`podwatch clean --gpu` lists the processes that hold it; a start waits until it is free"
            level = "fail" if wanted else "warn"
            yield Line("gpu", level, f"{text}, but this run's training is not running", fix)
    if devices and not settings.gpu.inference:
        fix = "set [gpu] inference to the GPUs that hold the inference engine"
        yield Line("gpu", "warn", "no inference GPU configured: podwatch cannot detect a silent death by memory", fix)
