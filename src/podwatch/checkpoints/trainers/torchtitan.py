"""torchtitan: ``<dump_folder>/checkpoint/step-N``. ``step-0`` is a seed made by the operator, no save of this run."""

import re

from podwatch.checkpoints.command_table import recogniser
from podwatch.checkpoints.layout import Kind, Recognition, Site, Weights
from podwatch.checkpoints.step_names import step_names
from podwatch.checkpoints.structures import INDEX
from podwatch.checkpoints.table_layout import TableLayout
from podwatch.checkpoints.table_places import Trainer
from podwatch.domain.trainer_log import StepPattern, TrainerLog


def _on_disk(site: Site) -> Recognition | None:
    root = TRAINER.place(site) or site.output_dir / "checkpoint"
    for step, name in step_names(root, "step-{step}").items():
        if step and (root / name / INDEX).is_file():
            return Recognition("torchtitan", f"{root.name}/{name} contains {INDEX}", certain=True)
    return None


LOG = TrainerLog(
    steps=(
        StepPattern(
            re.compile(
                r"^(?:\[titan\]\s*)?[\d\s:.,TZ/+|-]{0,40}(?:- \w{1,40} - INFO - )?step: {1,12}(\d{1,12})  loss: "
            )
        ),
    )
)
WEIGHTS = Weights(
    (".",),
    when="only the last step, with last_save_in_hf",
    convert="python scripts/checkpoint_conversion/convert_to_hf.py CHECKPOINT TARGET --hf_assets_path ASSETS"
    " --model_name NAME --model_flavor FLAVOR",
    note="in torchtitan's repository; config.json comes from the original model",
)


TRAINER = Trainer("torchtitan")
KIND = Kind(
    "torchtitan", lambda site: TableLayout(TRAINER, site), recogniser("torchtitan", _on_disk), log=LOG, weights=WEIGHTS
)
