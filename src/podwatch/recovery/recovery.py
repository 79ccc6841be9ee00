"""Recovery: keep one trainer in the state that its operator wants.

The loop's hand: observe, decide, carry out at most one action, and again. It turns when the sensing loop has turned,
when a request has changed run.json, when an action has ended, and while it waits for something, every few seconds.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from podwatch.checkpoints.second_writer import ALONE, Beside
from podwatch.config.settings import Policies, Settings
from podwatch.domain.errors import Busy, HostError, InternalError, PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.facts import NOT_SEARCHED, Facts
from podwatch.domain.finding import Finding, FindingKind, Severity, Verdict
from podwatch.domain.lease import LeaseAction
from podwatch.domain.process import FoundTree, TreeAnswer
from podwatch.domain.snapshot import Desired, Supervision
from podwatch.recovery import quarantine
from podwatch.recovery.actions import Action, Decision, Evaluate, Fetch, Phase, Start, Stop
from podwatch.recovery.choose import ASKS_STORE
from podwatch.recovery.command_changed import CommandWatch
from podwatch.recovery.context import RecoveryContext
from podwatch.recovery.decide import STORE_FIX, decide
from podwatch.recovery.failure import Failures
from podwatch.recovery.follow_attempt import AttemptFollower
from podwatch.recovery.lineages import Lineages
from podwatch.recovery.observe import LISTED_SECONDS, Observer, recall
from podwatch.recovery.perform import Performer
from podwatch.recovery.requests import Requests
from podwatch.recovery.restart_budget import MACHINE_FAULTS, MACHINE_RULES
from podwatch.recovery.start import Starter
from podwatch.recovery.state import GangStart, RecoveryState
from podwatch.trainer.trainer_handle import TrainerHandle

BY_HAND: Final = "run"
"""Kind of request: `podwatch run` typed on a terminal."""
PROBLEM_RETRY: Final = 30.0
BLOCKED_POLL: Final = 3.0
WAIT_POLL: Final = 0.5
SAVE_POLL: Final = 1.0
DECIDED_SECONDS: Final = 1.0
"""For the decision after a request, which reads /proc at most."""
BACKOFF_POLL: Final = 15.0
ASKED_LISTED_SECONDS: Final = 10.0
"""Between two lists of the checkpoints while only an operator can decide."""
MOST_EDITS: Final = 8
"""In one turn; each edit leads on, so that more of them show a fault of the table."""


_BEFORE_START: Final = frozenset(
    {Phase.STOPPING, Phase.EVALUATING, Phase.LOOKING, Phase.STARTING, Phase.BACKOFF, Phase.BLOCKED}
)
"""Phases in which status shows the step of the next start."""


class Recovery:
    """One per run: call ``begin`` once, ``consider`` at every tick of the sensing loop, ``close`` at the end."""

    def __init__(self, context: RecoveryContext, failures: Failures, gang: GangStart | None = None) -> None:
        """``gang``: None for a run on one node."""
        self.context, self.failures = context, failures
        self.lineages, self.command = Lineages(context), CommandWatch(context)
        self.starter = Starter(context, gang)
        self.observer = Observer(context, self.starter)
        self.performer = Performer(context, self.observer, self.starter, self.lineages, failures, gang)
        self.requests = Requests(context, self.observer, self.performer, self.command, self)
        self.follower = AttemptFollower(context)
        self.opening = ""
        """The first line that podwatch prints about this run; set by ``begin``."""
        self.decision = Decision(Phase.IDLE, "")
        """The last one."""
        self.closed = False
        self.task: asyncio.Task[None] | None = None
        self._action: Action | None = None
        self._done: Action | None = None
        self._repeated = 0
        """How often the last action was carried out in a row before."""
        self._woken, self._thinking = asyncio.Event(), False
        self._findings: tuple[Finding, ...] = ()
        self._of = ""
        """The start that they are about."""
        self._reported: set[str] = set()
        self._noted = ""
        """Key of the finding of the last decision."""
        self._decided = asyncio.Event()
        self._retry_at = float("-inf")
        """Monotonic time before which a failed turn is not repeated, unless an operator asks for something."""

    @property
    def handle(self) -> TrainerHandle | None:
        """The watched trainer."""
        return self.context.handle

    @property
    def desired(self) -> Desired:
        return self.context.desired

    @property
    def acting(self) -> bool:
        """Whether an action is carried out, or something new was not decided about yet."""
        return not self.closed and (self._action is not None or self._thinking or self._woken.is_set())

    @property
    def busy(self) -> bool:
        """Whether an action is carried out; an evaluation only until its result is known."""
        told = isinstance(self._action, Evaluate) and self.performer.evaluating is None
        return self._action is not None and not told

    @property
    def settled(self) -> bool:
        """Whether nothing follows before an operator acts."""
        rests = self.decision.phase in (Phase.STOPPED, Phase.FINISHED, Phase.RUNNING, Phase.ATTACHED, Phase.IDLE)
        return not self.acting and (rests or not self.decision.waits)

    @property
    def waits_for_store(self) -> bool:
        """Whether a start waits only for the store to report who holds the run."""
        asks = self.context.tools.standing.act is LeaseAction.ASK
        return asks and self.context.handle is None and self.decision.fix == STORE_FIX and not self.context.held()

    # -- life ---------------------------------------------------------------------------------------------------------

    async def begin(self, *, adopt_existing: str = "", by_hand: str = "", not_before_wall: float | None = None) -> None:
        """Watch what runs here, then start the loop's hand. Returns soon. ``adopt_existing``: id of the operator's
        `--adopt-existing`. ``by_hand``: id of the `podwatch run` that an operator typed; the first begin with it does
        not wait out a backoff. ``not_before_wall``: epoch second before which nothing is started, because earlier
        attempts of the job failed. Raises ConfigurationError when output_dir belongs to another run."""
        tools = self.context.tools
        with contextlib.suppress(HostError):  # the hand reads it later, before anything is decided
            self.context.adopt = adopt_existing
            await recall(self.context)
            if by_hand and by_hand != self.context.run.executed.get(BY_HAND):
                await self._forget_giving_up(executed={**self.context.run.executed, BY_HAND: by_hand})
        run = self.context.run
        if tools.settings.recovery.on_give_up == "exit" and run.history.gave_up:
            # Whoever starts podwatch again on this machine wants another try now, not in an hour.
            self.context.note(history=replace(run.history, gave_up_at=None), next_try_wall=None)
        if not_before_wall is not None:
            self.context.note(next_try_wall=max(self.context.run.next_try_wall or 0.0, not_before_wall))
        await tools.blocking(quarantine.make_spare, tools.workspace)
        sets = await self.context.rescan()
        foreign = [s for s in sets if not s.ours and s.complete]
        if tools.run_file.known and not tools.follows and foreign:
            self.context.notes.add(
                FindingKind.FOREIGN_CHECKPOINTS,
                Severity.WARNING,
                "podwatch does not use checkpoints from before its first start here: step "
                + ", ".join(str(s.step) for s in foreign),
                "run `podwatch run --adopt-existing` to use them, or `podwatch clean` to move them to quarantine",
            )
        self.context.show(Phase.LOOKING)
        self.context.free_since = tools.clock.monotonic()
        before = self.context.run.stopping
        await self.observer.search_pod()
        await self._finish_interrupted_moves()
        self.opening = await self._opening(half_stopped=before is not None)
        if (first := self._by(await self.observer.facts())).rests:
            self._show(first)
        self.task = asyncio.create_task(self._run(), name="podwatch-recovery")
        self.wake()

    async def _finish_interrupted_moves(self) -> None:
        """A start decides anew what is to be moved, so that what cannot be moved now is no reason not to guard."""
        try:
            await self.observer.finish_interrupted_moves()
        except (PodwatchError, OSError) as error:
            problem = _refused(error) if isinstance(error, OSError) else error
            text = f"an interrupted move to quarantine cannot be finished: {problem.what}"
            self.context.notes.add(FindingKind.BLOCKED, Severity.WARNING, text, problem.fix, subject="quarantine")

    async def _forget_giving_up(self, **more: Any) -> None:
        history = replace(self.context.run.history, gave_up_at=None)
        await self.context.edit(history=history, next_try_wall=None, **more)

    async def _opening(self, *, half_stopped: bool) -> str:
        handle = self.context.handle
        if handle is not None:
            stop = self.context.run.stopping
            if half_stopped and stop is not None and stop.start_id == handle.start_id:
                return "finishing an interrupted stop or start"
            status = await handle.exit_status()
            if status is None:
                return f"took over the running trainer (pid {handle.launcher.pid})"
            return f"training ended while podwatch was not running ({status.describe()})"
        search = self.observer.search.value
        trees: Sequence[FoundTree] = () if search is None else search.trees
        candidates = sum(tree.answer is TreeAnswer.ATTACH for tree in trees)
        beside = f" (trainers that podwatch did not start: {candidates}; see `podwatch status`)" if candidates else ""
        if self.context.desired is Desired.STOPPED:
            return f"training is stopped and stays stopped until `podwatch start`{beside}"
        if self.context.desired is Desired.FINISHED:
            return f"training has finished; `podwatch start` continues it{beside}"
        if candidates == 1:
            return "watching a trainer that podwatch did not start"
        if candidates:
            return f"{candidates} running trainers could be this run's: see `podwatch status`"
        if trees and not self.context.held():
            return f"not starting training yet beside pid {trees[0].launcher.pid}: {trees[0].reason}"
        if self.context.held():
            return f"no training is running, and podwatch starts none ({self.context.held()})"
        if self.context.run.history.gave_up:
            return "podwatch gave up restarting training; it still guards the checkpoints"
        return "no training is running: starting it"

    def leave(self) -> None:
        """podwatch is leaving: no new action, and no new count."""
        self.closed = True
        self._woken.set()

    async def close(self) -> None:
        """Stop watching; training continues. The next podwatch decides from what is there."""
        self.leave()
        task, self.task = self.task, None
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task])
        await self.command.close()
        await self.lineages.close()
        with contextlib.suppress(PodwatchError):
            await self.context.edit()
        self.context.tools.files.close()
        self.context.tools.evidence.close()

    def reconfigure(self, settings: Settings, policies: Policies) -> None:
        """Use new settings from the next decision on; the current action keeps the old ones."""
        self.context.tools = replace(self.context.tools, settings=settings, policies=policies)
        self.context.command_looked_at = float("-inf")
        self.wake()

    def read_again(self) -> bool:
        """Do what ``begin`` could not do without run.json, now that it may be readable. Return whether there was
        something to do."""
        if self.context.recalled or self.acting:
            return False
        self.wake()
        return True

    # -- the loop's hand ----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Decide again now, also after a failure."""
        self._retry_at = float("-inf")
        self._woken.set()

    async def decided(self) -> None:
        """Returns once status shows what follows a request; while an action is carried out, at once."""
        if self.task is None or self._action is not None or not self.acting:
            return
        self._decided.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DECIDED_SECONDS):
                await self._decided.wait()

    async def _run(self) -> None:
        while not self.closed:
            self._thinking = True
            self._woken.clear()
            try:
                pause = await self._turn()
            except (PodwatchError, OSError) as error:
                pause = self._failed(_refused(error) if isinstance(error, OSError) else error)
            except Exception as error:  # a bug must not leave training unguarded
                pause = self._failed(InternalError(f"{type(error).__name__}: {error}", fix="please report this"))
            finally:
                self._thinking = False
            if pause is None:
                await self._woken.wait()
            elif pause > 0 and not self._woken.is_set():
                await self._sleep(pause)

    async def _sleep(self, seconds: float) -> None:
        """Until something happens, at most so long."""
        sleep = asyncio.ensure_future(self.context.tools.clock.sleep(seconds))
        try:
            await self._until_woken(sleep)
        finally:
            sleep.cancel()

    async def _until_woken(self, other: "asyncio.Future[Any]") -> None:
        """Until something happens, or ``other`` is done."""
        woken = asyncio.ensure_future(self._woken.wait())
        try:
            await asyncio.wait([other, woken], return_when=asyncio.FIRST_COMPLETED)
        finally:
            woken.cancel()

    def _failed(self, problem: PodwatchError) -> float:
        """Show it; the next turn decides anew from what is there."""
        self.context.show(Phase.BLOCKED, str(problem))
        pause = BLOCKED_POLL if isinstance(problem, Busy) else PROBLEM_RETRY
        self._retry_at = self.context.tools.clock.monotonic() + pause
        self.observer.search = NOT_SEARCHED
        if isinstance(problem, Busy):  # the next search names who holds the run
            return pause
        self._note(Decision(Phase.BLOCKED, problem.what, problem.fix, kind=FindingKind.BLOCKED))
        self.decision = Decision(Phase.BLOCKED, str(problem), problem.fix, kind=FindingKind.BLOCKED)
        self.context.tools.say(EventName.RECOVERY_BLOCKED, str(problem), Severity.CRITICAL)
        return pause

    async def _turn(self) -> float | None:
        """Decide, and carry out what was decided. Returns the seconds until the next turn; None: until something
        happens."""
        if not self.context.recalled:
            try:
                await recall(self.context)
            except HostError:
                await self.observer.search_pod()  # without run.json nothing is decided, but what runs here is watched
                raise
        decision = await self._decide()
        for _ in range(MOST_EDITS):
            if decision.edit is None or self.closed:
                break
            await self.performer.apply(decision.edit)
            decision = await self._decide()
        if decision.phase is Phase.GAVE_UP and self.decision.phase is not Phase.GAVE_UP:
            await self.failures.settle_given_up(self.failures.why_gave_up or decision.why)
        self._show(decision)
        if self.closed:
            return None
        if decision.edit is not None:
            raise InternalError("the table of decisions goes round in circles", fix="please report this")
        if not (isinstance(decision.action, Evaluate) or self._waits_to_evaluate(decision)):
            self.performer.drop_evaluation(decision.why)
        if decision.action is not None:
            self._repeated = self._repeated + 1 if decision.action == self._done else 0
            self._done = decision.action
            await self._carry_out(decision.action)
            # What an action finds can lead to the same one once more, as long as a checkpoint keeps changing.
            return WAIT_POLL if self._repeated > 1 else 0.0
        self._done, self._repeated = None, 0
        if decision.phase is Phase.ENDING:
            return SAVE_POLL
        if self.context.handle is not None or decision.phase in (Phase.STOPPED, Phase.FINISHED, Phase.IDLE):
            return None
        if decision.phase in (Phase.PAUSED, Phase.OBSERVING) or not decision.waits:
            return None
        if decision.phase in (Phase.BACKOFF, Phase.GAVE_UP):
            due = decision.due_wall
            left = BACKOFF_POLL if due is None else max(0.05, due - self.context.tools.clock.wall())
            return min(left, BACKOFF_POLL)
        return BLOCKED_POLL if decision.phase is Phase.BLOCKED else WAIT_POLL

    def _waits_to_evaluate(self, decision: Decision) -> bool:
        """Whether training is being stopped for the evaluation that was asked for, or the pod is looked at once more
        before it."""
        if isinstance(decision.action, Stop):
            return bool(decision.action.evaluation)
        looks = decision.action is None and decision.phase in (Phase.LOOKING, Phase.BLOCKED)
        return looks and bool(self.context.run.evaluation) and not self.context.tools.standing.why_not

    async def _decide(self) -> Decision:
        """With a search of the pod, a list of the checkpoints and an answer of the store where they are needed."""
        soon = self.decision.kind is FindingKind.AMBIGUOUS_TRAINERS or bool(self.observer.look.kept)
        searched = self.observer.search_is_due(soon=soon)
        if searched:
            await self.observer.try_to_search()
        if self.context.handle is not None and self.context.run.stop_above is not None:
            await self.context.rescan()  # training ends with its next save
        facts = await self.observer.facts()
        if not searched and self.observer.search_is_due(soon=soon):  # the trainer has ended meanwhile
            await self.observer.try_to_search()
            facts = await self.observer.facts()
        decision = self._by(facts)
        reaches = decision.chosen or decision.phase in (Phase.BACKOFF, Phase.GAVE_UP)
        patience = LISTED_SECONDS if self.decision.waits else ASKED_LISTED_SECONDS
        old = self.context.tools.clock.monotonic() - self.observer.listed_at > patience
        if reaches and (facts.inventory is None or (decision.chosen and old)):
            if decision.why == ASKS_STORE.why:
                self.context.show(Phase.LOOKING, decision.why)
            await self.observer.list_again()
            decision = self._by(await self.observer.facts())
        return decision

    def _by(self, facts: Facts) -> Decision:
        mine = facts.trainer is not None and facts.trainer.start_id == self._of
        wrong = self.follower.resumed_wrong
        found = (*self._findings, *([wrong] if wrong is not None else [])) if mine else ()
        return decide(facts, found, self.context.tools.settings)

    async def _carry_out(self, action: Action) -> None:
        """One action, cancelled where it is not what would be decided any more."""
        self._action, self.observer.acting = action, type(action).__name__.lower()
        task = asyncio.create_task(self.performer.perform(action), name=f"podwatch-{self.observer.acting}")
        try:
            while not task.done():
                self._thinking = False
                await self._until_woken(task)
                if task.done():
                    break
                self._woken.clear()
                if await self._is_superseded(action) and not self.context.committed:
                    task.cancel()
                    await asyncio.wait([task])
            if not task.cancelled():
                task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
            self._action, self.observer.acting, self.context.committed = None, "", False
            if isinstance(action, Start) and self.context.handle is None:
                self.observer.search = NOT_SEARCHED  # what it has started, if anything, is found by a new one

    async def _is_superseded(self, action: Action) -> bool:
        """A stop, a finish, an attachment and a clean are always completed."""
        if not isinstance(action, Start | Fetch | Evaluate):
            return False
        decision = self._by(await self.observer.facts())
        decided = decision.action
        if isinstance(action, Evaluate):
            return not isinstance(decided, Evaluate)
        if isinstance(action, Fetch) and decision.chosen and decision.phase is Phase.LOOKING:
            return False  # what it has put in place so far looks like a save in progress
        return not isinstance(decided, Start | Fetch) or decided.choice.step != action.choice.step

    # -- what it shows ------------------------------------------------------------------------------------------------

    def _show(self, decision: Decision) -> None:
        self._decided.set()
        before, self.decision = self.decision, decision
        phase, why = decision.phase, decision.why
        if phase is Phase.RUNNING and self.context.phase is Phase.RUNNING and self.context.detail:
            why = self.context.detail  # how its start was confirmed
        if phase is Phase.GAVE_UP and self.failures.why_gave_up:
            why = self.failures.why_gave_up
        self.context.show(phase, why)
        self._note(decision)
        if phase is Phase.BACKOFF and before.phase is not Phase.BACKOFF and decision.due_wall is not None:
            seconds = decision.due_wall - self.context.tools.clock.wall()
            self.context.tools.say(EventName.RECOVERY_BACKOFF, why, seconds=round(seconds, 1))
        critical = phase is Phase.BLOCKED and decision.kind is not None and decision.severity is Severity.CRITICAL
        if critical and (before.phase, before.why) != (phase, decision.why):
            text = f"{decision.why}: {decision.fix}" if decision.fix else decision.why
            self.context.tools.say(EventName.RECOVERY_BLOCKED, text, Severity.CRITICAL)

    def _note(self, decision: Decision) -> None:
        """The finding of this decision, and no longer that of the one before."""
        notes, kind = self.context.notes, decision.kind
        key = "" if kind is None else f"{kind}:decision"
        if self._noted and self._noted != key:
            notes.drop("decision")
        self._noted = key
        if kind in (FindingKind.GAVE_UP, FindingKind.RESUMED_WRONG):  # it was reported with the failure
            if kind not in {finding.kind for finding in notes.all}:
                notes.add(kind, decision.severity, decision.why, decision.fix)
        elif kind is not None:
            notes.add(kind, decision.severity, decision.why, decision.fix, subject="decision")

    @property
    def state(self) -> RecoveryState:
        context = self.context
        run, handle, failure = context.run, context.handle, context.failure
        last = run.started_from
        step = context.attempt.resumed_from if context.attempt is not None else last
        failed = failure is not None and (handle is None or handle.start_id == failure.start_id)
        if failed or (context.phase in _BEFORE_START and context.desired is Desired.RUNNING):
            step = context.expected_step()
        return RecoveryState(
            phase=context.phase,
            since=context.since,
            step=step,
            attempts=run.history.streak_count,
            next_try_wall=run.next_try_wall if context.phase in (Phase.BACKOFF, Phase.GAVE_UP) else None,
            detail=context.detail,
            handle=handle,
            start_id=handle.start_id if handle is not None else "",
            supervision=handle.supervision if handle is not None else Supervision.NONE,
            protect_reasons=self._protected(last),
            unconfirmed=context.unconfirmed,
            hold_deletions=context.unconfirmed,
            acting=self._action is not None and not isinstance(self._action, Evaluate) and not self.performer.stuck,
            incident_id=context.last_incident,
            evaluation=context.evaluation or run.evaluation,
            adopted=context.adopted,
            changed_at=context.changed_at,
        )

    def _protected(self, last: int | None) -> tuple[tuple[int, str], ...]:
        context = self.context
        kept = dict(context.run.refused)
        if context.chosen is not None:
            kept[context.chosen] = "being resumed from"
        if context.restoring is not None:
            kept[context.restoring] = "being fetched"
        if context.run.wanted is not None:
            kept[context.run.wanted] = "requested by the operator"
        attempt = context.attempt
        if attempt is not None and attempt.resumed_from is not None and not attempt.made_step:
            kept[attempt.resumed_from] = "being resumed from"
        elif last is not None and context.phase in (Phase.STARTING, Phase.CONFIRMING, Phase.BLOCKED, Phase.BACKOFF):
            kept[last] = "last resumed from"
        return tuple(sorted(kept.items()))

    @property
    def asks_whose(self) -> bool:
        """Whether a start waits to be confirmed by a save or a file that another process may have written."""
        return (
            self.context.phase is Phase.CONFIRMING
            and self.context.attempt is not None
            and bool(self.context.attempt.unproven)
        )

    def findings(self) -> tuple[Finding, ...]:
        """Return recovery's own findings."""
        stuck = self.performer.stuck if self._action is not None else ()
        if not stuck:
            return self.context.notes.all
        text = "podwatch cannot end the old trainer; these processes are stuck: " + "; ".join(stuck)
        fix = "wait: training starts when they are gone; if they stay, reboot or use another machine"
        return (
            *self.context.notes.all,
            Finding(FindingKind.BLOCKED, Severity.CRITICAL, text, self.context.since, fix, subject="stuck"),
        )

    # -- the sensing loop ---------------------------------------------------------------------------------------------

    def consider(self, facts: Facts, findings: Sequence[Finding], beside: Beside = ALONE) -> None:
        """Take one turn's facts in, and wake the hand. ``beside``: other processes that may write into output_dir.
        Never blocks."""
        context, snapshot = self.context, facts.pod
        self.failures.snapshots.append(snapshot)
        self.observer.turn = facts
        self.follower.watch(snapshot, beside)
        if not self.closed:
            if self.task is not None and self.task.done():  # by a bug: training must not be left unguarded
                self.task = asyncio.create_task(self._run(), name="podwatch-recovery")
            self.command.compare_soon(snapshot.at)
            if self._action is None:
                self.lineages.check_soon()
        standing = context.tools.standing
        if context.run.yielded and standing.act is LeaseAction.HOLD and not standing.stop:
            context.edit_soon(yielded=False)
        idle = context.handle is None and self._action is None
        if standing.act is LeaseAction.SUPERSEDED and idle and not context.run.yielded:
            context.edit_soon(yielded=True)  # a trainer that an operator starts here from now on is not stopped
        if context.run.despite_store and standing.act is not LeaseAction.ASK:
            context.edit_soon(despite_store=False)
        sample = snapshot.trainer.value
        self._findings, self._of = (), ""
        if context.handle is not None and sample is not None and sample.start_id == context.handle.start_id:
            self._findings, self._of = tuple(findings), sample.start_id
            self._see_machine(findings)
            self._only_report(findings)
        if context.tools.clock.monotonic() >= self._retry_at:
            self._woken.set()

    def _see_machine(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            rule = finding.subject if finding.kind is FindingKind.LOG_RULE else ""
            if finding.kind in MACHINE_FAULTS or rule in MACHINE_RULES:
                self.context.machine_fault = finding.summary
                lasts = finding.kind in (FindingKind.GPU_FAULT, FindingKind.GPU_LOST)
                self.context.machine_broken |= lasts and finding.severity is Severity.CRITICAL

    def _only_report(self, findings: Sequence[Finding]) -> None:
        """Say once what podwatch would do if it were not held back."""
        if not (held := self.context.held()):
            return
        for finding in findings:
            mark = f"{self.context.watched}:{finding.key}"
            if finding.verdict is not Verdict.NONE and finding.confirmed and mark not in self._reported:
                self._reported.add(mark)
                self.context.tools.say(
                    EventName.FINDING_RAISED,
                    f"{held}: would {finding.verdict} because {finding.summary}",
                    Severity.WARNING,
                    kind=str(finding.kind),
                )


def _refused(error: OSError) -> PodwatchError:
    """Return the error as one line that includes the path: a finding shows no other location."""
    where = f"{error.filename}: " if error.filename else ""
    fix = "nothing: podwatch retries automatically"
    if isinstance(error, PermissionError):
        fix = "give podwatch's user access to it, or run podwatch as the user that training runs as"
    return PodwatchError(f"{where}{error.strerror or error}", fix=fix)
