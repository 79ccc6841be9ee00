"""A tiny random model under the real Lightning Trainer, saved at the end of each epoch.

Lightning promises to continue with the next epoch from such a checkpoint, where training is counted in epochs: with
``max_steps`` alone, 2.6.6 makes one more batch of the old epoch after a resume, and no weights could be compared. It
keeps no random states and no place in a shuffled epoch, so this run has no dropout and does not shuffle.
"""

import argparse
from pathlib import Path
from typing import Any

import telling

EPOCH = 8
"""Batches of one epoch, and so the interval between saves."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--max_epochs", type=int, required=True)
    parser.add_argument("--keep", type=int, default=-1)
    parser.add_argument("--ckpt_path", default="")
    return parser.parse_args()


ARGS = parse()
telling.begin(ARGS.output_dir / "checkpoints", ARGS.ckpt_path)

import torch  # noqa: E402

torch.set_num_threads(1)
torch.save = telling.slowly(torch.save)

from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def training_step(self, batch: Any, index: int) -> Any:
        rows, wanted = batch
        return torch.nn.functional.mse_loss(self.net(rows), wanted)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Tell(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        telling.step(trainer.global_step)


class Checkpoints(ModelCheckpoint):
    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        telling.begins(trainer.global_step)
        super()._save_checkpoint(trainer, filepath)
        telling.saved(trainer.global_step)


def main() -> None:
    seed_everything(7)
    rows = torch.randn(4 * EPOCH, 16, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True).sin())
    model = Model()
    checkpoints = Checkpoints(
        dirpath=ARGS.output_dir / "checkpoints", filename="{epoch}-{step}", every_n_epochs=1, save_last="link",
        monitor="step", mode="max", save_top_k=ARGS.keep,
    )  # fmt: skip
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=ARGS.max_epochs, logger=CSVLogger(ARGS.output_dir),
        callbacks=[Tell(), checkpoints, TQDMProgressBar()], enable_model_summary=False, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4), ckpt_path=ARGS.ckpt_path or None)
    torch.save(model.state_dict(), ARGS.output_dir / "final.pt")


main()
