"""Everything by which podwatch changes the trainer's directories, or its own beside them: each on a fresh ``Site``."""

import os
from collections.abc import Callable
from pathlib import Path

from podwatch.checkpoints.known_checkpoints import SetContents
from podwatch.checkpoints.layouts.base import PartDir, PartFiles, Tracker
from podwatch.checkpoints.layouts.write_trackers import repair
from podwatch.checkpoints.settle_time import probe
from podwatch.domain.checkpoint import CheckpointSet, Completeness, FileEntry
from podwatch.domain.run import IntentKind, Lineage, RunRecord
from podwatch.journal import load_run_record, save_run_record
from podwatch.policy.local_retention import Removal, RemovalKind, RemovalPlan, Trigger
from podwatch.recovery import quarantine
from podwatch.retention.list_trash_and_quarantine import SetAsideUsage
from podwatch.retention.remove_checkpoints import Remover
from podwatch.sync.restore.stage_and_put_in_place import StagingArea
from podwatch.sync.upload.keep_files_until_sent import Holder
from podwatch.system.clock import SystemClock
from tests.paths.hostile import Operation, Site, T


def _ahead(site: Site) -> tuple[Path, ...]:
    return (site.out / "checkpoints" / "step_9", site.out / "rollouts" / "step_9")


def _move(site: Site) -> None:
    quarantine.carry_out(site.workspace, site.intent(*_ahead(site)))


def _remover(site: Site) -> Remover:
    return Remover(site.workspace, site.journal, SystemClock(), site.events.append)


def _remove(site: Site) -> None:
    plan = RemovalPlan((Removal(RemovalKind.STORED_SET, 1, "test", 9),), (), Trigger.USAGE, 1, 0, False)
    _remover(site).carry_out(plan, lambda _: _ahead(site))


def _half_removed(site: Site) -> None:
    """A podwatch that was killed between two renames, and a full trash."""
    first, second = _ahead(site)
    rows = [[str(p), p.stat().st_dev, p.stat().st_ino] for p in (first, second)]
    intent = site.journal.open_intent(IntentKind.PRUNE, {"kind": "stored-set", "step": 9, "paths": rows})
    trash = site.workspace.probe().trash
    first.rename(trash / f"{intent.id}.9.0")


def _restore(step: int, to: str = "", below: str = "checkpoints") -> Callable[[Site], None]:
    def act(site: Site) -> None:
        placer = StagingArea(site.workspace, site.home / to if to else None, (T, T))
        target = site.home / to / "checkpoint" if to else site.out / below / f"step_{step}"
        name = f"restore-{step}-save"
        with placer.alone():
            placer.forget_others(name)
            places = placer.homes({"checkpoint": target}, frozenset())
            staged = places["checkpoint"].home / name / "checkpoint"
            placer.tree.make(staged)
            placer.tree.write_as(staged / "model.bin", b"restored", 0o644, (T, T))
            with placer.tree.directory(staged) as fd:
                os.fchown(fd, T, T)
            placer.put(places["checkpoint"], name, step, "line")
            placer.clean(places, name)

    return act


def _trackers(site: Site) -> None:
    latest, link = site.out / "latest", site.out / "checkpoints" / "step_latest"
    repair([Tracker(latest, content=b"5"), Tracker(link, target="step_5")], site.workspace.tree)


_SETS: dict[Path, SetContents] = {}


def _judged(site: Site) -> SetContents:
    path = site.out / "checkpoints" / "step_9"
    files = []
    for name in ("DONE", "model.bin"):
        s = (path / name).stat()
        files.append(FileEntry(name, "checkpoint", s.st_size, s.st_mtime_ns, s.st_mode, s.st_ino, s.st_dev))
    found = CheckpointSet(9, "custom", Completeness.COMPLETE, (), 1, 2, 1.0, "save")
    part = PartFiles(PartDir("checkpoint", path, True), True, tuple(files))
    return SetContents(found, tuple(files), (), (part,))


def _hold(site: Site) -> None:
    holder = Holder(site.workspace, site.journal, 0.0)
    held = holder.hold(_SETS[site.base])
    if held is not None:
        holder.unchanged(held)
        holder.cramped(held)
        holder.release(held)
    holder.take_over(None)


def _record(site: Site) -> None:
    save_run_record(site.workspace, RunRecord("run", Lineage("line")))
    load_run_record(site.workspace)


def _begin(site: Site) -> None:
    """What a podwatch does before its first look."""
    found = site.workspace.probe()
    quarantine.make_spare(found)
    probe(found.outside, found.tree)
    found.exposed()


def _look(site: Site) -> None:
    SetAsideUsage(site.workspace, lambda _: [(9, p) for p in _ahead(site)], keep_seconds=1.0).look(0.0, verified=99)
    quarantine.listing(site.workspace)
    quarantine.free_number(site.workspace)


OPERATIONS = {
    "begin": Operation(_begin),
    "record": Operation(_record),
    "quarantine": Operation(_move),
    "return": Operation(lambda site: quarantine.give_back(site.workspace, 7), before=_move),
    "remove": Operation(_remove),
    "sweep": Operation(lambda site: _remover(site).sweep_trash(), before=_half_removed),
    "restore": Operation(_restore(7)),
    "restore deep": Operation(_restore(7, below="run/default/checkpoints")),
    "restore over": Operation(_restore(9)),
    "restore to": Operation(_restore(9, to="to")),
    "trackers": Operation(_trackers),
    "hold": Operation(_hold, before=lambda site: _SETS.update({site.base: _judged(site)})),
    "look": Operation(_look, before=_move),
}
