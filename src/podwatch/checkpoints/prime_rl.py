"""What no table can say of prime-rl: which version wrote a run, the W&B ids that continue it, and its run directory.

Two layouts. A (v0.2 to v0.8.0): the trainer's tree ``checkpoints/step_N/trainer`` and the orchestrator's own below
``run_default/``; a resume also needs ``run_default/broadcasts/step_N``. B (from 289562d2e, 2026-08): both halves in
``checkpoints/step_N``, nothing else is needed. In B prime-rl nests every run in a directory of its own: output_dir must
be that run directory. ``checkpoint_dir`` is prime-rl's ``ckpt.output_dir``: it moves only the trainer's half (and
``weights``); the orchestrator's half is always below output_dir.
"""

import heapq
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from podwatch.checkpoints.command import Command, positive
from podwatch.checkpoints.command_table import ResumeRule, command_of
from podwatch.checkpoints.layout import Layout
from podwatch.checkpoints.places import is_plain_dir, listed
from podwatch.checkpoints.resume import StartPoint, resume_command
from podwatch.checkpoints.shapes import SAVES, Concern, ResumeCommand, Site
from podwatch.checkpoints.table import TrainerTable
from podwatch.checkpoints.templates import number_in
from podwatch.checkpoints.trainer import all_trainers
from podwatch.domain.run import is_id, valid_ids
from podwatch.system.files import opened


class PrimeRLLayout(Layout):
    """One prime-rl run. Distinguishes A from B by the files on disk, else by the command and the trainer's source."""

    _restored: frozenset[str] = frozenset()
    """The parts of a checkpoint that is restored here."""

    @property
    def table(self) -> TrainerTable:
        name = "prime-rl" if self.variant == "B" else "prime-rl-2025-nccl" if self._nccl else "prime-rl-2025"
        return self.trainer.tables["prime-rl-sft" if self.sft else name]

    @property
    def variant(self) -> str:
        """``A``, ``B``, or empty while nothing is written and nothing shows it."""
        return self._known() or hints(self._configured, "").variant

    def expect_parts(self, parts: Collection[str]) -> None:
        """Only checkpoints of layout A store a broadcast; those of SFT have no orchestrator's half."""
        self._restored = frozenset(parts) if "trainer" in parts else self._restored

    @property
    def sft(self) -> bool:
        """Whether the run is supervised fine-tuning: by the command, or without one by the files on disk."""
        if self._runs_prime_rl:
            return self._runs_sft
        restored = bool(self._restored) and "orchestrator" not in self._restored
        return restored or _holds_sft(self.output_dir, self._checkpoints)

    @cached_property
    def _configured(self) -> Command:
        return command_of(self.site)

    @cached_property
    def _runs_prime_rl(self) -> bool:
        return runs_prime_rl(self._configured)

    @cached_property
    def _runs_sft(self) -> bool:
        return bool(self.trainer.command.table_of(self._configured))

    @cached_property
    def _nccl(self) -> bool:
        return broadcasts_by_nccl(self._configured)

    @property
    def _checkpoints(self) -> Path:
        return (self._place or self.output_dir) / "checkpoints"

    def _known(self) -> str:
        """The variant by the files on disk, else by what is restored. Only B has the orchestrator's half inside
        checkpoints/, and B is newer than A."""
        shared = self.output_dir / "checkpoints"
        if any(is_plain_dir(step / "orchestrator") for step in _newest(shared)):
            return "B"
        if is_plain_dir(self.output_dir / "run_default"):
            return "A"
        if has_attempts(self.output_dir):
            return "B"
        return "" if "orchestrator" not in self._restored else "A" if "broadcast" in self._restored else "B"

    def resume_command(
        self, command: Sequence[str], step: int | None, override: str | Sequence[str], wandb: Mapping[str, str]
    ) -> ResumeCommand:
        checkpoint = None if step is None else self._checkpoints / f"step_{step}"
        asked = self._command(command)
        known = hints(asked, self._known())
        more, environment = ((), {}) if step is None else wandb_continued(asked, wandb, known)
        start = StartPoint(step, checkpoint, self.output_dir, self._checkpoints)
        return resume_command(rule_of(known), asked, start, override, more=more, environment=environment)

    def wandb_variables(self) -> tuple[str, ...]:
        """From August 2026, and v0.6.0 to v0.8.0. Not WANDB_RUN_ID: versions with two W&B runs would both claim it."""
        return ("PRL_RUN_ID", "WANDB_SHARED_RUN_ID")

    def wandb_identity(self) -> Mapping[str, str]:
        return wandb_identity(self.output_dir, self.variant)


# -- command line ------------------------------------------------------------------------------------------------------

_OLD = ("ckpt.resume_step", "trainer.ckpt.resume_step", "orchestrator.ckpt.resume_step")
_NEW = ("--resume", "resume.step", "resume.dir", "run.name", "run.dir", "clean")
_RUN_LINK = re.compile(r"^(?:offline-)?run-\d{8}_\d{6}-(.+)$")


@dataclass(frozen=True, slots=True)
class Hints:
    """``variant`` is A, B or empty; ``new_flags``: ``--resume.step N`` (2026-08-13 on) instead of ``--ckpt.resume-step
    N``. Layout and flag changed five days apart, so a layout-B trainer of those days takes the old flag: its source or
    a resume flag in the command shows which."""

    variant: str
    new_flags: bool


def hints(command: Command, seen: str) -> Hints:
    """``seen`` is the variant by the files on disk. Then, in this order: the command's own flags and the files that it
    names, the trainer's source in its directory."""
    old = command.has(*_OLD)
    new = command.has(*_NEW) or any(
        isinstance(document.get(table), dict)
        for document in command.documents
        for table in ("run", "resume")  # unknown before 2026-08-13, and prime-rl refuses an unknown table
    )
    source = (command.cwd or Path("/")) / "src" / "prime_rl"
    installed = is_plain_dir(source)
    variant = seen
    if not variant and new:
        variant = "B"
    if not variant and installed:
        variant = "A" if (source / "trainer" / "runs.py").exists() else "B"
    if not variant and old:
        variant = "A"
    if old != new:
        return Hints(variant, new)
    if installed:
        return Hints(variant, variant != "A" and _mentions(source / "trainer" / "ckpt.py", "ResumeConfig"))
    return Hints(variant, variant == "B")


def rule_of(known: Hints) -> ResumeRule:
    """How this version resumes."""
    table = all_trainers()["prime-rl"].command
    rule = table.resume if known.new_flags else table.variants[0].resume
    if known.variant:
        return rule
    return replace(
        rule,
        add=None,
        ask="podwatch cannot determine the prime-rl version, so not which flag resumes it",
        example='["--ckpt.resume-step", "{step}"] or, for versions from August 2026, ["--resume.step", "{step}"]',
    )


def wandb_continued(command: Command, wandb: Mapping[str, str], known: Hints) -> tuple[tuple[str, ...], dict[str, str]]:
    """Arguments and environment that continue the W&B run. Never one WANDB_RUN_ID for a version with two runs."""
    ids = valid_ids(wandb)
    if known.variant == "B":
        shared = ids.get("shared") or ids.get("orchestrator") or ids.get("trainer")
        return (), {"PRL_RUN_ID": shared} if shared else {}
    if "trainer" in ids and "orchestrator" in ids:
        # --wandb.shared exists from v0.5.0 on, exactly where wandb.id does not: passing the id there aborts the start.
        later = command.has("wandb.shared") or command.configured("wandb.shared") is not None
        if later or command.has("trainer.wandb.id", "orchestrator.wandb.id"):
            return (), {}
        return ("--trainer.wandb.id", ids["trainer"], "--orchestrator.wandb.id", ids["orchestrator"]), {}
    return (), {"WANDB_SHARED_RUN_ID": ids["shared"]} if "shared" in ids else {}


def wandb_identity(output_dir: Path, variant: str) -> Mapping[str, str]:
    """``{"trainer": id, "orchestrator": id}`` where two runs exist, else ``{"shared": id}``, else nothing."""
    trainer = _latest_run(output_dir / "wandb")
    if variant == "B":
        return {"shared": trainer} if trainer else {}
    orchestrator = _latest_run(output_dir / "run_default" / "wandb")
    if trainer and orchestrator and trainer != orchestrator:
        return {"trainer": trainer, "orchestrator": orchestrator}
    either = trainer or orchestrator
    return {"shared": either} if either else {}


def _latest_run(directory: Path) -> str:
    try:
        name = (directory / "latest-run").readlink().name
    except OSError:
        return ""
    match = _RUN_LINK.match(name)
    return match.group(1) if match and is_id(match.group(1)) else ""


def broadcasts_by_nccl(command: Command) -> bool:
    """Whether weights reach the engine by NCCL or NIXL, without the file system: then a resume needs no broadcast
    directory."""
    name = "weight_broadcast.type"
    kind = command.value(name, f"trainer.{name}", f"orchestrator.{name}")
    return kind is not None and kind.lower() in ("nccl", "nixl")


def _mentions(path: Path, word: str) -> bool:
    try:
        with opened(path) as file:
            return word.encode() in file.read(500_000)
    except OSError:
        return False


# -- files of a run ----------------------------------------------------------------------------------------------------


def looks_like_run(directory: Path) -> bool:
    """Whether it is a run directory as prime-rl creates it since 2026-08: each launch creates ``logs/attempt_N``, and a
    step directory below ``checkpoints/`` has the orchestrator's half or, for SFT, the trainer's."""
    newest = _newest(directory / "checkpoints")
    return has_attempts(directory) or any(
        is_plain_dir(step / half) for step in newest for half in ("orchestrator", "trainer")
    )


def has_attempts(directory: Path) -> bool:
    """Whether it has ``logs/attempt_N`` or ``logs/latest``, which each launch makes since 2026-08-13."""
    return is_plain_dir(directory / "logs" / "attempt_1") or os.path.islink(directory / "logs" / "latest")  # noqa: PTH114


def _holds_sft(output_dir: Path, checkpoints: Path) -> bool:
    """Whether the newest steps were saved by supervised fine-tuning: a data loader's state, and no orchestrator."""
    newest = _newest(checkpoints)
    if is_plain_dir(output_dir / "run_default") or any(is_plain_dir(step / "orchestrator") for step in newest):
        return False
    return any(is_plain_dir(step / "trainer" / "dataloader") for step in newest)


def _newest(checkpoints: Path) -> list[Path]:
    """The directories of the highest steps; empty if they cannot be read."""
    try:
        steps = [
            n for name in listed(checkpoints, files_too=False) if (n := number_in("step_{step}", name)) is not None
        ]
    except OSError:
        return []
    return [checkpoints / f"step_{step}" for step in heapq.nlargest(3, steps)]


def runs_prime_rl(command: Command) -> bool:
    """Whether the command starts a program of prime-rl."""
    return all_trainers()["prime-rl"].command.recognised("prime-rl", command, certain=True) is not None


# -- run directory -----------------------------------------------------------------------------------------------------
# Since 2026-08-13 (upstream e26b50503) a run writes to ``output_dir/run.dir``; ``run.dir`` defaults to ``run.name``,
# and ``run.name`` to a new random name at each start. A resume needs the directory of the run that saved, so it needs
# the name. Before that a run writes to output_dir itself.

_INTERVAL = ("ckpt.interval", "trainer.ckpt.interval")


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """``base`` is prime-rl's output_dir. ``name`` is the run's directory in it; empty: prime-rl makes a new one at each
    start."""

    base: Path
    name: str

    @property
    def path(self) -> Path | None:
        return Path(os.path.normpath(self.base / self.name)) if self.name else None


def run_directory(command: Command, output_dir: Path | None = None) -> RunDirectory:
    """The run directory that a version with run directories uses for this command. ``output_dir`` fills the
    placeholder."""
    base = command.value("output_dir") or "outputs"
    if output_dir is not None:
        base = base.replace("{output_dir}", str(output_dir))
    name = command.value("run.dir") or command.value("run.name") or ""
    return RunDirectory(Path(os.path.normpath((command.cwd or Path("/")) / base)), name)


def concerns_of_run(site: Site) -> tuple[Concern, ...]:
    """Reports a run directory that a resume cannot find, and a run that saves nothing."""
    command = command_of(site)
    if not runs_prime_rl(command) or any(program.passes for program in command.programs):
        return ()  # the arguments of a script can contain more
    return (*_directory(site, command), *_saves(command))


def _directory(site: Site, command: Command) -> tuple[Concern, ...]:
    below = [run for run in runs_below(site.output_dir) if run.name != "run_default"]  # older versions: orchestrator's
    on_disk = has_attempts(site.output_dir) or bool(below)
    if not on_disk and not hints(command, "").new_flags:
        return ()
    says = run_directory(command, site.output_dir)
    ours = os.path.realpath(site.output_dir)
    if says.path is None and command.has("run.name", "run.dir"):
        return ()  # a variable of the shell
    if says.path is None:
        own = site.output_dir if site.output_dir.parent == says.base else None
        if own is None:
            found = runs_below(says.base)
            own = found[0] if found else says.base / "NAME"
        return (
            Concern(
                "run.name",
                "prime-rl has no run.name: each start writes to a new directory with a random name below"
                f" {says.base}, so no resume finds a checkpoint",
                f'add "--run.name", "{own.name}" to trainer.command and set trainer.output_dir = "{own}"',
                certain=True,
            ),
        )
    # in a shell script, variables and ``cd`` can change the meaning
    if command.is_shell or os.path.realpath(says.path) == ours:
        return ()
    return (
        Concern(
            "run.name",
            f"prime-rl writes this run to {says.path}, but trainer.output_dir is {site.output_dir}",
            f'set trainer.output_dir = "{says.path}", or correct --output-dir and --run.name in trainer.command',
            certain=True,
        ),
    )


def _saves(command: Command) -> tuple[Concern, ...]:
    """Reports missing saves: ``--ckpt`` enables saving; without an interval prime-rl saves only at the end."""
    flags = [word.partition("=")[0] for word in command.words]
    in_words = any(flag == "--ckpt" or flag.startswith(("--ckpt.", "--trainer.ckpt")) for flag in flags)
    in_files = any(isinstance(command.configured(name), dict) for name in ("ckpt", "trainer.ckpt"))
    if not in_words and not in_files:
        text = "prime-rl saves no checkpoints: neither the command nor its configuration has ckpt"
        return (Concern(SAVES, text, 'add "--ckpt", "--ckpt.interval", "10" to trainer.command', certain=True),)
    if not command.has(*_INTERVAL) and not command.configured(*_INTERVAL):
        text = "prime-rl saves only at the end of training: ckpt.interval is not set"
        return (Concern(SAVES, text, 'add "--ckpt.interval", "10" to trainer.command', certain=True),)
    return ()


def runs_below(base: Path) -> tuple[Path, ...]:
    """Run directories directly below ``base``, the newest first."""
    found: list[tuple[int, Path]] = []
    try:
        with os.scandir(base) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) and looks_like_run(Path(entry.path)):
                    found.append((entry.stat(follow_symlinks=False).st_mtime_ns, Path(entry.path)))
    except OSError:
        return ()
    return tuple(path for _, path in sorted(found, reverse=True))


def steps_in_use(command: Command) -> int:
    """Number of steps below the newest one whose broadcasts and rollouts can still be read: the highest level that the
    command or a file named in it sets, plus one; never fewer than the default."""
    names = [f"{section}{key}" for key in _ASYNC_KEYS for section in ("", "orchestrator.", "trainer.")]
    levels = [min(MOST_STEPS_IN_USE, positive(found) or 0) for n in names for found in _all_values(command, n)]
    return max(STEPS_IN_USE, max(levels, default=0) + 1)


def _all_values(command: Command, name: str) -> tuple[object, ...]:
    return command.given(name), command.configured(name)


STEPS_IN_USE = 2
"""prime-rl's defaults: max_async_level 1, later a lag of 1 batch, and one step that is being written."""
MOST_STEPS_IN_USE = 1000
_ASYNC_KEYS = ("max_async_level", "max_off_policy_steps")
"""The second since 2026-08, when prime-rl began to remove old broadcasts itself."""
