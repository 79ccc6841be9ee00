"""DeepSpeed alone: ``<dir>/global_stepN`` with ``latest`` beside it.

N counts the engine's optimizer steps (a script can pass another number). Only tags of this form are steps; for others
use ``custom``. OpenRLHF's SFT, DPO and reward trainers and open-instruct's GRPO use this layout. How a script resumes
is unknown: most call ``load_checkpoint(dir)``, which reads ``latest``, and podwatch writes N there.
"""

import re

from podwatch.checkpoints.command_table import recogniser
from podwatch.checkpoints.layout import Kind, Recognition, Site, Weights
from podwatch.checkpoints.step_names import step_names
from podwatch.checkpoints.structures import is_model_states
from podwatch.checkpoints.table_layout import TableLayout
from podwatch.checkpoints.table_places import Trainer
from podwatch.domain.process import ProcessNames, ProcessRole
from podwatch.domain.trainer_log import StepPattern, TrainerLog


def _on_disk(site: Site) -> Recognition | None:
    root = site.checkpoint_dir or site.output_dir
    for step, name in sorted(step_names(root, "global_step{step}").items(), reverse=True)[:3]:
        if any(is_model_states(p.name) for p in (root / name).iterdir()):
            return Recognition("deepspeed", f"global_step{step} holds DeepSpeed's model states", certain=True)
    return None


LOG = TrainerLog(
    steps=(
        StepPattern(
            re.compile(
                r"^(?:\[[\d\s:.,-]{1,30}\] )?\[INFO\] \[logging\.py:[^\]]{1,40}\] (?:\[Rank 0\] )?"
                r"step=(\d{1,12}), skipped="
            )
        ),
    )
)
PROCESSES = ProcessNames(programs={"deepspeed": ProcessRole.LAUNCHER})
WEIGHTS = Weights(
    convert="python ../zero_to_fp32.py .. TARGET -t global_stepN --safe_serialization",
    note="in CHECKPOINT; config.json and the tokenizer come from the original model",
)


TRAINER = Trainer("deepspeed")
KIND = Kind(
    "deepspeed",
    lambda site: TableLayout(TRAINER, site),
    recogniser("deepspeed", _on_disk),
    log=LOG,
    processes=PROCESSES,
    weights=WEIGHTS,
)
