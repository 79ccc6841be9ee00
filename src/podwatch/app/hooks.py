"""Joins the hooks to the daemon: what they get about a checkpoint, and the events that a kill kept from being
recorded. Imported only where hooks are configured.
"""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podwatch.checkpoints.layout import Layout
from podwatch.checkpoints.trainers import trainer_named
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.event import EventName
from podwatch.domain.finding import Severity
from podwatch.domain.snapshot import Desired
from podwatch.hooks.hook_runner import Desk, Hooks
from podwatch.hooks.start_child import problem_of
from podwatch.journal import Journal
from podwatch.system.blocking_calls import Worker

if TYPE_CHECKING:
    from podwatch.app.build import Components

FACTS_SECONDS = 10.0
"""For a few stats in the checkpoint's directory; a hook runs without the facts if the file system does not answer."""
EVENTS_LOOKED_AT = 5000


def facts_of(layout: Layout, found: CheckpointSet | None) -> dict[str, Any]:
    """What a hook gets about a checkpoint on this pod. Blocks: looks for directories.

    ``weights`` is the directory that vLLM or transformers can load, None if the checkpoint has none; ``convert`` is the
    command that makes one, if the layout knows it."""
    if found is None:
        return {}
    required = [part for part in found.parts if part.required] or list(found.parts)
    known = trainer_named(layout.name).weights
    paths = layout.step_paths(found.step)
    places = [paths[0] / place.replace("{step}", str(found.step)) for place in known.places] if paths else []
    weights = next((place for place in places if place.is_dir()), None)
    return {
        "checkpoint": required[0].path if required else None,
        "parts": {part.name: part.path for part in found.parts},
        "size_bytes": found.size_bytes,
        "weights": None if weights is None else str(Path(weights).resolve()),
        "convert": known.convert,
    }


async def checkpoint_facts(parts: "Components", worker: Worker, step: int | None) -> Mapping[str, Any]:
    """What a hook gets about the checkpoint of ``step``; empty if the disk does not answer."""
    found = next((one for one in parts.checkpoints.catalogue.sets if one.step == step), None)
    try:
        return await worker.call(facts_of, parts.run.layout, found, timeout=FACTS_SECONDS)
    except OSError:  # a timeout is an OSError
        return {}


def make_desk(parts: "Components", worker: Worker, config: Path | None) -> Desk:
    """What the commands of one worker share."""
    run, facts = parts.run, partial(checkpoint_facts, parts, worker)
    return Desk(parts.settings, run.journal, run.clock, run.emit, facts, run.paths.state, str(config or ""), worker)


async def make_hooks(parts: "Components", config: Path | None) -> Hooks:
    """All hooks, with what earlier podwatch processes left; runs none yet."""
    worker = Worker("hooks")
    for hook in parts.settings.hooks:
        what, fix = await worker.call(problem_of, hook, parts.settings, os.environ)
        if what:
            text = f"the hook {hook.name} cannot run: {what}. To fix it: {fix}"
            parts.bus.say(EventName.CONFIG_WARNING, text, Severity.WARNING)
    hooks = Hooks(make_desk(parts, worker, config))
    parts.checkpoints.readers.append(hooks)
    await hooks.load()
    return hooks


async def report_missed(parts: "Components") -> None:
    """Report the end of training if an earlier podwatch was killed before it could: hooks run for it at least once, and
    they read events."""
    events = await parts.run.journal.run(Journal.events, limit=EVENTS_LOOKED_AT)
    oldest = events[0].wall if events else parts.run.clock.wall()
    run = parts.run.file.current
    if run.desired is Desired.FINISHED and run.desired_wall > oldest:
        ended = [e for e in events if e.name is EventName.TRAINER_FINISHED and e.wall >= run.desired_wall - 1.0]
        if not ended and parts.recovery.handle is None:
            text = "training is finished (podwatch was interrupted before it could report this)"
            parts.bus.say(EventName.TRAINER_FINISHED, text)
