"""The methods of the control socket. Each handler takes and returns JSON-safe dicts and raises PodwatchErrors."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from podwatch.daemon.loops import DaemonLoops
from podwatch.daemon.wiring import Components
from podwatch.domain.checkpoint import HeldAs, newest_complete
from podwatch.domain.errors import Busy, HostError, UsageError
from podwatch.domain.finding import counted
from podwatch.domain.mutation_guard import Mutation, MutationGuard
from podwatch.journal import Journal
from podwatch.recovery import quarantine
from podwatch.recovery.clean import Cleaned, request_clean
from podwatch.reporting.documents import (
    checkpoint_document,
    event_document,
    incident_document,
    inspection_document,
    remote_document,
)
from podwatch.reporting.view import DaemonView
from podwatch.retention.pruner import plan_document

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]

AT_ONCE = frozenset({"status", "events", "incidents", "shutdown", "preempt"})
"""Methods that run while podwatch is still starting."""
BEGIN_SECONDS = 20.0
"""How long the other methods wait for the end of the start: the client's deadline is 30 s."""


class Steering(Protocol):
    """The daemon as the handlers use it."""

    parts: Components
    rounds: DaemonLoops

    def view(self) -> DaemonView: ...

    def status(self) -> dict[str, Any]: ...

    def keep(self, task: "asyncio.Task[Any]") -> None: ...

    def reload(self) -> str: ...

    def leave(self, code: int) -> None: ...

    async def read_pins(self) -> None: ...


def make_handlers(daemon: Steering) -> Mapping[str, Handler]:
    """Method name -> coroutine."""
    parts, rounds = daemon.parts, daemon.rounds

    async def status(_: dict[str, Any]) -> dict[str, Any]:
        return daemon.status()

    async def start(params: dict[str, Any]) -> dict[str, Any]:
        step, fresh = _step(params), bool(params.get("fresh"))
        attach, beside = _pid(params, "attach"), _pid(params, "beside")
        started = await parts.recovery.requests.start(step=step, fresh=fresh, attach=attach, beside=beside)
        found = [{"pid": c.launcher.pid, "command": c.command, "reason": c.reason} for c in started.choose_from]
        if found:
            return {"message": started.message, "needs_choice": True, "candidates": found}
        return _told(started.message)

    async def restart(params: dict[str, Any]) -> dict[str, Any]:
        await parts.recovery.requests.restart(step=_step(params))
        return _told("restarting training")

    async def restart_plan(params: dict[str, Any]) -> dict[str, Any]:
        return dict(await parts.recovery.requests.dry_run(_step(params)))

    async def stop_training(params: dict[str, Any]) -> dict[str, Any]:
        after_save = bool(params.get("after_save"))
        await parts.recovery.requests.stop(after_save=after_save)
        if parts.recovery.handle is None:
            return {"message": "no training is running, and podwatch starts none until `podwatch start`"}
        if after_save:
            return _told("podwatch stops training after its next save (at once if no save can come)")
        return _told("stopping training (`podwatch start` starts it again)")

    async def checkpoints(_: dict[str, Any]) -> dict[str, Any]:
        await rounds.guarding.look()
        view = daemon.view()
        found, sending = parts.checkpoints.catalogue.sets, view.sync.uploading_step
        newest = newest_complete(found)
        held = {newest.step: ["newest complete"]} if newest is not None else {}
        for step in parts.recovery.state.protect:
            held.setdefault(step, []).append("a resume needs it")
        if sending is not None:
            held.setdefault(sending, []).append("uploading")
        published = await parts.run.journal.run(Journal.published)
        here = {(s.step, s.save_id) for s in found}
        return {
            "sets": [
                checkpoint_document(
                    s, stored=view.sync.stored, pins=view.pins, uploading_step=sending, held=held.get(s.step, ())
                )
                for s in found
            ],
            "remote": [remote_document(p, here) for p in published],
            "store_url": view.sync.store_url,
            "layout": parts.run.layout.name,
            "searched": [str(root) for root in parts.run.layout.watch_roots()],
            "capabilities": parts.checkpoints.capabilities.to_dict(),
        }

    async def pin(params: dict[str, Any]) -> dict[str, Any]:
        step = _needed_step(params)
        await parts.run.journal.run(Journal.pin, step, str(params.get("reason") or "by hand")[:200])
        await daemon.read_pins()
        return {
            "message": f"step {step} is pinned: podwatch never deletes its checkpoint, here or in the store",
            "step": step,
        }

    async def unpin(params: dict[str, Any]) -> dict[str, Any]:
        step = _needed_step(params)
        if step not in await parts.run.journal.run(Journal.pins):
            raise UsageError(f"step {step} is not pinned", fix="`podwatch checkpoints` shows what protects it")
        await parts.run.journal.run(Journal.unpin, step)
        await daemon.read_pins()
        return {"message": f"step {step} is no longer pinned", "step": step}

    async def verify(params: dict[str, Any]) -> dict[str, Any]:
        wanted = _step(params)
        # Without a step only complete ones: a checkpoint that is being written is not damaged.
        steps = [
            s.step for s in parts.checkpoints.catalogue.sets if s.step == wanted or (wanted is None and s.complete)
        ]
        if wanted is not None and not steps:
            raise UsageError(
                f"checkpoint of step {wanted} not found", fix="`podwatch checkpoints` lists the checkpoints"
            )
        answers = []
        for step in steps:
            try:
                looked = await parts.checkpoints.worker.call(parts.checkpoints.catalogue.inspect, step)
            except HostError:
                continue  # the trainer removed it since
            answers.append(inspection_document(step, looked.problems, looked.notes, looked.files))
        return {"steps": answers}

    async def sync(params: dict[str, Any]) -> dict[str, Any]:
        if reason := parts.run.guard.blocked_reason(Mutation.PUBLISH):
            raise HostError("podwatch uploads nothing now", where=reason, fix="`podwatch status` shows the fix")
        if parts.syncer is None:
            raise HostError("no store is configured", where="sync.store", fix='set it, for example "b2://my-bucket"')
        step = _step(params)
        for found in parts.checkpoints.catalogue.sets:
            if found.step == step and found.held:  # naming a held-back checkpoint releases it
                if found.earlier:
                    raise Busy(
                        f"step {step} belongs to an earlier branch of this run, which training has left",
                        where="sync",
                        fix=f"`podwatch restart --step {step}` returns to it; podwatch then uploads it",
                    )
                if found.held_as is HeldAs.IMPLAUSIBLE:
                    parts.checkpoints.implausible.release(found)
                else:
                    await parts.checkpoints.worker.call(parts.training.two_writers.release, found)
                parts.syncer.retry(found.step, found.save_id)
        task = asyncio.create_task(parts.syncer.sync_now(step))
        await asyncio.sleep(0)  # a permanent refusal fails in the first step of the task
        if params.get("wait") or task.done():
            await task
            state = parts.syncer.status()
            return {"message": f"step {state.last_step} is in the store", "step": state.last_step}
        daemon.keep(task)
        return {"message": "upload started; `podwatch status` shows its progress", "step": step}

    async def prune_plan(_: dict[str, Any]) -> dict[str, Any]:
        await rounds.guarding.look()
        return plan_document(rounds.pruner.plan())

    async def prune(_: dict[str, Any]) -> dict[str, Any]:
        await rounds.guarding.look()
        return plan_document(await rounds.pruner.prune_now(), done=True)

    async def quarantine_return(params: dict[str, Any]) -> dict[str, Any]:
        handle = parts.recovery.handle
        if handle is not None and await handle.exit_status() is None:
            raise Busy("training is running", where="quarantine", fix="run `podwatch stop-training` first")
        _may_move(parts.run.guard)
        back = await parts.deletion.worker.call(quarantine.give_back, parts.run.workspace, _whole(params, "id", None))
        parts.checkpoints.rescans.wake()
        return {
            "message": f"moved {counted(len(back), 'entry', 'entries')} back from quarantine",
            "paths": [str(p) for p in back],
        }

    async def clean(_: dict[str, Any]) -> dict[str, Any]:
        _may_move(parts.run.guard)
        cleaned = await request_clean(parts.recovery)
        parts.checkpoints.rescans.wake()
        return cleaned_document(cleaned, daemon=True)

    async def events(params: dict[str, Any]) -> dict[str, Any]:
        found = await parts.run.journal.run(
            Journal.events,
            after_id=_whole(params, "after_id", 0),
            since_wall=float(params.get("since_wall") or 0.0),
            limit=min(_whole(params, "limit", 1000), 10_000),
        )
        return {"events": [event_document(e) for e in found]}

    async def incidents(params: dict[str, Any]) -> dict[str, Any]:
        wanted = params.get("id")
        if wanted is None:
            found = await parts.run.journal.run(Journal.incidents, min(_whole(params, "limit", 50), 10_000))
        else:
            one = await parts.run.journal.run(Journal.incident, _whole(params, "id", None))
            if one is None:
                raise UsageError(f"incident {wanted} not found", fix="`podwatch incidents` lists them")
            found = [one]
        return {"incidents": [incident_document(i) for i in found]}

    async def reload(_: dict[str, Any]) -> dict[str, Any]:
        return {"message": daemon.reload()}

    async def shutdown(_: dict[str, Any]) -> dict[str, Any]:
        daemon.leave(0)
        return {"message": "podwatch exits; training continues, unguarded"}

    return {f.__name__: f for f in (
        status, start, restart, restart_plan, stop_training, checkpoints, verify, sync, prune_plan, prune,
        pin, unpin, quarantine_return, clean, events, incidents, reload, shutdown,
    )}  # fmt: skip


def once_begun(handlers: Mapping[str, Handler], begun: asyncio.Event) -> Mapping[str, Handler]:
    """The same handlers, but all except ``AT_ONCE`` wait until ``begun``: before that, podwatch has not read the state
    of the previous one, and would overwrite the request or act in parallel."""

    def waiting(handler: Handler) -> Handler:
        async def call(params: dict[str, Any]) -> dict[str, Any]:
            try:
                async with asyncio.timeout(BEGIN_SECONDS):
                    await begun.wait()
            except TimeoutError:
                raise Busy(
                    "podwatch is still starting: it examines the pod and its checkpoints",
                    fix="retry in a few seconds; `podwatch status` works already",
                ) from None
            return await handler(params)

        return call

    return {name: handler if name in AT_ONCE else waiting(handler) for name, handler in handlers.items()}


def _pid(params: dict[str, Any], name: str) -> int | None:
    value = params.get(name)
    if value is not None and type(value) is not int:
        raise UsageError(f"Invalid value for --{name}: {value!r} (expected a process id)")
    return value


def _may_move(guard: MutationGuard) -> None:
    if reason := guard.blocked_reason(Mutation.DELETE):
        raise Busy(
            "podwatch moves none of the trainer's files now", where=reason, fix="`podwatch status` shows the fix"
        )


def _step(params: Mapping[str, Any]) -> int | None:
    value = params.get("step")
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UsageError(f"Invalid value for step: {value!r} (expected a whole number, 0 or more)")
    return value


def _whole(params: Mapping[str, Any], name: str, default: int | None) -> int:
    """A row number or a count that fits SQLite. Raises UsageError for anything else."""
    value = params.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise UsageError(f"Invalid value for {name} (expected a whole number, 0 or more)", where="control socket")
    return value


def _needed_step(params: Mapping[str, Any]) -> int:
    step = _step(params)
    if step is None:
        raise UsageError("step not given", fix="add a step; `podwatch checkpoints` lists them")
    return step


def cleaned_document(cleaned: Cleaned, *, daemon: bool) -> dict[str, Any]:
    """The answer to `clean`. ``daemon``: a daemon runs and can start training."""
    if cleaned.number is None:
        said = "no files of an old run found"
    else:
        back = f"`podwatch quarantine return {cleaned.number}` moves them back"
        said = f"{counted(len(cleaned.paths), 'entry', 'entries')} moved to quarantine {cleaned.number} ({back})"
    follows = "podwatch now starts training from the beginning"
    if not (daemon and cleaned.starts):
        follows = "`podwatch start` starts training from the beginning"
    if not daemon:
        ways = "`podwatch run`" if cleaned.starts else "`podwatch run`, then `podwatch start`,"
        follows = f"{ways} starts training from the beginning"
    paths = [str(path) for path in cleaned.paths]
    return {"message": f"{said}; {follows}", "quarantine": cleaned.number, "paths": paths}


def _told(message: str) -> dict[str, Any]:
    """The answer to an accepted request whose operation has just started."""
    return {"message": f"{message}; `podwatch status` shows the progress"}
