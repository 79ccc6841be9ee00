"""Which trainer this is, and its layout: by ``trainer.layout``, or for "auto" by the command and output_dir.

An installed package can add a trainer by an entry point, which is the same table as in ``layouts.toml``; the
configuration must name it, "auto" does not choose it.
"""

import heapq
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from podwatch.checkpoints.command_table import command_of
from podwatch.checkpoints.layout import Layout
from podwatch.checkpoints.places import listed
from podwatch.checkpoints.prime_rl import PrimeRLLayout, concerns_of_run
from podwatch.checkpoints.shapes import PATTERN, Concern, Recognition, Site
from podwatch.checkpoints.structures import matching
from podwatch.checkpoints.trainer import DiskSign, Trainer, all_trainers, trainer_from
from podwatch.config import plugins
from podwatch.config.settings import CustomLayoutSettings, Settings
from podwatch.domain.errors import ConfigurationError, PodwatchError
from podwatch.domain.process import ProcessNames
from podwatch.domain.trainer_log import TrainerLog


def site_of(settings: Settings) -> Site:
    trainer = settings.trainer
    return Site(trainer.output_dir, trainer.checkpoint_dir, trainer.cwd, trainer.command, settings.checkpoints.custom)


def make_layout(settings: Settings) -> Layout:
    """The layout that the configuration names, or that "auto" detects, for its output directory (which need not exist
    yet). ConfigurationError: unknown, not recognized, or ambiguous."""
    site = site_of(settings)
    name, chosen_because = _chosen(settings, site)
    layout = layout_of(trainer_named(name), site)
    layout.chosen_because = chosen_because
    return layout


def _chosen(settings: Settings, site: Site) -> tuple[str, str]:
    """The name, and why "auto" chose it (empty if the configuration names it)."""
    if settings.trainer.layout != "auto":
        return settings.trainer.layout, ""
    found = choose(site)
    return found.layout, found.why


def layout_of(trainer: Trainer, site: Site) -> Layout:
    """The trainer's layout below one output directory. ConfigurationError: the operator's table is missing, or has a
    mistake."""
    if trainer.name == "custom":
        trainer, site = trainer_of_operator(site.custom), replace(site, checkpoint_dir=None)
    return (PrimeRLLayout if trainer.facts.hook == "prime-rl" else Layout)(trainer, site)


def trainer_of_operator(own: CustomLayoutSettings | None) -> Trainer:
    """``[checkpoints.custom]`` as an entry of ``layouts.toml``. A number has any zeros before it, and a file that is
    written last is required."""
    if own is None:
        raise ConfigurationError(
            'layout = "custom" needs a [checkpoints.custom] section',
            where="trainer.layout",
            fix="set parts (the directory of one step) and require (the files it must contain) there",
        )
    if twice := sorted(own.table.keys() & type(own).model_fields.keys()):
        raise ConfigurationError(
            f"{', '.join(twice)} in the table of other keys would be ignored",
            where="checkpoints.custom.table",
            fix=f"write {twice[0]} in [checkpoints.custom] itself",
        )
    values = {"reshards": True, "ends": "last" if own.last else "none", **own.table}
    values["parts"] = {name: [_any_zeros(path) for path in paths] for name, paths in own.parts.items()}
    values["require"] = [[glob] if isinstance(glob, str) else list(glob) for glob in (*own.require, *own.last)]
    values["last"] = {marker: list(covers) for marker, covers in own.last.items()}
    values["not_part"] = own.not_part
    values["also_ahead"] = [_any_zeros(path) for path in own.also_ahead]
    trainer, usual = trainer_from("custom", values), all_trainers()["custom"]
    return trainer if "command" in own.table else replace(trainer, command=usual.command)


def _any_zeros(path: str) -> str:
    return path.replace("{step", "{number")


def trainer_named(name: str) -> Trainer:
    """The entry of ``layouts.toml``, else that of an installed package. ConfigurationError: unknown, or the package
    fails."""
    known = all_trainers()
    if name in known:
        return known[name]
    plugin = plugins.find(plugins.LAYOUTS, name)
    if plugin is None:
        raise ConfigurationError(
            f"unknown layout {name!r}", where="trainer.layout", fix=f"choose one of {', '.join(known)}"
        )
    table = plugin.load()
    if not isinstance(table, Mapping) or not table.get("parts"):
        raise plugin.error(f"is a {type(table).__name__}, not a table with parts")
    try:
        with plugin.blamed():
            return trainer_from(name, table)
    except ConfigurationError as error:
        raise plugin.error(f"is a table that cannot be read: {error.what}") from error


def trainer_logs(settings: Settings) -> tuple[TrainerLog, ...]:
    """The log lines of every trainer that podwatch knows, and of the configured one if a package added it: a script
    can print the lines of another library than the one that saves its checkpoints. ConfigurationError: the package
    fails."""
    return tuple(trainer.log for trainer in _known(settings))


def process_names(settings: Settings | None = None) -> tuple[ProcessNames, ...]:
    """The process names of every trainer that podwatch knows, and of the configured one as ``trainer_logs``. Without
    ``settings`` only podwatch's own: for commands that look at all processes."""
    return tuple(trainer.processes for trainer in _known(settings))


def _known(settings: Settings | None) -> tuple[Trainer, ...]:
    own = all_trainers()
    if settings is None or settings.trainer.layout == "auto" or settings.trainer.layout in {*own} - {"custom"}:
        return tuple(own.values())
    name = settings.trainer.layout
    added = trainer_of_operator(settings.checkpoints.custom) if name == "custom" else trainer_named(name)
    return (added, *own.values())


# -- recognition -------------------------------------------------------------------------------------------------------


def choose(site: Site) -> Recognition:
    """The one trainer that fits: the certain one, or the only one. ConfigurationError with the candidates, or with what
    was examined."""
    found = recognised(site)
    candidates = [r for r in found if r.certain] or found
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        shown = "; ".join(f"{r.layout}: {r.why}" for r in candidates)
        raise ConfigurationError(
            f"several layouts fit: {shown}",
            where="trainer.layout",
            fix=f'set it to the right one, for example layout = "{candidates[0].layout}"',
        )
    raise ConfigurationError(
        f"no layout recognizes this trainer: {_examined(site)}",
        where="trainer.layout",
        fix=f"set it to one of {', '.join(all_trainers())} (docs/trainer.md describes each);"
        ' "custom" takes its rules from [checkpoints.custom]',
    )


def _examined(site: Site) -> str:
    command = f"the command runs {' '.join(site.command)[:120]!r}" if site.command else "there is no command"
    try:
        names = sorted(p.name for p in site.output_dir.iterdir())
    except OSError:
        return f"{command}, and {site.output_dir} does not exist or cannot be read"
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"{command}, and {site.output_dir} holds {shown or 'nothing'}"


def recognised(site: Site) -> list[Recognition]:
    """Every trainer with any evidence in the command or the directory. A directory that cannot be read is no
    evidence."""
    found = (recognise(trainer, site) for trainer in all_trainers().values())
    return [recognition for recognition in found if recognition is not None]


def recognise(trainer: Trainer, site: Site) -> Recognition | None:
    """Whether it is this trainer: by a certain sign of its command, else by what is in output_dir, else by an uncertain
    sign. A section ``[checkpoints.custom]`` is a decision of the operator."""
    if trainer.name == "custom":
        why = "the configuration has a [checkpoints.custom] section"
        return Recognition("custom", why, certain=True) if site.custom is not None else None
    name, command = trainer.name, command_of(site)
    return (
        trainer.command.recognised(name, command, certain=True)
        or _on_disk(trainer, site)
        or trainer.command.recognised(name, command, certain=False)
    )


def _on_disk(trainer: Trainer, site: Site) -> Recognition | None:
    layout = layout_of(trainer, site)
    try:
        tops = [layout.step_paths(step) for step in heapq.nlargest(3, layout.steps())]
        for sign in trainer.disk:
            if why := _why(sign, layout, [top for few in tops for top in few]):
                return Recognition(trainer.name, why, certain=sign.certain)
    except OSError:
        pass
    return None


def _why(sign: DiskSign, layout: Layout, tops: Iterable[Path]) -> str:
    """What the sign shows; empty: nothing."""
    if sign.exists:
        return next((f"{n} exists" for n in matching(listed(layout.output_dir, files_too=False), (sign.exists,))), "")
    for top in tops:
        names = _names_in(top) if sign.holds or sign.lacks else []
        found = [matching(names, globs) for globs in sign.holds]
        if all(found) and not matching(names, sign.lacks) and (not sign.beside or (top.parent / sign.beside).is_file()):
            what = f"contains {found[0][0]}" if found else f"is beside {sign.beside}" if sign.beside else "exists"
            return f"{top.name} {what}"
    return ""


def _names_in(top: Path) -> list[str]:
    """What is in a directory, and in the directories in it."""
    names = listed(top, files_too=True)
    return [*names, *(f"{name}/{inner}" for name in names for inner in listed(top / name, files_too=True))]


# -- can a restart resume? ---------------------------------------------------------------------------------------------

_OURS = ("trainer.resume_args", "trainer.command")
"""An error about these settings holds for every step; other errors can disappear with the first checkpoint."""
_STEP_LIKE = re.compile(r"[A-Za-z].*\d|\d+(?:\..*)?$")
"""A name that could be a step's."""


def concerns(settings: Settings) -> tuple[Concern, ...]:
    """Problems of the command or the directory that would make a restart fail or lose steps. Reads small files; can
    block. ConfigurationError as ``make_layout``."""
    site = site_of(settings)
    layout = layout_of(trainer_named(_chosen(settings, site)[0]), site)
    found = (*layout.trainer.command.concerns_of(command_of(site)), *_missing_rules(layout))
    if layout.trainer.facts.hook == "prime-rl":
        found += concerns_of_run(site)
    return (*found, *_unmatched(layout)) if layout.name == "custom" else found


def _missing_rules(layout: Layout) -> tuple[Concern, ...]:
    table = layout.table
    named = any(tracker.proves and not tracker.target for tracker in table.trackers)
    if table.require or table.last or named or table.hook:
        return ()
    what = (
        f"the table of layout {layout.name} names no file that a checkpoint must have and none that is written last: a"
        " part of the first save could be stored as a checkpoint"
    )
    fix = (
        'set require to the files of every save, such as ["model.pt", "optimizer.pt"], or last to the one that the'
        " trainer writes last"
    )
    return (Concern("checkpoints.custom", what, fix, certain=True),)


def _unmatched(layout: Layout) -> tuple[Concern, ...]:
    """Reports that nothing matches the operator's ``parts`` although a similar name exists."""
    places = (*layout.watch_roots(), layout.output_dir, layout.output_dir / "checkpoints")
    for folder in dict.fromkeys(() if layout.steps() else places):
        try:
            names = sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))
        except OSError:
            continue
        if like := [name for name in names if _STEP_LIKE.match(name)]:
            own = layout.site.custom.parts if layout.site.custom is not None else {}
            patterns = " or ".join(repr(path) for paths in own.values() for path in paths)
            what = f"nothing matches the pattern {patterns} of [checkpoints.custom] parts; found"
            fix = 'set parts to the name of a checkpoint, such as "checkpoints/ckpt_{step}" or "ckpt_{step}.pt"'
            return (Concern(PATTERN, f"{what} {', '.join(like[-3:])} in {folder}", fix),)
    return ()


def restart_concerns(settings: Settings, layout: Layout) -> tuple[Concern, ...]:
    """Problems that the layout finds in command and directory, and whether it knows how to pass a step. Reads small
    files; can block. Empty where podwatch has no command to start."""
    trainer = settings.trainer
    if not trainer.command:
        return ()
    try:
        found = concerns(settings)
    except (PodwatchError, OSError, ValueError):
        found = ()  # an unreadable or invalid path is no reason not to start
    try:
        made = layout.resume_command(trainer.command, 1, trainer.resume_args, {})
    except ConfigurationError as error:
        # sometimes only the first checkpoint shows prime-rl's version
        if error.where in _OURS and (layout.variant or layout.name != "prime-rl"):
            what = f"a restart cannot resume: {error.what}"
            return (*found, Concern("resume", what, f"{error.where}: {error.fix}", certain=True))
    except (PodwatchError, OSError, ValueError):
        return found  # this needs a checkpoint
    else:
        if made.argv == trainer.command and trainer.resume_args not in ("auto", "none"):
            what = "a restart cannot resume: trainer.resume_args adds nothing to the command"
            return (*found, Concern("resume", what, 'set it to a list such as ["--resume", "{checkpoint}"]', True))
    return found
