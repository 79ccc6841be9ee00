"""accelerate's ``save_state``: automatic names count saves, names of the script's own (``step_500``) usually steps.

Automatic naming refuses to save over an existing directory and loads the highest number, so checkpoints ahead must be
moved to quarantine; the script itself must set ``ProjectConfiguration(iteration=K + 1)``.
"""

from podwatch.checkpoints.command_table import recogniser
from podwatch.checkpoints.layout import Kind, Recognition, Site, Weights
from podwatch.checkpoints.table_layout import TableLayout
from podwatch.checkpoints.table_places import Trainer
from podwatch.domain.process import ProcessNames, ProcessRole
from podwatch.domain.trainer_log import TrainerLog


def _on_disk(site: Site) -> Recognition | None:
    """Recognize the random states, which no other trainer writes; open-instruct's directories have their own marker."""
    layout = TableLayout(TRAINER, site)
    for step in list(layout.steps())[-3:]:
        for path in layout.step_paths(step):
            if (path / "random_states_0.pkl").is_file() and not (path / "COMPLETED").exists():
                return Recognition("accelerate", f"{path.name} holds random_states_0.pkl", certain=True)
    return None


LOG = TrainerLog(run_bars=("steps", "training steps?", "global steps?"))
"""The bar of accelerate's examples, of diffusers and of scripts like them: one for the whole run, which starts at the
resumed step."""
PROCESSES = ProcessNames(
    programs={"accelerate": ProcessRole.LAUNCHER}, modules={"accelerate.commands.launch": ProcessRole.LAUNCHER}
)
WEIGHTS = Weights(
    (".",),
    when="`model.safetensors` without config.json and tokenizer: add those of the original model",
    convert="accelerate merge-weights CHECKPOINT/pytorch_model_fsdp_0 TARGET",
    note="sharded FSDP",
)


TRAINER = Trainer("accelerate")
KIND = Kind(
    "accelerate",
    lambda site: TableLayout(TRAINER, site),
    recogniser("accelerate", _on_disk),
    log=LOG,
    processes=PROCESSES,
    weights=WEIGHTS,
)
