"""NeMo 2: AutoResume takes the newest ``*-last``; an export ``*-end`` stops the next start."""

from podwatch.checkpoints.command_table import recogniser
from podwatch.checkpoints.layout import Kind, Recognition, Site, Weights
from podwatch.checkpoints.table_layout import TableLayout
from podwatch.checkpoints.table_places import Trainer


def _on_disk(site: Site) -> Recognition | None:
    layout = TableLayout(TRAINER, site)
    for step in layout.steps():
        path = layout.step_paths(step)[0]
        if (path / "weights").is_dir():
            return Recognition("nemo", f"checkpoints/{path.name} contains weights/", certain=True)
    return None


WEIGHTS = Weights(
    convert='python -c \'from nemo.collections import llm; llm.export_ckpt(path="CHECKPOINT", target="hf",'
    ' output_path="TARGET")\'',
    note="for the architectures that NeMo can export",
)


TRAINER = Trainer("nemo")
KIND = Kind("nemo", lambda site: TableLayout(TRAINER, site), recogniser("nemo", _on_disk), weights=WEIGHTS)
