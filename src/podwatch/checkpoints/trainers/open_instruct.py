"""open-instruct's SFT and DPO. Its GRPO trainer: layout ``deepspeed`` with output_dir = ``checkpoint_state_dir``.

It always resumes from the highest marked directory and accepts no step; and it writes ``COMPLETED`` into the highest
directory, whatever that is, so checkpoints ahead must be moved to quarantine. N of ``step_N`` counts optimizer steps,
of ``epoch_N`` epochs.
"""

from collections.abc import Sequence

from podwatch.checkpoints import command_line
from podwatch.checkpoints.command_line import program
from podwatch.checkpoints.layout import Kind, Recognition, Site, Weights
from podwatch.checkpoints.resume_flags import Preset
from podwatch.checkpoints.table_layout import TableLayout
from podwatch.checkpoints.table_places import Trainer

MARKER = "COMPLETED"
_SCRIPTS = ("finetune.py", "dpo_tune_cache.py")
_MODULES = ("open_instruct.finetune", "open_instruct.dpo_tune_cache")


def _preset(_site: Site, _command: Sequence[str]) -> Preset:
    """No argument helps: ``--resume_from_checkpoint`` is ignored as soon as output_dir exists."""
    return Preset(add=(), flags=("--resume_from_checkpoint",))


def _target(_site: Site, command: Sequence[str]) -> int | None:
    return command_line.positive(command_line.flag_value(command, ("--max_train_steps",)))


def recognise(site: Site) -> Recognition | None:
    seen = program(site.command, site.working_directory)
    module = seen.runs(*_MODULES)
    if not module and seen.script.endswith(tuple(f"open_instruct/{s}" for s in _SCRIPTS)):
        module = seen.script
    if module:
        return Recognition("open-instruct", f"the command runs {module}", certain=True)
    layout = TableLayout(TRAINER, site)
    for step in list(layout.steps())[-3:]:
        for path in layout.step_paths(step)[:1]:
            if (path / MARKER).is_file():
                return Recognition("open-instruct", f"{path.name} contains {MARKER}", certain=True)
    return None


WEIGHTS = Weights(note="accelerate's state; the script writes Hugging Face files to output_dir at the end")


TRAINER = Trainer("open-instruct", _preset, _target)
KIND = Kind("open-instruct", lambda site: TableLayout(TRAINER, site), recognise, weights=WEIGHTS)
