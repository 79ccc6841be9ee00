"""verl: by default below ``checkpoints/PROJECT/EXPERIMENT``. It reads its tracker even where a path is given."""

import re
from collections.abc import Sequence
from pathlib import Path

from podwatch.checkpoints import command_line
from podwatch.checkpoints.command_line import launched, program
from podwatch.checkpoints.layout import Kind, Recognition, Site, Weights
from podwatch.checkpoints.resume_flags import Preset
from podwatch.checkpoints.step_names import named_place, step_names
from podwatch.checkpoints.table_layout import TableLayout
from podwatch.checkpoints.table_places import Trainer
from podwatch.domain.trainer_log import StepPattern, TrainerLog

TRACKER = "latest_checkpointed_iteration.txt"
_RESUME = ("trainer.resume_mode", "trainer.resume_from_path")


def _place(site: Site) -> Path | None:
    named = command_line.key_value(site.command, ("trainer.default_local_dir",))
    if named is None:
        project = command_line.key_value(site.command, ("trainer.project_name",))
        experiment = command_line.key_value(site.command, ("trainer.experiment_name",))
        named = f"checkpoints/{project}/{experiment}" if project and experiment else None
    return named_place(site, named)


def _preset(_site: Site, _command: Sequence[str]) -> Preset:
    return Preset(
        add=("trainer.resume_mode=resume_path", "trainer.resume_from_path={checkpoint}"),
        keys=_RESUME,
        example='["trainer.resume_mode=resume_path", "trainer.resume_from_path={checkpoint}"]',
    )


def _target(_site: Site, command: Sequence[str]) -> int | None:
    return command_line.positive(command_line.key_value(command, ("trainer.total_training_steps",)))


def _processes(command: Sequence[str]) -> int | None:
    """PPO's own numbers, else those of SFT's launcher. A config file that the command names can set the number of
    nodes."""
    each, nodes = (command_line.key_value(command, (key,)) for key in ("trainer.n_gpus_per_node", "trainer.nnodes"))
    if each is None:
        return launched(command)
    if nodes is None and any(a.startswith("--config") for a in command):
        return None
    gpus, count = command_line.positive(each), command_line.positive(nodes if nodes is not None else "1")
    return gpus * count if gpus is not None and count is not None else None


def recognise(site: Site) -> Recognition | None:
    seen = program(site.command, site.working_directory)
    module = seen.runs("verl.trainer", "verl.experimental")
    if module:
        return Recognition("verl", f"the command runs {module}", certain=True)
    root = _place(site) or site.output_dir
    for name in step_names(root, "global_step_{step}").values():
        if (root / TRACKER).is_file():
            return Recognition("verl", f"{name} is beside {TRACKER}", certain=True)
        if (root / name / "actor").is_dir():
            return Recognition("verl", f"{name} contains actor/")
    told = seen.says("actor_rollout_ref.")
    return Recognition("verl", f"the command sets {told}*", certain=True) if told else None


LOG = TrainerLog(
    steps=(
        # The line of step 0, and those with validation's metrics alone, report no training.
        StepPattern(
            re.compile(r"^step:(?!0 - )(\d{1,12}) - "),
            also=re.compile(r" - (?:actor|critic|training|train|perf|timing_s|global_seqlen|response_length)[/(]"),
        ),
    ),
    run_bars=("training progress",),
    # verl/trainer/ppo/metric_utils.py, verl/workers/actor/dp_actor.py
    metrics={
        "reward": ("critic/rewards/mean", "critic/score/mean"),
        "entropy": ("actor/entropy", "actor/entropy_loss"),
        "kl": ("actor/ppo_kl", "actor/kl_loss"),  # against the policy that made the rollouts; against the reference
        "grad_norm": ("actor/grad_norm",),
        "loss": ("actor/pg_loss",),
    },
)
WEIGHTS = Weights(
    ("actor/huggingface",),
    when="`hf_model` is in the trainer's save_contents; otherwise config and tokenizer only",
    convert="python -m verl.model_merger merge --backend fsdp --local_dir CHECKPOINT/actor --target_dir TARGET",
    note="`--backend megatron` for Megatron; SFT: CHECKPOINT itself",
)


TRAINER = Trainer("verl", _preset, _target, _processes, _place)
KIND = Kind("verl", lambda site: TableLayout(TRAINER, site), recognise, log=LOG, weights=WEIGHTS)
