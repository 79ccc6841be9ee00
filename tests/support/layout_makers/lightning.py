"""One file, moved across file systems, so that it grows at its final name; and the two kinds of directory."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

from tests.support.checkpoints import torch_zip_bytes
from tests.support.layout_makers._writing import Operation, dcp, mkdir, write
from tests.support.layout_makers._zero import tag_operations


def content(step: int, *, weights_only: bool = False, best: str = "") -> bytes:
    """As ``dump_checkpoint`` makes it, in its order."""
    state: OrderedDict[str, int] = OrderedDict(weight=1)
    state._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    values: dict[str, Any] = {"epoch": 0, "global_step": step, "pytorch-lightning_version": "2.6.6"}
    values |= {"state_dict": state, "loops": {"fit_loop": {}}}
    if not weights_only:
        values |= {"callbacks": {"ModelCheckpoint{}": {"best_model_path": best}}}
        values |= {"optimizer_states": [{"state": {}}], "lr_schedulers": []}
    return torch_zip_bytes(values, (b"w" * 256,))


def file(path: Path, step: int, **options: Any) -> list[Operation]:
    return write(path, content(step, **options))


def operations(output_dir: Path, step: int) -> list[Operation]:
    return file(output_dir / "checkpoints" / f"epoch=0-step={step}.ckpt", step)


def fsdp(output_dir: Path, step: int) -> list[Operation]:
    directory = output_dir / "checkpoints" / f"epoch=0-step={step}.ckpt"
    return dcp(directory, 2) + write(directory / "meta.pt", torch_zip_bytes({"epoch": 0, "global_step": step}))


def deepspeed(output_dir: Path, step: int) -> list[Operation]:
    directory = output_dir / "checkpoints" / f"epoch=0-step={step}.ckpt"
    done = mkdir(directory) + tag_operations(directory / "checkpoint", global_step=step, epoch=0)
    return done + write(directory / "latest", b"checkpoint")
