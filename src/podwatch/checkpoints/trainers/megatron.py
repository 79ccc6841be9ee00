"""Megatron-LM: a garbled tracker makes it exit with status 0, which looks like a clean end."""

import re

from podwatch.checkpoints.command_table import recogniser
from podwatch.checkpoints.layout import Kind, Recognition, Site, Weights
from podwatch.checkpoints.step_names import step_names
from podwatch.checkpoints.table_layout import TableLayout
from podwatch.checkpoints.table_places import Trainer
from podwatch.domain.trainer_log import StepPattern, TrainerLog

TRACKER = "latest_checkpointed_iteration.txt"


def _on_disk(site: Site) -> Recognition | None:
    root = TRAINER.place(site) or site.output_dir
    for name in step_names(root, "iter_{step:07d}").values():
        if (root / TRACKER).is_file():
            return Recognition("megatron", f"{name} is beside {TRACKER}", certain=True)
        return Recognition("megatron", f"{name} exists")
    return None


LOG = TrainerLog(
    steps=(
        StepPattern(
            re.compile(r"^(?:\[[\d\s:.-]{1,30}\]\s*)?iteration {1,12}(\d{1,12})/ {0,12}\d{1,12} \| consumed samples:")
        ),
    )
)
WEIGHTS = Weights(note="the exporter of the model's architecture, for example Megatron Bridge")


TRAINER = Trainer("megatron")
KIND = Kind(
    "megatron", lambda site: TableLayout(TRAINER, site), recogniser("megatron", _on_disk), log=LOG, weights=WEIGHTS
)
