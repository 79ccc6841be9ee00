"""Orbax (JAX). N is what the program passes to ``save``."""

from podwatch.checkpoints.command_table import recogniser
from podwatch.checkpoints.layout import Kind, Recognition, Site
from podwatch.checkpoints.table_layout import TableLayout
from podwatch.checkpoints.table_places import Trainer


def _on_disk(site: Site) -> Recognition | None:
    layout = TableLayout(TRAINER, site)
    for step in list(layout.steps())[-3:]:
        return Recognition("orbax", f"{layout.step_paths(step)[0].name} contains files of Orbax", certain=True)
    for path in layout.ahead_of(-1):
        return Recognition("orbax", f"{path.name} is an unfinished save of Orbax", certain=True)
    return None


TRAINER = Trainer("orbax")
KIND = Kind("orbax", lambda site: TableLayout(TRAINER, site), recogniser("orbax", _on_disk))
