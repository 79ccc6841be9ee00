"""NeMo-RL always resumes from the highest ``step_N`` and accepts no step. N counts training steps over all epochs."""

from podwatch.checkpoints.command_table import recogniser
from podwatch.checkpoints.layout import Kind, Recognition, Site, Weights
from podwatch.checkpoints.step_names import step_names
from podwatch.checkpoints.table_layout import TableLayout
from podwatch.checkpoints.table_places import Trainer

INFO = "training_info.json"


def _on_disk(site: Site) -> Recognition | None:
    root = TRAINER.place(site) or site.output_dir
    for step, name in sorted(step_names(root).items(), reverse=True)[:3]:
        if (root / name / INFO).is_file() and (root / name / "policy").is_dir():
            return Recognition("nemo-rl", f"step_{step} contains policy/ and {INFO}", certain=True)
    return None


WEIGHTS = Weights(
    convert="uv run examples/converters/convert_dcp_to_hf.py --config=CHECKPOINT/config.yaml"
    " --dcp-ckpt-path=CHECKPOINT/policy/weights --hf-ckpt-path=TARGET",
    note="in NeMo-RL's repository; copy CHECKPOINT/policy/tokenizer beside it",
)


TRAINER = Trainer("nemo-rl")
KIND = Kind("nemo-rl", lambda site: TableLayout(TRAINER, site), recogniser("nemo-rl", _on_disk), weights=WEIGHTS)
