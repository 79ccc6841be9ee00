"""The rule for a complete Hugging Face ``checkpoint-N``.

``trainer_state.json`` is written last, but without a barrier, and an old one survives an overwrite; a resume with a
missing optimizer or scheduler silently starts a fresh one. So all files are required.
"""

from podwatch.checkpoints.layouts import zero_shards
from podwatch.checkpoints.layouts.base import Judgement, Marker
from podwatch.checkpoints.layouts.inside import Inside, StepView

STATE = "trainer_state.json"
UNFINISHED = "checkpoint-is-incomplete.txt"
_FSDP_MODEL = r"pytorch_model_fsdp_\d+$"
_FSDP_OPTIMIZER = r"optimizer_\d+$"
_RNG = r"rng_state_(\d+)\.pth"
_DATA = r".*\.(?:safetensors|bin|pt|distcp|metadata|index\.json)|(?:adapter_)?config\.json"
"""Files that are written before the state file. Not other ranks' random state (.pth), which can come later: there is no
barrier. Of JSON files only those of a save's start and the shard indexes: operators add tokenizers and evaluations
later."""


def judge_checkpoint(view: StepView) -> Judgement:
    """Apply the rule to one directory."""
    inside, step = view.only, view.step
    if UNFINISHED in inside.files:
        raise inside.fault(f"{UNFINISHED} is present: a save at a stop signal that was not finished")
    inside.require(STATE, why="it is written last")
    state = inside.json(STATE)
    recorded = state.get("global_step") if isinstance(state, dict) else None
    if recorded != step:
        raise inside.fault(f"{STATE} contains step {recorded}, not {step}", damaged=True)
    inside.written_last(STATE, _DATA)
    zero = _deepspeed(inside)
    world_size, tokens = None if zero is None else zero.ranks, list[str]()
    if zero is None:
        for pattern in (_FSDP_MODEL, _FSDP_OPTIMIZER):
            for folder in inside.folders(pattern):
                verdict = inside.below(folder).dcp()
                tokens.append(verdict.save_id)
                world_size = world_size or verdict.world_size
        if not (inside.hf_weights() or inside.folders(_FSDP_MODEL) or "pytorch_model_fsdp.bin" in inside.files):
            raise inside.fault("the weights are missing")
        if not ({"optimizer.pt", "optimizer.bin"} & inside.files.keys() or inside.folders(_FSDP_OPTIMIZER)):
            raise inside.fault("optimizer.pt is missing: a resume would silently start a fresh optimizer")
        inside.require("scheduler.pt")
    ranks = [int(m.group(1)) for m in inside.matches(_RNG)]
    inside.sound()
    # The state file is really the last one only with a single rank or a closing barrier (DeepSpeed).
    last = (bool(zero.ranks) if zero is not None else not ranks) and not inside.has_holes()
    return Judgement(
        True,
        marker=Marker.LAST_FILE if last else Marker.NONE,
        save_token="-".join(tokens),
        world_size=world_size or (max(ranks) + 1 if ranks else None),
    )


def _deepspeed(inside: Inside) -> zero_shards.Zero | None:
    """``latest`` names a tag whose ZeRO shards must all be there; None if this is no DeepSpeed checkpoint."""
    tags = inside.folders(r"global_step\d+$")
    if not tags and "latest" not in inside.files:
        return None
    tag = inside.text("latest")
    if tag not in tags:
        raise inside.fault(f"latest names {tag[:60]!r}, which does not exist")
    return zero_shards.check(inside.below(tag))
