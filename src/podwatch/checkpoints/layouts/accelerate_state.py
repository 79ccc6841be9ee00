"""The files that ``Accelerator.save_state`` writes into one directory. Used by accelerate, open-instruct.

Order: weights (hooks can put them into subdirectories), optimizer, scheduler, samplers, scaler, each rank's random
state, custom objects. No marker and no closing barrier, so nothing shows that the last rank is done.
"""

import re

from podwatch.checkpoints.layouts import nested, zero_shards
from podwatch.checkpoints.layouts.base import Judgement, Marker, Source
from podwatch.checkpoints.layouts.inside import Inside
from podwatch.checkpoints.structure import torch_zip

_COMMIT = "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83"
SOURCES = (
    Source("huggingface/accelerate", "src/accelerate/accelerator.py", _COMMIT),
    Source("huggingface/accelerate", "src/accelerate/checkpointing.py", _COMMIT),
    Source("huggingface/accelerate", "src/accelerate/utils/fsdp_utils.py", _COMMIT),
    zero_shards.SOURCE,
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
    tags = [f for f in inside.folders(_ZERO_TAG) if zero_shards.present(inside.below(f))]
    if tags:
        for tag in tags:
            zero_shards.check(inside.below(tag))
        ranks = zero_shards.closed(inside, tags).ranks
    else:
        token, leftovers = nested.check(inside)
        _weights(inside)
        if not any(re.fullmatch(r"optimizer[^/]*\.bin", n) for n in inside.files) and not inside.folders(
            _FSDP_OPTIMIZER
        ):
            raise inside.fault("optimizer.bin is missing")
    states = nested.gap(inside, _RANDOM, "the random state of rank")
    if states == 0:
        raise inside.fault("random_states_0.pkl is missing: each rank writes its own near the end")
    if ranks is not None and states < ranks:
        raise inside.fault(f"the random state of rank {states} is missing")
    inside.written_last("random_states_0.pkl", _OWN)
    nested.gap(inside, _CUSTOM, "custom object")
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
    if nested.gap(inside, _FSDP_SPLIT, "the model's part of rank"):
        return
    weights = [n for n in inside.names(r".*\.(?:safetensors|bin)") if not re.fullmatch(_NO_WEIGHTS, n)]
    if not weights:
        raise inside.fault("the weights are missing")
