"""accelerate's ``save_state``: ``<project>/checkpoints/checkpoint_K`` by itself, or a name that the script gives
(``step_500``, ``checkpoint-500``, ``checkpoint_500`` below output_dir, as in the transformers and diffusers examples).

K COUNTS SAVES, it is no training step: it can be compared only with other checkpoints of the run. So any new step
confirms a resume and none contradicts it, and the number of steps since a checkpoint is unknown. Automatic naming
refuses to save over an existing directory and loads the highest number, so checkpoints ahead must be moved to
quarantine; the script itself must set ``ProjectConfiguration(iteration=K + 1)``. Nothing marks the end of a save: such
a checkpoint must be unchanged for the long settle time and like those before it.
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
    """The flag of accelerate's examples, if the command shows that the script has it."""
    known = argv.has_flag(command, (_RESUME, "--checkpointing_steps"))
    return Preset(
        add=(_RESUME, "{checkpoint}") if known else None,
        flags=(_RESUME,),
        ask="accelerate is a library, so podwatch cannot know how the script calls load_state",
        example=f'["{_RESUME}", "{{checkpoint}}"]',
    )


RULES = Rules(
    name="accelerate",
    step=NAMED,
    directory="checkpoint_{step}",
    judge=judge,
    preset=_preset,
    sources=accelerate_state.SOURCES,
    # DDP and FSDP checkpoints load with another world size; DeepSpeed ones do not, and only they report a size.
    reshards=False,
)


def find(site: Site) -> Found:
    """Find the checkpoints. Automatic naming has its own directory; where it is used, nothing else counts."""
    base = site.checkpoint_dir or site.output_dir
    automatic = base / "checkpoints"
    for root, part, pattern in ((automatic, "checkpoints", AUTOMATIC), (base, "state", NAMED)):
        names = all_step_names(root, pattern)
        if names:
            return {n: [Entry(root, name, part) for name in sorted(found)] for n, found in names.items()}
    return {}


class Accelerate(SharedDirs):
    """``counts_saves`` is known after the first scan that finds a checkpoint."""

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
    """Recognize the random states, which no other trainer writes; open-instruct's directories have their own marker."""
    for entries in list(find(site).values())[-3:]:
        for entry in entries:
            if (entry.path / "random_states_0.pkl").is_file() and not (entry.path / "COMPLETED").exists():
                return Recognition("accelerate", f"{entry.name} holds random_states_0.pkl", certain=True)
    return None


KIND = Kind("accelerate", Accelerate, recognise)
