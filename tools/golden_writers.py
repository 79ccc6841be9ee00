"""The writers behind ``make-golden-checkpoints``: each lets a real library save a tiny model, as a training loop would.

Run as ``python golden_writers.py NAME OUT`` inside a virtual environment that has the library. A writer that takes two
ranks starts them itself. Models are a few kilobytes: only the files, their order and their format matter. Values are
seeded, so a second run changes only ids and times.
"""

import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def main() -> None:
    name, out = sys.argv[1], Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    WRITERS[name](out)


# -- ranks ------------------------------------------------------------------------------------------------------------


def _on_ranks(rule: Callable[..., None], out: Path, *arguments: object, size: int = 2) -> None:
    import torch.multiprocessing

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_rank, (rule, port, size, out, *arguments), nprocs=size)


def _rank(rank: int, rule: Callable[..., None], port: int, size: int, out: Path, *arguments: object) -> None:
    import torch
    import torch.distributed

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rule(out, *arguments)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    for helper in multiprocessing.active_children():  # Megatron's; a tracer waits for every process
        helper.kill()
    os._exit(0)  # gloo's threads would abort an interpreter that ends before them


def _join() -> None:
    import torch.distributed

    torch.distributed.init_process_group("gloo")


def _sharded_model():
    """A small MLP under FSDP2 with AdamW after one step."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def _gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=8, n_layer=1, n_head=1))


class _App:
    """The state that a training loop saves by DCP: model and optimizer by torch's own helper, and its progress."""

    def __init__(self, model, optimizer, progress):
        self.model, self.optimizer, self.progress = model, optimizer, progress

    def state_dict(self):
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer, "progress": self.progress}

    def load_state_dict(self, state):
        raise NotImplementedError


# -- torch ------------------------------------------------------------------------------------------------------------


def dcp_two_ranks(out: Path) -> None:
    _on_ranks(_dcp, out)


def _dcp(out: Path) -> None:
    import torch.distributed.checkpoint as dcp

    _join()
    model, optimizer = _sharded_model()
    for step in (5, 10):
        dcp.save({"app": _App(model, optimizer, {"step": step})}, checkpoint_id=out / f"step-{step}")


def prime_rl(out: Path) -> None:
    """Make the torch calls of ``prime_rl/orchestrator/ckpt.py`` and ``prime_rl/trainer/ckpt.py``, in their order."""
    _on_ranks(_prime_rl, out)


def _prime_rl(out: Path) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    _join()
    model, optimizer = _sharded_model()
    for variant, own in (("a", out / "a" / "run_default"), ("b", out / "b")):
        root = out / variant
        for step in (5, 10):
            if dist.get_rank() == 0:
                orchestrator = own / "checkpoints" / f"step_{step}" / "orchestrator"
                orchestrator.mkdir(parents=True)
                value = {"progress": {"step": step, "total_tokens": 10}}
                if variant == "a":
                    torch.save(value, orchestrator / "progress.pt")
                    broadcast = own / "broadcasts" / f"step_{step}"
                    broadcast.mkdir(parents=True)
                    from safetensors.torch import save_file

                    save_file({"w": torch.ones(8)}, broadcast / "model.safetensors")
                    (broadcast / "STABLE").touch()
                else:
                    torch.save(value, orchestrator / "progress.pt.abcdefgh.tmp")
                    (orchestrator / "progress.pt.abcdefgh.tmp").replace(orchestrator / "progress.pt")
            dist.barrier()
            trainer = root / "checkpoints" / f"step_{step}" / "trainer"
            trainer.mkdir(parents=True, exist_ok=True)
            dcp.save({"app": _App(model, optimizer, {"step": step})}, checkpoint_id=trainer)
            dist.barrier()


def torch_files(out: Path) -> None:
    """Single files in every form of ``torch.save``, and safetensors by the version of this environment."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "global_step": 7}
    torch.save(state, out / "crc.pt")
    torch.serialization.set_crc32_options(False)
    torch.save(state, out / "no-crc.pt")
    torch.serialization.set_crc32_options(True)
    torch.save(state, out / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save({}, out / "empty-dict.pt")
    torch.save(torch.arange(3), out / "tensor.bin")


def safetensors_file(out: Path) -> None:
    import numpy
    import safetensors
    from safetensors.numpy import save_file

    tensors = {
        "a": numpy.arange(12, dtype=numpy.float32).reshape(3, 4), "b": numpy.zeros(0, numpy.int64),
        "c": numpy.ones((2, 2), numpy.float16), "scalar": numpy.array(1.5), "flags": numpy.array([True, False, True]),
    }  # fmt: skip
    save_file(tensors, out / f"{safetensors.__version__}.safetensors", metadata={"format": "np"})


# -- Hugging Face -----------------------------------------------------------------------------------------------------


class _Rows:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        row = [(index + i) % 32 for i in range(8)]
        return {"input_ids": row, "labels": row}


def _hf_trainer(out: Path, **more: object):
    import functools

    import transformers
    from transformers import Trainer, TrainingArguments

    transformers.set_seed(0)
    shard_size = more.pop("max_shard_size", None)
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=4, save_steps=2, per_device_train_batch_size=2, report_to=[],
        logging_steps=1, disable_tqdm=True, **{"use_cpu": True, **more},
    )  # fmt: skip
    model = _gpt2()
    if shard_size:
        model.save_pretrained = functools.partial(model.save_pretrained, max_shard_size=shard_size)
    return Trainer(model=model, args=arguments, train_dataset=_Rows())


def hf(out: Path) -> None:
    _hf_trainer(out).train()


def hf_sharded(out: Path) -> None:
    _hf_trainer(out, max_shard_size=1500).train()


def hf_two_ranks(out: Path) -> None:
    """DDP: every rank writes its own random state, without a barrier after it."""
    _on_ranks(_hf_ddp, out)


def _hf_ddp(out: Path) -> None:
    _hf_trainer(out, ddp_backend="gloo").train()


def hf_deepspeed(out: Path) -> None:
    _on_ranks(_hf_ds, out)


def _hf_ds(out: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
    }
    _hf_trainer(out, deepspeed=config, use_cpu=False).train()


def hf_fsdp(out: Path) -> None:
    """Sharded FSDP, which accelerate refuses without a GPU: the calls of its ``fsdp_utils`` and of ``Trainer``, in
    their order (model, optimizer, scheduler, random states, ``trainer_state.json``)."""
    _on_ranks(_hf_fsdp, out)


def _hf_fsdp(out: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    _join()
    rank = torch.distributed.get_rank()
    model, optimizer = _sharded_model()
    for step in (2, 4):
        place = out / f"checkpoint-{step}"
        place.mkdir(parents=True, exist_ok=True)
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights}, checkpoint_id=place / "pytorch_model_fsdp_0")
        dcp.save({"optimizer": state}, checkpoint_id=place / "optimizer_0")
        if rank == 0:
            torch.save({"last_epoch": step}, place / "scheduler.pt")
        torch.save({"cpu": torch.get_rng_state()}, place / f"rng_state_{rank}.pth")
        if rank == 0:
            (place / "trainer_state.json").write_text(json.dumps({"global_step": step, "max_steps": 4}))


def accelerate(out: Path) -> None:
    import torch
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    torch.manual_seed(0)
    accelerator = Accelerator(
        cpu=True, project_config=ProjectConfiguration(project_dir=str(out), automatic_checkpoint_naming=True)
    )
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    loader = torch.utils.data.DataLoader(torch.randn(4, 8))
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    accelerator.register_for_checkpointing(_Counter())
    for _ in range(3):
        for batch in loader:
            accelerator.backward(model(batch).sum())
            optimizer.step()
        accelerator.save_state()


class _Counter:
    def state_dict(self) -> dict[str, int]:
        return {"global_step": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


# -- Lightning, DeepSpeed, torchtitan, Megatron core, verl, Orbax -----------------------------------------------------


def lightning(out: Path) -> None:
    import lightning as L  # noqa: N812
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch, _index):
            return self.layer(batch).sum()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    L.seed_everything(0)
    keep = ModelCheckpoint(dirpath=out, every_n_train_steps=2, save_top_k=-1, save_last="link")
    trainer = L.Trainer(
        max_steps=4, accelerator="cpu", callbacks=[keep], logger=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(8, 8)))


def lightning_directory(out: Path) -> None:
    """A sharded ``*.ckpt`` directory: the order of ``FSDPStrategy.save_checkpoint`` (which wants CUDA), by its calls:
    the DCP save, then rank 0 writes ``meta.pt``."""
    _on_ranks(_lightning_directory, out)


def _lightning_directory(out: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    _join()
    model, optimizer = _sharded_model()
    for step in (2, 4):
        path = out / f"epoch=0-step={step}.ckpt"
        if torch.distributed.get_rank() == 0:
            path.mkdir()
        torch.distributed.barrier()
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer_0": state}, checkpoint_id=path)
        if torch.distributed.get_rank() == 0:
            torch.save({"global_step": step, "epoch": 0, "loops": {}}, path / "meta.pt")
        torch.distributed.barrier()


def deepspeed(out: Path, stage: int = 2) -> None:
    _on_ranks(_deepspeed, out, stage)


def deepspeed_zero3(out: Path) -> None:
    deepspeed(out, 3)


def _engine(stage: int):
    import deepspeed
    import torch

    deepspeed.init_distributed("gloo")
    model = torch.nn.Linear(8, 4)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def _train(engine) -> None:
    import torch

    engine.backward(engine(torch.randn(1, 8)).sum())
    engine.step()


def _deepspeed(out: Path, stage: int) -> None:
    engine = _engine(stage)
    for _ in range(2):
        _train(engine)
        engine.save_checkpoint(str(out))


def openrlhf(out: Path) -> None:
    """The engine's own ``save_checkpoint`` per role, with the tags OpenRLHF's trainers give."""
    _on_ranks(_openrlhf, out)


def _openrlhf(out: Path) -> None:
    actor, critic = _engine(2), _engine(2)
    for step in (5, 10):
        for role, engine in (("_actor", actor), ("_critic", critic)):
            _train(engine)
            engine.save_checkpoint(str(out / role), tag=f"global_step{step}", client_state={"global_step": step})


def torchtitan(out: Path) -> None:
    _on_ranks(_torchtitan, out)


def _torchtitan(out: Path) -> None:
    from torchtitan.components.checkpointer.dcp import CheckpointManager

    class Progress:
        step = 0

        def state_dict(self) -> dict[str, int]:
            return {"step": self.step}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.step = state["step"]

    class Optimizers:
        """The part of torchtitan's container that the manager uses."""

        def __init__(self, model, optimizer):
            self.model, self.optimizer = model, optimizer

        def state_dict(self):
            from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

            return get_optimizer_state_dict(
                self.model, self.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
            )

        def load_state_dict(self, state):
            raise NotImplementedError

    _join()
    model, optimizer = _sharded_model()
    progress = Progress()
    manager = CheckpointManager(
        CheckpointManager.Config(enable=True, interval=5, keep_latest_k=0), dataloader=None, model_parts=[model],
        optimizers=Optimizers(model, optimizer), lr_schedulers=Progress(), states={"train_state": progress},
        sd_adapter=None, base_folder=str(out),
    )  # fmt: skip
    manager.states.pop("dataloader")
    for step in (10, 12):
        progress.step = step
        manager.save(step, last_step=step == 12)
    manager.close()


def megatron(out: Path) -> None:
    """Megatron core's own ``dist_checkpointing.save``; the tracker as Megatron-LM's training loop writes it."""
    _on_ranks(_megatron, out)


def _megatron(out: Path) -> None:
    import torch
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor

    # It queries a device that does not exist; the files do not depend on the answers.
    torch.cuda.synchronize, torch.cuda.current_device = lambda *_: None, lambda: "cpu"
    _join()
    parallel_state.initialize_model_parallel(1, 1)
    rank = torch.distributed.get_rank()
    for step in (10, 20):
        values = torch.arange(64.0).reshape(8, 8)[rank * 4 : rank * 4 + 4]
        state = {
            "model": {"w": ShardedTensor.from_rank_offsets("model.w", values, (0, rank, 2))},
            "optimizer": {"exp_avg": ShardedTensor.from_rank_offsets("optimizer.exp_avg", values, (0, rank, 2))},
            "iteration": step,
            "args": {"world_size": 2},
        }
        place = out / f"iter_{step:07d}"
        place.mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        dist_checkpointing.save(state, str(place))
        torch.distributed.barrier()
        if rank == 0:
            (out / "latest_checkpointed_iteration.txt").write_text(str(step))
        torch.distributed.barrier()


def verl(out: Path) -> None:
    """verl's ``FSDPCheckpointManager`` for actor and critic; ``data.pt`` and the tracker as ``ray_trainer`` writes
    them."""
    _on_ranks(_verl, out)


def _verl(out: Path) -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    _join()
    managers = {}
    for role in ("actor", "critic"):
        model = _gpt2()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model.parameters())
        model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
        optimizer.step()
        managers[role] = FSDPCheckpointManager(model, optimizer, None, None)
    for step in (2, 4):
        for role, manager in managers.items():
            manager.save_checkpoint(str(out / f"global_step_{step}" / role), global_step=step)
        if torch.distributed.get_rank() == 0:
            torch.save({"_snapshot": {"_num_yielded": step}}, out / f"global_step_{step}" / "data.pt")
            (out / "latest_checkpointed_iteration.txt").write_text(str(step))
        torch.distributed.barrier()


def orbax(out: Path) -> None:
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(save_interval_steps=1)
    with ocp.CheckpointManager(out.absolute(), options=options) as manager:
        for step in (10, 20):
            state = {"params": {"w": jnp.arange(8.0)}, "step": step}
            manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state)))
            manager.wait_until_finished()


def user_runner(out: Path) -> None:
    """A hand-written loop: model directory by transformers, then optimizer, scheduler, ``training_info.json``, link."""
    import torch

    torch.manual_seed(0)
    model = _gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    root = out / "training_state"
    for step in (3, 6):
        place = root / f"step_{step}"
        model.save_pretrained(place / "model")
        torch.save(optimizer.state_dict(), place / "optimizer.pt")
        torch.save(scheduler.state_dict(), place / "scheduler.pt")
        (place / "training_info.json").write_text(json.dumps({"step": step}))
        link = root / "step_latest"
        link.unlink(missing_ok=True)
        link.symlink_to(place.name)


WRITERS: dict[str, Callable[[Path], None]] = {
    "dcp-2-ranks": dcp_two_ranks, "prime-rl": prime_rl, "torch-files": torch_files, "safetensors": safetensors_file,
    "hf": hf, "hf-sharded": hf_sharded, "hf-ddp": hf_two_ranks, "hf-deepspeed": hf_deepspeed, "hf-fsdp": hf_fsdp,
    "accelerate": accelerate, "lightning": lightning, "lightning-directory": lightning_directory,
    "deepspeed": deepspeed, "deepspeed-zero3": deepspeed_zero3, "openrlhf": openrlhf, "torchtitan": torchtitan,
    "megatron": megatron, "verl": verl, "orbax": orbax, "runner": user_runner,
}  # fmt: skip

if __name__ == "__main__":
    main()
