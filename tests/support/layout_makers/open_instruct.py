"""``accelerator.save_state``, then ``COMPLETED``."""

from pathlib import Path

from tests.support.layout_makers._writing import Operation, write
from tests.support.layout_makers.accelerate import deepspeed


def operations(output_dir: Path, step: int, name: str = "step_{step}") -> list[Operation]:
    directory = output_dir / name.format(step=step)
    return deepspeed(directory) + write(directory / "COMPLETED", b"COMPLETED")
