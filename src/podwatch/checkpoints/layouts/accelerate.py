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

from podwatch.checkpoints.formats import torch_zip
from podwatch.checkpoints.layouts import command_line, deepspeed, step_dirs
from podwatch.checkpoints.layouts.base import Judgement, Kind, Marker, Recognition, Site, Source, Weights
from podwatch.checkpoints.layouts.resume_flags import Preset
from podwatch.checkpoints.layouts.shared_directory import Entry, Found, SharedDirs
from podwatch.checkpoints.layouts.shared_rules import Inside, StepView
from podwatch.checkpoints.layouts.step_dirs import Rules, all_step_names
from podwatch.domain.process import ProcessNames, ProcessRole
from podwatch.domain.trainer_log import TrainerLog

# -- contents of one save --------------------------------------------------------------------------------------------
# The files that ``Accelerator.save_state`` writes into one directory; open-instruct writes them too. Order: weights
# (hooks can put them into subdirectories), optimizer, scheduler, samplers, scaler, each rank's random state, custom
# objects. No marker and no closing barrier, so nothing shows that the last rank is done.

_COMMIT = "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83"
SOURCES = (
    Source("huggingface/accelerate", "src/accelerate/accelerator.py", _COMMIT),
    Source("huggingface/accelerate", "src/accelerate/checkpointing.py", _COMMIT),
    Source("huggingface/accelerate", "src/accelerate/utils/fsdp_utils.py", _COMMIT),
    deepspeed.SOURCE,
)
_RANDOM = re.compile(r"random_states_(\d+)\.pkl")
_CUSTOM = re.compile(r"custom_checkpoint_(\d+)\.pkl")
_ZERO_TAG = r"pytorch_model(?:_\d+)?$"
_FSDP_MODEL = r"pytorch_model_fsdp_\d+$"
_FSDP_OPTIMIZER = r"optimizer_\d+$"
_FSDP_SPLIT = re.compile(r"pytorch_model_fsdp_(?:\d+_)?rank(\d+)\.bin")
_NO_WEIGHTS = r"(?:.*/)?(?:optimizer|scheduler|sampler|dl_state_dict|scaler)[^/]*"
_OWN = re.compile(
    r"(?:pytorch_model|model|optimizer|scheduler|adapter_model)[^/]*\.(?:safetensors|bin)"
    r"|(?:pytorch_model_fsdp|optimizer)_\d+/\.metadata|latest"
)
"""Written by rank 0 before its random state."""


def check(inside: Inside) -> Judgement:
    """Complete as far as the files show: ``Marker.NONE``. ``Fault`` if not. The world size only where shards fix it."""
    ranks, token, leftovers = None, "", tuple[str, ...]()
    tags = [f for f in inside.folders(_ZERO_TAG) if deepspeed.present(inside.below(f))]
    if tags:
        for tag in tags:
            deepspeed.check(inside.below(tag))
        ranks = deepspeed.closed(inside, tags).ranks
    else:
        token, leftovers = step_dirs.check(inside)
        _weights(inside)
        if not any(re.fullmatch(r"optimizer[^/]*\.bin", n) for n in inside.files) and not inside.folders(
            _FSDP_OPTIMIZER
        ):
            raise inside.fault("optimizer.bin is missing")
    states = step_dirs.gap(inside, _RANDOM, "the random state of rank")
    if states == 0:
        raise inside.fault("random_states_0.pkl is missing: each rank writes its own near the end")
    if ranks is not None and states < ranks:
        raise inside.fault(f"the random state of rank {states} is missing")
    inside.written_last("random_states_0.pkl", _OWN)
    step_dirs.gap(inside, _CUSTOM, "custom object")
    inside.sound()
    for name in inside.names(r".*\.pkl"):
        problem = torch_zip.check(inside.path / name)
        if problem:
            raise inside.fault(f"{name} {problem}", damaged=True)
    if inside.has_holes():
        raise inside.fault("a file has ranges that were never written")
    return Judgement(True, marker=Marker.NONE, save_token=token, world_size=ranks, leftovers=leftovers)


def _weights(inside: Inside) -> None:
    if inside.hf_weights() or inside.folders(_FSDP_MODEL):
        return
    if step_dirs.gap(inside, _FSDP_SPLIT, "the model's part of rank"):
        return
    weights = [n for n in inside.names(r".*\.(?:safetensors|bin)") if not re.fullmatch(_NO_WEIGHTS, n)]
    if not weights:
        raise inside.fault("the weights are missing")


# -- layout ----------------------------------------------------------------------------------------------------------

AUTOMATIC = re.compile(r"checkpoint_(0|[1-9][0-9]{0,17})")
NAMED = re.compile(r"(?:step_|checkpoint-|checkpoint_)(0|[1-9][0-9]{0,17})")
_RESUME = "--resume_from_checkpoint"


def judge(view: StepView) -> Judgement:
    return check(view.only)


def _preset(_site: Site, command: Sequence[str]) -> Preset:
    """The flag of accelerate's examples, if the command shows that the script has it."""
    known = command_line.has_flag(command, (_RESUME, "--checkpointing_steps"))
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
    sources=SOURCES,
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

KIND = Kind("accelerate", Accelerate, recognise, log=LOG, processes=PROCESSES, weights=WEIGHTS)
