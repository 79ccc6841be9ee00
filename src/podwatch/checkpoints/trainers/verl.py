"""verl: by default below ``checkpoints/PROJECT/EXPERIMENT``. It reads its tracker even where a path is given."""

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
    for name in step_names(root, "global_step_{step}").values():
        if (root / TRACKER).is_file():
            return Recognition("verl", f"{name} is beside {TRACKER}", certain=True)
        if (root / name / "actor").is_dir():
            return Recognition("verl", f"{name} contains actor/")
    return None


LOG = TrainerLog(
    steps=(
        # The line of step 0, and those with validation's metrics alone, report no training.
        StepPattern(
            re.compile(r"^step:(?!0 - )(\d{1,12}) - "),
            also=re.compile(r" - (?:actor|critic|training|train|perf|timing_s|global_seqlen|response_length)[/(]"),
        ),
    ),
    run_bars=("training progress",),
    # verl/trainer/ppo/metric_utils.py, verl/workers/actor/dp_actor.py
    metrics={
        "reward": ("critic/rewards/mean", "critic/score/mean"),
        "entropy": ("actor/entropy", "actor/entropy_loss"),
        "kl": ("actor/ppo_kl", "actor/kl_loss"),  # against the policy that made the rollouts; against the reference
        "grad_norm": ("actor/grad_norm",),
        "loss": ("actor/pg_loss",),
    },
)
WEIGHTS = Weights(
    ("actor/huggingface",),
    when="`hf_model` is in the trainer's save_contents; otherwise config and tokenizer only",
    convert="python -m verl.model_merger merge --backend fsdp --local_dir CHECKPOINT/actor --target_dir TARGET",
    note="`--backend megatron` for Megatron; SFT: CHECKPOINT itself",
)


TRAINER = Trainer("verl")
KIND = Kind("verl", lambda site: TableLayout(TRAINER, site), recogniser("verl", _on_disk), log=LOG, weights=WEIGHTS)
