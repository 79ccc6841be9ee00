"""open-instruct's SFT and DPO. Its GRPO trainer: layout ``deepspeed`` with output_dir = ``checkpoint_state_dir``.

It always resumes from the highest marked directory and accepts no step; and it writes ``COMPLETED`` into the highest
directory, whatever that is, so checkpoints ahead must be moved to quarantine. N of ``step_N`` counts optimizer steps,
of ``epoch_N`` epochs.
"""

from podwatch.checkpoints.command_table import recogniser
from podwatch.checkpoints.layout import Kind, Recognition, Site, Weights
from podwatch.checkpoints.table_layout import TableLayout
from podwatch.checkpoints.table_places import Trainer

MARKER = "COMPLETED"


def _on_disk(site: Site) -> Recognition | None:
    layout = TableLayout(TRAINER, site)
    for step in list(layout.steps())[-3:]:
        for path in layout.step_paths(step)[:1]:
            if (path / MARKER).is_file():
                return Recognition("open-instruct", f"{path.name} contains {MARKER}", certain=True)
    return None


WEIGHTS = Weights(note="accelerate's state; the script writes Hugging Face files to output_dir at the end")


TRAINER = Trainer("open-instruct")
KIND = Kind(
    "open-instruct", lambda site: TableLayout(TRAINER, site), recogniser("open-instruct", _on_disk), weights=WEIGHTS
)
