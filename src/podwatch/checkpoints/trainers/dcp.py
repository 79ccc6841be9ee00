"""Plain ``torch.distributed.checkpoint``: step directories of any name that ends with its number."""

from podwatch.checkpoints.command_table import recogniser
from podwatch.checkpoints.layout import Kind, Recognition, Site, Weights
from podwatch.checkpoints.step_names import is_plain_dir, newest_names
from podwatch.checkpoints.structures import INDEX
from podwatch.checkpoints.table_layout import TableLayout
from podwatch.checkpoints.table_places import Trainer


def _on_disk(site: Site) -> Recognition | None:
    root = site.checkpoint_dir or site.output_dir
    for name in newest_names(root, "{name}{number}"):
        for folder in (root / name, *sorted(p for p in (root / name).iterdir() if is_plain_dir(p))):
            if (folder / INDEX).is_file() and any(folder.glob("__*.distcp")):
                return Recognition("dcp", f"{folder.relative_to(root)} is a DCP directory")
    return None


WEIGHTS = Weights(
    note="`python -m torch.distributed.checkpoint.format_utils dcp_to_torch CHECKPOINT FILE` makes one torch file,"
    " which needs the script's model class"
)


TRAINER = Trainer("dcp")
KIND = Kind("dcp", lambda site: TableLayout(TRAINER, site), recogniser("dcp", _on_disk), weights=WEIGHTS)
