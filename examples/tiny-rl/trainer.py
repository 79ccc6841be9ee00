"""The trainer: REINFORCE on the rollouts, checkpoints through torch.distributed.checkpoint as prime-rl writes them."""

import argparse
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from layout import Layout
from orchestrator import wait_for
from policy import make_deterministic, make_policy, reinforce_loss
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful


@dataclass
class Progress:
    step: int = 0
    total_samples: int = 0


class AppState(Stateful):
    """Model, optimizer, scheduler and progress under one key, the shape of prime-rl's own checkpoint."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, scheduler: Any, progress: Progress) -> None:
        self.model, self.optimizer, self.scheduler, self.progress = model, optimizer, scheduler, progress

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizers": optimizer,
            "scheduler": self.scheduler.state_dict(),
            "progress": asdict(self.progress),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizers"]
        )
        self.scheduler.load_state_dict(state["scheduler"])
        for key, value in state["progress"].items():
            setattr(self.progress, key, value)


def broadcast(layout: Layout, model: torch.nn.Module, step: int) -> None:
    target = layout.broadcast(step)
    target.mkdir(parents=True, exist_ok=True)
    part = target / "model.pt.tmp"  # after a resume STABLE is there already, and the engine may read
    torch.save(model.state_dict(), part)
    part.replace(target / "model.pt")
    (target / "STABLE").touch()


def ping(url: str) -> None:
    """prime-rl's heartbeat: one GET after every step, one second at most, errors ignored."""
    if url:
        try:
            urllib.request.urlopen(url, timeout=1).close()
        except OSError:
            pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--layout", choices=("A", "B"), required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--max-steps", type=int, required=True)
    parser.add_argument("--interval", type=int, required=True)
    parser.add_argument("--resume-step", type=int)
    parser.add_argument("--step-time", type=float, default=0.0)
    parser.add_argument("--save-time", type=float, default=0.0)
    parser.add_argument("--heartbeat-url", default="")
    args = parser.parse_args()
    make_deterministic()
    layout = Layout(args.output_dir, args.layout)
    model = make_policy(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=args.max_steps)
    progress = Progress(step=layout.first_step)
    state = {"app": AppState(model, optimizer, scheduler, progress)}
    if args.resume_step is not None:
        source = layout.trainer_checkpoint(args.resume_step)
        if not source.exists():
            raise FileNotFoundError(f"Checkpoint not found at {source}")
        dcp.load(state, checkpoint_id=str(source))
        print(f"Resumed from {source}", flush=True)

    def save(step: int) -> None:
        print(f"Saving checkpoint at step {step}", flush=True)
        if args.save_time:  # simulates a large model; prime-rl blocks training during a save
            target = layout.trainer_checkpoint(step)
            target.mkdir(parents=True, exist_ok=True)
            (target / "__0_0.distcp").touch()
            time.sleep(args.save_time)
        dcp.save(state, checkpoint_id=str(layout.trainer_checkpoint(step)))

    start = layout.start_after(args.resume_step)
    if layout.variant == "B":
        broadcast(layout, model, start - 1)  # HEAD broadcasts once at start-up, whatever the step
    for step in range(start, args.max_steps + layout.first_step):
        began = time.monotonic()
        progress.step = step
        if layout.variant == "A":
            broadcast(layout, model, step)
            if step and step % args.interval == 0 and step != args.resume_step:
                save(step)
        rollouts = layout.rollouts(step) / "rank_0.bin"
        wait_for(rollouts)
        batch = torch.load(rollouts, weights_only=True)
        loss = reinforce_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        progress.total_samples += len(batch["rewards"])
        if args.step_time:
            time.sleep(max(0.0, args.step_time - (time.monotonic() - began)))
        if layout.variant == "B":
            broadcast(layout, model, step)
            if step % args.interval == 0:
                save(step)
        reward, seconds = float(batch["rewards"].mean()), time.monotonic() - began
        print(
            f"\x1b[32m{time.strftime('%H:%M:%S')} SUCCESS Step {step} | Time: {seconds:.2f}s | "
            f"Loss: {loss.item():.4f} | Reward: {reward:.4f}\x1b[0m",
            flush=True,
        )
        ping(args.heartbeat_url)
    progress.step = args.max_steps
    if layout.variant == "A":
        broadcast(layout, model, args.max_steps)
        save(args.max_steps)
    elif args.max_steps % args.interval:
        save(args.max_steps)
    final = args.output_dir / "final.pt"
    torch.save(model.state_dict(), final.with_suffix(".tmp"))
    final.with_suffix(".tmp").replace(final)
    print("RL trainer finished!", flush=True)


if __name__ == "__main__":
    main()
