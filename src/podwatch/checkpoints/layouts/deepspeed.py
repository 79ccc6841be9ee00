"""DeepSpeed's files below one tag, whichever trainer saves by it (OpenRLHF, the HF Trainer, accelerate, Lightning), and
DeepSpeed alone: ``<dir>/global_stepN`` with ``latest`` beside it.

Every rank writes its own model states and optimizer shard, and rank 0 writes ``latest`` before the barrier that ends
the save, so ``latest`` alone proves nothing: each rank's file must exist. The number of ranks is inside the model
states (``dp_world_size``).

N counts the engine's optimizer steps (a script can pass another number). Only tags of this form are steps; for others
use ``custom``. OpenRLHF's SFT, DPO and reward trainers and open-instruct's GRPO use this layout. How a script resumes
is unknown: most call ``load_checkpoint(dir)``, which reads ``latest``, and podwatch writes N there.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from podwatch.checkpoints.formats import dcp, torch_zip
from podwatch.checkpoints.layouts import command_line, shared_rules
from podwatch.checkpoints.layouts.base import Judgement, Kind, Marker, Recognition, Site, Source, Tracker, Weights
from podwatch.checkpoints.layouts.command_line import program
from podwatch.checkpoints.layouts.resume_flags import Preset
from podwatch.checkpoints.layouts.shared_rules import Inside, StepView
from podwatch.checkpoints.layouts.step_dirs import Rules, StepDirs, step_names
from podwatch.domain.process import ProcessNames, ProcessRole
from podwatch.domain.trainer_log import StepPattern, TrainerLog

# -- files below one tag -----------------------------------------------------------------------------------------------

MODEL = re.compile(r"(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
"""The name with the data-parallel rank under ZeRO 3, where the weights are also split."""
OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_?optim_states\.pt")
"""Old versions have no last underscore."""
_EXPERT = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_STAGE = "ds_config.zero_optimization.stage"
_RANK_ZERO = re.compile(r"(?:(?:bf16_|fp16_)?zero_pp_rank_0_)?mp_rank_00_(?:model|optim)_states\.pt")

SOURCE = Source("deepspeedai/DeepSpeed", "deepspeed/runtime/engine.py", "edaa7221267243c7be7fb49c5d5f5c4fb97b4641")


@dataclass(frozen=True, slots=True)
class Zero:
    """``ranks`` is the data-parallel size the shards were written for; None: not readable, so the files of the last
    ranks could be missing unnoticed. ``values`` are the small values of the first model states."""

    ranks: int | None
    values: Mapping[str, object]

    def number(self, name: str) -> int | None:
        value = self.values.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None


def present(tag: Inside) -> bool:
    return any(MODEL.fullmatch(n) or OPTIM.fullmatch(n) for n in tag.files)


def check(tag: Inside) -> Zero:
    """Check the files of one tag: ``Fault`` unless every rank's exist. ``sound`` checks their structure."""
    models, shards = tag.matches(MODEL), tag.matches(OPTIM)
    if not models:
        raise tag.fault("no model states")
    problem = torch_zip.check(tag.path / models[0].string)
    if problem:  # reading values would need a child process
        raise tag.fault(f"{models[0].string} {problem}", damaged=True)
    zero = Zero(None, tag.values(models[0].string))
    size = zero.number("dp_world_size")
    zero = Zero(size if size and size > 0 else None, zero.values)
    slices = max(zero.number("mp_world_size") or 1, *(int(m["mp"]) + 1 for m in (*models, *shards)))
    split = any(m["dp"] is not None for m in models)
    for number in range(slices):
        mine = [m for m in models if int(m["mp"]) == number]
        if not mine:
            raise tag.fault(f"the model states of model-parallel rank {number} are missing")
        if split:
            _every_rank(tag, mine, zero.ranks, "model", number)
        own = [m for m in shards if int(m["mp"]) == number]
        if own:
            _every_rank(tag, own, zero.ranks, "optim", number)
        elif shards or ("optimizer#" not in zero.values and zero.number(_STAGE) != 0):
            # Without ZeRO the optimizer is inside the model states; with it there is nothing under that name.
            raise tag.fault(f"the optimizer shards of model-parallel rank {number} are missing")
    _experts(tag)
    return zero


def _every_rank(tag: Inside, found: list[re.Match[str]], size: int | None, kind: str, part: int) -> None:
    have = {int(m["dp"]) for m in found if m["dp"] is not None}
    missing = set(range(size or max(have, default=0) + 1)) - have
    if missing:
        raise tag.fault(f"{kind} shard of rank {min(missing)} (mp {part}) is missing")


def _experts(tag: Inside) -> None:
    """Require a file for every expert of a layer (mixture of experts), without gaps; their number is not recorded."""
    found: dict[tuple[str, str], set[int]] = {}
    for match in tag.matches(_EXPERT):
        found.setdefault((match.group(1), match.group(3)), set()).add(int(match.group(2)))
    for (layer, _), have in sorted(found.items()):
        missing = set(range(max(have) + 1)) - have
        if missing:
            raise tag.fault(f"expert {min(missing)} of layer {layer} is missing")


def over(latest: Path, view: StepView, tag: Inside, pattern: re.Pattern[str], later: bool) -> Marker:
    """Require that ``latest`` was written for this save (``Fault`` if not); returns how strong that evidence is.
    ``later``: a later step exists.

    Rank 0 writes its own files before ``latest``: if these are newer, the tag is being saved again, or that was
    interrupted. Other ranks can be later: there is no barrier between.
    """
    said = shared_rules.text(latest)
    begun = any(full.startswith(said) for full in ("global_step", "best_global_step"))
    if not begun and pattern.fullmatch(said) is None:
        return Marker.NONE  # the user's own tag: no evidence about this one
    shared_rules.reached(latest, view.step, tag, pattern, later=later)
    try:
        _rank_zero_done(tag, latest.stat().st_mtime_ns)
    except FileNotFoundError:
        return Marker.NONE
    return Marker.LAST_FILE if pattern.fullmatch(said) else Marker.NONE


def closed(inside: Inside, tags: Collection[str]) -> Zero:
    """As ``over``, where ``latest`` is in the step itself, beside its one tag: HF, accelerate, Lightning."""
    name = inside.text("latest")
    if name not in tags:
        raise inside.fault(f"latest names {name[:60]!r}, which does not exist")
    zero = check(inside.below(name))
    _rank_zero_done(inside.below(name), inside.files["latest"].mtime_ns)
    return zero


def _rank_zero_done(tag: Inside, latest_ns: int) -> None:
    limit = latest_ns + dcp.MTIME_TOLERANCE_NS
    newer = [n for n, f in tag.files.items() if _RANK_ZERO.fullmatch(n) and f.mtime_ns > limit]
    if newer:
        raise tag.fault(f"{min(newer)} is newer than latest: being overwritten, or an overwrite was interrupted")


# -- how OpenRLHF loads what DeepSpeed saved ---------------------------------------------------------------------------

PLAIN_MODULES = ("openrlhf.cli.train_sft", "openrlhf.cli.train_dpo", "openrlhf.cli.train_rm", "openrlhf.cli.train_kd")
NEW, OLD = "--ckpt.load_enable", "--load_checkpoint"
LOAD = (NEW, OLD)
"""From 2026-04-19 (ed62d0e2) on every flag has dots."""


def has_dots(command: Sequence[str]) -> bool | None:
    """Whether the command uses dotted flags. None if no flag shows it."""
    flags = [a.partition("=")[0] for a in command if a.startswith("--")]
    if any("." in f for f in flags):
        return True
    return False if any("_" in f for f in flags) else None


def load_preset(command: Sequence[str]) -> Preset:
    """OpenRLHF loads what ``latest`` names; no step can be passed. A fresh start must not load: with an empty directory
    it would fail."""
    dots = command_line.has_flag(command, (NEW,)) or has_dots(command)
    if dots is None and not command_line.has_flag(command, (OLD,)):
        return Preset(
            add=None,
            bare=LOAD,
            ask="podwatch cannot determine the OpenRLHF version, so not which flag makes it load",
            example=f'["{NEW}"], or for versions before April 2026 ["{OLD}"]',
        )
    return Preset(add=(NEW if dots else OLD,), bare=LOAD)


# -- DeepSpeed alone ---------------------------------------------------------------------------------------------------

STEP = re.compile(r"global_step(0|[1-9][0-9]{0,17})$")
LATEST = "latest"
_TARGETS = ("--max-steps", "--max_train_steps", "--train_steps", "--num_training_steps")


def judge(view: StepView) -> Judgement:
    tag = view.only
    zero = check(tag)
    tag.sound()
    marker = over(view.root / LATEST, view, tag, STEP, shared_rules.has_later(view, STEP))
    return Judgement(True, marker=marker if zero.ranks else Marker.NONE, world_size=zero.ranks)


def trackers(root: Path, step: int | None) -> tuple[Tracker, ...]:
    return () if step is None else (Tracker(root / LATEST, content=f"global_step{step}".encode()),)


def pinned(root: Path) -> Mapping[int, str]:
    step = shared_rules.number(root / LATEST, STEP)
    return {} if step is None else {step: LATEST}


def _preset(site: Site, command: Sequence[str]) -> Preset:
    seen = program(command, site.working_directory)
    if seen.runs(*PLAIN_MODULES) or command_line.has_flag(command, LOAD):
        return load_preset(command)
    if command_line.has_flag(command, ("--checkpoint_state_dir",)):
        return Preset(add=())  # open-instruct's GRPO loads what latest names, whenever the directory exists
    return Preset(
        add=None,
        ask="DeepSpeed is a library, so podwatch cannot know how the script resumes",
        example='["--resume"]; podwatch writes the step into the file "latest", so if the script calls load_checkpoint'
        ' whenever that file exists, set it to "none"',
    )


def _target(_site: Site, command: Sequence[str], _root: Path) -> int | None:
    return command_line.positive(command_line.flag_value(command, _TARGETS))


RULES = Rules(
    name="deepspeed",
    step=STEP,
    directory="global_step{step}",
    judge=judge,
    preset=_preset,
    sources=(
        SOURCE,
        Source("allenai/open-instruct", "open_instruct/grpo_fast.py", "e6c3044aa6201c8bfa4573c1b03142af599e730d"),
    ),
    reshards=False,
    rests_on=lambda root: (root / LATEST,),
    trackers=trackers,
    pinned=pinned,
    target=_target,
)


def recognise(site: Site) -> Recognition | None:
    root = site.checkpoint_dir or site.output_dir
    for step, name in sorted(step_names(root, STEP).items(), reverse=True)[:3]:
        if any(MODEL.fullmatch(p.name) for p in (root / name).iterdir()):
            return Recognition("deepspeed", f"global_step{step} holds DeepSpeed's model states", certain=True)
    seen = program(site.command, site.working_directory).runs(*PLAIN_MODULES)
    return Recognition("deepspeed", f"the command runs {seen}: DeepSpeed's files", certain=True) if seen else None


LOG = TrainerLog(
    steps=(
        StepPattern(
            re.compile(
                r"^(?:\[[\d\s:.,-]{1,30}\] )?\[INFO\] \[logging\.py:[^\]]{1,40}\] (?:\[Rank 0\] )?"
                r"step=(\d{1,12}), skipped="
            )
        ),
    )
)
PROCESSES = ProcessNames(programs={"deepspeed": ProcessRole.LAUNCHER})

WEIGHTS = Weights(
    convert="python ../zero_to_fp32.py .. TARGET -t global_stepN --safe_serialization",
    note="in CHECKPOINT; config.json and the tokenizer come from the original model",
)

KIND = Kind("deepspeed", lambda site: StepDirs(site, RULES), recognise, log=LOG, processes=PROCESSES, weights=WEIGHTS)
