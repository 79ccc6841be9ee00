"""prime-rl, verl, torchtitan, plain DCP, Hugging Face, Megatron-LM and NeMo 2."""

import json
from pathlib import Path

from tests.support.checkpoints import safetensors_bytes
from tests.support.layout_makers import Maker, Operation, Script

TRACKER = "latest_checkpointed_iteration.txt"


def verl_fsdp(output_dir: Path, step: int, *, world: int = 2, critic: bool = False) -> list[Operation]:
    """``RayPPOTrainer._save_checkpoint`` with FSDP: every rank's three files, rank 0's configs, barrier, critic,
    dataloader, tracker."""
    script, directory = Script(), output_dir / f"global_step_{step}"
    for role in ("actor", *(("critic",) if critic else ())):
        _fsdp(script, directory / role, world)
    script.torch(directory / "data.pt", {"_snapshot": {"_snapshot_step": step}})
    script.write(output_dir / TRACKER, str(step))
    return script.operations


def verl_critic(output_dir: Path, step: int) -> list[Operation]:
    return verl_fsdp(output_dir, step, critic=True)


def _fsdp(script: Script, directory: Path, world: int) -> None:
    for rank in range(world):
        for kind in ("model", "optim", "extra_state"):
            script.torch(directory / f"{kind}_world_size_{world}_rank_{rank}.pt")
    script.json(directory / "huggingface" / "config.json", {"model_type": "x"})
    script.json(directory / "huggingface" / "tokenizer.json", {})
    script.json(directory / "fsdp_config.json", {"FSDP_version": 2, "world_size": world})


def verl_sft(output_dir: Path, step: int) -> list[Operation]:
    script, directory = Script(), output_dir / f"global_step_{step}"
    _fsdp(script, directory, 2)
    script.torch(directory / "data_0.pt")
    script.replace(output_dir / TRACKER, str(step))
    return script.operations


def verl_torchtitan(output_dir: Path, step: int) -> list[Operation]:
    """``engine = torchtitan``: one DCP directory called step-N in the place of actor."""
    script, directory = Script(), output_dir / f"global_step_{step}"
    script.dcp(directory / f"step-{step}")
    script.torch(directory / "data.pt", {"_snapshot": {"_snapshot_step": step}})
    script.write(output_dir / TRACKER, str(step))
    return script.operations


def verl_automodel(output_dir: Path, step: int) -> list[Operation]:
    """``engine = automodel`` in SFT: each rank's shard of the model, the export made of them, then the optimizer."""
    script, directory = Script(), output_dir / f"global_step_{step}"
    script.json(directory / "model" / ".hf_metadata" / "config.json", {"model_type": "x"})
    for rank in (1, 2):
        part = safetensors_bytes({"w": 32}, offsets={"w": 32 * (rank - 1)})
        script.write(directory / "model" / f"shard-0000{rank}-model-00001-of-00001.safetensors", part)
    export = directory / "model" / "consolidated"
    script.json(export / "config.json", {"model_type": "x"})
    script.write(export / "model-00001-of-00001.safetensors", safetensors_bytes())
    script.json(export / "model.safetensors.index.json", {"weight_map": {"w": "model-00001-of-00001.safetensors"}})
    script.dcp(directory / "optim")
    script.torch(directory / "data_0.pt")
    script.replace(output_dir / TRACKER, str(step))
    return script.operations


def _torch_dist(script: Script, directory: Path) -> None:
    script.torch(directory / "common.pt")
    script.dcp(directory)
    script.json(directory / "metadata.json", {"sharded_backend": "torch_dist", "sharded_backend_version": 1})


def verl_megatron_old(output_dir: Path, step: int) -> list[Operation]:
    script, directory = Script(), output_dir / f"global_step_{step}"
    _torch_dist(script, directory / "actor" / "dist_ckpt")
    script.json(directory / "actor" / "huggingface" / "config.json", {})
    script.json(directory / "actor" / "transformer_config.json", {})
    script.torch(directory / "data.pt")
    script.write(output_dir / TRACKER, str(step))
    return script.operations


def verl_megatron_new(output_dir: Path, step: int) -> list[Operation]:
    """Since June 2026: three trees, Hugging Face weights by a bridge, and the list of it all last."""
    script, directory = Script(), output_dir / f"global_step_{step}"
    for role in ("actor", "critic"):
        place = directory / role
        for content in ("optimizer", "extra"):
            _torch_dist(script, place / content / "dist_ckpt")
        script.json(place / "model" / "huggingface" / "config.json", {})
        script.write(place / "model" / "huggingface" / "model.safetensors", safetensors_bytes())
        script.json(place / "transformer_config.json", {})
        contents = {
            "schema_version": 2,
            "global_step": step,
            "world_size": 2,
            "contents": {"model": {"path": "model/huggingface", "format": "huggingface"}},
            "directories": {"model/huggingface": "", "optimizer/dist_ckpt": "", "extra/dist_ckpt": ""},
        }
        script.replace(place / "ckpt_contents.json", json.dumps(contents))
    script.torch(directory / "data.pt")
    script.write(output_dir / TRACKER, str(step))
    return script.operations


FULL = ("layers.0.weight", "optimizer.state.w", "lr_scheduler.last_epoch", "dataloader.dp_rank_0", "train_state.step")


def torchtitan(output_dir: Path, step: int) -> list[Operation]:
    script = Script()
    script.dcp(output_dir / "checkpoint" / f"step-{step}", keys=FULL)
    return script.operations


def torchtitan_export(output_dir: Path, step: int) -> list[Operation]:
    """``last_save_model_only``: the model's own names only."""
    script = Script()
    script.dcp(output_dir / "checkpoint" / f"step-{step}", keys=("layers.0.weight", "norm.weight"))
    return script.operations


def dcp(output_dir: Path, step: int) -> list[Operation]:
    script = Script()
    script.dcp(output_dir / f"step_{step}")
    return script.operations


def hf(output_dir: Path, step: int) -> list[Operation]:
    script, directory = Script(), output_dir / f"checkpoint-{step}"
    script.json(directory / "config.json", {})
    script.json(directory / "generation_config.json", {})
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for number, shard in enumerate(shards):
        script.write(directory / shard, safetensors_bytes({f"w{number}": 16}))
    script.json(directory / "model.safetensors.index.json", {"weight_map": {f"w{n}": s for n, s in enumerate(shards)}})
    script.torch(directory / "training_args.bin")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        script.torch(directory / name)
    state = {"global_step": step, "max_steps": 100, "best_model_checkpoint": None}
    script.json(directory / "trainer_state.json", state)
    return script.operations


def megatron(output_dir: Path, step: int) -> list[Operation]:
    script = Script()
    _torch_dist(script, output_dir / f"iter_{step:07d}")
    script.write(output_dir / TRACKER, str(step))
    return script.operations


def megatron_legacy(output_dir: Path, step: int) -> list[Operation]:
    """TP 2, PP 2; each rank's optimizer state first."""
    script, directory = Script(), output_dir / f"iter_{step:07d}"
    for rank in ("00_000", "01_000", "00_001", "01_001"):
        script.torch(directory / f"mp_rank_{rank}" / "distrib_optim.pt")
        script.torch(directory / f"mp_rank_{rank}" / "model_optim_rng.pt")
    script.write(output_dir / TRACKER, str(step))
    return script.operations


def nemo(output_dir: Path, step: int) -> list[Operation]:
    script, name = Script(), f"gpt--val_loss=1.20-step={step}-consumed_samples={step * 8}.0-last"
    directory = output_dir / "checkpoints" / name
    mark = output_dir / "checkpoints" / f"{name}-unfinished"
    script.write(mark, b"")
    _torch_dist(script, directory / "weights")
    script.json(directory / "context" / "io.json", {})
    script.write(directory / "context" / "model.yaml", "a: 1\n")
    script.do(mark.unlink)
    return script.operations


def prime_rl_a(output_dir: Path, step: int) -> list[Operation]:
    script, own = Script(), output_dir / "run_default"
    script.torch(own / "checkpoints" / f"step_{step}" / "orchestrator" / "progress.pt", {"progress": {"step": step}})
    broadcast = own / "broadcasts" / f"step_{step}"
    script.write(broadcast / "model.safetensors", safetensors_bytes())
    script.json(broadcast / "config.json", {})
    script.do((broadcast / "STABLE").touch)
    script.dcp(output_dir / "checkpoints" / f"step_{step}" / "trainer")
    return script.operations


def prime_rl_b(output_dir: Path, step: int) -> list[Operation]:
    script, directory = Script(), output_dir / "checkpoints" / f"step_{step}"
    progress = directory / "orchestrator" / "progress.pt"
    torch_file = Script()
    torch_file.torch(progress.with_name("progress.pt.tmp"), {"progress": {"step": step}})
    script.operations.extend(torch_file.operations)
    script.do(lambda: progress.with_name("progress.pt.tmp").replace(progress) and None)
    script.dcp(directory / "trainer")
    return script.operations


MAKERS: dict[str, tuple[str, Maker]] = {
    "prime-rl-a": ("prime-rl", prime_rl_a),
    "prime-rl-b": ("prime-rl", prime_rl_b),
    "verl-fsdp": ("verl", verl_fsdp),
    "verl-critic": ("verl", verl_critic),
    "verl-sft": ("verl", verl_sft),
    "verl-torchtitan": ("verl", verl_torchtitan),
    "verl-automodel": ("verl", verl_automodel),
    "verl-megatron-old": ("verl", verl_megatron_old),
    "verl-megatron-new": ("verl", verl_megatron_new),
    "torchtitan": ("torchtitan", torchtitan),
    "dcp": ("dcp", dcp),
    "hf": ("hf", hf),
    "megatron": ("megatron", megatron),
    "megatron-legacy": ("megatron", megatron_legacy),
    "nemo": ("nemo", nemo),
}
"""Name -> (layout, maker)."""
