"""SkyRL: output_dir is ``trainer.ckpt_path``, of the SFT trainer ``ckpt_path``. The command shows what a save has."""

import re
from collections.abc import Sequence
from pathlib import Path

from podwatch.checkpoints import command_line
from podwatch.checkpoints.command_line import program
from podwatch.checkpoints.layout import Kind, Recognition, Site, Weights
from podwatch.checkpoints.resume_flags import Preset
from podwatch.checkpoints.step_names import named_place, step_names
from podwatch.checkpoints.table import TrainerTable, all_tables
from podwatch.checkpoints.table_layout import TableLayout
from podwatch.checkpoints.table_places import Trainer

TRACKER = "latest_ckpt_global_step.txt"
_SFT_KEYS = ("resume_from",)
_RL_KEYS = ("trainer.resume_mode", "trainer.resume_path")


def _is_sft(site: Site) -> bool:
    seen = program(site.command, site.working_directory)
    return "sft" in f"{seen.module} {seen.script}" or bool(re.search(r"-m[ =]+\S*sft", seen.shell))


def _is_async(site: Site) -> bool:
    seen = program(site.command, site.working_directory)
    return "fully_async" in f"{seen.module} {seen.script}" or "fully_async" in seen.shell


def _saves_late(command: Sequence[str]) -> bool:
    found = [a.partition("=") for a in command]
    return any(n.endswith("async_dist_ckpt_save") and v.lower() == "true" for n, _, v in found)


def _preset(site: Site, command: Sequence[str]) -> Preset:
    if _is_sft(site) or command_line.key_value(command, _SFT_KEYS) is not None:
        return Preset(add=("resume_from={checkpoint}",), keys=_SFT_KEYS)
    return Preset(
        add=("trainer.resume_mode=from_path", "trainer.resume_path={checkpoint}"),
        keys=_RL_KEYS,
    )


def _target(_site: Site, command: Sequence[str]) -> int | None:
    return command_line.positive(
        command_line.key_value(command, ("trainer.max_training_steps", "max_training_steps", "num_steps"))
    )


def _place(site: Site) -> Path | None:
    named = command_line.key_value(site.command, ("trainer.ckpt_path", "ckpt_path"))
    return named_place(site, named)


def _table(site: Site) -> TrainerTable:
    kind = "skyrl-async" if _is_async(site) else "skyrl-late" if _saves_late(site.command) else "skyrl"
    return all_tables()[kind]


def recognise(site: Site) -> Recognition | None:
    seen = program(site.command, site.working_directory)
    module = seen.runs("skyrl", "skyrl_train")
    if module:
        return Recognition("skyrl", f"the command runs {module}", certain=True)
    root = _place(site) or site.output_dir
    if (root / TRACKER).is_file() and step_names(root, "global_step_{step}"):
        return Recognition("skyrl", f"{TRACKER} exists", certain=True)
    return None


WEIGHTS = Weights(
    note="`trainer.hf_save_interval` exports to `trainer.export_path`/global_step_N/policy, outside the checkpoint"
)


TRAINER = Trainer("skyrl", _preset, _target, place=_place, table=_table)
KIND = Kind("skyrl", lambda site: TableLayout(TRAINER, site), recognise, weights=WEIGHTS)
