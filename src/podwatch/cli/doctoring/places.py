"""Directories, the disk, and room for the next save."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from podwatch.checkpoints.layouts import make_layout
from podwatch.cli.doctoring.common import Line, Sets, in_time, nearest
from podwatch.client.times import size
from podwatch.config.settings import Settings
from podwatch.daemon.paths import workspace_of
from podwatch.system.workspace import Workspace

LINKS_SHOWN = 4

KEEP_FLAGS = ("--ckpt.keep-last", "--ckpt.keep", "--trainer.ckpt.keep-last")
"""prime-rl's (facts/prime-rl.md section 2)."""


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
    """Can another user lead podwatch out of the run's directories, or take its own away?"""
    workspace = workspace_of(settings)
    if problem := in_time(workspace.problem):
        yield Line("directories", "fail", problem, "podwatch changes nothing until this is repaired")
        return
    links = in_time(lambda: _links(settings, workspace))
    for link in links[:LINKS_SHOWN]:
        text = f"{link} is a symbolic link: podwatch follows none, so it moves and uploads nothing behind it"
        yield Line("directories", "warn", text, "use a directory, or set trainer.checkpoint_dir to the link's target")
    if exposed := in_time(workspace.exposed):
        yield Line("directories", "warn", exposed, "or accept it: podwatch notices it")
    if not links and not exposed:
        yield Line("directories", "ok", f"{workspace.outside}: only podwatch can change it")


def _links(settings: Settings, workspace: Workspace) -> list[Path]:
    """Links on the way to what the layout reads and moves. A link that is moved itself is none of them."""
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
        # as the disk sensor: what statvfs says of the whole disk means nothing then, what lies there of ours does
        capacity = settings.disk.capacity
        free = max(0, min(free, capacity - sum(found.size_bytes for found in sets)))
    ratio = 1 - free / capacity if capacity else 0.0
    level = "warn" if ratio >= settings.disk.prune_above else "ok"
    fix = f"above {settings.disk.prune_above:.0%} podwatch prunes" if level == "warn" else ""
    yield Line("disk", level, f"{ratio:.0%} of {size(capacity)} used, {size(free)} free", fix)
    newest = newest_complete(sets)
    if newest is None:
        yield Line("disk", "ok", "the size of a save is not known yet")
        return
    last = newest.size_bytes
    need = int(last * settings.disk.margin)
    ours = sum(found.size_bytes for found in sets)
    if free + ours - last < need:
        others = max(0, capacity - free - ours)
        text = f"the disk ({size(capacity)}) holds one set only: a set is {size(last)}, with margin {size(need)}"
        text += f", and {size(others)} are taken by something else"
        yield Line("disk", "fail", text, "a save is written while the one before must stay: use a bigger disk")
        return
    yield from _peak(settings, last, free + ours)
    if free < need:
        text = f"the next save needs {size(need)} ({size(last)} and the margin), {size(free)} are free"
        yield Line("disk", "warn", text, "podwatch prunes before the save: see `podwatch prune --dry-run`")
    else:
        yield Line("disk", "ok", f"the next save needs {size(need)} with its margin, and {size(free)} are free")


def _peak(settings: Settings, last: int, room: int) -> Iterator[Line]:
    """Trainers delete the oldest after the new one is written: one set more than they keep."""
    from podwatch.checkpoints.layouts import argv

    kept = argv.positive(argv.flag_value(settings.trainer.command, KEEP_FLAGS))
    if kept is not None and (kept + 1) * last > room:
        text = f"the trainer keeps {kept} sets, so {kept + 1} lie here at the peak ({size((kept + 1) * last)})"
        text += f", and there is room for {size(room)}"
        yield Line("disk", "warn", text, "podwatch removes the oldest before each save; or let the trainer keep fewer")


def files(settings: Settings) -> Iterator[Line]:
    """What this filesystem tells about files that are being written."""
    from podwatch.checkpoints.capabilities import probe

    there = nearest(settings.trainer.output_dir.parent)
    found = in_time(lambda: probe(there))
    words = {True: "yes", False: "no", None: "unknown"}
    text = (
        f"{found.filesystem or 'an unknown filesystem'}: unwritten ranges can be seen: {words[found.holes]}, "
        f"writers (leases): {words[found.leases]}, events: {words[found.inotify]}"
    )
    yield Line("files", "ok", text + ("; quiet times are doubled" if found.slow else ""))
    if settings.checkpoints.leases and not found.leases:
        yield Line("files", "warn", "[checkpoints] leases has no effect here", "set it to false")
