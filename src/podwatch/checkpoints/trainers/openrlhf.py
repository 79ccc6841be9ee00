"""OpenRLHF's PPO and its kin; output_dir is ``ckpt.path``. Its SFT, DPO and reward trainers: layout ``deepspeed``.

Both roles have a ``latest`` of their own, so after a crash they can name different steps: before a start podwatch
writes N into both. The number is the trainer's global step.
"""

from podwatch.checkpoints.command_table import recogniser
from podwatch.checkpoints.layout import Kind, Recognition, Site, Weights
from podwatch.checkpoints.step_names import step_names
from podwatch.checkpoints.table_layout import TableLayout
from podwatch.checkpoints.table_places import Trainer

_ROLES = ("_actor", "_critic")


def _on_disk(site: Site) -> Recognition | None:
    root = site.checkpoint_dir or site.output_dir
    for folder in _ROLES:
        for step in step_names(root / folder, "global_step{step}"):
            return Recognition("openrlhf", f"{folder}/global_step{step} exists", certain=True)
    return None


WEIGHTS = Weights(
    ("../global_step{step}_hf",),
    when="with its option for Hugging Face files",
    convert="python ../zero_to_fp32.py .. TARGET -t global_stepN --safe_serialization",
    note="in _actor/global_stepN; config.json and the tokenizer come from the original model",
)


TRAINER = Trainer("openrlhf")
KIND = Kind("openrlhf", lambda site: TableLayout(TRAINER, site), recogniser("openrlhf", _on_disk), weights=WEIGHTS)
