"""Silent death: the inference engine is gone, and no process reports an error (docs/detection.md).

vLLM's API server ends with code 0 when its engine dies, and the launcher ignores code 0, so device memory is the
evidence. Each GPU is judged separately: if one GPU of a tensor-parallel engine is empty, the engine is dead. Where
memory cannot be read, and for one of several servers, the server's own answers are the evidence.
"""

from collections.abc import Iterator
from dataclasses import replace

from podwatch.detection import confirming
from podwatch.detection.observe import SHARED_PART, Turn, lasting_seconds
from podwatch.detection.operator_ends import operator_wait, perhaps_intended
from podwatch.detection.start import LEVEL_POLLS
from podwatch.detection.window import Signal, Window, agreeing, judged, names, signal
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity
from podwatch.domain.process import ProcessRole
from podwatch.domain.snapshot import Supervision

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
    policy, asleep = turn.policies.gpu, confirming.memory_may_fall(turn)
    if policy.inference:
        yield from _no_evidence(turn, asleep)
    for index in () if turn.ending or asleep else policy.inference:
        window = turn.start.of(f"gpu{index}")
        if window.counts():
            proof = seen_to_end(turn, window)
            if proof is not None or window.counts(policy.hold, confirming.LEAST_EMPTY):
                yield from _judge_memory(turn, index, window, proof)


def _judge_memory(turn: Turn, index: int, window: Window, proof: Evidence | None) -> Iterator[Finding]:
    start, since, found = turn.start, window.since or 0.0, turn.start.memory[index]
    before = found.level or found.highest or turn.learned.baseline(index) or 0
    shared = index in turn.policies.gpu.shared
    value = f"{found.value / GIB:.2f} GiB, was {before / GIB:.2f} GiB"
    if shared and found.value >= turn.policies.gpu.floor:
        value += f"; below {SHARED_PART:.0%} of that counts as the engine's death on a shared GPU"
    engine, steps = confirming.engine(turn, since), confirming.steps(turn, since)
    second: tuple[Signal, ...] = (
        confirming.cuda(turn, index), engine, confirming.health(turn), confirming.liveness(turn), steps
    )  # fmt: skip
    away = found.used_at if found.used_at is not None else turn.at - RELOAD_SECONDS
    new = None if agreeing((steps,)) else confirming.replacement(turn, min(away, since))
    summary, waits = f"GPU {index} lost the inference engine's memory", ""
    alone = "check the inference log; set [inference] urls so that podwatch also checks the server's /health"
    if new is not None:
        summary += f", and {confirming.named(new)} was started since: the inference engine is loading again"
        alone = "podwatch waits while the new engine loads, and restarts training if no step is made for too long"
        second = tuple(replace(s, window=None) for s in second)
    elif agreeing(second):
        wait = operator_wait(turn, since)
        how, waits = ("died silently", "") if wait is None else ("ended", wait.announcement)
        fell = f"memory in use fell from {before / GIB:.1f} to {found.value / GIB:.1f} GiB"
        summary = f"the inference engine on GPU {index} {how}: {fell} (confirmed by {names(second)})"
    elif shared and {engine.agreement, steps.agreement} == {Agreement.DISAGREES}:
        # Another process freed memory and the engine still works: this is the new level.
        start.memory[index] = replace(found, recent=(found.value,) * LEVEL_POLLS, used_at=None)
        start.windows[f"gpu{index}"] = window.reset()
        return
    else:
        summary += ", but no corroborating signal confirms a death: podwatch does not restart training"
    more = (*((proof,) if proof is not None else ()), *confirming.logs(turn, "silent-death"))
    first = signal(f"gpu{index} memory", window, value)
    yield judged(
        FindingKind.SILENT_DEATH, summary, since, first, second, subject=f"gpu{index}", waits=waits, alone=alone,
        more=more,
    )  # fmt: skip


def _no_evidence(turn: Turn, asleep: str) -> Iterator[Finding]:
    """Why memory proves nothing here: sleep mode, MIG."""
    start = turn.start
    if start.memory_said is None and (asleep or start.mig):
        start.memory_said = turn.at
    since = turn.at if start.memory_said is None else start.memory_said
    if asleep:
        yield Finding(
            FindingKind.MEMORY_MAY_FALL,
            Severity.INFO,
            f"sleep mode can free the memory of the inference GPUs ({asleep}), so podwatch does not detect a silent"
            " death by memory",
            since,
            'the other signals still count; to judge by memory anyway, set [inference] sleep = "no"',
            evidence=(Evidence("sleep mode", asleep, Agreement.UNAVAILABLE),),
        )
    for index in sorted(start.mig):
        yield Finding(
            FindingKind.GPU_MIG,
            Severity.WARNING,
            f"GPU {index} is partitioned (MIG), and its memory does not show a single instance: podwatch cannot detect"
            " a silent death there by memory",
            since,
            "set [inference] urls so that podwatch checks the engine's /health instead",
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
    snapshot, fell = turn.snapshot, below.since or 0.0
    engines = _ends(turn, ProcessRole.ENGINE, fell - confirming.NEAR_SECONDS)
    servers = _ends(turn, ProcessRole.INFERENCE, fell - confirming.NEAR_SECONDS)
    if not turn.needs(ProcessRole.ENGINE) or not (engines or dead_in_log(turn, fell)):
        return None
    first, since, least = min([fell, *engines]), max([fell, *engines]), PROVEN_SECONDS
    declared = any(  # vLLM's own server reported its engine as dead
        s.counts and s.declared_at is not None and s.declared_at >= first - confirming.NEAR_SECONDS
        for s in turn.start.servers.values()
    )
    if not declared:
        since, least = max([since, *servers]), REFUSED_SECONDS
    at = snapshot.trainer.at
    late = at - since >= least and min(at, snapshot.gpus.at, snapshot.inference.at) > since
    if not late or not (declared or servers) or not snapshot.inference.ok or snapshot.boot_at is None:
        return None
    if not agreeing((confirming.health(turn),)) or confirming.replacement(turn, first) is not None:
        return None
    if perhaps_intended(turn, since, declared=declared):
        return None
    how = "its process ended" if engines else "reported in vLLM's log"
    return Evidence(SEEN_TO_END, f"{how}; launcher and trainer still run", Agreement.AGREES, at - since)


def _ends(turn: Turn, role: ProcessRole, after: float) -> list[float]:
    """When processes of this role ended that had lived long and were alive at one reading and gone at the next."""
    least, start = lasting_seconds(turn.policies.gpu), turn.start
    found = [life for life in start.lives.values() if life.role is role and life.seen_to_end and life.seconds >= least]
    return [at for life in found if (at := life.ended_at or 0.0) >= after and at > start.gap_at]


def dead_in_log(turn: Turn, since: float) -> bool:
    """Whether the inference server's own log reports the death of its engine around ``since`` or later."""
    return any(
        m.rule == ENGINE_DEAD and m.role == ProcessRole.INFERENCE and m.last_at >= since - confirming.NEAR_SECONDS
        for m in turn.snapshot.logs.value or ()
    )


def is_confirming(turn: Turn) -> bool:
    """Whether podwatch should poll faster now, because evidence accumulates that the engine was seen to end: for at
    most ``CONFIRM_SECONDS`` after the end of one engine process."""
    trainer, recent = turn.trainer, turn.at - CONFIRM_SECONDS
    if not trainer.alive or turn.ending or trainer.supervision is not Supervision.SUPERVISED:
        return False
    armed = [w for index in turn.policies.gpu.inference if (w := turn.start.of(f"gpu{index}")).armed]
    if not armed or confirming.memory_may_fall(turn):
        return False
    fell = [w.since for w in armed if w.since is not None and w.since >= recent]
    return bool(_ends(turn, ProcessRole.ENGINE, recent)) or any(dead_in_log(turn, since) for since in fell)


# -- by the server's answers -------------------------------------------------------------------------------------------


def dead_server(turn: Turn) -> Iterator[Finding]:
    """``/health`` was 200 and is refused or 5xx at every request, or ``/liveness`` fails several times in a row.
    Neither alone leads to a restart: a server can be restarted by its own parent, and a long weight update blocks
    ``/liveness``. GPU memory has a rule of its own: a single empty reading during a weight update proves nothing."""
    for url, server in turn.start.servers.items():
        down, stuck = turn.start.of(f"health:{url}"), turn.start.of(f"liveness:{url}")
        if down.counts(turn.policies.gpu.hold, LEAST_DOWN):
            steps = confirming.steps(turn, down.since or 0.0, needed=True)
            yield _judge_server(turn, url, down, f"/health is {server.newest.health}", steps)
        elif stuck.counts(confirming.LIVENESS_SECONDS):
            # A weight update that reaches its first timeout (720 s in prime-rl) blocks both /liveness and the steps,
            # then continues: ``hang`` judges the two together, with its longer limit.
            yield _judge_server(turn, url, stuck, "/liveness fails repeatedly")


def _judge_server(turn: Turn, url: str, window: Window, value: str, *more: Signal) -> Finding:
    since = window.since or 0.0
    second = (confirming.engine(turn, since), *more)
    dead = agreeing(second)
    wait = operator_wait(turn, since) if dead else None
    confirmed = f" (confirmed by {names(second)})" if dead else "; no corroborating signal"
    return judged(
        FindingKind.SILENT_DEATH, f"the inference server at {url} is dead: {value}{confirmed}", since,
        signal(f"server {url}", window, value), second, subject=url,
        waits=wait.announcement if wait is not None else "",
        alone="podwatch does not restart training; check the inference log",
        more=confirming.logs(turn, "silent-death"),
    )  # fmt: skip
