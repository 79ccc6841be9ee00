"""A trainer of one's own: ``[checkpoints.custom]`` says where a step lies and what it must contain.

Patterns match the path inside the step directory; ``*`` matches ``/`` too. Without ``last`` nothing says that a save is
over, so such a set must be quiet for the long settle time.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from podwatch.checkpoints.layouts import argv
from podwatch.checkpoints.layouts.base import Judgement, PartDir, PartFiles, ResumeCommand, StepSeen
from podwatch.checkpoints.layouts.names import is_plain_dir, step_names
from podwatch.checkpoints.scan import is_temporary
from podwatch.checkpoints.structure import dcp
from podwatch.checkpoints.structure.files import check_file
from podwatch.checkpoints.structure.holes import has_hole
from podwatch.config.settings import CustomLayoutSettings
from podwatch.domain.checkpoint import FileEntry
from podwatch.domain.errors import ConfigurationError

_NUMBER = r"(0|[1-9]\d{0,17})"


class CustomLayout:
    """Everything of one step in one directory, one part called ``checkpoint``."""

    name = "custom"
    variant = ""
    finish_lines: tuple[str, ...] = ()

    def __init__(self, output_dir: Path, settings: CustomLayoutSettings) -> None:
        self.output_dir = output_dir
        self._settings = settings
        segments = settings.step_dir.split("/")
        place = next(i for i, s in enumerate(segments) if "{step}" in s)
        self._root = output_dir.joinpath(*segments[:place])
        self._segment = segments[place]
        self._below = "/".join(segments[place + 1 :])
        self._pattern = _compile(self._segment)
        self._parts: dict[int, tuple[PartDir, ...]] = {}

    def watch_roots(self) -> tuple[Path, ...]:
        return (self._root,)

    def part_dir(self, part: str, step: int) -> Path:
        if part != "checkpoint":
            raise ConfigurationError(
                f"layout custom has no part {part!r}",
                where=str(self.output_dir),
                fix="the set was saved by another layout: restore it to a directory of its own with --to",
            )
        return self._root / self._segment.replace("{step}", str(step)) / self._below

    def expect_parts(self, parts: Collection[str]) -> None:
        """There is only one variant."""

    def steps(self) -> Mapping[int, tuple[PartDir, ...]]:
        known = self._parts
        self._parts = {
            n: known[n] if n in known else (PartDir("checkpoint", self.part_dir("checkpoint", n), required=True),)
            for n in sorted(step_names(self._root, self._pattern))
        }
        return self._parts

    def step_paths(self, step: int) -> tuple[Path, ...]:
        own = self._root / self._segment.replace("{step}", str(step))
        return (own,) if is_plain_dir(own) else ()

    def spare_paths(self, below: int) -> tuple[tuple[int, Path], ...]:
        return ()

    def judge(self, step: int, parts: Sequence[PartFiles]) -> Judgement:
        part = parts[0]
        files = {f.path: f for f in part.files if not is_temporary(f.path)}
        optional = {n for n in files if any(fnmatchcase(n, g) for g in self._settings.optional)}
        files = {n: f for n, f in files.items() if n not in optional}
        leftovers = tuple(f"{part.part.name}/{n}" for n in sorted(optional))
        try:
            return self._judge(part.part.path, files, leftovers)
        except FileNotFoundError:
            return Judgement(False, "a file vanished while being read", leftovers=leftovers)
        except OSError as error:
            return Judgement(False, f"cannot be read: {error.strerror}", unreadable=True, leftovers=leftovers)

    def _judge(self, path: Path, files: Mapping[str, FileEntry], leftovers: tuple[str, ...]) -> Judgement:
        last = self._settings.last
        for pattern in (*self._settings.required, *((last,) if last else ())):
            if not any(fnmatchcase(n, pattern) for n in files):
                return Judgement(False, f"nothing matches {pattern!r}", strong=False, leftovers=leftovers)
        if not files:
            return Judgement(False, "the directory is empty", strong=False, leftovers=leftovers)
        if last:
            marked = max(f.mtime_ns for n, f in files.items() if fnmatchcase(n, last))
            newer = [n for n, f in files.items() if f.mtime_ns > marked + dcp.MTIME_TOLERANCE_NS]
            if newer:
                reason = f"{min(newer)} is newer than {last!r}, which is written last"
                return Judgement(False, reason, leftovers=leftovers)
        tokens: list[str] = []
        stale: list[str] = []
        world_size: int | None = None
        for folder, inside in _dcp_folders(files).items():
            verdict = dcp.check(path / folder, inside)
            if not verdict.whole:
                return Judgement(
                    False,
                    f"{folder or 'step directory'}: {verdict.reason}",
                    damaged=verdict.damaged,
                    unreadable=verdict.unreadable,
                    leftovers=leftovers,
                )
            tokens.append(verdict.save_id)
            stale.extend(f"checkpoint/{folder}/{n}" if folder else f"checkpoint/{n}" for n in verdict.leftovers)
            world_size = world_size or verdict.world_size
        for name in sorted(files):
            problem = check_file(path / name)
            if problem:
                return Judgement(False, f"{name} {problem}", damaged=True, strong=bool(last), leftovers=leftovers)
            if not last and name.endswith(".safetensors") and has_hole(path / name):
                # Nothing else tells a preallocated file from a written one here.
                reason = f"{name} has ranges that were never written"
                return Judgement(False, reason, strong=False, leftovers=leftovers)
        return Judgement(
            True,
            strong=bool(last),
            save_token="-".join(tokens),
            world_size=world_size,
            leftovers=(*leftovers, *stale),
        )

    def ahead_of(self, step: int | None) -> tuple[Path, ...]:
        """Step directories, and whatever ``ahead`` names, above ``step``."""
        limit = -1 if step is None else step
        found = [self._root / name for n, name in sorted(step_names(self._root, self._pattern).items()) if n > limit]
        for pattern in self._settings.ahead:
            found.extend(self._matching(pattern, limit))
        return tuple(dict.fromkeys(found))

    def _matching(self, pattern: str, limit: int) -> list[Path]:
        segments = pattern.split("/")
        place = next((i for i, s in enumerate(segments) if "{step}" in s), None)
        if place is None or pattern.startswith("/") or ".." in segments:
            return []
        parent, expression = self.output_dir.joinpath(*segments[:place]), _compile(segments[place])
        try:
            entries = sorted(parent.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = []
        for entry in entries:
            match = expression.match(entry.name)
            target = entry.joinpath(*segments[place + 1 :])
            if match and int(match.group(1)) > limit and not target.is_symlink() and target.exists():
                found.append(target)
        return found

    def progress(self) -> tuple[StepSeen, ...]:
        for step in sorted(step_names(self._root, self._pattern), reverse=True)[:1]:
            try:
                return (StepSeen("checkpoint", step, self.part_dir("checkpoint", step).stat().st_mtime),)
            except (FileNotFoundError, NotADirectoryError):
                return ()
        return ()

    def resume_command(
        self, command: Sequence[str], step: int | None, override: str | Sequence[str], wandb: Mapping[str, str]
    ) -> ResumeCommand:
        own_way = any(p in a for p in ("{step}", "{checkpoint}") for a in command)
        if step is not None and override == "auto" and not own_way:
            raise ConfigurationError(
                "a custom layout does not know how its trainer resumes",
                where="trainer.resume_args",
                fix='set it, for example to ["--from-step", "{step}"]; "none" if a script reads PODWATCH_STEP',
            )
        extra = tuple(override) if step is not None and not isinstance(override, str) else ()
        return argv.build(
            command,
            step=step,
            checkpoint=None if step is None else self.part_dir("checkpoint", step),
            output_dir=self.output_dir,
            resume_args=extra,
            environment={},
            removed=(),
        )

    def first_step_after(self, step: int) -> int:
        """N: whether numbers name finished or coming steps is the trainer's secret, so the lower bound."""
        return step

    def target_step(self, command: Sequence[str]) -> int | None:
        return argv.positive(argv.flag_value(command, ("--max-steps",)))

    def wandb_identity(self) -> Mapping[str, str]:
        return {}

    def log_globs(self) -> tuple[str, ...]:
        return ("*.log", "logs/*.log")


def _compile(segment: str) -> re.Pattern[str]:
    before, after = segment.split("{step}", 1)
    return re.compile(rf"^{re.escape(before)}{_NUMBER}{re.escape(after)}$")


def _dcp_folders(files: Mapping[str, FileEntry]) -> dict[str, dict[str, dcp.Shard]]:
    """Directories that hold an index or shards, with all that lies below each."""
    folders = set()
    for name in files:
        folder, _, base = name.rpartition("/")
        if base in (dcp.INDEX, dcp.INDEX_TMP) or dcp.is_shard(base):
            folders.add(folder)
    found: dict[str, dict[str, dcp.Shard]] = {}
    for folder in sorted(folders):
        lead = f"{folder}/" if folder else ""
        found[folder] = {
            n.removeprefix(lead): dcp.Shard(f.size, f.mtime_ns) for n, f in files.items() if n.startswith(lead)
        }
    return found
