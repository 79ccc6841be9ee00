"""The operator's own trainer: ``[checkpoints.custom]`` defines the place of a step and its required content.

Patterns match the path inside the step directory; ``*`` matches ``/`` too. Without ``last`` nothing shows the end of a
save, so such a checkpoint must be unchanged for the long settle time.
"""

import re
from dataclasses import replace
from pathlib import Path

from podwatch.checkpoints.layout import PATTERN, Concern, Kind, Recognition, Site
from podwatch.checkpoints.table import TrainerTable, custom_table
from podwatch.checkpoints.table_layout import TableLayout
from podwatch.checkpoints.table_places import Trainer
from podwatch.config.settings import CustomLayoutSettings
from podwatch.domain.errors import ConfigurationError

_STEP_LIKE = re.compile(r"[A-Za-z].*\d|\d+(?:\..*)?$")
"""A name that could be a step's."""
_SHOWN = 3


def _table(site: Site) -> TrainerTable:
    if site.custom is None:
        raise ConfigurationError(
            'layout = "custom" needs a [checkpoints.custom] section',
            where="trainer.layout",
            fix="set step_dir (the directory of one step) and required (the files it must contain) there",
        )
    own = site.custom
    return custom_table(own.step_dir, required=own.required, optional=own.optional, ahead=own.ahead, last=own.last)


TRAINER = Trainer("custom", table=_table)


def _make(site: Site) -> TableLayout:
    _table(site)  # a mistake is reported at once
    return TableLayout(TRAINER, replace(site, checkpoint_dir=None))


def concerns(site: Site) -> tuple[Concern, ...]:
    """Reports rules by which a part of the first save would be a checkpoint, and that nothing matches ``step_dir``
    although a similar name exists."""
    return () if site.custom is None else (*_missing_rules(site.custom), *_unmatched(site, site.custom))


def _missing_rules(settings: CustomLayoutSettings) -> tuple[Concern, ...]:
    if settings.required or settings.last:
        return ()
    return (
        Concern(
            "checkpoints.custom",
            "[checkpoints.custom] names no file that a checkpoint must have and none that is written last: a part of"
            " the first save could be stored as a checkpoint",
            'set required to the files of every save, such as ["model.pt", "optimizer.pt"], or last to the one that'
            " the trainer writes last",
            certain=True,
        ),
    )


def _unmatched(site: Site, settings: CustomLayoutSettings) -> tuple[Concern, ...]:
    layout = _make(site)
    if layout.steps():
        return ()
    for folder in dict.fromkeys((*layout.watch_roots(), site.output_dir, site.output_dir / "checkpoints")):
        like = [name for name in _names(folder) if _STEP_LIKE.match(name)]
        if like:
            shown = ", ".join(like[-_SHOWN:])
            return (
                Concern(
                    PATTERN,
                    f"nothing matches the pattern {settings.step_dir!r} of [checkpoints.custom] step_dir; found {shown}"
                    f" in {folder}",
                    'set step_dir to the name of a checkpoint, such as "checkpoints/ckpt_{step}" or "ckpt_{step}.pt"',
                ),
            )
    return ()


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return []


def recognise(site: Site) -> Recognition | None:
    """Recognize the configuration section, which is a decision of the operator."""
    if site.custom is None:
        return None
    return Recognition("custom", "the configuration has a [checkpoints.custom] section", certain=True)


KIND = Kind("custom", _make, recognise, concerns)
