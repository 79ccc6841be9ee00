"""prime-rl's two layouts.

A (v0.2 to v0.8.0): the trainer's tree ``checkpoints/step_N/trainer`` and the orchestrator's own below ``run_default/``;
a resume also needs ``run_default/broadcasts/step_N``. B (from 289562d2e, 2026-08): both halves in
``checkpoints/step_N``, nothing else is needed. In B prime-rl nests every run in a directory of its own: output_dir must
be that run directory. ``checkpoint_dir`` is prime-rl's ``ckpt.output_dir``: it moves only the trainer's half (and
``weights``); the orchestrator's half is always below output_dir.

Supervised fine-tuning (``sft``) has no orchestrator: its steps have only the trainer's half, which contains the state
of the data loader.
"""

import heapq
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from podwatch.checkpoints.formats import dcp, safetensors, torch_zip
from podwatch.checkpoints.formats.files import check_file
from podwatch.checkpoints.layouts import prime_rl_run
from podwatch.checkpoints.layouts.base import (
    Judgement,
    Kind,
    PartDir,
    PartFiles,
    ResumeCommand,
    Site,
    Source,
    StepSeen,
    Tracker,
    Weights,
)
from podwatch.checkpoints.layouts.prime_rl_run import Hints
from podwatch.checkpoints.layouts.shared_rules import WEIGHT_INDEXES
from podwatch.checkpoints.layouts.step_dirs import OnDemand, is_plain_dir, not_there, step_names
from podwatch.checkpoints.scan import is_temporary
from podwatch.domain.errors import ConfigurationError
from podwatch.domain.process import ProcessNames, ProcessRole
from podwatch.domain.trainer_log import BAD, NEAR, RAISED, LogRule, StepPattern, TrainerLog

# -- rule for a complete step ----------------------------------------------------------------------------------------
# The trainer's half is a DCP directory; the orchestrator's is ``progress.pt``; in layout A the broadcast with
# ``STABLE`` is needed too. There is no marker for the whole step, so all required parts must be complete.

PROGRESS = "progress.pt"
DATALOADER = "dataloader/rank_0.pt"
"""State of the data loader (SFT). Each rank has a file of its own; without rank 0's the trainer refuses to resume."""
STABLE = "STABLE"
NCCL_READY = "NCCL_READY"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


class Fault(Exception):  # noqa: N818 - internal, never shown as an error
    """Why a part is not complete. ``damaged``: nothing is missing, but a file is broken."""

    def __init__(self, reason: str, *, damaged: bool = False, unreadable: bool = False) -> None:
        self.reason, self.damaged, self.unreadable = reason, damaged, unreadable
        super().__init__(reason)


def judge_set(step: int, parts: Sequence[PartFiles], *, sft: bool = False) -> Judgement:
    """``sft``: supervised fine-tuning, whose steps have only the trainer's half."""
    by_name = {p.part.name: p for p in parts}
    trainer = by_name["trainer"]
    if not trainer.files:
        begun = "orchestrator" in by_name and by_name["orchestrator"].present
        reason = (
            f"waiting for the trainer: only the orchestrator has saved step {step}"
            if begun
            else "the trainer has saved nothing"
        )
        return Judgement(False, reason, pending=begun, problems={"trainer": reason})
    faults: dict[str, Fault] = {}
    verdict = _verdict(trainer)
    try:
        _trainer(trainer, verdict)
        if sft and not any(f.path == DATALOADER for f in trainer.files):
            raise Fault(f"{DATALOADER} is missing")
    except Fault as fault:
        faults["trainer"] = fault
    for name, rule in (("orchestrator", _orchestrator), ("broadcast", _broadcast)):
        part = by_name.get(name)
        if part is None or not part.part.required:
            continue
        try:
            rule(part)
        except Fault as fault:
            faults[name] = fault
    problems = {n: f.reason for n, f in faults.items()}
    missing = [f for f in faults.values() if not f.damaged]
    return Judgement(
        whole=not faults,
        reason="; ".join(f"{n}: {r}" for n, r in problems.items()),
        damaged=bool(faults) and not missing,
        save_token=verdict.save_id,
        world_size=verdict.world_size,
        unreadable=any(f.unreadable for f in faults.values()),
        problems=problems,
        leftovers=tuple(f"trainer/{n}" for n in verdict.leftovers),
    )


def _verdict(part: PartFiles) -> dcp.DcpVerdict:
    return dcp.check(part.part.path, {f.path: dcp.Shard(f.size, f.mtime_ns) for f in part.files})


def _trainer(part: PartFiles, verdict: dcp.DcpVerdict) -> None:
    if not verdict.whole:
        raise Fault(verdict.reason, damaged=verdict.damaged, unreadable=verdict.unreadable)
    _sound(part)


def _orchestrator(part: PartFiles) -> None:
    if not any(f.path == PROGRESS for f in part.files):
        raise Fault(f"{PROGRESS} is missing")
    try:
        problem = torch_zip.check(part.part.path / PROGRESS)
    except OSError as error:
        raise _read_fault(PROGRESS, error) from error
    if problem:
        raise Fault(f"{PROGRESS} {problem}", damaged=True)


def _broadcast(part: PartFiles) -> None:
    """STABLE is written last, so it must not be older than the weights."""
    stable = next((f for f in part.files if f.path == STABLE), None)
    if stable is None:
        raise Fault(f"{STABLE} is missing" if part.present else "the directory is missing")
    markers = {STABLE, NCCL_READY}
    weights = [f for f in part.files if f.path not in markers and not is_temporary(f.path)]
    by_nccl = any(f.path == NCCL_READY for f in part.files)  # weights sent that way leave no file
    if not by_nccl and not any(f.path.endswith(_WEIGHTS) for f in weights):
        raise Fault(f"{STABLE} exists without weights")
    missing = _not_here(part, {f.path for f in weights})
    if missing:
        raise Fault(f"{missing} is missing, which the index of the weights lists")
    newer = [f.path for f in weights if f.mtime_ns > stable.mtime_ns + dcp.MTIME_TOLERANCE_NS]
    if newer:
        raise Fault(f"{min(newer)} is newer than {STABLE}: being rewritten, or that was interrupted")
    _sound(part)


def _not_here(part: PartFiles, names: Collection[str]) -> str:
    """The first missing shard that an index lists; empty if all exist."""
    for name in WEIGHT_INDEXES:
        if name in names:
            try:
                shards = safetensors.read_index(part.part.path / name).shards
            except OSError as error:
                raise _read_fault(name, error) from error
            return min(shards - set(names), default="")
    return ""


def _sound(part: PartFiles) -> None:
    """Check header and tail of every file of a known kind."""
    for file in part.files:
        if is_temporary(file.path):
            continue
        try:
            problem = check_file(part.part.path / file.path)
        except OSError as error:
            raise _read_fault(file.path, error) from error
        if problem:
            raise Fault(f"{file.path} {problem}", damaged=True)


def _read_fault(path: str, error: OSError) -> Fault:
    if isinstance(error, FileNotFoundError):
        return Fault(f"{path} vanished")
    return Fault(f"cannot read {path}: {error.strerror}", unreadable=True)


# -- layout ----------------------------------------------------------------------------------------------------------


class PrimeRLLayout:
    """One prime-rl run. Distinguishes A from B by the files on disk, else by the command and the trainer's source."""

    name = "prime-rl"
    shared_parts: frozenset[str] = frozenset()
    reshards = True
    saves_block = True
    counts_all = True
    sources: tuple[Source, ...] = (
        Source("PrimeIntellect-ai/prime-rl", "src/prime_rl/trainer/ckpt.py", "559b44772"),
        Source("PrimeIntellect-ai/prime-rl", "src/prime_rl/orchestrator/ckpt.py", "559b44772"),
        Source("PrimeIntellect-ai/prime-rl", "src/prime_rl/utils/pathing.py", "559b44772"),
        Source("PrimeIntellect-ai/prime-rl", "src/prime_rl/trainer/ckpt.py", "a24ec986b"),
        Source("PrimeIntellect-ai/prime-rl", "src/prime_rl/trainer/sft/train.py", "559b44772"),
    )

    def __init__(
        self,
        output_dir: Path,
        *,
        checkpoint_dir: Path | None = None,
        cwd: Path | None = None,
        command: Sequence[str] = (),
    ) -> None:
        self.output_dir = output_dir
        self.chosen_because = ""
        self.cwd = cwd if cwd is not None else output_dir.parent
        self._command = tuple(command)
        self._trainer_root = checkpoint_dir or output_dir
        self._expected = ""
        self._expects_sft = False

    # -- which variant ------------------------------------------------------------------------------------------

    @property
    def variant(self) -> str:
        """``A``, ``B``, or empty while nothing is written and nothing shows it."""
        return self._seen() or self._expected or self.hints().variant

    def hints(self) -> Hints:
        return prime_rl_run.hints(self._command, self.cwd, self._seen())

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
        if self._command_runs:
            return self._command_is_sft
        return self._expects_sft or prime_rl_run.holds_sft(self.output_dir, self._checkpoints)

    @cached_property
    def _command_runs(self) -> str:
        return prime_rl_run.command_runs(self._command, self.cwd)

    @cached_property
    def _command_is_sft(self) -> bool:
        return prime_rl_run.runs_sft(self._command, self.cwd)

    @property
    def finish_lines(self) -> tuple[str, ...]:
        return ("SFT trainer finished!",) if self.sft else ("RL trainer finished!", "Orchestrator finished.")

    def _seen(self) -> str:
        """The variant by the files on disk. Only B has the orchestrator's half inside checkpoints/, and B is newer than
        A."""
        shared = self.output_dir / "checkpoints"
        newest = heapq.nlargest(3, step_names(shared))
        if any(is_plain_dir(shared / f"step_{n}" / "orchestrator") for n in newest):
            return "B"
        if is_plain_dir(self.output_dir / "run_default"):
            return "A"
        return "B" if prime_rl_run.has_attempts(self.output_dir) else ""

    # -- where things lie ---------------------------------------------------------------------------------------

    @property
    def _checkpoints(self) -> Path:
        return self._trainer_root / "checkpoints"

    def _own(self, variant: str) -> Path:
        """The directory of the orchestrator."""
        return self.output_dir / "run_default" if variant != "B" else self.output_dir

    def watch_roots(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys((self._checkpoints, self._own(self.variant) / "checkpoints")))

    def part_dir(self, part: str, step: int) -> Path:
        for candidate in self._build(step, self.variant, self._nccl):
            if candidate.name == part:
                return candidate.path
        raise ConfigurationError(
            f"prime-rl has no part {part!r} in layout {self.variant or 'A'}",
            where=str(self.output_dir),
            fix="another layout saved this checkpoint: restore it to another directory with --to",
        )

    def _build(self, step: int, variant: str, nccl: bool) -> tuple[PartDir, ...]:
        name, own = f"step_{step}", self._own(variant)
        halves = (
            PartDir("trainer", self._checkpoints / name / "trainer", required=True),
            PartDir("orchestrator", own / "checkpoints" / name / "orchestrator", required=True),
        )
        weights = PartDir("weights", self._trainer_root / "weights" / name, required=False, uploaded=False, export=True)
        if self.sft:
            return (halves[0], weights)
        rollouts = PartDir("rollouts", own / "rollouts" / name, required=False, uploaded=False)
        broadcast = own / "broadcasts" / name
        if variant == "B":
            return (*halves, PartDir("broadcast", broadcast, required=False, uploaded=False), rollouts, weights)
        batches = PartDir("batches", self.output_dir / "rollouts" / name, required=False, uploaded=False)
        needed = not nccl
        return (*halves, PartDir("broadcast", broadcast, needed, uploaded=needed), weights, rollouts, batches)

    @cached_property
    def _nccl(self) -> bool:
        return prime_rl_run.broadcasts_by_nccl(self._command, self.cwd)

    def steps(self) -> Mapping[int, tuple[PartDir, ...]]:
        variant = self.variant
        roots = {self._checkpoints, self._own(variant) / "checkpoints", self._trainer_root / "weights"}
        found = {step for root in roots for step in step_names(root)}
        nccl = self._nccl
        return OnDemand(sorted(found), lambda step: self._build(step, variant, nccl))

    def _step_roots(self, variant: str) -> dict[str, Path]:
        own = self._own(variant)
        roots = {
            "checkpoints": self._checkpoints,
            "orchestrator": own / "checkpoints",
            "weights": self._trainer_root / "weights",
            "broadcasts": own / "broadcasts",
            "rollouts": own / "rollouts",
        }
        if variant != "B":
            roots["batches"] = self.output_dir / "rollouts"
        return roots

    def step_paths(self, step: int) -> tuple[Path, ...]:
        candidates = dict.fromkeys(root / f"step_{step}" for root in self._step_roots(self.variant).values())
        return tuple(p for p in candidates if is_plain_dir(p))

    def spare_paths(self, below: int) -> tuple[tuple[int, Path], ...]:
        roots, kept = self._step_roots(self.variant), set(self.steps())
        found = {
            (step, roots[kind] / name)
            for kind in ("broadcasts", "rollouts", "batches")
            if kind in roots
            for step, name in step_names(roots[kind]).items()
            if step < below and step not in kept
        }
        return tuple(sorted(found))

    # -- judging ------------------------------------------------------------------------------------------------

    def judge(self, step: int, parts: Sequence[PartFiles]) -> Judgement:
        judgement = judge_set(step, parts, sft=self.sft)
        if judgement.whole:
            return judgement
        # The trainer deletes checkpoints/step_N whole; the orchestrator's half is elsewhere in layout A.
        return replace(judgement, deleted=not_there(self._checkpoints / f"step_{step}"))

    # -- before a start -----------------------------------------------------------------------------------------

    def ahead_of(self, step: int | None) -> tuple[Path, ...]:
        """Directories ahead of ``step``. Moving them away prevents a desync, stale policies and half-written steps.

        Entire ``step_M`` directories. In A all rollouts are included; in B also the broadcast of N, because the trainer
        rewrites it in place at start-up while the orchestrator can already read it.
        """
        return prime_rl_run.ahead(
            self._step_roots(self.variant), step, newer=self.variant == "B", output_dir=self.output_dir
        )

    def trackers(self, step: int | None) -> tuple[Tracker, ...]:
        """Empty: prime-rl takes the highest name, and podwatch passes the step."""
        return ()

    def pinned(self) -> Mapping[int, str]:
        return {}

    def resume_command(
        self, command: Sequence[str], step: int | None, override: str | Sequence[str], wandb: Mapping[str, str]
    ) -> ResumeCommand:
        checkpoint = None if step is None else self._checkpoints / f"step_{step}"
        seen = self._seen() or self._expected
        known = prime_rl_run.hints(command, self.cwd, seen)
        return prime_rl_run.resume_command(
            command, step, override, wandb, known, checkpoint=checkpoint, output_dir=self.output_dir, cwd=self.cwd
        )

    def first_step_after(self, step: int) -> int:
        """A: checkpoint N may be saved at the top of step N (v0.2 to v0.6 count from 0), so N can come first; from
        v0.7.0 it is N + 1, and the lower bound covers both. B: N is finished, N + 1 comes first."""
        return step + 1 if self.variant == "B" and not self.sft else step

    def processes(self, command: Sequence[str]) -> int | None:
        """None: the same command starts inference and orchestrator, and the trainer reshards anyway."""
        return None

    def target_step(self, command: Sequence[str]) -> int | None:
        return prime_rl_run.target_step(command, self.cwd)

    def wandb_variables(self) -> tuple[str, ...]:
        return prime_rl_run.WANDB_VARIABLES

    def wandb_identity(self) -> Mapping[str, str]:
        return prime_rl_run.wandb_identity(self.output_dir, self.variant)

    # -- progress -----------------------------------------------------------------------------------------------

    def progress(self) -> tuple[StepSeen, ...]:
        """Newest broadcast with STABLE (written every step), newest rollouts, newest trainer checkpoint."""
        own = self._own(self.variant)
        return prime_rl_run.progress(own / "broadcasts", own / "rollouts", self._checkpoints)

    def log_globs(self) -> tuple[str, ...]:
        """v0.2 to v0.5, v0.6 to v0.8, and HEAD with its attempts, in this order."""
        return (
            "logs/*.stdout",
            "logs/*.log",
            "logs/trainer/*.log",
            "run_default/logs/*.log",
            "logs/latest/*.log",
            "logs/latest/trainer/*.log",
        )


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
    # prime_rl/trainer/rl/train.py, orchestrator/metrics.py, utils/metrics_server.py (559b44772), monitor/file.py
    # (v0.8.0), step lines of January 2026 (a24ec986b). "trainer_..." are of its metrics endpoint.
    metrics={
        "reward": ("reward/mean", "reward/all/mean"),  # until v0.7
        "entropy": ("entropy/all/mean", "entropy/mean", "trainer_entropy"),  # from v0.5, before
        "kl": ("mismatch_kl/all/mean", "mismatch_kl/mean", "trainer_mismatch_kl"),  # trainer against inference engine
        "grad_norm": ("optim/grad_norm", "trainer_grad_norm"),
        "loss": ("loss/mean", "trainer_loss"),
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
    "prime-rl", _make, prime_rl_run.recognise, prime_rl_run.concerns, log=LOG, processes=PROCESSES, weights=WEIGHTS
)
