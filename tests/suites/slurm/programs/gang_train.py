"""A tiny model sharded over the ranks of torchrun on some nodes (FSDP2, gloo), saved by torch.distributed.checkpoint.

CHAOS_CONTROL is a directory that all nodes see: ``slow`` makes a step take 0.5 s at least, ``hold`` lets every rank
wait before the step after the second checkpoint as long as it exists, ``kill.NODE`` ends the rank on that node by
SIGKILL, ``hang.NODE`` lets it wait forever before a step, so that the others wait inside it, ``ecc.NODE`` ends it as a
broken GPU does.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

torch.set_num_threads(1)
CONTROL = Path(os.environ["CHAOS_CONTROL"])
NODE = os.environ.get("SLURMD_NODENAME", "")


def ordered(may_hold: bool) -> None:
    """What the test wants to happen now."""
    while may_hold and (CONTROL / "hold").exists() and not (CONTROL / f"kill.{NODE}").exists():
        time.sleep(0.1)
    if (CONTROL / f"kill.{NODE}").exists():
        (CONTROL / f"kill.{NODE}").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    if (CONTROL / f"hang.{NODE}").exists():
        (CONTROL / f"hang.{NODE}").unlink()
        signal.pause()
    if (CONTROL / f"ecc.{NODE}").exists():
        (CONTROL / f"ecc.{NODE}").unlink()
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    if (CONTROL / "slow").exists():
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--interval", type=int, required=True)
    parser.add_argument("--resume", default="")
    args = parser.parse_args()
    life = {"node": NODE, "resume": args.resume, "rank": os.environ.get("RANK"), "told": os.environ.get(
        "PODWATCH_NODE_RANK", ""), "step": os.environ.get("PODWATCH_STEP", "")}  # fmt: skip
    with (CONTROL / f"lives-{NODE or 'alone'}.jsonl").open("a") as out:
        out.write(json.dumps(life) + "\n")
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    net: Any = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    step = 0
    if args.resume:
        model_state, optimizer_state = get_state_dict(net, optimizer)
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "step": 0}
        dcp.load(state, checkpoint_id=args.resume)
        set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        step = state["step"]
    rows = torch.randn(96, 16, generator=torch.Generator().manual_seed(1))
    while step < args.steps:
        ordered(may_hold=step == 2 * args.interval)
        batch = rows[[(8 * step + 4 * dist.get_rank() + n) % len(rows) for n in range(4)]]
        loss = torch.nn.functional.mse_loss(net(batch), batch.sum(1, keepdim=True).sin())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        print(f"step: {step}  loss: {loss.item():.5f}", flush=True)
        if step % args.interval == 0:
            model_state, optimizer_state = get_state_dict(net, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state, "step": step}
            dcp.save(state, checkpoint_id=args.output_dir / f"step-{step}")
    full = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        torch.save(full, args.output_dir / "final.pt")
    dist.barrier()
    dist.destroy_process_group()


main()
