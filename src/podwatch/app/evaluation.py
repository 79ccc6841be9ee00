"""Joins the evaluations to the daemon: checkpoints here and in the store, disk space and pins. Imported only
where ``[evaluation] command`` is configured."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from podwatch.app.build import Components, make_restore
from podwatch.app.hooks import FACTS_SECONDS, facts_of, make_desk
from podwatch.checkpoints.trainers import trainer_named
from podwatch.domain.checkpoint import Completeness
from podwatch.domain.errors import HostError, PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import Severity
from podwatch.domain.run_state import RunState
from podwatch.domain.snapshot import Desired
from podwatch.hooks.evaluation import Evaluations, Room
from podwatch.hooks.evaluation_files import place_of
from podwatch.hooks.evaluations_due import BEST_PIN, Result, Target
from podwatch.hooks.evaluations_in_one_stop import Batch, NoRoom
from podwatch.hooks.start_child import problem_of
from podwatch.store.restore.thread import RestoreThread
from podwatch.system.blocking_calls import Worker

DISK_SECONDS: Final = 10.0


class PodSite:
    """Implements ``hooks.evaluation.Site``. ``worker`` looks at the disk."""

    def __init__(self, parts: Components, place: Path, restore: RestoreThread | None) -> None:
        self._parts, self._place = parts, place
        self._restore, self._worker = restore, Worker("evaluation")

    async def here(self, target: Target) -> tuple[str, Mapping[str, Any]] | None:
        sets = self._parts.checkpoints.catalogue.sets
        found = next((s for s in sets if s.step == target.step and s.complete), None)
        if found is None or target.save_id not in ("", found.save_id):
            return None
        layout = self._parts.run.layout
        about = await self._worker.call(facts_of, layout, found, timeout=FACTS_SECONDS)
        return found.save_id, {**about, "layout": layout.name, "note": trainer_named(layout.name).weights.note}

    async def fetch(self, step: int, to: Path) -> tuple[str, Mapping[str, Any]]:
        restore, layout = self._restore, self._parts.run.layout
        if restore is None:
            raise HostError(f"the checkpoint of step {step} is not on this pod, and no store is configured")
        await self._room_for(step, to)
        report = await restore.fetch_to(to, step)
        parts = {Path(path).name: path for path in (*report.parts, *report.exports.parts)}
        known = trainer_named(layout.name).weights
        base = report.parts[0] if report.parts else ""
        inside = [Path(base) / p.replace("{step}", str(step)) for p in known.places if base and not p.startswith("..")]
        places = [Path(path) for name, path in parts.items() if name == "weights"] + inside
        weights = next((place for place in places if place.is_dir()), None)
        return report.save_id, {
            "checkpoint": base,
            "parts": parts,
            "size_bytes": report.total_bytes,
            "weights": None if weights is None else str(weights),
            "convert": known.convert,
            "layout": layout.name,
            "note": known.note,
        }

    async def _room_for(self, step: int, to: Path) -> None:
        """Raises HostError if the stored checkpoint does not fit besides the reserve."""
        backup = self._parts.backup
        saves = () if backup is None else backup.status().checkpoints
        size = max((s.total_bytes for s in saves if s.step == step), default=0)
        free = await self._worker.call(_free, to, timeout=DISK_SECONDS)
        if free is not None and free < size + self._parts.settings.evaluation.reserve:
            gb = f"{free / 1e9:.1f} GB are free, the checkpoint needs {size / 1e9:.1f} GB"
            fix = "set [evaluation] dir to a larger disk"
            raise NoRoom(f"no space to fetch step {step} from the store: {gb}", where=str(to), fix=fix)

    def local(self) -> Sequence[tuple[int, str]]:
        return [(s.step, s.save_id) for s in self._parts.checkpoints.catalogue.sets if s.complete]

    def stored(self) -> Sequence[tuple[int, str]]:
        backup = self._parts.backup
        saves = () if backup is None else backup.status().checkpoints
        return sorted((save.step, save.here or save.save_id) for save in saves if save.whole)

    async def room(self) -> Room:
        rooms = []
        for place, needed in self._to_keep_free().items():
            try:
                free = await self._worker.call(_free, Path(place), timeout=DISK_SECONDS)
            except OSError:  # a timeout is an OSError
                continue
            if free is not None:
                rooms.append(Room(free, needed))
        unknown = Room(None, self._parts.settings.evaluation.reserve)
        return min(rooms, key=lambda r: (r.free or 0) - r.needed, default=unknown)

    async def newest(self) -> int | None:
        sets = await self._parts.checkpoints.rescans.rescan()
        open_or_whole = (Completeness.WRITING, Completeness.COMPLETE)
        return max((s.step for s in sets if s.completeness in open_or_whole and not s.held), default=None)

    def _to_keep_free(self) -> Mapping[str, int]:
        """Path -> bytes that must stay free on its file system, as far as podwatch knows now."""
        settings = self._parts.settings
        reserve, save = settings.evaluation.reserve, self._parts.pruner.next_save_bytes or 0
        places = (self._place, self._parts.run.paths.state)
        return {**{str(place): reserve for place in places}, str(settings.trainer.output_dir): reserve + save}

    @property
    def desired(self) -> Desired:
        recovery = self._parts.recovery
        return recovery.desired if recovery.requests.idle else Desired.RUNNING

    def stop_refused(self) -> str:
        return self._parts.recovery.requests.why_no_evaluation()

    async def training_gpus(self) -> str | None:
        build, trainer = self._parts.training.environment.build, self._parts.settings.trainer
        environment = await self._worker.call(build, trainer, timeout=DISK_SECONDS)
        return environment.get("CUDA_VISIBLE_DEVICES")

    async def with_training_stopped(self, batch: Batch) -> tuple[bool, str]:
        outcome = await self._parts.recovery.requests.evaluate(batch)
        return outcome.stopped, outcome.why_not

    async def keep_best(self, result: Result | None, text: str) -> None:
        def kept(run: RunState) -> RunState:
            ours = {step for step, reason in run.pins.items() if reason.startswith(BEST_PIN)}
            only = run.unpinned(*ours)
            return only if result is None or result.step in only.pins else only.pinned(result.step, text)

        await self._parts.run.file.edit(kept)


def _free(path: Path) -> int | None:
    """Free bytes of the file system of ``path``, or of its first parent that exists."""
    for place in (path, *path.parents):
        with contextlib.suppress(FileNotFoundError):
            found = os.statvfs(place)
            return found.f_bavail * found.f_frsize
    return None


async def make_evaluations(parts: Components, config: Path | None) -> Evaluations:
    """With what earlier podwatch processes left; evaluates nothing yet."""
    settings, worker, run = parts.settings, Worker("evaluations"), parts.run
    restore = None
    if parts.backup is not None:
        restore = make_restore(settings, run, parts.backup, "evaluation fetch")
    place = place_of(settings.evaluation, run.paths.state, settings.run_id)
    what, fix = await worker.call(problem_of, settings.evaluation.as_hook(), settings, os.environ)
    if what:
        parts.bus.say(EventName.CONFIG_WARNING, f"evaluations cannot run: {what}. To fix it: {fix}", Severity.WARNING)
    evaluations = Evaluations(make_desk(parts, worker, config), PodSite(parts, place, restore))
    parts.checkpoints.readers.append(evaluations)
    with contextlib.suppress(PodwatchError):  # the journal's own finding reports it
        await evaluations.load()
    return evaluations
