"""A trainer of one's own: ``[checkpoints.custom]`` says where a step lies and what it must contain.

Patterns match the path inside the step directory; ``*`` matches ``/`` too. Without ``last`` nothing says that a save is
over, so such a set must be quiet for the long settle time.
"""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from podwatch.checkpoints.layouts.base import Judgement, Kind, Marker, Recognition, Site
from podwatch.checkpoints.layouts.inside import Fault, Inside, StepView
from podwatch.checkpoints.layouts.preset import Preset
from podwatch.checkpoints.layouts.step_dirs import Part, Rules, StepDirs
from podwatch.checkpoints.structure import dcp
from podwatch.checkpoints.structure.files import check_file
from podwatch.checkpoints.structure.holes import has_hole
from podwatch.config.settings import CustomLayoutSettings
from podwatch.domain.errors import ConfigurationError

_NUMBER = r"(0|[1-9]\d{0,17})"


class CustomLayout(StepDirs):
    """Everything of one step in one directory, one part called ``checkpoint``."""

    def __init__(self, output_dir: Path, settings: CustomLayoutSettings) -> None:
        super().__init__(Site(output_dir, custom=settings), rules(settings))


def rules(settings: CustomLayoutSettings) -> Rules:
    segments = settings.step_dir.split("/")
    place = next(i for i, s in enumerate(segments) if "{step}" in s)

    def root(site: Site) -> Path:
        return site.output_dir.joinpath(*segments[:place])

    def also_ahead(found_root: Path, step: int | None) -> tuple[Path, ...]:
        output = found_root.parents[place - 1] if place else found_root
        limit = -1 if step is None else step
        return tuple(p for pattern in settings.ahead for p in _matching(output, pattern, limit))

    return Rules(
        name="custom",
        step=_compile(segments[place]),
        directory=segments[place].replace("{", "{{").replace("}", "}}").replace("{{step}}", "{step}"),
        judge=lambda view: _judge(view, settings),
        preset=_preset,
        sources=(),
        reshards=True,  # nobody knows, and blocking a resume needs to be known
        parts=(Part(below="/".join(segments[place + 1 :])),),
        root=root,
        also_ahead=also_ahead,
    )


def _preset(_site: Site, _command: Sequence[str]) -> Preset:
    return Preset(
        add=None,
        ask="a custom layout does not know how its trainer resumes",
        example='["--from-step", "{step}"]',
        wandb=False,
    )


def _judge(view: StepView, settings: CustomLayoutSettings) -> Judgement:
    whole = view.only
    optional = {n for n in whole.files if any(fnmatchcase(n, g) for g in settings.optional)}
    inside = Inside(whole.path, {n: f for n, f in whole.files.items() if n not in optional}, whole.part)
    last = settings.last
    for pattern in (*settings.required, *((last,) if last else ())):
        if not any(fnmatchcase(n, pattern) for n in inside.files):
            raise Fault(f"nothing matches {pattern!r}")
    if not inside.files:
        raise Fault("the directory is empty")
    if last:
        marked = max(f.mtime_ns for n, f in inside.files.items() if fnmatchcase(n, last))
        newer = [n for n, f in inside.files.items() if f.mtime_ns > marked + dcp.MTIME_TOLERANCE_NS]
        if newer:
            raise Fault(f"{min(newer)} is newer than {last!r}, which is written last")
    tokens: list[str] = []
    stale: list[str] = []
    world_size: int | None = None
    for folder in _dcp_folders(inside.files):
        here = inside.below(folder) if folder else inside
        verdict = dcp.check(here.path, {n: dcp.Shard(f.size, f.mtime_ns) for n, f in here.files.items()})
        if not verdict.whole:
            where = folder or "step directory"
            raise Fault(f"{where}: {verdict.reason}", damaged=verdict.damaged, unreadable=verdict.unreadable)
        tokens.append(verdict.save_id)
        stale.extend(f"checkpoint/{folder}/{n}" if folder else f"checkpoint/{n}" for n in verdict.leftovers)
        world_size = world_size or verdict.world_size
    for name in sorted(inside.files):
        problem = check_file(inside.path / name)
        if problem:
            raise Fault(f"{name} {problem}", damaged=True)
        if not last and name.endswith(".safetensors") and has_hole(inside.path / name):
            # Nothing else tells a preallocated file from a written one here.
            raise Fault(f"{name} has ranges that were never written")
    return Judgement(
        True,
        marker=Marker.LAST_FILE if last else Marker.NONE,
        save_token="-".join(tokens),
        world_size=world_size,
        leftovers=(*(f"{whole.part}/{n}" for n in sorted(optional)), *stale),
    )


def _matching(output_dir: Path, pattern: str, limit: int) -> list[Path]:
    segments = pattern.split("/")
    place = next((i for i, s in enumerate(segments) if "{step}" in s), None)
    if place is None or pattern.startswith("/") or ".." in segments:
        return []
    parent, expression = output_dir.joinpath(*segments[:place]), _compile(segments[place])
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


def _compile(segment: str) -> re.Pattern[str]:
    before, after = segment.split("{step}", 1)
    return re.compile(rf"^{re.escape(before)}{_NUMBER}{re.escape(after)}$")


def _dcp_folders(files: Mapping[str, object]) -> list[str]:
    """Directories that hold an index or shards."""
    folders = set()
    for name in files:
        folder, _, base = name.rpartition("/")
        if base in (dcp.INDEX, dcp.INDEX_TMP) or dcp.is_shard(base):
            folders.add(folder)
    return sorted(folders)


def _make(site: Site) -> StepDirs:
    if site.custom is None:
        raise ConfigurationError(
            'layout = "custom" needs a [checkpoints.custom] section',
            where="trainer.layout",
            fix="say there where one step lies (step_dir) and what it must contain (required)",
        )
    return StepDirs(site, rules(site.custom))


def recognise(site: Site) -> Recognition | None:
    """A person who wrote the section means it."""
    if site.custom is None:
        return None
    return Recognition("custom", "the configuration has a [checkpoints.custom] section", certain=True)


KIND = Kind("custom", _make, recognise)
