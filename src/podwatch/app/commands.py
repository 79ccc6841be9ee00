"""The methods of the control socket. Each takes and returns JSON-safe dicts and raises PodwatchErrors."""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from podwatch.api.control_socket import Handler
from podwatch.app.pause import MOST_SECONDS, Maintenance, described
from podwatch.app.settings_in_force import Reload
from podwatch.app.status_view import StatusSource
from podwatch.disk.explain import plan_document
from podwatch.domain.checkpoint import newest_complete
from podwatch.domain.document import of
from podwatch.domain.errors import Busy, HostError, UsageError
from podwatch.domain.finding import counted
from podwatch.domain.run import Mutation, MutationGuard
from podwatch.domain.status_document import PauseDocument
from podwatch.journal import Journal
from podwatch.recovery import quarantine
from podwatch.recovery.perform import Cleaned
from podwatch.report.json_documents import (
    checkpoint_document,
    event_document,
    incident_document,
    inventory_document,
)
from podwatch.report.status import build_status

if TYPE_CHECKING:
    from podwatch.app.build import Components
    from podwatch.hooks.evaluation import Evaluations

AT_ONCE = frozenset({"status", "events", "incidents", "shutdown", "preempt"})
"""Methods that run while podwatch is still starting."""
BEGIN_SECONDS = 20.0
"""How long the other methods wait for the end of the start: the client's deadline is 30 s."""


class Commands:
    """One method for each method of the control socket; ``table`` lists them. They work only after ``begun``, except
    those of ``AT_ONCE``: before that, podwatch has not read the state of the previous one, and would overwrite the
    request or act in parallel."""

    def __init__(
        self,
        parts: "Components",
        status: StatusSource,
        maintenance: Maintenance,
        reload: Reload,
        evaluations: "Evaluations | None" = None,
    ) -> None:
        self._parts, self._status, self._maintenance = parts, status, maintenance
        self._reload, self._evaluations = reload, evaluations
        self.begun = asyncio.Event()

    def table(self) -> Mapping[str, Handler]:
        """Method name -> coroutine."""
        methods = (
            self.status, self.start, self.restart, self.restart_plan, self.stop_training, self.checkpoints,
            self.sync, self.prune_plan, self.prune, self.pin, self.unpin, self.quarantine_return, self.clean,
            self.events, self.incidents, self.reload, self.shutdown, self.pause, self.unpause, self.preempt,
            self.evaluate,
        )  # fmt: skip
        named = {method.__name__: method for method in methods}
        return {name: method if name in AT_ONCE else self._once_begun(method) for name, method in named.items()}

    def _once_begun(self, method: Handler) -> Handler:
        async def call(params: dict[str, Any]) -> dict[str, Any]:
            try:
                async with asyncio.timeout(BEGIN_SECONDS):
                    await self.begun.wait()
            except TimeoutError:
                raise Busy(
                    "podwatch is still starting: it examines the pod and its checkpoints",
                    fix="retry in a few seconds; `podwatch status` works already",
                ) from None
            return await method(params)

        return call

    async def status(self, _: dict[str, Any]) -> dict[str, Any]:
        return build_status(self._status.view())

    async def start(self, params: dict[str, Any]) -> dict[str, Any]:
        step, fresh = _step(params), bool(params.get("fresh"))
        attach, ignore = _pid(params, "attach"), _pid(params, "ignore")
        started = await self._parts.recovery.requests.start(step=step, fresh=fresh, attach=attach, ignore=ignore)
        found = [{"pid": c.launcher.pid, "command": c.command, "reason": c.reason} for c in started.choose_from]
        if found:
            return {"message": started.message, "needs_choice": True, "candidates": found}
        return _accepted(started.message)

    async def restart(self, params: dict[str, Any]) -> dict[str, Any]:
        await self._parts.recovery.requests.restart(step=_step(params))
        return _accepted("restarting training")

    async def restart_plan(self, params: dict[str, Any]) -> dict[str, Any]:
        return dict(await self._parts.recovery.requests.dry_run(_step(params)))

    async def stop_training(self, params: dict[str, Any]) -> dict[str, Any]:
        after_save = bool(params.get("after_save"))
        await self._parts.recovery.requests.stop(after_save=after_save)
        if self._parts.recovery.handle is None and not self._parts.recovery.busy:
            return {"message": "no training is running, and podwatch starts none until `podwatch start`"}
        if after_save:
            return _accepted("podwatch stops training after its next save (at once if no save can come)")
        return _accepted("stopping training (`podwatch start` starts it again)")

    async def checkpoints(self, _: dict[str, Any]) -> dict[str, Any]:
        await self._parts.checkpoints.rescans.rescan()
        view = self._status.view()
        found, sending = self._parts.checkpoints.catalogue.sets, view.sync.uploading_step
        newest = newest_complete(found)
        held = {newest.step: ["newest complete"]} if newest is not None else {}
        for step in self._parts.recovery.state.protect:
            held.setdefault(step, []).append("a resume needs it")
        if sending is not None:
            held.setdefault(sending, []).append("uploading")
        return {
            "sets": [
                checkpoint_document(
                    s, stored=view.sync.stored, pins=view.facts.pins, uploading_step=sending, held=held.get(s.step, ())
                ).to_json()
                for s in found
            ],
            "remote": [inventory_document(save).to_json() for save in view.sync.checkpoints],
            "store_url": view.sync.store_url,
            "layout": self._parts.run.layout.name,
            "searched": [str(root) for root in self._parts.run.layout.watch_roots()],
            "capabilities": self._parts.checkpoints.capabilities.to_json(),
        }

    async def pin(self, params: dict[str, Any]) -> dict[str, Any]:
        step = _needed_step(params)
        reason = str(params.get("reason") or "by hand")[:200]
        await self._parts.run.file.edit(lambda run: run.pinned(step, reason))
        return {
            "message": f"step {step} is pinned: podwatch never deletes its checkpoint, here or in the store",
            "step": step,
        }

    async def unpin(self, params: dict[str, Any]) -> dict[str, Any]:
        step = _needed_step(params)
        if step not in self._parts.run.file.current.pins:
            raise UsageError(f"step {step} is not pinned", fix="`podwatch checkpoints` shows what protects it")
        await self._parts.run.file.edit(lambda run: run.unpinned(step))
        return {"message": f"step {step} is no longer pinned", "step": step}

    async def sync(self, params: dict[str, Any]) -> dict[str, Any]:
        if reason := self._parts.run.guard.blocked_reason(Mutation.PUBLISH):
            raise HostError("podwatch uploads nothing now", where=reason, fix="`podwatch status` shows the fix")
        if self._parts.backup is None:
            raise HostError("no store is configured", where="sync.store", fix='set it, for example "b2://my-bucket"')
        step = _step(params)
        for found in self._parts.checkpoints.catalogue.sets:
            if found.step == step and found.held:  # naming a held-back checkpoint releases it
                if found.earlier:
                    raise Busy(
                        f"step {step} belongs to an earlier branch of this run, which training has left",
                        where="sync",
                        fix=f"`podwatch restart --step {step}` returns to it; podwatch then uploads it",
                    )
                await self._parts.checkpoints.worker.call(self._parts.checkpoints.catalogue.release, found)
                self._parts.backup.retry(found.step, found.save_id)
        task = asyncio.create_task(self._parts.backup.sync_now(step))
        await asyncio.sleep(0)  # a permanent refusal fails in the first step of the task
        if params.get("wait") or task.done():
            await task
            stored = step if step is not None else self._parts.backup.status().last_step
            return {"message": f"step {stored} is in the store", "step": stored}
        self._parts.foundation.tasks.keep(task)
        return {"message": "upload started; `podwatch status` shows its progress", "step": step}

    async def prune_plan(self, _: dict[str, Any]) -> dict[str, Any]:
        await self._parts.checkpoints.rescans.rescan()
        pruner = self._parts.pruner
        return plan_document(pruner.plan(), waits_for=pruner.waits_for)

    async def prune(self, _: dict[str, Any]) -> dict[str, Any]:
        await self._parts.checkpoints.rescans.rescan()
        return plan_document(await self._parts.pruner.prune_now(), done=True)

    async def quarantine_return(self, params: dict[str, Any]) -> dict[str, Any]:
        handle = self._parts.recovery.handle
        if handle is not None and await handle.exit_status() is None:
            raise Busy("training is running", where="quarantine", fix="run `podwatch stop-training` first")
        _may_move(self._parts.run.guard)
        workspace, number = self._parts.run.workspace, _whole(params, "id", None)
        back = await self._parts.checkpoints.removals.call(quarantine.give_back, workspace, number)
        self._parts.checkpoints.rescans.wake()
        return {
            "message": f"moved {counted(len(back), 'entry', 'entries')} back from quarantine",
            "paths": [str(p) for p in back],
        }

    async def clean(self, _: dict[str, Any]) -> dict[str, Any]:
        _may_move(self._parts.run.guard)
        cleaned = await self._parts.recovery.requests.clean()
        self._parts.checkpoints.rescans.wake()
        return cleaned_document(cleaned, daemon=True)

    async def events(self, params: dict[str, Any]) -> dict[str, Any]:
        found = await self._parts.run.journal.run(
            Journal.events,
            after_id=_whole(params, "after_id", 0),
            since_wall=float(params.get("since_wall") or 0.0),
            limit=min(_whole(params, "limit", 1000), 10_000),
        )
        return {"events": [event_document(e) for e in found]}

    async def incidents(self, params: dict[str, Any]) -> dict[str, Any]:
        wanted = params.get("id")
        if wanted is None:
            found = await self._parts.run.journal.run(Journal.incidents, min(_whole(params, "limit", 50), 10_000))
        else:
            one = await self._parts.run.journal.run(Journal.incident, _whole(params, "id", None))
            if one is None:
                raise UsageError(f"incident {wanted} not found", fix="`podwatch incidents` lists them")
            found = [one]
        account = self._status.view().account
        return {"incidents": [incident_document(i, account).to_json() for i in found]}

    async def reload(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"message": await self._reload.now()}

    async def shutdown(self, _: dict[str, Any]) -> dict[str, Any]:
        self._parts.exit.leave(0)
        return {"message": "podwatch exits; training continues, unguarded"}

    async def evaluate(self, params: dict[str, Any]) -> dict[str, Any]:
        if self._evaluations is None:
            fix = "set [evaluation] command and restart podwatch (docs/hooks.md)"
            raise UsageError("no evaluation is configured", where="[evaluation]", fix=fix)
        steps = params.get("steps")
        if steps is not None:
            steps = [_needed_step({"step": step}) for step in steps if isinstance(steps, list)]
        targets = await self._evaluations.request(steps)
        text = ", ".join(str(t.step) for t in targets)
        when = f"{self._evaluations.when}; " if self._evaluations.when else ""
        message = f"requested: the evaluation of step {text}; {when}`podwatch eval` shows the results"
        return {"message": message, "steps": [t.step for t in targets]}

    async def pause(self, params: dict[str, Any]) -> dict[str, Any]:
        seconds = params.get("seconds")
        if seconds is not None and (type(seconds) not in (int, float) or not 0 < seconds <= MOST_SECONDS):
            raise UsageError(
                f"Invalid value for the pause: {seconds!r} s (expected at most 30 days)",
                fix="omit the time for a pause without end",
            )
        busy = "; a stop or a start that has begun is finished first" if self._parts.recovery.state.acting else ""
        text = {name: str(params.get(name) or "")[:200] for name in ("by", "reason")}
        begun = await self._maintenance.begin(seconds, **text)
        message = f"{described(begun)}: podwatch stops and starts no training{busy}"
        return {"message": message, "pause": of(PauseDocument, begun).to_json()}

    async def unpause(self, _: dict[str, Any]) -> dict[str, Any]:
        was = await self._maintenance.end("unpause")
        return {"message": "podwatch acts again" if was else "podwatch was not paused", "pause": None}

    async def preempt(self, params: dict[str, Any]) -> dict[str, Any]:
        by = str(params.get("by") or "")[:100]
        self._parts.exit.preempt(f"preempted{f' by {by}' if by else ''}")
        seconds = self._parts.settings.recovery.preempt_grace
        message = f"preempted: podwatch requests training to end and exits, within {seconds:g} s"
        return {"message": message, "grace_seconds": seconds}


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


def _accepted(message: str) -> dict[str, Any]:
    """The answer to an accepted request whose operation has just started."""
    return {"message": f"{message}; `podwatch status` shows the progress"}
