"""The 2025 runner. Its order is not known; this is one."""

from pathlib import Path

from tests.support.checkpoints import safetensors_bytes, torch_zip_bytes
from tests.support.layout_makers._writing import Operation, write, write_json


def operations(output_dir: Path, step: int) -> list[Operation]:
    directory = output_dir / "training_state" / f"step_{step}"
    done = write_json(directory / "model" / "config.json", {"model_type": "qwen3"})
    done += write(directory / "model" / "model.safetensors", safetensors_bytes())
    done += write(directory / "optimizer.pt", torch_zip_bytes({"state": {}}, (b"o" * 256,)))
    done += write(directory / "scheduler.pt", torch_zip_bytes({"last_epoch": step}))
    return done + write_json(directory / "training_info.json", {"step": step, "loss": 0.5})


def link(output_dir: Path, step: int) -> None:
    path = output_dir / "training_state" / "step_latest"
    path.unlink(missing_ok=True)
    path.symlink_to(f"step_{step}")
