"""The operator's own trainer: ``[checkpoints.custom]`` defines the place of a step and its required content.

Patterns match the path inside the step directory; ``*`` matches ``/`` too. Without ``last`` nothing shows the end of a
save, so such a checkpoint must be unchanged for the long settle time.
"""

import os
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from podwatch.checkpoints.formats import dcp
from podwatch.checkpoints.formats.files import has_hole
from podwatch.checkpoints.layouts.base import PATTERN, Concern, Judgement, Kind, Marker, Recognition, Site
from podwatch.checkpoints.layouts.resume_flags import Preset
from podwatch.checkpoints.layouts.shared_directory import Entry, SharedDirs
from podwatch.checkpoints.layouts.shared_rules import Fault, Inside, StepView
from podwatch.checkpoints.layouts.step_dirs import Part, Rules, StepDirs, all_step_names
from podwatch.config.settings import STEP_FIELD, CustomLayoutSettings
from podwatch.domain.errors import ConfigurationError

_NUMBER = r"([0-9]{1,18})"
_STEP_LIKE = re.compile(r"[A-Za-z].*\d|\d+(?:\..*)?$")
"""A name that could be a step's."""
_SHOWN = 3


class CustomLayout(StepDirs):
    """Everything of one step in one directory, one part called ``checkpoint``."""

    def __init__(self, output_dir: Path, settings: CustomLayoutSettings) -> None:
        super().__init__(Site(output_dir, custom=settings), rules(settings))


def rules(settings: CustomLayoutSettings) -> Rules:
    segments = settings.step_dir.split("/")
    place = _place(settings)

    def root(site: Site) -> Path:
        return site.output_dir.joinpath(*segments[:place])

    def also_ahead(found_root: Path, step: int | None) -> tuple[Path, ...]:
        output = found_root.parents[place - 1] if place else found_root
        limit = -1 if step is None else step
        return tuple(p for pattern in settings.ahead for p in _matching(output, pattern, limit))

    return Rules(
        name="custom",
        step=_compile(segments[place]),
        directory=lambda found_root, step: _name(segments[place], found_root, step),
        judge=lambda view: _judge(view, settings),
        preset=_preset,
        sources=(),
        reshards=True,  # unknown, and a resume is only blocked for a known reason
        parts=(Part(below="/".join(segments[place + 1 :])),),
        root=root,
        also_ahead=also_ahead,
    )


def _preset(_site: Site, _command: Sequence[str]) -> Preset:
    return Preset(
        add=None,
        ask="podwatch does not know how a trainer with a custom layout resumes",
        example='["--from-step", "{step}"]',
        wandb=False,
    )


def _judge(view: StepView, settings: CustomLayoutSettings) -> Judgement:
    whole = view.only
    optional = {n for n in whole.files if any(fnmatchcase(n, g) for g in settings.optional)}
    inside = Inside(whole.path, {n: f for n, f in whole.files.items() if n not in optional}, whole.part)
    _required(inside, settings)
    tokens, stale, world_size = _dcp(inside)
    _sound(inside, preallocated=not settings.last)
    return Judgement(
        True,
        marker=Marker.LAST_FILE if settings.last else Marker.NONE,
        save_token="-".join(tokens),
        world_size=world_size,
        leftovers=(*(f"{whole.part}/{n}" for n in sorted(optional)), *stale),
    )


def _required(inside: Inside, settings: CustomLayoutSettings) -> None:
    """Require every configured file, and that no file is newer than the one written last."""
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


def _dcp(inside: Inside) -> tuple[list[str], list[str], int | None]:
    """Require that every DCP directory is complete: (their save ids, files that no index lists, number of ranks)."""
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
    return tokens, stale, world_size


def _sound(inside: Inside, *, preallocated: bool) -> None:
    """Require that every file is whole, as far as its format shows. ``preallocated``: a file that was created with its
    full size and not written yet is not: nothing else distinguishes the two without ``last``."""
    for name in sorted(inside.files):
        problem = inside.problem_of(name)
        if problem:
            raise Fault(f"{name} {problem}", damaged=True)
        if preallocated and name.endswith(".safetensors") and has_hole(inside.path / name):
            raise Fault(f"{name} has ranges that were never written")


def _matching(output_dir: Path, pattern: str, limit: int) -> list[Path]:
    segments = pattern.split("/")
    place = next((i for i, s in enumerate(segments) if STEP_FIELD.search(s)), None)
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


def _place(settings: CustomLayoutSettings) -> int:
    """The index of the ``step_dir`` segment with the number."""
    return next(i for i, s in enumerate(settings.step_dir.split("/")) if STEP_FIELD.search(s))


def _compile(segment: str) -> re.Pattern[str]:
    """Matches the segment with the number in it, with or without leading zeros."""
    field = STEP_FIELD.search(segment)
    if field is None:
        return re.compile(r"(?!)")
    return re.compile(rf"^{re.escape(segment[: field.start()])}{_NUMBER}{re.escape(segment[field.end() :])}$")


def _name(segment: str, root: Path, step: int) -> str:
    """The name of a step that does not exist: as wide as configured, else as the others are."""
    field = STEP_FIELD.search(segment)
    assert field is not None  # the settings have been validated
    width = int(field[1] or 0)
    if not width:
        others = sorted(all_step_names(root, _compile(segment)).items(), reverse=True)
        for number, names in others[:1]:
            digits = _compile(segment).fullmatch(names[0])
            width = len(digits[1]) if digits is not None and digits[1] != str(number) else 0
    return f"{segment[: field.start()]}{step:0{width}d}{segment[field.end() :]}"


def _is_file(settings: CustomLayoutSettings) -> bool:
    """``ckpt_{step}.pt``: the number is in the last segment, and a suffix follows it."""
    segment = settings.step_dir.rsplit("/", 1)[-1]
    field = STEP_FIELD.search(segment)
    return field is not None and segment[field.end() :].startswith(".")


def _files(site: Site, settings: CustomLayoutSettings) -> StepDirs:
    """A layout in which each checkpoint is one entry, usually a file, of a shared directory."""
    found_rules = rules(settings)
    root = found_rules.root(site)

    def find() -> Mapping[int, Sequence[Entry]]:
        found: dict[int, list[Entry]] = {}
        try:
            with os.scandir(root) as entries:
                for entry in entries:
                    match = found_rules.step.fullmatch(entry.name)
                    if match is not None and not entry.is_symlink():
                        found.setdefault(int(match[1]), []).append(Entry(root, entry.name))
        except (FileNotFoundError, NotADirectoryError):
            pass
        return {step: sorted(few, key=lambda e: e.name) for step, few in found.items()}

    return SharedDirs(site, found_rules, find, {"checkpoint": root})


def concerns(site: Site) -> tuple[Concern, ...]:
    """Reports that nothing matches ``step_dir`` although a similar name exists."""
    settings = site.custom
    if settings is None:
        return ()
    segments, place = settings.step_dir.split("/"), _place(settings)
    root = site.output_dir.joinpath(*segments[:place])
    expression = _compile(segments[place])
    if any(expression.fullmatch(name) for name in _names(root)):
        return ()
    for folder in dict.fromkeys((root, site.output_dir, site.output_dir / "checkpoints")):
        like = [name for name in _names(folder) if _STEP_LIKE.match(name)]
        if like:
            shown = ", ".join(like[-_SHOWN:])
            return (
                Concern(
                    PATTERN,
                    f"nothing matches the pattern {settings.step_dir!r} of [checkpoints.custom] step_dir; found {shown}"
                    f" in {folder}",
                    'set step_dir to the name of a checkpoint, such as "checkpoints/ckpt_{step}" or "ckpt_{step}.pt"',
                ),
            )
    return ()


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return []


def _dcp_folders(files: Mapping[str, object]) -> list[str]:
    """Directories that contain an index or shards."""
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
            fix="set step_dir (the directory of one step) and required (the files it must contain) there",
        )
    return _files(site, site.custom) if _is_file(site.custom) else StepDirs(site, rules(site.custom))


def recognise(site: Site) -> Recognition | None:
    """Recognize the configuration section, which is a decision of the operator."""
    if site.custom is None:
        return None
    return Recognition("custom", "the configuration has a [checkpoints.custom] section", certain=True)


KIND = Kind("custom", _make, recognise, concerns)
