"""A tiny random GPT-2 under the real Hugging Face Trainer, with dropout: what it promises covers the random states."""

import argparse
from pathlib import Path
from typing import Any

import telling


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--max_steps", type=int, required=True)
    parser.add_argument("--save_steps", type=int, required=True)
    parser.add_argument("--save_total_limit", type=int)
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--resume_from_checkpoint", default="")
    return parser.parse_args()


ARGS = parse()
telling.begin(ARGS.output_dir, ARGS.resume_from_checkpoint)

import safetensors.torch  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)
torch.save = telling.slowly(torch.save)
safetensors.torch.save_file = telling.slowly(safetensors.torch.save_file)

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed  # noqa: E402


class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, seed: int) -> None:
        self._rows = torch.randint(0, 64, (96, 16), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


class Tell(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        telling.step(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        telling.saved(state.global_step)


def main() -> None:
    set_seed(7)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    # The first evaluation is the best one here (the loss only falls), so the best checkpoint grows old.
    best = {
        "eval_strategy": "steps", "eval_steps": ARGS.save_steps, "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss", "greater_is_better": True,
    }  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(ARGS.output_dir), max_steps=ARGS.max_steps, save_steps=ARGS.save_steps,
        save_total_limit=ARGS.save_total_limit, per_device_train_batch_size=4, logging_steps=1, seed=7, use_cpu=True,
        report_to=[], learning_rate=1e-3, **(best if ARGS.best else {}),
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=arguments, train_dataset=Data(1), eval_dataset=Data(2) if ARGS.best else None,
        callbacks=[Tell()],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=ARGS.resume_from_checkpoint or None)
    torch.save(model.state_dict(), ARGS.output_dir / "final.pt")


main()
