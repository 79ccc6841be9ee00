"""A tiny random model in a loop of its own, with the real ``Accelerator.save_state`` and ``load_state``.

They keep model, optimizer, scheduler, random states and what was registered; which rows come next is the script's own
affair, as it is in accelerate's examples: here the step says it.
"""

import argparse
from pathlib import Path
from typing import Any

import telling


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--max_train_steps", type=int, required=True)
    parser.add_argument("--checkpointing_steps", type=int, required=True)
    parser.add_argument("--resume_from_checkpoint", default="")
    return parser.parse_args()


ARGS = parse()
telling.begin(ARGS.output_dir, ARGS.resume_from_checkpoint)

import safetensors.torch  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)
torch.save = telling.slowly(torch.save)
safetensors.torch.save_file = telling.slowly(safetensors.torch.save_file)

from accelerate import Accelerator  # noqa: E402
from accelerate.utils import set_seed  # noqa: E402
from tqdm import tqdm  # noqa: E402


class Progress:
    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def main() -> None:
    set_seed(7)
    accelerator = Accelerator(cpu=True)
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, ARGS.max_train_steps)
    net, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if ARGS.resume_from_checkpoint:
        accelerator.load_state(ARGS.resume_from_checkpoint)
    rows = torch.randn(96, 16, generator=torch.Generator().manual_seed(1))
    bar = tqdm(range(ARGS.max_train_steps), initial=progress.step, desc="Steps")
    while progress.step < ARGS.max_train_steps:
        batch = rows[[(4 * progress.step + n) % len(rows) for n in range(4)]]
        loss = torch.nn.functional.mse_loss(net(batch), batch.sum(1, keepdim=True).sin())
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        progress.step += 1
        bar.update(1)
        telling.step(progress.step)
        if progress.step % ARGS.checkpointing_steps == 0:
            accelerator.save_state(str(ARGS.output_dir / f"step_{progress.step}"))
            telling.saved(progress.step)
    torch.save(accelerator.unwrap_model(net).state_dict(), ARGS.output_dir / "final.pt")


main()
