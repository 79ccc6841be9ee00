"""SkyRL: output_dir is ``trainer.ckpt_path``, of the SFT trainer ``ckpt_path``. The command shows what a save has."""

from podwatch.checkpoints.command_table import recogniser
from podwatch.checkpoints.layout import Kind, Recognition, Site, Weights
from podwatch.checkpoints.step_names import step_names
from podwatch.checkpoints.table_layout import TableLayout
from podwatch.checkpoints.table_places import Trainer

TRACKER = "latest_ckpt_global_step.txt"


def _on_disk(site: Site) -> Recognition | None:
    root = TRAINER.place(site) or site.output_dir
    if (root / TRACKER).is_file() and step_names(root, "global_step_{step}"):
        return Recognition("skyrl", f"{TRACKER} exists", certain=True)
    return None


WEIGHTS = Weights(
    note="`trainer.hf_save_interval` exports to `trainer.export_path`/global_step_N/policy, outside the checkpoint"
)


TRAINER = Trainer("skyrl")
KIND = Kind("skyrl", lambda site: TableLayout(TRAINER, site), recogniser("skyrl", _on_disk), weights=WEIGHTS)
