"""All into ``tmp_step_N``, then the rename; over an existing step by way of ``old_step_N``."""

import shutil
from pathlib import Path

from tests.support.checkpoints import torch_zip_bytes
from tests.support.layout_makers._writing import Operation, dcp, mkdir, rename, write, write_json


def operations(output_dir: Path, step: int) -> list[Operation]:
    staged, final, old = (output_dir / f"{lead}step_{step}" for lead in ("tmp_", "", "old_"))
    done = mkdir(staged)
    done += write_json(staged / "training_info.json", {"total_steps": step, "consumed_samples": 64 * step})
    done += write(staged / "config.yaml", b"grpo:\n  max_num_steps: 100\n")
    done += dcp(staged / "policy" / "weights", 2) + dcp(staged / "policy" / "optimizer", 2)
    done += write_json(staged / "policy" / "tokenizer" / "tokenizer_config.json", {})
    done += write(staged / "train_dataloader.pt", torch_zip_bytes({"position": step}))
    if not final.exists():
        return done + rename(staged, final)
    return done + rename(final, old) + rename(staged, final) + [lambda: shutil.rmtree(old)]
