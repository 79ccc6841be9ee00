"""open-instruct's SFT and DPO: ``step_N`` or ``epoch_N`` below output_dir, as accelerate saves them, and ``COMPLETED``.

EACH rank writes ``COMPLETED`` after its own part, without a barrier: the first one comes early, the last one is newest.
So it must not be older than anything in the directory. Where both kinds exist the trainer uses steps only. It always
resumes from the highest marked directory and accepts no step; and it writes ``COMPLETED`` into the highest directory,
whatever that is, so checkpoints ahead must be moved to quarantine. N of ``step_N`` counts optimizer steps, of
``epoch_N`` epochs. Its GRPO trainer keeps DeepSpeed directories: layout ``deepspeed`` with output_dir =
``checkpoint_state_dir``.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from podwatch.checkpoints.layouts import accelerate, command_line
from podwatch.checkpoints.layouts.base import Judgement, Kind, Layout, Marker, Recognition, Site, Source, Weights
from podwatch.checkpoints.layouts.command_line import program
from podwatch.checkpoints.layouts.resume_flags import Preset
from podwatch.checkpoints.layouts.shared_directory import Entry, Found, SharedDirs
from podwatch.checkpoints.layouts.shared_rules import StepView
from podwatch.checkpoints.layouts.step_dirs import Rules, all_step_names

STEP = re.compile(r"step_(0|[1-9][0-9]{0,17})")
EPOCH = re.compile(r"epoch_(0|[1-9][0-9]{0,17})")
MARKER = "COMPLETED"
_SCRIPTS = ("finetune.py", "dpo_tune_cache.py")
_MODULES = ("open_instruct.finetune", "open_instruct.dpo_tune_cache")


def judge(view: StepView) -> Judgement:
    inside = view.only
    inside.require(MARKER, why="every rank writes it after its own part")
    verdict = accelerate.check(inside)
    if inside.text(MARKER) != MARKER:
        raise inside.fault(f"{MARKER} is empty or garbled: a rank is writing it")
    inside.written_last(MARKER)
    return replace(verdict, marker=Marker.LAST_FILE)


def _preset(_site: Site, _command: Sequence[str]) -> Preset:
    """No argument helps: ``--resume_from_checkpoint`` is ignored as soon as output_dir exists."""
    return Preset(add=(), flags=("--resume_from_checkpoint",))


def _target(_site: Site, command: Sequence[str], _root: Path) -> int | None:
    return command_line.positive(command_line.flag_value(command, ("--max_train_steps",)))


_COMMIT = "e6c3044aa6201c8bfa4573c1b03142af599e730d"
RULES = Rules(
    name="open-instruct",
    step=STEP,
    directory="step_{step}",
    judge=judge,
    preset=_preset,
    sources=(
        Source("allenai/open-instruct", "open_instruct/finetune.py", _COMMIT),
        Source("allenai/open-instruct", "open_instruct/utils.py", _COMMIT),
        *accelerate.SOURCES,
    ),
    reshards=False,
    first_after=1,
    target=_target,
)


def find(site: Site) -> Found:
    root = site.checkpoint_dir or site.output_dir
    for pattern in (STEP, EPOCH):
        names = all_step_names(root, pattern)
        if names:
            return {n: [Entry(root, name) for name in sorted(found)] for n, found in names.items()}
    return {}


def make(site: Site) -> Layout:
    return SharedDirs(site, RULES, lambda: find(site), {"checkpoint": site.checkpoint_dir or site.output_dir})


def recognise(site: Site) -> Recognition | None:
    seen = program(site.command, site.working_directory)
    module = seen.runs(*_MODULES)
    if not module and seen.script.endswith(tuple(f"open_instruct/{s}" for s in _SCRIPTS)):
        module = seen.script
    if module:
        return Recognition("open-instruct", f"the command runs {module}", certain=True)
    for entries in list(find(site).values())[-3:]:
        if (entries[0].path / MARKER).is_file():
            return Recognition("open-instruct", f"{entries[0].name} contains {MARKER}", certain=True)
    return None


WEIGHTS = Weights(note="accelerate's state; the script writes Hugging Face files to output_dir at the end")

KIND = Kind("open-instruct", make, recognise, weights=WEIGHTS)
