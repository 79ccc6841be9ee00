"""What decisions about training rest on: the trainer, the pod around it, the checkpoints and the store, read as late as
a decision needs them.

Readings carry the time at which they were begun. A search of the pod reads all of /proc, and the store is billed by
the call: both are made again only where a decision needs a younger one.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from podwatch.checkpoints.known_checkpoints import CHANGED, InspectionUnanswered
from podwatch.checkpoints.layout import Layout
from podwatch.checkpoints.scan import scan_part
from podwatch.domain.checkpoint import CheckpointSet, Completeness, newest_complete
from podwatch.domain.errors import HostError, PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.facts import (
    NOT_MEASURED,
    NOT_SEARCHED,
    Facts,
    Inventory,
    NodesOfRun,
    PendingEvaluation,
    PodSearch,
    StoreFacts,
    Trainer,
)
from podwatch.domain.finding import FindingKind, Severity
from podwatch.domain.lease import LeaseAction
from podwatch.domain.process import ATTACHED_ID
from podwatch.domain.run import Mutation, Pause
from podwatch.domain.run_state import Stopping
from podwatch.domain.snapshot import Desired, Reading, SensorState, Snapshot, observed, unobserved
from podwatch.domain.starts import StartedBy
from podwatch.domain.stored_checkpoint import StoredCheckpoint
from podwatch.journal import Journal
from podwatch.recovery import gpus_and_ports_free
from podwatch.recovery.choose import INSPECTIONS, Choice, other_world
from podwatch.recovery.context import Attempt, RecoveryContext
from podwatch.recovery.start import Starter
from podwatch.recovery.start_entries import enter_running, first_start
from podwatch.sensors.base import Wakeable
from podwatch.trainer.start_and_adopt import Look
from podwatch.trainer.trainer_handle import TrainerHandle

ADOPT: Final = "--adopt-existing"
"""Kind of request: a flag of `podwatch run`."""
FETCH_TRIES: Final = 3
"""Failed downloads after which an older checkpoint on this pod is better: waiting for the store wastes GPU time."""
WITH_A_LOCAL_ONE: Final = 4.0
"""Seconds that a start waits for the store while this pod has a complete checkpoint: an unreachable store is retried
for minutes, and idle GPUs cost money. B2 answers the four requests within one second."""
ONLY_STORE: Final = 180.0
"""The same while this pod has none: only the store can provide one."""
INVENTORY_SECONDS: Final = 60.0
"""The store is asked again after this time."""
LISTED_SECONDS: Final = 1.0
"""A list of the checkpoints is young enough for a start for so long."""
SEARCH_SECONDS: Final = 15.0
"""Between two searches of the pod while podwatch runs no trainer."""
SEARCH_SOON: Final = 3.0
"""The same while a start waits for something that may train."""


class Observer:
    """Reads what is not in the snapshot. One per run; the loop's hand asks it."""

    def __init__(self, context: RecoveryContext, starter: Starter) -> None:
        self.context, self.starter = context, starter
        self.look = Look()
        self.search: Reading[PodSearch] = NOT_SEARCHED
        self.turn = Facts(Snapshot(0.0, 0.0), context.run)
        """The facts of the last turn of the sensing loop."""
        self.evaluation: PendingEvaluation | None = None
        self.acting = ""
        self.question: tuple[str, str] | None = None
        self.inventory: Inventory | None = None
        self._asked: tuple[float, int | None] = (float("-inf"), None)
        """When, and for which named step, the store was asked last."""
        self.listed_at = float("-inf")
        self.failed_fetches = 0
        self.damaged_in_store: dict[tuple[int, str], str] = {}
        """(step, save_id) of what a fetch found damaged, and how: another download would be the same."""
        self.missing_in_store: set[tuple[int, str]] = set()
        """(step, save_id) of what was deleted while it was fetched."""
        self.damaged_here: dict[tuple[int, str], str] = {}
        self._misfits: dict[int, str] = {}
        self._ended_at: tuple[str, float] = ("", 0.0)
        """The start whose end was seen last, and when."""

    # -- the pod

    async def try_to_search(self) -> None:
        """As ``search_pod``; where training is not wanted, a pod that cannot be searched is only reported."""
        context = self.context
        try:
            await self.search_pod()
        except (OSError, PodwatchError) as error:  # a timeout is an OSError
            if context.desired is Desired.RUNNING and context.handle is None:
                raise
            self.search = unobserved(SensorState.BLIND, context.tools.clock.monotonic(), str(error))
            text = f"podwatch cannot see whether an operator starts a trainer: {error}"
            context.notes.add(FindingKind.SENSOR_BLIND, Severity.WARNING, text, subject="lookout")
        else:
            context.notes.drop("lookout")

    async def search_pod(self) -> None:
        """Search the pod, and watch what is found of this run's own: a supervised trainer, alive or ended, and one that
        an earlier podwatch had attached to."""
        context, at = self.context, self.context.tools.clock.monotonic()
        self.look = look = await context.tools.launcher.look()
        old = context.handle
        if look.handle is not None and (old is None or old.start_id != look.handle.start_id):
            await adopt(context, look.handle)
        elif look.handle is None and old is None and (identity := self._attached_before(look)) is not None:
            with contextlib.suppress(PodwatchError):  # it has ended meanwhile
                await adopt(context, await context.tools.launcher.attach(identity))
        mine = set()
        if (handle := context.handle) is not None:
            mine = {process.identity for process in (await handle.tree()).value or ()} | {handle.launcher}
        trees = tuple(tree for tree in look.trees if tree.launcher not in mine)
        self.search = observed(PodSearch(trees, look.kept), at)

    def _attached_before(self, look: Look) -> Any:
        """The launcher of the attached trainer whose end is not recorded. Found by its identity, because it may no
        longer look like a trainer."""
        run = self.context.run
        last = run.starts[-1] if run.starts else None
        if last is not None and last.by is StartedBy.OPERATOR and last.ended is None:
            for tree in look.trees:
                if tree.start_id == last.id:
                    return tree.launcher
        return None if run.stopping is None else meant_by(run.stopping, look)

    async def finish_interrupted_moves(self) -> None:
        """Of an earlier podwatch, after the first search; a start decides anew what is still to be moved."""
        handle = self.context.handle
        alive = handle is not None and await handle.exit_status() is None
        if not self.context.held() and not self.look.kept:
            await self.starter.finish_moves(beside_training=alive or bool(self.look.trees))

    def search_is_due(self, *, soon: bool) -> bool:
        """Whether a decision needs a younger search than there is."""
        handle = self.context.handle
        if handle is not None and (self.trainer_lives or not is_by_hand(handle)):
            return False
        age = self.context.tools.clock.monotonic() - self.search.at
        young = self.search.at >= self.context.free_since
        return not young or age >= (SEARCH_SOON if soon else SEARCH_SECONDS)

    @property
    def trainer_lives(self) -> bool:
        """Whether the watched trainer was alive when it was asked last."""
        return self.context.handle is not None and self._ended_at[0] != self.context.handle.start_id

    async def trainer(self) -> Trainer | None:
        """The watched one. One that podwatch started lives until it was released, also if its supervisor was killed."""
        handle, clock = self.context.handle, self.context.tools.clock
        if handle is None:
            return None
        status = await handle.exit_status()
        attached = is_by_hand(handle)
        lives = not attached or status is None
        if status is None:
            self._ended_at = ("", 0.0)
        elif self._ended_at[0] != handle.start_id:
            self._ended_at = (handle.start_id, clock.monotonic())
        sample = self.turn.pod.trainer.value
        seen = sample is not None and sample.start_id == handle.start_id
        return Trainer(
            handle.start_id,
            handle.launcher.pid,
            lives,
            attached,
            ended_wall=None if status is None else status.at_wall or clock.wall(),
            ended_at=None if status is None else self._ended_at[1],
            finish_line=seen and sample is not None and sample.finish_line,
            unconfirmed=self.context.unconfirmed,
        )

    # -- checkpoints and the store

    async def list_again(self) -> None:
        """List the checkpoints here, and ask the store where its answer is too old."""
        tools, run = self.context.tools, self.context.run
        sets = await self.context.rescan()
        self.listed_at = now = tools.clock.monotonic()
        at, wanted = self._asked
        if (
            self.inventory is None
            or now - at >= INVENTORY_SECONDS
            or wanted != run.wanted
            or at < self.context.free_since
        ):
            self.inventory = await self.ask_store(run.wanted)
            self._asked = (tools.clock.monotonic(), run.wanted)
        asked = None if tools.layout.reshards else tools.layout.processes(tools.settings.trainer.command)
        self._misfits = {}
        for found in sets if asked is not None else ():
            saved = await tools.blocking(saved_by, tools.layout, found.step) if found.complete else None
            if why := other_world(saved, asked, counts_all=tools.layout.counts_all):
                self._misfits[found.step] = why

    def forget_inventory(self) -> None:
        self.inventory = None

    async def ask_store(self, wanted: int | None) -> Inventory:
        """What it has, the newest first, or those of the step that the operator named."""
        restore, here = self.context.tools.store.restore, newest_complete(self.context.tools.catalogue.sets)
        if restore is None:
            return Inventory()
        if here is None:
            self.failed_fetches = 0  # no checkpoint is here, so only the store can help: ask it again
        if self.failed_fetches >= FETCH_TRIES:
            return Inventory((), f"{self.failed_fetches} fetches failed")
        try:
            found = await restore.saves(wanted, within=ONLY_STORE if here is None else WITH_A_LOCAL_ONE)
        except (PodwatchError, OSError) as error:  # a call that hangs ends in a TimeoutError
            return Inventory((), str(error))
        damaged = {} if wanted is not None else self.damaged_in_store
        return Inventory(
            tuple(
                StoredCheckpoint(
                    save.step,
                    save.save_id,
                    save.manifest.lineage if save.manifest is not None else "",
                    *save.order,
                    problem=save.problem or damaged.get(save.key, ""),
                )
                for save in found
            )
        )

    @property
    def checkpoints(self) -> tuple[CheckpointSet, ...]:
        """Those here; what an inspection before a start found damaged is."""
        found = []
        for one in self.context.tools.catalogue.sets:
            why = self.damaged_here.get((one.step, one.save_id)) if one.complete else None
            found.append(
                one if why is None else replace(one, completeness=Completeness.DAMAGED, reason=why, unclear=True)
            )
        return tuple(found)

    async def is_damaged(self, choice: Choice) -> bool:
        """Inspect the chosen checkpoint on this pod. Whether it cannot be started from: it is damaged, or changed
        meanwhile, or no inspection gives an answer, which is then asked about."""
        tools, step = self.context.tools, choice.step
        assert step is not None
        unanswered = ""
        for _ in range(INSPECTIONS):
            try:
                reasons = await tools.blocking(tools.catalogue.verify, step)
                break
            except InspectionUnanswered as error:
                unanswered = error.what
                await tools.clock.sleep(1.0)
        else:
            self.ask(f"step {step} may be complete, but no inspection gave an answer: {unanswered}")
            return True
        if not reasons or reasons == (CHANGED,):
            return bool(reasons)
        self.damaged_here[step, choice.save_id] = reasons[0]
        tools.say(
            EventName.CHECKPOINT_DAMAGED,
            f"step {step} is damaged, so podwatch does not use it: {reasons[0]}",
            Severity.WARNING,
            step=step,
        )
        return True

    def forget_damage(self, step: int) -> None:
        """Another copy of this step was fetched: what an inspection found here was about the one before."""
        self.damaged_here = {key: why for key, why in self.damaged_here.items() if key[0] != step}

    def ask(self, why: str, fix: str = "") -> None:
        """Only an operator can decide now; holds until a request."""
        self.question = (
            why,
            fix or "see `podwatch checkpoints`, then run `podwatch start --step N` or `podwatch start --fresh`",
        )

    def refuse_fetched(self, choice: Choice, why: str) -> None:
        """Do not fetch this save again: it was damaged when it was stored, or became so since. An older one is used."""
        assert choice.step is not None
        self.damaged_in_store[choice.step, choice.save_id] = why
        self.forget_inventory()
        self.context.tools.say(
            EventName.CHECKPOINT_DAMAGED,
            f"step {choice.step} is damaged in the store, so podwatch continues from an older checkpoint: {why}."
            f" `podwatch start --step {choice.step}` tries it all the same",
            Severity.WARNING,
            step=choice.step,
        )

    def note_missing(self, choice: Choice) -> bool:
        """A save was deleted from the store while it was fetched: a newer one has replaced it. Return whether it is the
        first time: a store that shows it and does not have it is no reason to wait."""
        assert choice.step is not None
        self.forget_inventory()
        key = (choice.step, choice.save_id)
        if key in self.missing_in_store:
            return False
        self.missing_in_store.add(key)
        return True

    # -- all of it

    async def facts(self) -> Facts:
        """Those of the last turn as of now, with what was searched and asked since."""
        context, tools = self.context, self.context.tools
        now, wall, run = tools.clock.monotonic(), tools.clock.wall(), context.run
        if context.pausing and run.pause is None:
            run = replace(run, pause=Pause(wall))
        follows = tools.follows
        standing, lease = tools.standing, None
        if tools.store.lease is not None:
            error = tools.store_error if standing.act is LeaseAction.ASK else ""
            lease = StoreFacts(lease=standing, error=error)
        return replace(
            self.turn,
            pod=replace(self.turn.pod, at=now, wall=wall, gpus=tools.gpus.latest()),
            run=run,
            checkpoints=self.checkpoints,
            unreadable=tools.catalogue.unlisted,
            store=lease,
            trainer=await self.trainer(),
            acting=self.acting,
            unwritable=context.blocked(),
            search=self.search,
            held=await self._held(now),
            free_since=context.free_since,
            evaluation=self.evaluation,
            nodes=None if tools.place is None else NodesOfRun(follows=follows),
            inventory=self.inventory if self._asked[0] >= context.free_since else None,
            misfits=self._misfits,
            behind_links=tools.catalogue.out_of_reach,
            doubt=tools.guard.blocked_reason(Mutation.FRESH_START),
            question=self.question,
            last_step=tools.policies.max_steps,
        )

    async def _held(self, now: float) -> Reading[tuple[str, ...]]:
        """Only read while nothing of ours lives."""
        context, tools = self.context, self.context.tools
        if context.handle is not None:
            return NOT_MEASURED
        if isinstance(tools.gpus, Wakeable):  # its next poll may be seconds away, and idle GPUs cost money
            tools.gpus.wake()
        free = self.starter.free(context.free_since)
        if free.holders and now - context.free_since >= tools.settings.gpu.release_wait:
            free = await tools.blocking(gpus_and_ports_free.named, free, self.look.holders)
        if not free.observed and not free.holders:
            return unobserved(SensorState.BLIND, now, "GPU memory has not been observed yet")
        return observed(free.holders, now)


def is_by_hand(handle: TrainerHandle) -> bool:
    """Whether podwatch did not start it. One whose supervisor was killed is watched in the same way, and is ours."""
    return handle.start_id.startswith(ATTACHED_ID)


# -- run.json, and the trainer that it names ---------------------------------------------------------------------------


async def recall(context: RecoveryContext) -> None:
    """Read run.json if it is not known yet, and begin it where this run has none. Raises HostError while it cannot be
    read or written: then nothing may be started, because the desired state is unknown. The operator's
    `--adopt-existing` is executed here, once; it also replaces what belongs to another run."""
    run_file, wanted, changes = context.tools.run_file, context.adopt, dict[str, Any]()
    await read_run(context)
    adopts = bool(wanted) and context.run.executed.get(ADOPT) != wanted
    if adopts:
        await replace_other_run(context)
    elif wanted:
        run_file.other_run = ""
    run_file.refuse_other_run()
    starts = context.run.starts
    if not starts:
        starts = changes["starts"] = (await first_start(context.tools),)
    if adopts:
        changes |= {"adopted": starts[-1].id, "executed": {**context.run.executed, ADOPT: wanted}}
    if changes:
        await context.edit(**changes)
    context.recalled = True


async def read_run(context: RecoveryContext) -> None:
    """Read run.json if it is not known yet. Raises HostError while it cannot be read."""
    if not context.tools.run_file.known:
        await context.tools.blocking(context.tools.run_file.load)


async def replace_other_run(context: RecoveryContext) -> None:
    """Where output_dir belongs to another run, let this one begin in it; the next edit records that."""
    if context.tools.run_file.other_run:
        context.tools.run_file.other_run = ""
        context.note(starts=(await first_start(context.tools),))


async def adopt(context: RecoveryContext, handle: TrainerHandle) -> None:
    """Watch a trainer that an earlier podwatch watched, alive or ended. For one that is watched already, only read what
    run.json knows of its start: what was seen of it stays known."""
    tools, watched = context.tools, context.handle
    start = context.run.start(handle.start_id)
    if start is not None and not start.seen:
        await context.start_was_seen(start.id)
    if watched is not None and (watched.start_id, watched.launcher) == (handle.start_id, handle.launcher):
        context.attempt = await attempt_of(context, handle, context.attempt)
        return
    attempt = await attempt_of(context, handle)
    context.watch(handle, attempt, adopted=True)
    tools.begin_start(attempt.started_at, handle.start_id)
    with contextlib.suppress(HostError):  # recorded at the next chance: training is watched without it
        await enter_running(tools, handle)
    status, pid = await handle.exit_status(), handle.launcher.pid
    tools.say(
        EventName.TRAINER_ADOPTED,
        f"took over the running trainer (pid {pid})"
        if status is None
        else f"the trainer (pid {pid}) ended while podwatch was not running ({status.describe()})",
        start_id=handle.start_id,
        pid=pid,
    )


async def attempt_of(context: RecoveryContext, handle: TrainerHandle, seen: Attempt | None = None) -> Attempt:
    """The start of this trainer as run.json knows it, with the steps that were ``seen`` of it."""
    tools, start = context.tools, context.run.start(handle.start_id)
    age = max(0.0, tools.clock.wall() - handle.started_wall)
    attempt = seen or Attempt(handle.start_id, tools.clock.monotonic() - age, known=False)
    if attempt.known or start is None or start.by is not StartedBy.PODWATCH or not start.proved:
        return attempt
    step = start.from_step
    first = None if step is None else await tools.blocking(tools.layout.first_step_after, step)
    open_incident = await tools.journal.run(Journal.current_incident)
    return replace(
        attempt,
        known=True,
        resumed_from=step,
        first_step=first,
        # Otherwise a run of days that ends before its next step would look like a checkpoint that fails to load.
        made_step=attempt.made_step or start.confirmed,
        incident_id=open_incident.id if open_incident is not None else None,
    )


def meant_by(stop: Stopping, look: Look) -> Any:
    """Return the launcher of the attached trainer that podwatch was stopping, if it still runs. Found by pid and start
    time, because it may no longer look like a trainer."""
    for tree in look.trees:
        if (tree.launcher.pid, tree.launcher.start_ticks) == (stop.pid, stop.ticks):
            return tree.launcher
    for identity in look.stoppable:
        if stop.boot and (identity.pid, identity.start_ticks, identity.boot_id) == (stop.pid, stop.ticks, stop.boot):
            return identity
    return None


# -- number of processes that wrote a checkpoint ----------------------------------------------------------------------


def saved_by(layout: Layout, step: int) -> int | None:
    """The world size that the layout's rule finds in the checkpoint; None: not known, absent or not readable.
    Blocks."""
    try:
        parts: Sequence[Any] | None = layout.steps().get(step)
    except OSError:
        return None
    return layout.judge(step, [scan_part(p).found for p in parts]).world_size if parts else None
