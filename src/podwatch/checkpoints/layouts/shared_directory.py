"""Checkpoints that are entries of a directory shared by many: single files, and directories whose names hold more than
the step. A restore must use the same name, so the name is stored with the checkpoint: ``PartDir.names``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from podwatch.checkpoints.layouts.base import Judgement, PartDir, PartFiles, Site, StepSeen
from podwatch.checkpoints.layouts.shared_rules import Inside, StepView, judged
from podwatch.checkpoints.layouts.step_dirs import OnDemand, Rules, StepDirs
from podwatch.domain.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Entry:
    """One checkpoint: ``root / name``, a file or a directory. ``part`` is the kind of place."""

    root: Path
    name: str
    part: str = "checkpoint"

    @property
    def path(self) -> Path:
        return self.root / self.name


Found = Mapping[int, Sequence[Entry]]
"""Step -> its entries, the one that counts first."""
Find = Callable[[], Found]


class SharedDirs(StepDirs):
    """``find`` lists the checkpoints; ``places`` maps each part to the directory for a restore."""

    def __init__(self, site: Site, rules: Rules, find: Find, places: Mapping[str, Path]) -> None:
        super().__init__(site, rules)
        self._find, self._places = find, places
        self.shared_parts = frozenset(places)

    def watch_roots(self) -> tuple[Path, ...]:
        found = (e.root for entries in self._find().values() for e in entries[:1])
        return tuple(dict.fromkeys((*self._places.values(), *found)))

    def part_dir(self, part: str, step: int) -> Path:
        if part not in self._places:
            raise ConfigurationError(
                f"layout {self.name} has no part {part!r}",
                where=str(self.output_dir),
                fix="another layout saved this checkpoint: restore it to another directory with --to",
            )
        here = [e.root for e in self._find().get(step, ()) if e.part == part]
        return here[0] if here else self._places[part]

    def steps(self) -> Mapping[int, tuple[PartDir, ...]]:
        found = self._find()

        def parts(step: int) -> tuple[PartDir, ...]:
            entry = found[step][0]
            return (PartDir(entry.part, entry.root, required=True, names=(entry.name,)),)

        return OnDemand(sorted(found), parts)

    def step_paths(self, step: int) -> tuple[Path, ...]:
        return tuple(e.path for e in self._find().get(step, ()))

    def judge(self, step: int, parts: Sequence[PartFiles]) -> Judgement:
        whole = Inside.of(parts[0])
        name = parts[0].part.names[0]
        inside = whole if name in whole.files else whole.below(name)

        def siblings() -> Sequence[Path]:
            found = sorted(self._find().items(), reverse=True)
            return [entries[0].path for n, entries in found if n != step][:3]

        return judged(self._rules.judge, StepView(step, parts[0].part.path, {inside.part: inside}, siblings))

    def ahead_of(self, step: int | None) -> tuple[Path, ...]:
        limit = -1 if step is None else step
        found = dict.fromkeys(e.path for n, es in sorted(self._find().items()) if n > limit for e in es)
        found.update(dict.fromkeys(self._rules.also_ahead(self._root, step)))
        if step is None:
            for path in (t.path for t in self.trackers(0)):
                if path.is_symlink() or path.exists():
                    found[path] = None
        return tuple(p for p in found if not any(parent in found for parent in p.parents))

    def _checkpoint(self, step: int) -> Path:
        """The file or directory that is passed to the trainer. A new name only if there is no checkpoint: then there is
        no resume."""
        here = self._find().get(step, ())
        return here[0].path if here else next(iter(self._places.values())) / self._fresh_name(step)

    def progress(self) -> tuple[StepSeen, ...]:
        for step, entries in sorted(self._find().items(), reverse=True)[:5]:
            try:
                return (StepSeen("checkpoint", step, entries[0].path.stat().st_mtime),)
            except (FileNotFoundError, NotADirectoryError):
                continue
        return ()
