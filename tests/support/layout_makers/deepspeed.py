"""``engine.save_checkpoint(dir)``: every rank's files, rank 0's recovery script, then ``latest``."""

from pathlib import Path
from typing import Any

from tests.support.layout_makers._writing import Operation, write
from tests.support.layout_makers._zero import tag_operations


def operations(output_dir: Path, step: int, **options: Any) -> list[Operation]:
    done = tag_operations(output_dir / f"global_step{step}", **options)
    done += write(output_dir / "zero_to_fp32.py", b"print()\n")
    return done + write(output_dir / "latest", f"global_step{step}".encode())
