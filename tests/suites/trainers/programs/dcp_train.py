"""A tiny random model sharded over the ranks of torchrun (FSDP2, gloo), saved by ``torch.distributed.checkpoint``.

What DCP keeps is what the script hands to it: model and optimizer. Which rows come next is told by the step.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import telling


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--interval", type=int, required=True)
    parser.add_argument("--resume", default="")
    return parser.parse_args()


ARGS = parse()
telling.begin(ARGS.output_dir, ARGS.resume)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

torch.set_num_threads(1)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    net: Any = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    step = 0
    if ARGS.resume:
        model_state, optimizer_state = get_state_dict(net, optimizer)
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "step": 0}
        dcp.load(state, checkpoint_id=ARGS.resume)
        set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        step = state["step"]
    rows = torch.randn(96, 16, generator=torch.Generator().manual_seed(1))
    while step < ARGS.steps:
        batch = rows[[(8 * step + 4 * dist.get_rank() + n) % len(rows) for n in range(4)]]
        loss = torch.nn.functional.mse_loss(net(batch), batch.sum(1, keepdim=True).sin())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if dist.get_rank() == 0:
            print(f"step: {step}  loss: {loss.item():.5f}", flush=True)
        telling.step(step)
        if step % ARGS.interval == 0:
            model_state, optimizer_state = get_state_dict(net, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state, "step": step}
            dcp.save(state, checkpoint_id=ARGS.output_dir / f"step-{step}")
            telling.saved(step)
    full = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        torch.save(full, ARGS.output_dir / "final.pt")
    dist.barrier()
    dist.destroy_process_group()


main()
sys.stdout.flush()
os._exit(0)  # a thread of torch can abort the interpreter's own end: "terminate called without an active exception"
