"""Silent death: the inference engine is gone, and no process reports an error (docs/detection.md).

vLLM's API server ends with code 0 when its engine dies, and the launcher ignores code 0, so device memory is the
evidence. Each GPU is judged separately: if one GPU of a tensor-parallel engine is empty, the engine is dead. Where
memory cannot be read, and for one of several servers, the server's own answers are the evidence.
"""

from collections.abc import Iterator
from dataclasses import replace

from podwatch.detection import confirming
from podwatch.detection.observe import SHARED_PART, Turn, boottime_of, lasting_seconds
from podwatch.detection.operator_ends import operator_wait, perhaps_intended
from podwatch.detection.start import Level, Life, Server
from podwatch.detection.verdict import agreeing, judged, names
from podwatch.detection.window import Signal, Window, failing
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity
from podwatch.domain.process import ProcessRole
from podwatch.domain.snapshot import Supervision

LEAST_BELOW = 3
"""Readings below the floor, however short ``hold`` is: two could be a transient."""
LEAST_DOWN = 2
"""Answers of a server that is asked every 5 s; they must span at least ``hold``."""
RELOAD_SECONDS = 300.0
"""If podwatch never saw this GPU's memory in use, it assumes that an engine process younger than this is loading."""
CONFIRM_SECONDS = 10.0
"""How long podwatch polls faster after it saw an engine end: ``hold`` plus the time until the first reading."""
PROVEN_SECONDS = 2.5
"""Least time from the reading that missed the engine to the verdict. prime-rl's launcher stops its children one after
another: the inference server, right after it the orchestrator, which SIGTERM ends at once (asyncio has no handler for
it), then the trainer. So a run that is being stopped loses its orchestrator within a second of the server, and a
reading notices that a second later. With a reading every 0.5 s this makes five, and with a GPU poll of 2 s the verdict
still comes within 5 s."""
REFUSED_SECONDS = 4.5
"""The same if no server answered 503: a server that an operator or a supervisor stopped in order to restart it looks
the same. A replacement has this long to appear, nearly as long as in ``required-child-exited``."""
ENGINE_DEAD = "engine-dead"
"""The shipped log rule that matches vLLM's ``EngineDeadError``."""
SEEN_TO_END = "engine seen to end"
GIB = 1 << 30


# -- by memory ---------------------------------------------------------------------------------------------------------


def silent_death(turn: Turn) -> Iterator[Finding]:
    """The memory of an inference GPU is gone, and another signal agrees."""
    trainer, start, policy = turn.trainer, turn.start, turn.policies.gpu
    if not policy.inference or trainer is None or not trainer.alive:
        return
    asleep = confirming.memory_may_fall(turn)
    yield from _no_evidence(turn, asleep)
    if turn.ending or asleep:
        return
    for index in policy.inference:
        window = start.of(f"gpu{index}")
        if not window.armed or window.since is None:
            continue
        proof = seen_to_end(turn, window)
        if proof is not None or window.counts(policy.hold, LEAST_BELOW):
            yield from _judge_memory(turn, index, window, proof)


def _judge_memory(turn: Turn, index: int, window: Window, proof: Evidence | None) -> Iterator[Finding]:
    assert window.since is not None
    assert turn.trainer is not None
    start, since, found = turn.start, window.since, turn.start.levels[index]
    before = found.level or found.highest or turn.learned.baseline(index) or 0
    shared = index in turn.policies.gpu.shared
    value = f"{found.value / GIB:.2f} GiB, was {before / GIB:.2f} GiB"
    if shared and found.value >= turn.policies.gpu.floor:
        value += f"; below {SHARED_PART:.0%} of that counts as the engine's death on a shared GPU"
    first = failing(f"gpu{index} memory", value, window)
    engine, steps = confirming.engine(turn, since), confirming.steps(turn, since)
    second: tuple[Signal, ...] = (
        confirming.cuda(turn, index),
        engine,
        confirming.health(turn),
        confirming.liveness(turn),
        steps,
    )
    away = found.used_at if found.used_at is not None else turn.at - RELOAD_SECONDS
    new = confirming.replacement(turn, min(away, since)) if steps.agreement is not Agreement.AGREES else None
    summary, alone, wait = f"GPU {index} lost the inference engine's memory", "", None
    if new is not None:
        summary += f", and {confirming.named(new)} was started since: the inference engine is loading again"
        alone = "podwatch waits while the new engine loads, and restarts training if no step is made for too long"
        second = tuple(replace(s, window=None) for s in second)
    elif agreeing(second):
        wait = operator_wait(turn, turn.trainer, since)
        how = "died silently" if wait is None else "ended"
        fell = f"memory in use fell from {before / GIB:.1f} to {found.value / GIB:.1f} GiB"
        summary = f"the inference engine on GPU {index} {how}: {fell} (confirmed by {names(second)})"
    elif shared and {engine.agreement, steps.agreement} == {Agreement.DISAGREES}:
        # Another process freed memory and the engine still works: this is the new level.
        start.levels[index] = Level(polls=found.polls, level=found.value, highest=found.highest, value=found.value)
        start.windows[f"gpu{index}"] = window.reset()
        return
    else:
        summary += ", but no corroborating signal confirms a death: podwatch does not restart training"
        alone = "check the inference log; set [inference] urls so that podwatch also checks the server's /health"
    more = ((proof,) if proof is not None else ()) + confirming.logs(turn, "silent-death")
    yield judged(
        FindingKind.SILENT_DEATH, summary, since, first, second, subject=f"gpu{index}",
        waits=wait.announcement if wait is not None else "", alone=alone, more=more,
    )  # fmt: skip


def _no_evidence(turn: Turn, asleep: str) -> Iterator[Finding]:
    """Why memory proves nothing here: sleep mode, MIG."""
    start = turn.start
    if not asleep and not start.mig:
        return
    if start.memory_said is None:
        start.memory_said = turn.at
    if asleep:
        yield Finding(
            FindingKind.MEMORY_MAY_FALL,
            Severity.INFO,
            f"sleep mode can free the memory of the inference GPUs ({asleep}), so podwatch does not detect a silent"
            " death by memory",
            start.memory_said,
            suggestion='the other signals still count; to judge by memory anyway, set [inference] sleep = "no"',
            evidence=(Evidence("sleep mode", asleep, Agreement.UNAVAILABLE),),
        )
    for index in sorted(start.mig):
        yield Finding(
            FindingKind.GPU_MIG,
            Severity.WARNING,
            f"GPU {index} is partitioned (MIG), and its memory does not show a single instance: podwatch cannot detect"
            " a silent death there by memory",
            start.memory_said,
            suggestion="set [inference] urls so that podwatch checks the engine's /health instead",
            evidence=(Evidence(f"gpu{index} memory", "MIG is on", Agreement.UNAVAILABLE),),
            subject=f"gpu{index}",
        )


# -- without the window ------------------------------------------------------------------------------------------------


def seen_to_end(turn: Turn, below: Window) -> Evidence | None:
    """Complete evidence of an engine's death, which does not need the ``hold`` window; None while any of it is missing.

    Required: the engine's end was seen in the tree or in its own log; at a later reading its memory is gone (``below``)
    and its server refuses or answers 5xx; ``PROVEN_SECONDS`` later launcher, orchestrator and trainer live, and nothing
    shows a signal such as SIGINT. A refusing server proves less than a 503, because a server that is being stopped
    closes its socket first: without a 503 the server's process must be gone too, and ``REFUSED_SECONDS`` count from its
    end.
    """
    snapshot, trainer, fell = turn.snapshot, turn.trainer, below.since
    if trainer is None or not trainer.alive or fell is None or not snapshot.inference.ok:
        return None
    ended = [life for life in _ends(turn) if (life.ended_at or 0.0) >= fell - confirming.NEAR_SECONDS]
    engines = [life.ended_at or 0.0 for life in ended if life.role is ProcessRole.ENGINE]
    if not turn.needs(ProcessRole.ENGINE) or not (engines or dead_in_log(turn, fell)):
        return None
    first, since, least = min([fell, *engines]), max([fell, *engines]), PROVEN_SECONDS
    declared = any(_declared(server, first) for server in turn.start.servers.values())
    if not declared:
        servers = [life.ended_at or 0.0 for life in ended if life.role is ProcessRole.INFERENCE]
        if not servers:
            return None
        since, least = max(since, *servers), REFUSED_SECONDS
    at = snapshot.trainer.at
    if at - since < least or min(at, snapshot.gpus.at, snapshot.inference.at) <= since:
        return None
    if not agreeing((confirming.health(turn),)) or boottime_of(snapshot, at) is None:
        return None
    if confirming.replacement(turn, first) is not None:
        return None
    if perhaps_intended(turn, trainer, since, declared=declared):
        return None
    how = "its process ended" if engines else "reported in vLLM's log"
    return Evidence(SEEN_TO_END, f"{how}; launcher and trainer still run", Agreement.AGREES, at - since)


def _ends(turn: Turn) -> list[Life]:
    """Processes that had lived long and were alive at one reading and gone at the next."""
    least, start = lasting_seconds(turn.policies.gpu), turn.start
    found = (life for life in start.lives.values() if life.seen_to_end and life.seconds >= least)
    return [life for life in found if (life.ended_at or 0.0) > start.gap_at]


def _declared(server: Server, first: float) -> bool:
    """Whether vLLM's own server reported its engine as dead."""
    at = server.declared_at
    return server.counts and at is not None and at >= first - confirming.NEAR_SECONDS


def dead_in_log(turn: Turn, since: float) -> bool:
    """Whether the inference server's own log reports the death of its engine around ``since`` or later."""
    reading = turn.snapshot.logs
    return reading.ok and any(
        m.rule == ENGINE_DEAD and m.role == ProcessRole.INFERENCE and m.last_at >= since - confirming.NEAR_SECONDS
        for m in reading.value or ()
    )


def is_confirming(turn: Turn) -> bool:
    """Whether podwatch should poll faster now, because evidence accumulates that the engine was seen to end: for at
    most ``CONFIRM_SECONDS`` after the end of one engine process."""
    trainer, start = turn.trainer, turn.start
    if trainer is None or not trainer.alive or turn.ending or trainer.supervision is not Supervision.SUPERVISED:
        return False
    windows = [start.of(f"gpu{index}") for index in turn.policies.gpu.inference]
    if not any(window.armed for window in windows) or confirming.memory_may_fall(turn):
        return False
    ends = [life.ended_at or 0.0 for life in _ends(turn) if life.role is ProcessRole.ENGINE]
    if any(turn.at - ended_at <= CONFIRM_SECONDS for ended_at in ends):
        return True
    fell = [w.since for w in windows if w.armed and w.since is not None]
    return any(turn.at - since <= CONFIRM_SECONDS and dead_in_log(turn, since) for since in fell)


# -- by the server's answers -------------------------------------------------------------------------------------------


def dead_server(turn: Turn) -> Iterator[Finding]:
    """``/health`` was 200 and is refused or 5xx at every request, or ``/liveness`` fails several times in a row.
    Neither alone leads to a restart: a server can be restarted by its own parent, and a long weight update blocks
    ``/liveness``."""
    trainer = turn.trainer
    if trainer is None or not trainer.alive or turn.ending or not turn.snapshot.inference.ok:
        return
    for url, server in turn.start.servers.items():
        down, stuck = turn.start.of(f"health:{url}"), turn.start.of(f"liveness:{url}")
        if down.counts(turn.policies.gpu.hold, LEAST_DOWN):
            first = failing(f"server {url}", f"/health is {server.health}", down)
            yield _judge_server(turn, server, first, down, by_steps=True)
        elif stuck.counts(confirming.LIVENESS_SECONDS):
            # A weight update that reaches its first timeout (720 s in prime-rl) blocks both /liveness and the steps,
            # then continues: ``hang`` judges the two together, with its longer limit.
            first = failing(f"server {url}", "/liveness fails repeatedly", stuck)
            yield _judge_server(turn, server, first, stuck, by_steps=False)


def _judge_server(turn: Turn, server: Server, first: Signal, window: Window, *, by_steps: bool) -> Finding:
    assert window.since is not None
    assert turn.trainer is not None
    # GPU memory is not used here: it has a rule of its own, and a single reading of empty memory during a weight update
    # that blocks /liveness proves nothing.
    second: tuple[Signal, ...] = (confirming.engine(turn, window.since),)
    if by_steps:
        second = (*second, confirming.steps(turn, window.since, needed=True))
    dead = agreeing(second)
    wait = operator_wait(turn, turn.trainer, window.since) if dead else None
    confirmed = f" (confirmed by {names(second)})" if dead else "; no corroborating signal"
    summary = f"the inference server at {server.url} is dead: {first.value}{confirmed}"
    return judged(
        FindingKind.SILENT_DEATH, summary, window.since, first, second, subject=server.url,
        waits=wait.announcement if wait is not None else "",
        alone="podwatch does not restart training; check the inference log",
        more=confirming.logs(turn, "silent-death"),
    )  # fmt: skip
