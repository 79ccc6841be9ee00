"""Whether a save is complete, by the table of its trainer and by the structures in it. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from podwatch.checkpoints import special
from podwatch.checkpoints.inspection import Inspection, InspectionOutcome
from podwatch.checkpoints.structures import (
    FILLED,
    HOLE_FROM,
    TOLERANCE_NS,
    Files,
    SaveShape,
    Shortfall,
    has_structure,
    is_dcp,
    matching,
    newer_than,
    shortfalls,
    whole_number,
)
from podwatch.checkpoints.table import Globs, SaveEnd, TrackerRule, TrainerTable
from podwatch.checkpoints.templates import glob_of, number_in

_MOST_FAULTS = 50


@dataclass(frozen=True, slots=True)
class TrackerFacts:
    """A tracker as it was read; ``text`` is None where there is none."""

    text: str | None
    mtime_ns: int = 0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an inspection must know besides the files. ``trackers``: the name that rules use -> the path.
    ``needed_parts`` and ``doubtful_parts``: parts of ``if_any`` that other steps have, or that nobody has yet.
    ``later``: a later step exists. ``beside``: paths beside the step that must not exist. ``twin``: another directory
    of the same step."""

    trackers: Mapping[str, str] = field(default_factory=dict)
    needed_parts: Sequence[str] = ()
    doubtful_parts: Sequence[str] = ()
    later: bool = False
    beside: Sequence[str] = ()
    twin: str = ""


@dataclass(frozen=True, slots=True)
class SaveFacts:
    """One save as it was read. ``beside``: names of what is there of ``about.beside``."""

    step: int
    files: Files
    trackers: Mapping[str, TrackerFacts]
    about: Surroundings
    beside: tuple[str, ...] = ()


def inspect_save(table: TrainerTable, save: SaveFacts) -> Inspection:
    """What is missing counts before what is broken: a save that is being written is both."""
    refused = (
        save.about.twin and f"{save.about.twin} is step {save.step} too: move one of them away, or use layout custom"
    )
    unreadable = next((f"{n}: {f.unreadable}" for n, f in sorted(save.files.items()) if f.unreadable), "")
    if refused or unreadable:
        return Inspection(InspectionOutcome.UNKNOWN, refused or f"cannot be read: {unreadable}")
    structured = sum(has_structure(name) for name in save.files)
    about = Inspection(
        InspectionOutcome.WHOLE,
        hole=next((n for n, f in sorted(save.files.items()) if f.has_hole and f.size >= HOLE_FROM), ""),
        unsized=next((n for n, f in sorted(save.files.items()) if f.unsized), ""),
        checked=structured,
        unchecked=len(save.files) - structured,
    )
    files = {n: f for n, f in save.files.items() if not matching((n,), table.not_part)}
    files |= {n: replace(files[n], problem="") for n in matching(files, table.unchecked)}
    shape = SaveShape()
    found = list(_shortfalls(table, save, files, shape))
    missing = next((s for s in found if not s.damaged), None)
    if found:
        outcome = InspectionOutcome.NOT_COMPLETE if missing else InspectionOutcome.DAMAGED
        return replace(
            about,
            outcome=outcome,
            reason=(missing or found[0]).reason,
            is_export=_is_export(table, files, shape),
            problems=_by_part(table, found),
            faults=tuple(dict.fromkeys(s.reason for s in found[:_MOST_FAULTS])),
        )
    lacks = next((s.reason for s in _conditions(table.usual, files)), "")
    return replace(
        about,
        outcome=InspectionOutcome.NOT_COMPLETE if lacks else InspectionOutcome.WHOLE,
        reason=lacks,
        lacks=bool(lacks),
        unusual=lacks,
        ends=_end(table, save, files, shape),
        save_token="-".join(t for t in shape.tokens if t),
        world_size=_world_size(table, shape),
        leftovers=tuple(sorted((*shape.unlisted, *(set(save.files) - set(files))))),
    )


def _by_part(table: TrainerTable, found: Sequence[Shortfall]) -> Mapping[str, str]:
    problems: dict[str, str] = {}
    for shortfall in found:
        part = shortfall.part or shortfall.reason.partition(":")[0]
        if part in table.parts:
            problems.setdefault(part, shortfall.reason)
    return problems


def _shortfalls(table: TrainerTable, save: SaveFacts, files: Files, shape: SaveShape) -> Iterator[Shortfall]:
    if not files:
        yield Shortfall("it is empty")
        return
    inside = list(shortfalls(files, shape, table.dcp_config))
    if _is_export(table, files, shape):
        yield Shortfall("it contains only the model: an export, not a resume point")
    yield from inside
    yield from _names(table, save, files)
    yield from _order(table, files)
    yield from _contents(table, save, files)
    for rule in table.trackers:
        yield from _tracker(rule, save, files)
    if table.hook == "orbax":
        yield from special.orbax_shortfalls(files, shape)
    holes = [n for n, f in sorted(files.items()) if f.has_hole and n.endswith(FILLED)]
    if holes and table.ends is SaveEnd.NONE:
        yield Shortfall(f"{holes[0]} has ranges that were never written")


def _is_export(table: TrainerTable, files: Files, shape: SaveShape) -> bool:
    if not table.index_holds:
        return False
    if shape.keys:
        return not shape.keys & set(table.index_holds)
    return not any(is_dcp(name) for name in files) and bool(matching(files, ("*.index.json",)))


def _world_size(table: TrainerTable, shape: SaveShape) -> int | None:
    """A resume with another number is refused where the trainer cannot reshard: only what was split counts there."""
    return max(shape.fixed_ranks or (shape.seen_ranks if table.reshards else ()), default=None)


# -- names ------------------------------------------------------------------------------------------------------------


def _names(table: TrainerTable, save: SaveFacts, files: Files) -> Iterator[Shortfall]:
    for name in matching(files, table.absent):
        yield Shortfall(f"{name} exists: the save has not finished")
    for name in save.beside:
        yield Shortfall(f"{name} exists: the checkpoint is being written or removed, or that was interrupted")
    for one_of in table.require:
        part = one_of[0].partition(":")[0] if ":" in one_of[0] else ""
        if part in table.if_any and part not in save.about.needed_parts and not matching(files, (f"{part}:*",)):
            continue
        if not matching(files, [g.replace("{step}", str(save.step)) for g in one_of]):
            shown = [g.replace("{step}", str(save.step)) for g in one_of if not g.startswith("!")]
            yield Shortfall(f"{' or '.join(shown[:3])}{' or others' if len(shown) > 3 else ''} is missing")
    yield from _conditions(table.needs, files)


def _conditions(conditions: Mapping[str, Globs], files: Files) -> Iterator[Shortfall]:
    for condition, wanted in conditions.items():
        found = matching(files, (condition,))
        for glob in wanted if found else ():
            if not matching(files, (glob,)):
                yield Shortfall(f"{glob} is missing, which belongs to {found[0]}")


# -- the order in which files were written ----------------------------------------------------------------------------


def _order(table: TrainerTable, files: Files) -> Iterator[Shortfall]:
    """A marker of an earlier save survives a save over an existing directory, and a kill during it."""
    for marker, covers in table.last.items():
        for mark in matching(files, (marker,)):
            folder = mark[: -len(mark.replace(":", "/").rpartition("/")[2])]
            own = [g.replace("./", folder, 1) if g.startswith(("./", "!./")) else g for g in covers]
            if newer := newer_than(files[mark].mtime_ns, (n for n in matching(files, own) if n != mark), files):
                yield Shortfall(f"{newer} is newer than {mark}: being overwritten, or an overwrite was interrupted")


def _tracker(rule: TrackerRule, save: SaveFacts, files: Files) -> Iterator[Shortfall]:
    """The tracker must name this step or a later one. One that names a lower step but is younger than this checkpoint
    (a repair, a run that went back) says nothing about it. With ``later`` steps an empty one is their affair."""
    own = matching(files, (f"{rule.part}:*",)) if rule.part else sorted(files)
    tracker = save.trackers.get(rule.file, TrackerFacts(None))
    if not rule.proves or not own or (tracker.text is None and save.about.later) or _is_free(rule, tracker):
        return
    if tracker.text is None:
        yield Shortfall(f"{rule.file} is missing: it is written last", part=rule.part)
        return
    named = _step_named(rule, tracker.text)
    if named is None:
        if not save.about.later:
            yield Shortfall(f"{rule.file} is empty or garbled: it is being written", part=rule.part)
        return
    if named < save.step and tracker.mtime_ns <= max(files[n].mtime_ns for n in own) + TOLERANCE_NS:
        yield Shortfall(
            f"{rule.file} names step {named}: the save of step {save.step} has not finished", part=rule.part
        )
    elif newer := newer_than(tracker.mtime_ns, matching(own, rule.covers), files):
        yield Shortfall(f"{newer} is newer than {rule.file}: being overwritten, or an overwrite was interrupted")


def _step_named(rule: TrackerRule, text: str) -> int | None:
    return next((n for form in (rule.content, *rule.others) if (n := number_in(form, text)) is not None), None)


def _is_free(rule: TrackerRule, tracker: TrackerFacts) -> bool:
    """Whether it holds a text of the script's own: not the begin of a name that is being written."""
    if not rule.free or tracker.text is None or _step_named(rule, tracker.text) is not None:
        return False
    return not any(form.partition("{")[0].startswith(tracker.text) for form in (rule.content, *rule.others))


# -- contents ---------------------------------------------------------------------------------------------------------


def _contents(table: TrainerTable, save: SaveFacts, files: Files) -> Iterator[Shortfall]:
    for glob, keys in (*table.step_in.items(), *table.step_if_in.items()):
        for name in matching(files, (glob,)):
            content = files[name].content
            held = content if isinstance(content, dict) else {}
            found = next((held[k] for k in keys if k in held), None)
            if files[name].problem or (found is None and glob in table.step_if_in):
                continue
            if whole_number(found) != save.step:
                yield Shortfall(f"{name} contains step {str(found)[:30]}, not {save.step}", damaged=True)
    for name, text in table.text.items():
        if name in files and files[name].content != text:
            yield Shortfall(f"{name} is empty or garbled: it is being written")
    for glob, key in table.lists.items():
        for name in matching(files, (glob,)):
            yield from _listed(name, key, files)
    for name, facts in sorted(files.items()):
        for value, wanted in table.values.items() if isinstance(facts.content, dict) else ():
            if value in facts.content and not all(w in facts.content for w in wanted):
                yield Shortfall(f"{name} contains weights only, so training cannot resume from it")


def _listed(name: str, key: str, files: Files) -> Iterator[Shortfall]:
    """Directories that a JSON file lists must have files, and the model's among them must have weights."""
    content = files[name].content
    if not isinstance(content, dict):
        return
    folder, listed = name[: name.rfind("/") + 1], content.get(key)
    for directory in sorted(map(str, listed)) if isinstance(listed, dict | list) else ():
        inside = matching(files, (f"{glob_of(folder + directory)}/*",))
        if not inside:
            yield Shortfall(f"{folder}{directory} is missing, which {name} lists")
        elif _path_of_model(content) == directory and not matching(inside, ("*.safetensors", "*.bin", "*.distcp")):
            yield Shortfall(f"{folder}{directory} contains no weights, which {name} lists")


def _path_of_model(content: Mapping[str, object]) -> object:
    contents = content.get("contents")
    model = contents.get("model") if isinstance(contents, dict) else None
    return model.get("path") if isinstance(model, dict) else None


# -- the end of the save ----------------------------------------------------------------------------------------------


def _end(table: TrainerTable, save: SaveFacts, files: Files, shape: SaveShape) -> SaveEnd:
    weak = matching(files, table.weak_if) and not matching(files, table.weak_unless)
    weak = weak or shape.ranks_unknown or any(f.has_hole or f.unsized for f in files.values())
    weak = weak or any(p in save.about.doubtful_parts and not matching(files, (f"{p}:*",)) for p in table.if_any)
    for rule in table.trackers:
        tracker = save.trackers.get(rule.file, TrackerFacts(None))
        weak = weak or (rule.free and (tracker.text is None or _step_named(rule, tracker.text) is None))
    if weak:
        return SaveEnd.NONE
    return SaveEnd.LAST if table.ends is SaveEnd.COMMIT and matching(files, table.last_if) else table.ends
