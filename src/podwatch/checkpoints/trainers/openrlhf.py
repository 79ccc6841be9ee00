"""OpenRLHF's PPO and its kin; output_dir is ``ckpt.path``. Its SFT, DPO and reward trainers: layout ``deepspeed``.

Both roles have a ``latest`` of their own, so after a crash they can name different steps: before a start podwatch
writes N into both. The number is the trainer's global step.
"""

from collections.abc import Sequence

from podwatch.checkpoints import command_line
from podwatch.checkpoints.command_line import program
from podwatch.checkpoints.layout import Kind, Recognition, Site, Weights
from podwatch.checkpoints.resume_flags import Preset
from podwatch.checkpoints.step_names import step_names
from podwatch.checkpoints.table import TrainerTable, all_tables
from podwatch.checkpoints.table_layout import TableLayout
from podwatch.checkpoints.table_places import Trainer
from podwatch.checkpoints.trainers.deepspeed import load_preset

PPO_MODULES = ("openrlhf.cli.train_ppo_ray",)
_ROLES = ("_actor", "_critic")


def wants_critic(command: Sequence[str]) -> bool | None:
    """Whether the command saves a critic; None if the command does not show it."""
    estimator = command_line.flag_value(command, ("--algo.advantage.estimator", "--advantage_estimator"))
    if estimator is not None:
        return estimator == "gae"
    return True if command_line.has_flag(command, ("--critic_pretrain",)) else None


def _table(site: Site) -> TrainerTable:
    critic = wants_critic(site.command)
    return all_tables()["openrlhf" if critic is None else f"openrlhf-{'with' if critic else 'without'}-critic"]


def _preset(_site: Site, command: Sequence[str]) -> Preset:
    return load_preset(command)


def _target(_site: Site, _command: Sequence[str]) -> int | None:
    """None: the target is in episodes and epochs of a data set of unknown length."""
    return None


def recognise(site: Site) -> Recognition | None:
    seen = program(site.command, site.working_directory).runs(*PPO_MODULES)
    if seen:
        return Recognition("openrlhf", f"the command runs {seen}", certain=True)
    root = site.checkpoint_dir or site.output_dir
    for folder in _ROLES:
        for step in step_names(root / folder, "global_step{step}"):
            return Recognition("openrlhf", f"{folder}/global_step{step} exists", certain=True)
    return None


WEIGHTS = Weights(
    ("../global_step{step}_hf",),
    when="with its option for Hugging Face files",
    convert="python ../zero_to_fp32.py .. TARGET -t global_stepN --safe_serialization",
    note="in _actor/global_stepN; config.json and the tokenizer come from the original model",
)


TRAINER = Trainer("openrlhf", _preset, _target, table=_table)
KIND = Kind("openrlhf", lambda site: TableLayout(TRAINER, site), recognise, weights=WEIGHTS)
