"""The facts of the status in words, one row each: terminal, page and digest print them. Pure."""

from collections.abc import Iterator
from dataclasses import replace

from podwatch.domain.account_document import AccountDocument
from podwatch.domain.finding import counted
from podwatch.domain.nodes import NodeView
from podwatch.domain.snapshot import Health, Supervision
from podwatch.domain.status_document import (
    CheckpointsDocument,
    CountersDocument,
    DaemonDocument,
    DiskDocument,
    GpuDocument,
    IncidentDocument,
    RecoveryView,
    Row,
    ServerDocument,
    Status,
    SyncDocument,
    Tone,
    TrainingDocument,
    TrainingState,
)
from podwatch.domain.times import ago, amount, between, gib, local, size, span
from podwatch.report.headline import NOT_BACKED_UP, age, headline

_DOWN = (TrainingState.RECOVERING, TrainingState.DOWN, TrainingState.GAVE_UP, TrainingState.BLOCKED)
"""States in which training makes no progress and should."""
SILENT_SECONDS = 20.0
"""A node that has not reported for this long is shown so; it reports every second."""
REASON = "the reason for the end"


def worded(status: Status) -> Status:
    """The status with its headline and its rows."""
    backed_up = status.sync is None or bool(status.sync.store_url)
    return replace(
        status,
        headline=headline(status),
        not_backed_up="" if backed_up else NOT_BACKED_UP,
        rows=tuple(_rows(status)),
    )


def _rows(status: Status) -> Iterator[Row]:
    """Every fact that a person reads."""
    training = status.training
    if status.run_id:
        yield Row("run", status.run_id)
    if training is not None:
        yield from _training_rows(status, training)
    alive = None if training is None else training.alive
    for gpu in status.gpus:
        yield _gpu_row(gpu, alive)
    for server in status.inference:
        yield _inference_row(server, alive)
    if status.disk is not None:
        yield _disk_row(status.disk)
    if status.checkpoints is not None:
        yield _checkpoint_row(status, status.checkpoints)
    if status.nodes:
        yield _nodes_row(status)
    if status.sync is not None:
        yield _store_row(status, status.sync)
        yield from _upload_row(status.sync)
    if status.incident is not None:
        tone = Tone.WARNING if status.incident.open else Tone.NONE
        yield Row("last death", incident_text(status.incident, status.time), tone)
    down = training is not None and training.state in _DOWN
    if status.account is not None and not down and (text := _account(status.account)):
        yield Row("goodput", text)
    if training is not None and training.last_log_line:
        yield Row("log", training.last_log_line)
    if status.daemon is not None and status.recovery is not None:
        yield Row("podwatch", _podwatch(status, status.daemon, status.recovery))


def _share(part: float | None, whole: float | None) -> float | None:
    """From 0 to 1; None if one of them is unknown."""
    return None if part is None or not whole else max(0.0, min(1.0, part / whole))


# -- training ----------------------------------------------------------------------------------------------------------


def _training_rows(status: Status, training: TrainingDocument) -> Iterator[Row]:
    if training.step is not None:
        yield Row("step", _step(status, training, training.step))
        if training.target_step:
            share = _share(training.step, training.target_step)
            yield Row("progress", _progress(status, training, training.step, training.target_step), share=share)
    if outage := _outage(status, training):
        yield Row("outage", outage, Tone.WARNING)
    if training.alive:
        yield Row("trainer", _living_trainer(status, training))
    elif training.alive is False:
        ended = training.exit
        text = f"ended: {ended.text}" if ended is not None and ended.text else "not running"
        when = None if ended is None else age(status, ended.at)
        yield Row("trainer", text + (f", {ago(when)}" if when is not None else ""))


def _step(status: Status, training: TrainingDocument, step: int) -> str:
    text = f"{step}"
    if training.target_step is not None:
        text += f" of {training.target_step}"
    if training.median_step_seconds:
        text += f", one every {span(training.median_step_seconds)}"
    risk, state = training.steps_at_risk, training.state
    if risk is None:
        from_disk = training.step_source == "checkpoint"
        return text + "; this is the newest checkpoint; podwatch finds no later step in training's logs" * from_disk
    if training.trainer_ended_at or state is TrainingState.STOPPED:
        text += f"; {_steps(risk)} since the newest checkpoint"
    elif state in (TrainingState.RUNNING, TrainingState.STARTING):
        text += f"; if training dies now: {_steps(risk)} lost{_pod_lost(status.sync, step, risk)}"
    elif state in _DOWN:
        text += f"; {_steps(risk)} lost"
    return text


def _pod_lost(sync: SyncDocument | None, step: int, risk: int) -> str:
    """The steps since the newest checkpoint in the store, if a lost pod costs more than a dead trainer."""
    if sync is None or not sync.store_url or (sync.last_step is None and sync.saves is None):
        return ""
    with_pod = step - (sync.last_step or 0)
    return f", if the pod is lost: {_steps(with_pod)}" if with_pod > risk else ""


def _progress(status: Status, training: TrainingDocument, step: int, target: int) -> str:
    """Per cent of the target, and the time to it."""
    text = f"{min(100, 100 * max(0, step) // target)} %"
    finish = None if status.account is None else status.account.finish_seconds
    if step >= target or training.state is TrainingState.FINISHED or finish is None:
        return text
    left = between(finish.low, finish.high)
    return f"{text}, ends in {left}" if training.state is TrainingState.RUNNING else f"{text}, {left} of training left"


def _outage(status: Status, training: TrainingDocument) -> str:
    """For how long training has made no progress while it is down; empty if unknown, if it is not down, or if the
    finding about the restart in progress says it."""
    said = any(reason.verdict == "restart" and reason.confirmed for reason in status.reasons)
    if training.state not in _DOWN or status.overall == "warning" or said:
        return ""
    if training.step is not None:
        since = age(status, training.step_at)
        return "" if since is None else f"no step for {span(since)}"
    if training.exit is None:
        return ""  # perhaps nothing was started yet
    saved = None if status.checkpoints is None else age(status, status.checkpoints.newest_complete_at)
    return "the last start made no step" + ("" if saved is None else f"; no new checkpoint for {span(saved)}")


_STARTED_BY = {Supervision.SUPERVISED: "started by podwatch", Supervision.ATTACH: "not started by podwatch"}


def _living_trainer(status: Status, training: TrainingDocument) -> str:
    parts = [_pids(training, training.pid)] if training.pid else []
    up = age(status, training.started_at)
    parts += [f"up {span(up)}"] if up is not None else []
    parts += [counted(training.processes, "process", "processes")] if training.processes else []
    if any(reason.kind == "supervisor-lost" for reason in status.reasons):
        parts += ["started by podwatch, its supervisor has ended"]
    elif training.supervision in _STARTED_BY:
        parts += [_STARTED_BY[training.supervision]]
    parts += ["saving now"] if training.saving else []
    stopping = status.recovery is not None and status.recovery.phase == "stopping"
    over = training.state is TrainingState.DOWN or (stopping and training.state in _DOWN)
    return ("no longer trains: " if over else "") + ", ".join(parts)


def _pids(training: TrainingDocument, launcher: int) -> str:
    """The pid of the trainer and of its launcher, if there are both."""
    pids = [pid for pid in training.trainer_pids if pid != launcher]
    if training.trainer_ended_at:
        return f"process ended; its launcher, pid {launcher}, still runs"
    if not pids:
        return f"pid {launcher}"
    return f"pid {pids[0]} (launcher {launcher})" if len(pids) == 1 else f"{len(pids)} trainers below pid {launcher}"


# -- the machine -------------------------------------------------------------------------------------------------------


def _gpu_row(gpu: GpuDocument, alive: bool | None) -> Row:
    """A remark takes the place of use and heat."""
    label, used, base = f"GPU {gpu.index}", gpu.memory_used_bytes, gpu.baseline_bytes
    if gpu.state != "ok":
        return Row(label, gpu.state.upper() + (f": {gpu.detail}" if gpu.detail else ""), Tone.CRITICAL)
    expected = alive is not False and gpu.role in ("inference", "shared")  # without a trainer, GPUs are empty
    old = bool(gpu.outdated and (alive or used))
    fallen = expected and not old and base is not None and used is not None and used < base / 2
    busy, heat = gpu.utilization_percent, gpu.temperature_celsius
    text = f"{gpu.role:<10}{gib(used):>9} of {gib(gpu.memory_total_bytes)}"
    if fallen or old:
        text += f"  {_outdated(alive)}" if old else f"  (was {gib(base)})"
    else:
        text += ("" if busy is None else f"  {busy:3.0f} % busy") + ("" if heat is None else f"  {heat:.0f} C")
    return Row(label, text, Tone.CRITICAL if fallen else Tone.NONE, _share(used, gpu.memory_total_bytes))


def _outdated(alive: bool | None) -> str:
    """A remark on a reading from before podwatch stopped or started the trainer."""
    return "(before the start)" if alive else "(before the stop)"


def _inference_row(server: ServerDocument, alive: bool | None) -> Row:
    healthy = server.health is Health.OK
    text = f" {server.health}"
    if server.http_status is not None and not healthy:
        text += f" (HTTP {server.http_status})"
    if server.requests_running is not None:
        text += f", {counted(round(server.requests_running), 'request')} running"
    if server.outdated and (alive or healthy):
        text += f"  {_outdated(alive)}"
    tone = Tone.NONE if healthy or alive is False else Tone.CRITICAL
    return Row("inference", server.url + text, tone)


def _disk_row(disk: DiskDocument) -> Row:
    text = f"{disk.used_ratio * 100:.0f} % of {size(disk.capacity_bytes)} used, {size(disk.free_bytes)} free"
    tone = Tone.WARNING if disk.used_ratio >= disk.prune_above_ratio else Tone.NONE
    if disk.next_save_bytes is not None:
        text += f"; next save {size(disk.next_save_bytes)} {'fits' if disk.next_save_fits else 'DOES NOT FIT'}"
        tone = tone if disk.next_save_fits else Tone.CRITICAL
    return Row("disk", text, tone, min(1.0, disk.used_ratio))


# -- checkpoints and the store -----------------------------------------------------------------------------------------


def _checkpoint_row(status: Status, checkpoints: CheckpointsDocument) -> Row:
    newest = checkpoints.newest_complete_step
    if newest is None:
        return Row("checkpoint", "none complete on this pod yet")
    total, whole = len(checkpoints.sets), sum(1 for found in checkpoints.sets if found.completeness == "complete")
    count = f"{whole} complete" + (f", {total - whole} incomplete" if total > whole else "")
    when = ago(age(status, checkpoints.newest_complete_at))
    return Row("checkpoint", f"newest complete: step {newest} ({when}); {count} on this pod")


def _store_row(status: Status, sync: SyncDocument) -> Row:
    if not sync.store_url:
        why = "configured, but podwatch does not use it" if sync.refused else "none configured"
        return Row("store", why, Tone.WARNING)
    if any(node.here and node.rank for node in status.nodes):
        return Row("store", f"{sync.store_url}; node 0 uploads for all nodes")
    facts = (
        _newest_stored(status, sync),
        _not_sent(status.counters),
        _holder(sync),
        _store_trouble(status, sync),
    )
    text = "; ".join(fact for fact in facts if fact)
    return Row("store", f"{sync.store_url}, {text}", Tone.CRITICAL if sync.ok is False else Tone.NONE)


def _newest_stored(status: Status, sync: SyncDocument) -> str:
    if sync.last_step is None:
        return "podwatch has not read its content yet" if sync.saves is None else "nothing stored yet"
    return f"newest stored: step {sync.last_step} ({ago(age(status, sync.last_published_at))})"


def _upload_row(sync: SyncDocument) -> Iterator[Row]:
    """The upload in progress, if there is one."""
    if sync.uploading_step is None:
        return
    share = _share(sync.uploaded_bytes, sync.total_bytes)
    text = f"step {sync.uploading_step}: {size(sync.uploaded_bytes)} of {size(sync.total_bytes)}"
    text += "" if share is None else f" ({100 * share:.0f} %)"
    if sync.ok is False:
        yield Row("upload", f"{text}, continues when the store can be used", share=share)
        return
    if sync.upload_bytes_per_second is not None:
        text += f", {size(sync.upload_bytes_per_second)}/s"
    if sync.upload_left_seconds is not None:
        text += f", {span(sync.upload_left_seconds)} left"
    yield Row("upload", text, share=share)


def _not_sent(counters: CountersDocument | None) -> str:
    """How many checkpoints never reached the store; empty if all did."""
    if counters is None:
        return ""
    skipped, abandoned = counters.skipped, counters.abandoned
    total = counters.published + skipped + abandoned
    counts = [f"{skipped} skipped for a newer one"] * bool(skipped) + [f"{abandoned} given up"] * bool(abandoned)
    return f"{skipped + abandoned} of {total} checkpoints never stored ({', '.join(counts)})" if counts else ""


def _holder(sync: SyncDocument) -> str:
    """Which other pod holds or may train the run, or when this one publishes; empty if it does."""
    if sync.superseded:
        return f"SUPERSEDED by pod{f' {sync.holder}' if sync.holder else ''}: this pod no longer uploads checkpoints"
    if sync.standing == "watching":
        return f"this pod does not train: pod {sync.holder or 'unknown'} possibly still does"
    return settling(sync.settles_in_seconds)


def settling(seconds: int | None) -> str:
    """For how long this pod's claim of the run settles; empty for None: it does not."""
    if seconds is None:
        return ""
    return f"this pod's claim of the run is decided in {span(seconds)}, nothing is published before"


_CANNOT = "the store cannot be used: "
"""How the errors of a store in a directory begin (``store.objects.directory``)."""


def _store_trouble(status: Status, sync: SyncDocument) -> str:
    """Why the store cannot be used, and when podwatch tries again; empty if it can."""
    if sync.ok is not False:
        return ""
    error = sync.error or "unknown error"
    if error.startswith(_CANNOT):  # a directory that is full, read-only or gone
        word, error = "NOT USABLE", error.removeprefix(_CANNOT)
    else:
        word = "REFUSED" if sync.refused else "NOT REACHABLE"
    left = age(status, sync.next_attempt_at)
    return f"{word}: {error}" + (f"; next attempt in {span(-left)}" if left is not None and left < 0 else "")


# -- nodes, incidents, the account, podwatch ---------------------------------------------------------------------------


def unreported(count: int, nodes: int) -> str:
    """``1 of 4 nodes has not reported``; empty if all have."""
    missing = count - nodes
    return f"{missing} of {count} nodes {'has' if missing == 1 else 'have'} not reported" if missing > 0 else ""


def _nodes_row(status: Status) -> Row:
    """The nodes of this run, and which one is the reason for the end of the attempt."""
    missing = unreported(status.node_count, len(status.nodes))
    text = "; ".join([*map(_node, status.nodes), *([missing] if missing else [])])
    silent = any(node.silent_seconds >= SILENT_SECONDS for node in status.nodes)
    ended = any(node.reason for node in status.nodes)
    return Row("nodes", text, Tone.CRITICAL if ended else Tone.WARNING if silent or missing else Tone.NONE)


def _node(node: NodeView) -> str:
    text = f"{node.rank} {node.host} {node.phase}" + ("" if node.step is None else f" step {node.step}")
    if node.reason:
        return f"{text} ({REASON})"
    return f"{text}, silent for {span(node.silent_seconds)}" if node.silent_seconds >= SILENT_SECONDS else text


def incident_text(incident: IncidentDocument, now: float | None) -> str:
    """One incident as a story: when, what, what podwatch did, and what it cost."""
    opened, closed = incident.opened_at, incident.closed_at
    when = "" if opened is None or now is None else f"{local(opened, now)} ({ago(now - opened)}) "
    text, done = f"{when}{incident.kind}: {incident.summary}", incident.resolution
    if incident.open:
        done = f"still open: {done}" if done else "still open"
    if done:
        text += f" -> {done}"
    if incident.lost_steps is not None:
        down = "" if opened is None or closed is None else f", no training for {span(closed - opened)}"
        text += f" ({_steps(incident.lost_steps)} lost{down})"
    return text


def _account(account: AccountDocument) -> str:
    """The share of the time that no failure took, and what the run costs; empty while it is unknown."""
    if account.goodput_ratio is None:
        return ""
    text, money = f"{account.goodput_ratio * 100:.0f} %", account.money
    if money.so_far is not None:
        lost = f", {money.lost:.2f} lost" if money.lost else ""
        return f"{text}; {amount(money.so_far, money.currency)}{lost}"
    if account.failures and account.lost_seconds is not None:
        text += f", {counted(account.failures, 'failure')} cost {span(account.lost_seconds)}"
    return text


def _podwatch(status: Status, daemon: DaemonDocument, recovery: RecoveryView) -> str:
    text = "watching" if recovery.phase == "running" else recovery.phase  # about podwatch, not about training
    text += f": {recovery.detail}" if recovery.detail else ""
    if recovery.attempts > 1 and not recovery.gave_up:
        text += f" (attempt {recovery.attempts})"
    if recovery.confirmed is False:
        text += "; the resume is NOT CONFIRMED"
    if daemon.mode == "observe":
        text += "; OBSERVE mode: podwatch only reports restarts and deletions"
    up = age(status, daemon.started_at)
    text += "" if up is None else f"; up {span(round(up))}"
    return text + (f", {daemon.http_url}" if daemon.http_url else "")


def _steps(count: int) -> str:
    return "no step" if count == 0 else "1 step" if count == 1 else f"{count} steps"
