"""accelerate's ``save_state``: ``<project>/checkpoints/checkpoint_K`` by itself, or a name that the script gives
(``step_500``, ``checkpoint-500``, ``checkpoint_500`` below output_dir, as in the transformers and diffusers examples).

K COUNTS SAVES, it is no training step: it can be compared with other checkpoints of the run only. So any step that is
made confirms a resume and none contradicts it, and steps since a checkpoint are unknown. Automatic naming refuses to
save over an existing directory and loads the highest number, so what is ahead must be aside; the script itself must set
``ProjectConfiguration(iteration=K + 1)``. Nothing marks the end of a save: such a set must be quiet for the long time
and like the sets before it.
"""

import re
from collections.abc import Sequence

from podwatch.checkpoints.layouts import accelerate_state, argv
from podwatch.checkpoints.layouts.base import Judgement, Kind, Recognition, Site
from podwatch.checkpoints.layouts.entries import Entry, Found, SharedDirs
from podwatch.checkpoints.layouts.inside import StepView
from podwatch.checkpoints.layouts.names import all_step_names
from podwatch.checkpoints.layouts.preset import Preset
from podwatch.checkpoints.layouts.step_dirs import Rules

AUTOMATIC = re.compile(r"checkpoint_(0|[1-9]\d{0,17})")
NAMED = re.compile(r"(?:step_|checkpoint-|checkpoint_)(0|[1-9]\d{0,17})")
_RESUME = "--resume_from_checkpoint"


def judge(view: StepView) -> Judgement:
    return accelerate_state.check(view.only)


def _preset(_site: Site, command: Sequence[str]) -> Preset:
    """The examples' flag, if the command shows that the script has it."""
    known = argv.has_flag(command, (_RESUME, "--checkpointing_steps"))
    return Preset(
        add=(_RESUME, "{checkpoint}") if known else None,
        flags=(_RESUME,),
        ask="accelerate is a library: how the script calls load_state is its own",
        example=f'["{_RESUME}", "{{checkpoint}}"]',
    )


RULES = Rules(
    name="accelerate",
    step=NAMED,
    directory="checkpoint_{step}",
    judge=judge,
    preset=_preset,
    sources=accelerate_state.SOURCES,
    # DDP and FSDP sets load with another world size; of DeepSpeed's only the size is reported, and it binds.
    reshards=False,
)


def find(site: Site) -> Found:
    """Automatic naming is its own directory; where it is used, nothing else is looked at."""
    base = site.checkpoint_dir or site.output_dir
    automatic = base / "checkpoints"
    for root, part, pattern in ((automatic, "checkpoints", AUTOMATIC), (base, "state", NAMED)):
        names = all_step_names(root, pattern)
        if names:
            return {n: [Entry(root, name, part) for name in sorted(found)] for n, found in names.items()}
    return {}


class Accelerate(SharedDirs):
    """``counts_saves`` is known from the first look at a checkpoint on."""

    counts_saves = False

    def __init__(self, site: Site) -> None:
        base = site.checkpoint_dir or site.output_dir
        super().__init__(site, RULES, self._look, {"checkpoints": base / "checkpoints", "state": base})

    def _look(self) -> Found:
        found = find(self._site)
        if found:
            self.counts_saves = any(entry.part == "checkpoints" for entry in next(iter(found.values())))
        return found

    def first_step_after(self, step: int) -> int:
        self._look()
        return 0 if self.counts_saves else super().first_step_after(step)


def recognise(site: Site) -> Recognition | None:
    """By the random states, which no one else writes; open-instruct's directories are told by their own file."""
    for entries in list(find(site).values())[-3:]:
        for entry in entries:
            if (entry.path / "random_states_0.pkl").is_file() and not (entry.path / "COMPLETED").exists():
                return Recognition("accelerate", f"{entry.name} holds random_states_0.pkl", certain=True)
    return None


KIND = Kind("accelerate", Accelerate, recognise)
