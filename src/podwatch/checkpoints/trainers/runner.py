"""The 2025 RL runner: without ``--from-step`` it follows the link ``step_latest``, which is only a hint."""

from podwatch.checkpoints.command_table import recogniser
from podwatch.checkpoints.layout import Kind, Recognition, Site, Weights
from podwatch.checkpoints.step_names import STEP, newest_names
from podwatch.checkpoints.table_layout import TableLayout
from podwatch.checkpoints.table_places import Trainer

INFO = "training_info.json"


def _on_disk(site: Site) -> Recognition | None:
    inside = site.output_dir.name == "training_state"
    root = site.checkpoint_dir or (site.output_dir if inside else site.output_dir / "training_state")
    for name in newest_names(root, STEP):
        if (root / name / INFO).is_file() and (root / name / "model").is_dir():
            return Recognition("runner", f"{root.name}/{name} contains model/ and {INFO}", certain=True)
    return None


WEIGHTS = Weights(("model",))


TRAINER = Trainer("runner")
KIND = Kind("runner", lambda site: TableLayout(TRAINER, site), recogniser("runner", _on_disk), weights=WEIGHTS)
