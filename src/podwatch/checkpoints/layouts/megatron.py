"""Megatron-LM: ``iter_0000005`` directories and ``latest_checkpointed_iteration.txt`` beside them.

torch_dist (the default) is a DCP directory whose ``metadata.json`` follows ``.metadata``; the legacy form is one
``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`` per model-parallel rank. After a barrier rank 0 writes the tracker, by a
plain open and write. A garbled tracker makes Megatron exit with status 0, which looks like a clean end.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from podwatch.checkpoints.formats import dcp
from podwatch.checkpoints.layouts import command_line, shared_rules
from podwatch.checkpoints.layouts.base import Judgement, Kind, Marker, Recognition, Site, Source, Tracker, Weights
from podwatch.checkpoints.layouts.command_line import program
from podwatch.checkpoints.layouts.resume_flags import Preset
from podwatch.checkpoints.layouts.shared_rules import Inside, StepView
from podwatch.checkpoints.layouts.step_dirs import Rules, StepDirs, inside_output, step_names
from podwatch.domain.trainer_log import StepPattern, TrainerLog

STEP = re.compile(r"iter_([0-9]{7}|[1-9][0-9]{7,17})")
TRACKER = "latest_checkpointed_iteration.txt"
_COMMON = "common.pt"
"""Until Megatron core 0.16 the unsharded state; no index lists it."""
CONFIG = "metadata.json"
_LEGACY = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?/(?:model_optim_rng|model_rng)\.pt")
_DATA = re.compile(r"(?:.*/)?(?:.*\.distcp|\.metadata|metadata\.json|common\.pt|model_optim_rng\.pt|distrib_optim\.pt)")
"""Files written before the tracker; tokenizer files can come after it."""


def torch_dist(inside: Inside) -> dcp.DcpVerdict:
    """Apply the DCP rule to Megatron's distributed checkpoint, and require the config that is written after its
    index."""
    verdict = inside.dcp()
    inside.written_last(CONFIG, r".*\.distcp|\.metadata|common\.pt")
    inside.json(CONFIG)
    return verdict


def _legacy(inside: Inside) -> None:
    """Require every tensor-parallel rank of every stage; a rank must have the files that other ranks have."""
    ranks = [tuple(int(g or 0) for g in m.groups()) for m in inside.matches(_LEGACY)]
    if not ranks:
        raise inside.fault(f"no {dcp.INDEX} and no mp_rank directory with model_optim_rng.pt")
    sizes = [max(r[axis] for r in ranks) + 1 for axis in range(3)]
    if len(set(ranks)) != sizes[0] * sizes[1] * sizes[2]:
        raise inside.fault(f"{len(set(ranks))} of {sizes[0] * sizes[1] * sizes[2]} model-parallel ranks have saved")
    optimizers = inside.names(r"mp_rank_[\d_]+/distrib_optim\.pt")
    if optimizers and len(optimizers) != len(set(ranks)):
        raise inside.fault(f"{len(optimizers)} of {len(set(ranks))} ranks have their distrib_optim.pt")


def judge(view: StepView) -> Judgement:
    inside = view.only
    later = shared_rules.has_later(view, STEP)
    shared_rules.reached(view.root / TRACKER, view.step, inside, data=_DATA, later=later)
    if not (dcp.INDEX in inside.files or any(dcp.is_shard(n) for n in inside.files)):
        _legacy(inside)
        inside.sound()
        return Judgement(True, marker=Marker.LAST_FILE)
    verdict = torch_dist(inside)
    if any((sibling / _COMMON).is_file() for sibling in view.siblings()):
        inside.require(_COMMON, why="other steps have it, and a load starts with it")
    inside.sound()
    leftovers = tuple(f"{inside.part}/{n}" for n in verdict.leftovers)
    return Judgement(
        True,
        marker=Marker.LAST_FILE,
        save_token=verdict.save_id,
        world_size=verdict.world_size,
        leftovers=leftovers,
    )


def _root(site: Site) -> Path:
    return inside_output(site, command_line.flag_value(site.command, ("--save",)))


def _preset(site: Site, _command: Sequence[str]) -> Preset:
    """``--load`` names a base model at a fresh start, so it is replaced only for a resume, like the flags that would
    restart at iteration 0."""
    return Preset(
        add=("--load", str(_root(site)), "--ckpt-step", "{step}"),
        flags=("--ckpt-step",),
        resuming=("--load",),
        resuming_bare=("--finetune", "--no-load-optim", "--no-load-rng"),
    )


def _trackers(root: Path, step: int | None) -> tuple[Tracker, ...]:
    return shared_rules.as_number(root / TRACKER, step)


def _pinned(root: Path) -> Mapping[int, str]:
    return shared_rules.pinned(root / TRACKER)


def _target(_site: Site, command: Sequence[str], _root: Path) -> int | None:
    return command_line.positive(command_line.flag_value(command, ("--train-iters",)))


RULES = Rules(
    name="megatron",
    step=STEP,
    directory="iter_{step:07d}",
    judge=judge,
    preset=_preset,
    sources=(
        Source("NVIDIA/Megatron-LM", "megatron/training/checkpointing.py", "d98e8a64d"),
        Source("NVIDIA/Megatron-LM", "megatron/core/dist_checkpointing/serialization.py", "d98e8a64d"),
    ),
    reshards=True,  # torch_dist does; the world size of the legacy form cannot be read from outside
    root=_root,
    rests_on=lambda root: (root / TRACKER,),
    trackers=_trackers,
    pinned=_pinned,
    target=_target,
    finish_lines=("after training is done",),
)


def recognise(site: Site) -> Recognition | None:
    root = _root(site)
    for name in step_names(root, STEP).values():
        if (root / TRACKER).is_file():
            return Recognition("megatron", f"{name} is beside {TRACKER}", certain=True)
        return Recognition("megatron", f"{name} exists")
    seen = program(site.command, site.working_directory)
    if re.fullmatch(r"(?:pretrain|train)_\w+\.py", seen.name) and seen.says("--train-iters", "--ckpt-format"):
        return Recognition("megatron", f"the command runs {seen.name} with Megatron's arguments", certain=True)
    told = seen.says("--tensor-model-parallel-size")
    return Recognition("megatron", f"the command has {told}") if told else None


LOG = TrainerLog(
    steps=(
        StepPattern(
            re.compile(r"^(?:\[[\d\s:.-]{1,30}\]\s*)?iteration {1,12}(\d{1,12})/ {0,12}\d{1,12} \| consumed samples:")
        ),
    )
)

WEIGHTS = Weights(note="the exporter of the model's architecture, for example Megatron Bridge")

KIND = Kind("megatron", lambda site: StepDirs(site, RULES), recognise, log=LOG, weights=WEIGHTS)
