"""The paths of prime-rl's files, in both of its layouts. No torch import: the launcher must start fast.

Layout A (prime-rl v0.2 to v0.8.0): two checkpoint trees, steps count from 0, checkpoint N = "N steps are done, step N
is next", and it is written at the top of step N.
Layout B (from commit 289562d2e): one directory per step for both processes, steps count from 1, checkpoint N = "step N
is finished"; the orchestrator writes its half when it ships batch N, before the trainer has trained it.
"""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Layout:
    root: Path
    variant: str  # "A" or "B"

    @property
    def _orchestrator_root(self) -> Path:
        return self.root / "run_default" if self.variant == "A" else self.root

    def trainer_checkpoint(self, step: int) -> Path:
        return self.root / "checkpoints" / f"step_{step}" / "trainer"

    def orchestrator_checkpoint(self, step: int) -> Path:
        return self._orchestrator_root / "checkpoints" / f"step_{step}" / "orchestrator"

    def broadcast(self, step: int) -> Path:
        return self._orchestrator_root / "broadcasts" / f"step_{step}"

    def rollouts(self, step: int) -> Path:
        return self._orchestrator_root / "rollouts" / f"step_{step}"

    def log(self, name: str) -> Path:
        return self.root / "logs" / f"{name}.log"

    @property
    def first_step(self) -> int:
        return 0 if self.variant == "A" else 1

    def start_after(self, resume_step: int | None) -> int:
        """The first step to train after loading checkpoint ``resume_step`` (None: fresh)."""
        if resume_step is None:
            return self.first_step
        return resume_step if self.variant == "A" else resume_step + 1


def write_whole(path: Path, data: bytes) -> None:
    """Temp file and rename, as prime-rl writes progress.pt and rollouts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.name}.tmp")
    with tmp.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    tmp.rename(path)
