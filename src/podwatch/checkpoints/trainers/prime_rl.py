"""prime-rl's two layouts.

A (v0.2 to v0.8.0): the trainer's tree ``checkpoints/step_N/trainer`` and the orchestrator's own below ``run_default/``;
a resume also needs ``run_default/broadcasts/step_N``. B (from 289562d2e, 2026-08): both halves in
``checkpoints/step_N``, nothing else is needed. In B prime-rl nests every run in a directory of its own: output_dir must
be that run directory. ``checkpoint_dir`` is prime-rl's ``ckpt.output_dir``: it moves only the trainer's half (and
``weights``); the orchestrator's half is always below output_dir.

Supervised fine-tuning (``sft``) has no orchestrator: its steps have only the trainer's half, which contains the state
of the data loader.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from podwatch.checkpoints.command import Command
from podwatch.checkpoints.command_table import command_of, recogniser
from podwatch.checkpoints.layout import Kind, ResumeCommand, Site, Weights
from podwatch.checkpoints.resume import StartPoint, resume_command
from podwatch.checkpoints.step_names import is_plain_dir, newest_steps
from podwatch.checkpoints.table import TrainerTable, all_tables
from podwatch.checkpoints.table_layout import TableLayout
from podwatch.checkpoints.table_places import Trainer
from podwatch.checkpoints.trainers import prime_rl_run
from podwatch.checkpoints.trainers.prime_rl_run import Hints
from podwatch.domain.process import ProcessNames, ProcessRole
from podwatch.domain.trainer_log import BAD, NEAR, RAISED, LogRule, StepPattern, TrainerLog


class PrimeRLLayout(TableLayout):
    """One prime-rl run. Distinguishes A from B by the files on disk, else by the command and the trainer's source."""

    def __init__(
        self,
        output_dir: Path,
        *,
        checkpoint_dir: Path | None = None,
        cwd: Path | None = None,
        command: Sequence[str] = (),
    ) -> None:
        super().__init__(TRAINER, Site(output_dir, checkpoint_dir, cwd, tuple(command)))
        self.cwd = cwd if cwd is not None else output_dir.parent
        self._expected = ""
        self._expects_sft = False

    # -- which variant ------------------------------------------------------------------------------------------

    @property
    def table(self) -> TrainerTable:
        if self.sft:
            return all_tables()["prime-rl-sft"]
        if self.variant == "B":
            return all_tables()["prime-rl"]
        return all_tables()["prime-rl-2025-nccl" if self._nccl else "prime-rl-2025"]

    @property
    def variant(self) -> str:
        """``A``, ``B``, or empty while nothing is written and nothing shows it."""
        return self._seen() or self._expected or self.hints().variant

    def hints(self) -> Hints:
        """What the configured command and the files on disk show of the version."""
        return prime_rl_run.hints(self._configured, self._seen())

    def expect_parts(self, parts: Collection[str]) -> None:
        """Set the variant: only checkpoints of layout A store a broadcast; those of SFT have no orchestrator's half."""
        if "trainer" not in parts:
            return
        self._expects_sft = "orchestrator" not in parts
        if not self._expects_sft:
            self._expected = "A" if "broadcast" in parts else "B"

    @property
    def sft(self) -> bool:
        """Whether the run is supervised fine-tuning: by the command, or without one by the files on disk."""
        if self._runs_prime_rl:
            return self._runs_sft
        return self._expects_sft or prime_rl_run.holds_sft(self.output_dir, self._checkpoints)

    @property
    def _configured(self) -> Command:
        return command_of(self._site)

    @cached_property
    def _runs_prime_rl(self) -> bool:
        return prime_rl_run.runs_prime_rl(self._configured)

    @cached_property
    def _runs_sft(self) -> bool:
        return prime_rl_run.runs_sft(self._configured)

    @cached_property
    def _nccl(self) -> bool:
        return prime_rl_run.broadcasts_by_nccl(self._configured)

    @property
    def _checkpoints(self) -> Path:
        return (self._place or self.output_dir) / "checkpoints"

    def _seen(self) -> str:
        """The variant by the files on disk. Only B has the orchestrator's half inside checkpoints/, and B is newer than
        A."""
        shared = self.output_dir / "checkpoints"
        if any(is_plain_dir(shared / f"step_{n}" / "orchestrator") for n in newest_steps(shared)):
            return "B"
        if is_plain_dir(self.output_dir / "run_default"):
            return "A"
        return "B" if prime_rl_run.has_attempts(self.output_dir) else ""

    # -- the command --------------------------------------------------------------------------------------------

    def resume_command(
        self, command: Sequence[str], step: int | None, override: str | Sequence[str], wandb: Mapping[str, str]
    ) -> ResumeCommand:
        checkpoint = None if step is None else self._checkpoints / f"step_{step}"
        asked = self._command(command)
        known = prime_rl_run.hints(asked, self._seen() or self._expected)
        more, environment = ((), {}) if step is None else prime_rl_run.wandb_continued(asked, wandb, known)
        start = StartPoint(step, checkpoint, self.output_dir, self._checkpoints)
        return resume_command(prime_rl_run.rule_of(known), asked, start, override, more=more, environment=environment)

    def wandb_variables(self) -> tuple[str, ...]:
        return prime_rl_run.WANDB_VARIABLES

    def wandb_identity(self) -> Mapping[str, str]:
        return prime_rl_run.wandb_identity(self.output_dir, self.variant)


TRAINER = Trainer("prime-rl")


def _make(site: Site) -> PrimeRLLayout:
    return PrimeRLLayout(site.output_dir, checkpoint_dir=site.checkpoint_dir, cwd=site.cwd, command=site.command)


_COLUMNS = {"Reward": "orchestrator", "Loss": "trainer"}
"""Both roles print the same line with other columns."""
LOG = TrainerLog(
    steps=(
        # The level must be first or right after a time stamp: model output quoted inside a line must not count.
        StepPattern(re.compile(r"^[\d\s:.,TZ/+|-]{0,40}SUCCESS\s+Step (\d{1,12}) \|"), roles=_COLUMNS),
        StepPattern(re.compile(r"^Step (\d{1,12}) \|"), json_level="SUCCESS", roles=_COLUMNS),
    ),
    # prime_rl/trainer/rl/train.py, orchestrator/metrics.py (559b44772), monitor/file.py (v0.8.0), step lines of January
    # 2026 (a24ec986b).
    metrics={
        "reward": ("reward/mean", "reward/all/mean"),  # until v0.7
        "entropy": ("entropy/all/mean", "entropy/mean"),  # from v0.5, before
        "kl": ("mismatch_kl/all/mean", "mismatch_kl/mean"),  # trainer against inference engine
        "grad_norm": ("optim/grad_norm",),
        "loss": ("loss/mean",),
    },
    errors=(
        LogRule(
            "api-connection-errors",
            rf"(?:{BAD}{NEAR}|{RAISED})(?:APIConnectionError|APITimeoutError|openai\.APIConnectionError)",
            count=20,
            within=600.0,
            says="the orchestrator cannot reach the inference server",
            fix="check the server with `podwatch status` and a request to its /health",
            supports=("silent-death", "hang"),
        ),
        # src/prime_rl/utils/pathing.py (06c96a8e8), from v0.5.0 on
        LogRule(
            "run-directory-used",
            rf"(?:{BAD}{NEAR}|{RAISED})(?:Run|Output|Checkpoint) directory '[^']{{1,400}}' already contains",
            critical=True,
            says="prime-rl refuses to start: an earlier run used its run directory",
            fix="resume from a step (`podwatch start --step N`), or set another run.name in the training command;"
            " --clean deletes the directory with its checkpoints",
        ),
    ),
)
PROCESSES = ProcessNames(
    # set with setproctitle from v0.6.0
    titles={
        "PRIME-RL::Launcher": ProcessRole.LAUNCHER,
        "PRIME-RL::Inference": ProcessRole.INFERENCE,
        "PRIME-RL::Orchestrator": ProcessRole.ORCHESTRATOR,
        "PRIME-RL::Trainer": ProcessRole.TRAINER,
        "PRIME-RL::EnvServer": ProcessRole.OTHER,
    },
    programs={
        "rl": ProcessRole.LAUNCHER,
        "sft": ProcessRole.LAUNCHER,
        "inference": ProcessRole.INFERENCE,
        "orchestrator": ProcessRole.ORCHESTRATOR,
        "trainer": ProcessRole.TRAINER,
    },
    modules={
        "prime_rl.trainer.rl.train": ProcessRole.TRAINER,
        "prime_rl.trainer.sft.train": ProcessRole.TRAINER,
        "prime_rl.entrypoints.rl": ProcessRole.LAUNCHER,
        "prime_rl.rl": ProcessRole.LAUNCHER,
        "prime_rl.inference.server": ProcessRole.INFERENCE,
        "prime_rl.entrypoints.inference": ProcessRole.INFERENCE,
        "prime_rl.orchestrator.orchestrator": ProcessRole.ORCHESTRATOR,
    },
)

WEIGHTS = Weights(
    ("../../weights/step_{step}", "../../broadcasts/step_{step}", "../../run_default/broadcasts/step_{step}"),
    when="`weights` until 2026-08, with its own interval; `broadcasts` where weights are broadcast by files, not by"
    " NCCL; `STABLE` inside marks the end",
    note="with LoRA the directory holds the adapter only",
)

KIND = Kind(
    "prime-rl",
    _make,
    recogniser("prime-rl", prime_rl_run.on_disk),
    prime_rl_run.concerns,
    log=LOG,
    processes=PROCESSES,
    weights=WEIGHTS,
)
