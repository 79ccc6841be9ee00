"""Joins the hooks to the daemon: what they get about a checkpoint, and the events that a kill kept from being
recorded. Imported only where hooks are configured.
"""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from podwatch.app.components import Components
from podwatch.app.host_and_endpoints import Host
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


async def checkpoint_facts(parts: Components, worker: Worker, step: int | None) -> Mapping[str, Any]:
    """What a hook gets about the checkpoint of ``step``; empty if the disk does not answer."""
    found = next((one for one in parts.checkpoints.catalogue.sets if one.step == step), None)
    try:
        return await worker.call(facts_of, parts.run.layout, found, timeout=FACTS_SECONDS)
    except OSError:  # a timeout is an OSError
        return {}


async def make_hooks(parts: Components, host: Host, config: Path | None) -> Hooks:
    """All hooks, with what earlier podwatch processes left; runs none yet."""
    worker = Worker("hooks")
    desk = Desk(
        parts.settings,
        host.journal,
        host.clock,
        host.bus,
        partial(checkpoint_facts, parts, worker),
        parts.run.paths.state,
        str(config or ""),
        worker,
    )
    for hook in parts.settings.hooks:
        what, fix = await worker.call(problem_of, hook, parts.settings, os.environ)
        if what:
            text = f"the hook {hook.name} cannot run: {what}. To fix it: {fix}"
            host.bus.say(EventName.CONFIG_WARNING, text, Severity.WARNING)
    hooks = Hooks(desk)
    parts.checkpoints.readers.append(hooks)
    await hooks.load()
    return hooks


async def report_missed(parts: Components, host: Host) -> None:
    """Report the end of training if an earlier podwatch was killed before it could: hooks run for it at least once, and
    they read events."""
    journal = host.journal
    events = await journal.run(Journal.events, limit=EVENTS_LOOKED_AT)
    oldest = events[0].wall if events else host.clock.wall()
    run = parts.run.file.current
    if run.desired is Desired.FINISHED and run.desired_wall > oldest:
        ended = [e for e in events if e.name is EventName.TRAINER_FINISHED and e.wall >= run.desired_wall - 1.0]
        if not ended and parts.recovery.handle is None:
            text = "training is finished (podwatch was interrupted before it could report this)"
            host.bus.say(EventName.TRAINER_FINISHED, text)
