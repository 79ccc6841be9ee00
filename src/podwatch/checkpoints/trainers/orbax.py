"""Orbax (JAX). N is what the program passes to ``save``."""

from collections.abc import Sequence

from podwatch.checkpoints.layout import Kind, Recognition, Site
from podwatch.checkpoints.resume_flags import Preset
from podwatch.checkpoints.table_layout import TableLayout
from podwatch.checkpoints.table_places import Trainer


def _preset(_site: Site, _command: Sequence[str]) -> Preset:
    return Preset(
        add=None,
        ask="Orbax is a library, so podwatch cannot know how the program restores",
        example='["--restore_step", "{step}"]; podwatch moves later steps to quarantine, so if the program'
        ' restores latest_step(), set it to "none"',
    )


def recognise(site: Site) -> Recognition | None:
    layout = TableLayout(TRAINER, site)
    for step in list(layout.steps())[-3:]:
        return Recognition("orbax", f"{layout.step_paths(step)[0].name} contains files of Orbax", certain=True)
    for path in layout.ahead_of(-1):
        return Recognition("orbax", f"{path.name} is an unfinished save of Orbax", certain=True)
    return None


TRAINER = Trainer("orbax", _preset)
KIND = Kind("orbax", lambda site: TableLayout(TRAINER, site), recognise)
