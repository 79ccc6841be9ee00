"""Check the directories, the disk, and the space for the next save."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from podwatch.app.paths_and_run_lock import workspace_of
from podwatch.checkpoints.trainers import make_layout
from podwatch.cli.check.report import Level, Line, Sets, nearest
from podwatch.config.settings import Settings
from podwatch.domain.times import size
from podwatch.system.blocking_calls import in_time
from podwatch.system.own_directories import Workspace

LINKS_SHOWN = 4


def output_dir(settings: Settings) -> Iterator[Line]:
    path = settings.trainer.output_dir
    there = nearest(path)
    if not there.is_dir():
        yield Line("output_dir", "fail", f"{there} is not a directory", "correct trainer.output_dir")
    elif not os.access(there, os.W_OK | os.X_OK):
        yield Line("output_dir", "fail", f"{there} is not writable", "run podwatch as its owner, or as root")
    elif there != path:
        yield Line("output_dir", "ok", f"{path} does not exist yet; {there} is writable")
    else:
        yield Line("output_dir", "ok", str(path))


def own_directory(settings: Settings) -> Iterator[Line]:
    """Whether other users can redirect podwatch out of the run's directories, or replace its own directory."""
    workspace = workspace_of(settings)
    if problem := in_time(workspace.problem):
        yield Line("directories", "fail", problem, "fix this; until then podwatch moves and deletes nothing")
        return
    text, fix = in_time(lambda: workspace.foreign_owners(_paths(settings)))
    if text:
        yield Line("directories", "fail", text, fix)
    links = in_time(lambda: _links(settings, workspace))
    for link in links[:LINKS_SHOWN]:
        text = f"{link} is a symbolic link: podwatch does not follow it, so it uploads nothing from its target"
        yield Line("directories", "warn", text, "use a directory, or set trainer.checkpoint_dir to the link's target")
    if exposed := in_time(workspace.exposed):
        yield Line("directories", "warn", exposed, "or accept it: podwatch detects a replaced directory")
    if not links and not exposed and not text:
        yield Line("directories", "ok", f"{workspace.outside}: only podwatch can change it")


def _paths(settings: Settings) -> list[Path]:
    """What the layout reads and moves."""
    layout = make_layout(settings)
    return [*layout.watch_roots(), *layout.ahead_of(None)]


def _links(settings: Settings, workspace: Workspace) -> list[Path]:
    """Symbolic links among the parents of the paths that the layout reads and moves."""
    layout = make_layout(settings)
    found: dict[Path, None] = {}
    for path in (*layout.watch_roots(), *(p.parent for p in layout.ahead_of(None))):
        root = workspace.root_of(path)
        for way in (path, *path.parents):
            if root is None or root not in way.parents:
                break
            if way.is_symlink():
                found[way] = None
    return list(found)


def state_dir(settings: Settings) -> Iterator[Line]:
    path = settings.state_dir
    there = nearest(path)
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        yield Line("state_dir", "ok", str(path))
    else:
        yield Line("state_dir", "fail", f"{there} is not writable", "set state_dir to a directory on local disk")


def disk(settings: Settings, all_sets: Sets) -> Iterator[Line]:
    from podwatch.domain.checkpoint import newest_complete

    there = nearest(settings.trainer.checkpoint_dir or settings.trainer.output_dir)
    usage = in_time(lambda: shutil.disk_usage(there))
    sets = all_sets()
    capacity, free = usage.total, usage.free
    if settings.disk.capacity:
        # like the disk sensor: statvfs shows the host's disk then, so only our own files count
        capacity = settings.disk.capacity
        free = max(0, min(free, capacity - sum(found.size_bytes for found in sets)))
    ratio = 1 - free / capacity if capacity else 0.0
    level: Level = "warn" if ratio >= settings.disk.prune_above else "ok"
    fix = f"nothing: above {settings.disk.prune_above:.0%} podwatch deletes old checkpoints" if level == "warn" else ""
    yield Line("disk", level, f"{ratio:.0%} of {size(capacity)} used, {size(free)} free", fix)
    newest = newest_complete(sets)
    if newest is None:
        yield Line("disk", "ok", "the size of a checkpoint is not known yet")
        return
    last = newest.size_bytes
    need = int(last * settings.disk.margin)
    ours = sum(found.size_bytes for found in sets)
    if free + ours - last < need:
        others = max(0, capacity - free - ours)
        text = f"the disk ({size(capacity)}) has space for one checkpoint only: a checkpoint is {size(last)}"
        text += f", with margin {size(need)}, and other files take {size(others)}"
        fix = "use a bigger disk: podwatch must keep the last checkpoint until the next one is complete"
        yield Line("disk", "fail", text, fix)
        return
    yield from _peak(settings, last, free + ours)
    if free < need:
        text = f"the next save needs {size(need)} ({size(last)} and the margin), but only {size(free)} are free"
        fix = "nothing: podwatch deletes old checkpoints before the save (see `podwatch prune --dry-run`)"
        yield Line("disk", "warn", text, fix)
    else:
        yield Line("disk", "ok", f"the next save needs {size(need)} with its margin; {size(free)} are free")


def _peak(settings: Settings, last: int, room: int) -> Iterator[Line]:
    """The peak: trainers delete the oldest checkpoint after the new one, so one more exists than they keep."""
    from podwatch.checkpoints.command_table import command_of
    from podwatch.checkpoints.trainer import all_trainers
    from podwatch.checkpoints.trainers import site_of

    names = [name for trainer in all_trainers().values() for name in trainer.command.keep]
    kept = command_of(site_of(settings)).number(*names)
    if kept is not None and (kept + 1) * last > room:
        text = f"the trainer keeps {kept} checkpoints, so up to {kept + 1} exist ({size((kept + 1) * last)})"
        text += f", but there is space for {size(room)} only"
        yield Line(
            "disk", "warn", text, "let the trainer keep fewer, or let podwatch delete the oldest before each save"
        )
