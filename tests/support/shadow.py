"""The table of decisions in the shadow of today's operations: at each act of theirs, and at each turn in which they
rest, ``decide`` is asked about the same pod, and what it would do is written down where it is something else.
"""

import asyncio
import functools
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from podwatch.domain.facts import (
    Facts,
    Inventory,
    Leaving,
    NodesOfRun,
    PendingEvaluation,
    PodSearch,
    StoreFacts,
    Trainer,
)
from podwatch.domain.finding import Finding, FindingKind, Severity, Verdict
from podwatch.domain.run import Mutation, Pause
from podwatch.domain.run_state import RunState, Stopping
from podwatch.domain.snapshot import Snapshot, Supervision, observed
from podwatch.policy.confirm_resume import ConfirmationState
from podwatch.recovery.actions import Decision, Phase
from podwatch.recovery.choose import other_world
from podwatch.recovery.context import RecoveryContext
from podwatch.recovery.decide import decide
from podwatch.recovery.manual_starts import ManualStarts
from podwatch.recovery.recovery import Recovery
from podwatch.recovery.resume_point import saved_by
from podwatch.recovery.start import Starter
from podwatch.recovery.stop import Stops
from podwatch.recovery.stop_for_evaluation import Evaluating

EXPLAINED = {
    r"does start \d+, would start \d+": "the start itself lists and inspects once more, right before anything is moved",
    r"does fetch \d+, would start \d+": "the same: what is damaged here is known after its inspection, in the start",
    r"does start .*, would rest: blocked: training did not continue from step": "a wrong resume is never a step back",
    r"does start None, would rest: blocked: podwatch cannot start training: .trainer. command": "the start refuses it",
    r"rests \(gave-up\), would dropstart": "a start that did not happen leaves the list; today it stays there",
    r"does finish, would recordend: looking: training has ended": "the run was recorded as finished before",
    r"does stop, would rest: looking: training has ended: podwatch checks how": "nobody asked the table in these 2 min",
    r"does attach, would start None": "the test's launcher forgets a trainer that was attached to a moment ago",
}
"""What differs on purpose, each with its reason."""
WAITING = frozenset({Phase.IDLE, Phase.BLOCKED, Phase.BACKOFF, Phase.GAVE_UP, Phase.PAUSED, Phase.OBSERVING})


def name_of(decision: Decision) -> str:
    what = decision.action or decision.edit
    if what is None:
        return "rest"
    choice = getattr(what, "choice", None)
    step = "" if choice is None else f" {choice.step}"
    return f"{type(what).__name__.lower()}{step}"


@dataclass
class Shadow:
    """One per test. ``lines``: what differs, each once."""

    lines: list[str] = field(default_factory=list)
    findings: tuple[Finding, ...] = ()
    """Of the last turn with a verdict."""
    judged: str = ""
    """The start that they are about."""
    snapshot: Snapshot | None = None
    recoveries: dict[int, Recovery] = field(default_factory=dict)
    ended_at: dict[str, float] = field(default_factory=dict)
    """When the end of each start was seen."""

    def note(self, line: str) -> None:
        if line not in self.lines and not any(re.match(known, line) for known in EXPLAINED):
            self.lines.append(line)

    def recovery(self, context: RecoveryContext) -> Recovery:
        return self.recoveries[id(context)]

    async def decision(self, context: RecoveryContext, did: str = "", **hints: Any) -> Decision:
        facts = await gather(context, self.recovery(context), self, did, **hints)
        found = self.findings if context.handle is not None and context.watched == self.judged else ()
        found = (*found, *_resumed_wrong(context))
        return decide(facts, found, context.tools.settings)

    async def acts(self, context: RecoveryContext, did: str, allowed: tuple[str, ...], **hints: Any) -> None:
        decision = await self.decision(context, did, **hints)
        would = name_of(decision)
        if would.split()[0] not in allowed or (" " in did and " " in would and would != did):
            self.note(f"does {did}, would {would}: {decision.phase}: {decision.why[:90]}")


def _resumed_wrong(context: RecoveryContext) -> tuple[Finding, ...]:
    attempt = context.attempt
    if attempt is None or context.phase is not Phase.CONFIRMING:
        return ()
    clock = context.tools.clock
    answer = attempt.confirmation(clock.monotonic(), context.tools.settings.trainer.startup_patience)
    if answer.state is not ConfirmationState.RESUMED_WRONG:
        return ()
    kind = FindingKind.RESUMED_WRONG
    return (Finding(kind, Severity.CRITICAL, "resumed wrong", 0.0, verdict=Verdict.RESTART, confirmed=True),)


async def gather(
    context: RecoveryContext,
    recovery: Recovery,
    shadow: Shadow,
    did: str,
    *,
    evaluation: PendingEvaluation | None = None,
    nodes: NodesOfRun | None = None,
    named: str = "",
) -> Facts:
    tools, clock = context.tools, context.tools.clock
    now, wall = clock.monotonic(), clock.wall()
    look = await tools.launcher.look()
    handle = look.handle or context.handle
    trainer, mine = None, frozenset[str]()
    if handle is not None:
        status = await handle.exit_status()
        attached = handle.supervision is Supervision.ATTACH
        ended = None if status is None else status.at_wall or wall
        since = None if status is None else shadow.ended_at.setdefault(handle.start_id, now)
        trainer = Trainer(handle.start_id, handle.launcher.pid, status is None, attached, ended, since)
        mine = frozenset({handle.start_id})
    trees = tuple(t for t in look.trees if t.start_id not in mine)
    run = context.run
    last = run.starts[-1] if run.starts else None
    again = next((t for t in trees if last is not None and t.start_id == last.id and last.ended is None), None)
    if trainer is None and again is not None:  # an earlier podwatch had attached to it
        trainer = Trainer(again.start_id, again.launcher.pid, attached=True)
    held = recovery.starter.free(context.free_since)
    wanted = run.wanted
    within = getattr(tools.store.restore, "within", None)
    saves, trouble = await recovery.chooser._remote(wanted)
    if tools.store.restore is not None:
        tools.store.restore.within = within  # type: ignore[attr-defined]
    misfits: dict[int, str] = {}
    asked = None if tools.layout.reshards else tools.layout.processes(tools.settings.trainer.command)
    for found in tools.catalogue.sets:
        saved = None if asked is None else saved_by(tools.layout, found.step)
        if why := other_world(saved, asked, counts_all=tools.layout.counts_all):
            misfits[found.step] = why
    return Facts(
        pod=replace(shadow.snapshot or Snapshot(now, wall), at=now, wall=wall, gpus=tools.gpus.latest()),
        run=replace(_translated(context, recovery, run, did, trainer), attach=named),
        checkpoints=tools.catalogue.sets,
        unreadable=tools.catalogue.unlisted,
        store=None if tools.store.lease is None else StoreFacts(lease=tools.standing),
        trainer=trainer,
        acting="start" if did.startswith("start") else "",
        leaving=Leaving("it ends") if recovery.runner.closed else None,
        unwritable=context.blocked(),
        search=observed(PodSearch(trees, look.kept), now),
        held=observed(held.holders, now) if held.observed else replace(observed(held.holders, now), at=float("-inf")),
        free_since=context.free_since,
        evaluation=evaluation,
        nodes=nodes,
        inventory=Inventory(saves, trouble),
        misfits=misfits,
        behind_links=tools.catalogue.out_of_reach,
        doubt=tools.guard.blocked_reason(Mutation.FRESH_START),
        last_step=tools.policies.max_steps,
    )


def _translated(
    context: RecoveryContext, recovery: Recovery, run: RunState, did: str, trainer: Trainer | None
) -> RunState:
    """What today's requests and waits keep in memory, as run.json will say it."""
    request = context.by_request or context.request_pending
    asked_to_stop = run.stop_requested_for != "" and run.stop_requested_for == context.watched
    changes: dict[str, Any] = {
        "requested": request or asked_to_stop,
        "despite_store": recovery.checks._decided,
        "evaluation": context.evaluation,
    }
    if context.paused and run.pause is None:
        changes["pause"] = Pause(context.tools.clock.wall())
    if request and did.startswith("stop") and run.desired.value == "running" and trainer is not None:
        changes["stopping"] = Stopping(trainer.start_id, "restart requested")  # the request's own edit
    if did.startswith("start") and run.history.gave_up and run.next_try_wall is None:
        changes["next_try_wall"] = context.tools.clock.wall()  # cleared before the start, not by it
    return replace(run, **changes)


def wrapped(shadow: Shadow, patch: pytest.MonkeyPatch) -> None:
    """Ask the table at each act."""

    def around(owner: type, name: str, before: Callable[..., Awaitable[None]]) -> None:
        method = getattr(owner, name)

        @functools.wraps(method)
        async def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            await before(self, *args, **kwargs)
            return await method(self, *args, **kwargs)

        patch.setattr(owner, name, called)

    async def start(self: Starter, choice: Any) -> None:
        nodes = None
        if self.context.tools.place is not None:
            follows = self.context.tools.follows
            nodes = NodesOfRun(follows=follows, step=choice.step)
        await shadow.acts(self.context, f"start {choice.step}", ("start",), nodes=nodes)

    async def fetch(self: Starter, choice: Any) -> None:
        await shadow.acts(self.context, f"fetch {choice.step}", ("fetch",))

    async def stop(self: Stops, handle: Any, why: str, *, evaluation: bool = False, **_: Any) -> None:
        due = PendingEvaluation("it", due=True) if evaluation else None
        await shadow.acts(self.context, "stop", ("stop", "finish", "count", "wantstop", "recordend"), evaluation=due)

    async def guard(self: ManualStarts, tree: Any) -> None:
        last = self.context.run.starts[-1] if self.context.run.starts else None
        if last is not None and last.id == tree.start_id and last.ended is None:
            return  # it is known
        await shadow.acts(self.context, "attach", ("attach", "recordend", "dropstart"), named=tree.start_id)

    async def finish(self: Stops, finding: Any) -> None:
        await shadow.acts(self.context, "finish", ("finish",))

    async def work(self: Evaluating, _: Any) -> None:
        await shadow.acts(self.context, "evaluate", ("evaluate",), evaluation=PendingEvaluation("it", due=True))

    around(Starter, "start", start)
    around(Starter, "fetch", fetch)
    around(Stops, "stop_tree", stop)
    around(ManualStarts, "guard", guard)
    around(Stops, "_finish", finish)
    around(Evaluating, "_work", work)

    made = Recovery.__init__

    def init(self: Recovery, context: RecoveryContext, *args: Any) -> None:
        made(self, context, *args)
        shadow.recoveries[id(context)] = self

    patch.setattr(Recovery, "__init__", init)
    consider = Recovery.consider

    def considered(self: Recovery, snapshot: Snapshot, findings: Any, *args: Any) -> None:
        shadow.snapshot = snapshot
        if findings or self.context.watched != shadow.judged:
            shadow.findings, shadow.judged = tuple(findings), self.context.watched
        consider(self, snapshot, findings, *args)
        task = asyncio.ensure_future(rests(self))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    tasks: set[asyncio.Future[None]] = set()

    async def rests(self: Recovery) -> None:
        """Where today's operations rest, the table does."""
        before = self._idle_as()
        if before is None:
            return
        decision = await shadow.decision(self.context)
        if self._idle_as() == before and not decision.rests:
            shadow.note(f"rests ({before[0]}), would {name_of(decision)}: {decision.phase}: {decision.why[:90]}")

    def idle_as(self: Recovery) -> tuple[str, str] | None:
        context = self.context
        waits = self.runner.ready or context.phase in WAITING
        return (str(context.phase), context.watched) if waits and not self.runner.closed else None

    patch.setattr(Recovery, "_idle_as", idle_as, raising=False)
    patch.setattr(Recovery, "consider", considered)
