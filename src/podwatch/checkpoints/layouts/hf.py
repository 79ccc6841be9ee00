"""Hugging Face Trainer and what is built on it (TRL, axolotl, LLaMA-Factory): ``checkpoint-N`` directories.

``trainer_state.json`` is written last, but without a barrier, and an old one survives an overwrite; a resume with a
missing optimizer or scheduler silently starts a fresh one. So the whole set is demanded (facts/checkpoints.md 1b, 6).
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from podwatch.checkpoints.layouts import argv
from podwatch.checkpoints.layouts.base import Judgement, PartDir, PartFiles, ResumeCommand, StepSeen
from podwatch.checkpoints.layouts.hf_judge import judge_checkpoint
from podwatch.checkpoints.layouts.names import is_plain_dir, step_names
from podwatch.domain.errors import ConfigurationError

CHECKPOINT = re.compile(r"^checkpoint-(0|[1-9]\d{0,17})$")
_FLAG = "--resume_from_checkpoint"


class HFLayout:
    """``output_dir/checkpoint-N``, one part. ``tmp-checkpoint-N`` (transformers 4.36 to 4.38) is not a checkpoint."""

    name = "hf"
    variant = ""
    finish_lines: tuple[str, ...] = ("train_runtime",)
    """Printed in the last metrics line, by every version and at every log level."""

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = output_dir
        self._parts: dict[int, tuple[PartDir, ...]] = {}

    def watch_roots(self) -> tuple[Path, ...]:
        return (self.output_dir,)

    def part_dir(self, part: str, step: int) -> Path:
        if part != "checkpoint":
            raise ConfigurationError(
                f"layout hf has no part {part!r}",
                where=str(self.output_dir),
                fix="the set was saved by another layout: restore it to a directory of its own with --to",
            )
        return self.output_dir / f"checkpoint-{step}"

    def expect_parts(self, parts: Collection[str]) -> None:
        """There is only one variant."""

    def steps(self) -> Mapping[int, tuple[PartDir, ...]]:
        known = self._parts
        self._parts = {
            n: known[n] if n in known else (PartDir("checkpoint", self.part_dir("checkpoint", n), required=True),)
            for n in sorted(step_names(self.output_dir, CHECKPOINT))
        }
        return self._parts

    def step_paths(self, step: int) -> tuple[Path, ...]:
        path = self.part_dir("checkpoint", step)
        return (path,) if is_plain_dir(path) else ()

    def spare_paths(self, below: int) -> tuple[tuple[int, Path], ...]:
        return ()

    def judge(self, step: int, parts: Sequence[PartFiles]) -> Judgement:
        return judge_checkpoint(step, parts[0])

    def ahead_of(self, step: int | None) -> tuple[Path, ...]:
        limit = -1 if step is None else step
        found = sorted(step_names(self.output_dir, CHECKPOINT).items())
        return tuple(self.output_dir / name for number, name in found if number > limit)

    def progress(self) -> tuple[StepSeen, ...]:
        """The newest checkpoint with its state file; between saves only logs and heartbeats tell more."""
        for step in sorted(step_names(self.output_dir, CHECKPOINT), reverse=True)[:5]:
            try:
                status = (self.part_dir("checkpoint", step) / "trainer_state.json").stat()
            except (FileNotFoundError, NotADirectoryError):
                continue
            return (StepSeen("checkpoint", step, status.st_mtime),)
        return ()

    def resume_command(
        self, command: Sequence[str], step: int | None, override: str | Sequence[str], wandb: Mapping[str, str]
    ) -> ResumeCommand:
        kept, removed = argv.strip_flags(command, (_FLAG,))
        extra: tuple[str, ...] = ()
        if step is not None and override == "auto":
            extra = (_FLAG, "{checkpoint}")
        elif step is not None and not isinstance(override, str):
            extra = tuple(override)
        run = wandb.get("shared", "")
        return argv.build(
            kept,
            step=step,
            checkpoint=None if step is None else self.part_dir("checkpoint", step),
            output_dir=self.output_dir,
            resume_args=extra,
            environment={"WANDB_RUN_ID": run, "WANDB_RESUME": "allow"} if run and step is not None else {},
            removed=removed,
        )

    def first_step_after(self, step: int) -> int:
        """N itself: an evaluation at the start (``eval_on_start``) is reported under the loaded step."""
        return step

    def target_step(self, command: Sequence[str]) -> int | None:
        direct = argv.positive(argv.flag_value(command, ("--max_steps",)))
        if direct is not None:
            return direct
        for step in sorted(step_names(self.output_dir, CHECKPOINT), reverse=True)[:3]:
            try:
                state = json.loads((self.part_dir("checkpoint", step) / "trainer_state.json").read_bytes())
            except (OSError, ValueError):
                continue
            value = state.get("max_steps") if isinstance(state, dict) else None
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return None

    def wandb_identity(self) -> Mapping[str, str]:
        """W&B writes into the working directory, which is not the layout's to know."""
        return {}

    def log_globs(self) -> tuple[str, ...]:
        return ("*.log", "logs/*.log")
