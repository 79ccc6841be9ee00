"""Lightning. Every start makes a new ``version_K`` directory, so all of them are searched.

``last.ckpt`` is a copy, or a symlink, which podwatch sets to the step before a start.
"""

import re
from collections.abc import Sequence

from podwatch.checkpoints import command_line
from podwatch.checkpoints.command_line import program
from podwatch.checkpoints.layout import Kind, Recognition, Site, Weights
from podwatch.checkpoints.resume_flags import Preset
from podwatch.checkpoints.table_layout import TableLayout
from podwatch.checkpoints.table_places import Trainer
from podwatch.domain.trainer_log import EpochBar, TrainerLog

_FLAG, _KEY = "--ckpt_path", "ckpt_path"


def _preset(site: Site, command: Sequence[str]) -> Preset:
    """LightningCLI has ``fit --ckpt_path``; Hydra templates have ``ckpt_path=``. Other scripts are unknown."""
    hydra = command_line.key_value(command, (_KEY,)) is not None or any(a.startswith("trainer.") for a in command)
    if hydra:
        return Preset(add=(_KEY + "={checkpoint}",), keys=(_KEY,))
    cli = "fit" in program(command, site.working_directory).arguments or command_line.has_flag(command, (_FLAG,))
    return Preset(
        add=(_FLAG, "{checkpoint}") if cli else None,
        flags=(_FLAG,),
        ask="Lightning is a library, so podwatch cannot know how the script passes ckpt_path to fit()",
        example=f'["{_FLAG}", "{{checkpoint}}"]',
    )


def _target(_site: Site, command: Sequence[str]) -> int | None:
    flag = command_line.flag_value(command, ("--trainer.max_steps", "--max_steps"))
    return command_line.positive(flag or command_line.key_value(command, ("trainer.max_steps",)))


def recognise(site: Site) -> Recognition | None:
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


TRAINER = Trainer("lightning", _preset, _target)
KIND = Kind("lightning", lambda site: TableLayout(TRAINER, site), recognise, log=LOG, weights=WEIGHTS)
