"""Lightning. Every start makes a new ``version_K`` directory, so all of them are searched.

``last.ckpt`` is a copy, or a symlink, which podwatch sets to the step before a start.
"""

import re

from podwatch.checkpoints.command_table import recogniser
from podwatch.checkpoints.layout import Kind, Recognition, Site, Weights
from podwatch.checkpoints.table_layout import TableLayout
from podwatch.checkpoints.table_places import Trainer
from podwatch.domain.trainer_log import EpochBar, TrainerLog


def _on_disk(site: Site) -> Recognition | None:
    layout = TableLayout(TRAINER, site)
    for step in list(layout.steps())[-3:]:
        for path in layout.step_paths(step)[:1]:
            return Recognition("lightning", f"{path.name} exists", certain=True)
    if (site.output_dir / "lightning_logs").is_dir():
        return Recognition("lightning", "lightning_logs exists")
    return None


LOG = TrainerLog(
    # Sanity check and validation have bars too, without v_num.
    epoch_bars=(EpochBar(re.compile(r"Epoch (\d{1,9})"), needs="v_num="),),
    # rich's bar; it has at least one full cell
    epoch_lines=(re.compile(r"^Epoch (?=.*━)(\d{1,9})/-?\d{1,9}\s+[━╸╺ ]*\s(\d{1,12})/(\d{1,12}) \d+:\d\d:\d\d • "),),
)
WEIGHTS = Weights(note="the state of the script's LightningModule: its own code exports the model")


TRAINER = Trainer("lightning")
KIND = Kind(
    "lightning", lambda site: TableLayout(TRAINER, site), recogniser("lightning", _on_disk), log=LOG, weights=WEIGHTS
)
