"""Render the status document as text: the verdict in the first line, then facts, then what the operator must do; or as
one line for monitoring plugins.

Pure. ``status_verdict.py`` words the verdict and reads the fields.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from podwatch.client.status_verdict import (
    NOT_BACKED_UP,
    Document,
    age_of,
    clean,
    entries,
    not_backed_up,
    now_of,
    section,
    verdict,
)
from podwatch.client.terminal_text import bar, cut, wrap
from podwatch.client.times_and_sizes import ago, amount, between, from_rfc3339, gib, local, size, span

GREEN, YELLOW, RED, BOLD, DIM, RESET = "\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[1m", "\x1b[2m", "\x1b[0m"
_TONES = {"ok": GREEN, "warning": YELLOW, "critical": RED, "unknown": YELLOW}
_DOWN = ("recovering", "down", "gave-up", "blocked")
"""States in which training makes no progress and should."""


class Layout(NamedTuple):
    """How the facts are set in a width: columns before the label, of the label, of a bar (0: no bars)."""

    width: int
    indent: int
    label: int
    bar: int
    short: bool
    """GPUs and servers in fewer words."""

    @property
    def text(self) -> int:
        """The column in which the texts begin."""
        return self.indent + self.label


def layout_of(width: int) -> Layout:
    """The layout for a terminal of ``width`` columns, clamped to 40..120."""
    width = max(40, min(width, 120))
    if width >= 100:
        return Layout(width, 2, 12, 24, short=False)
    if width >= 77:
        return Layout(width, 2, 12, 10, short=False)
    return Layout(width, 0, 11, min(10, width - 44) if width >= 49 else 0, short=True)


_WHOLE: Final = Layout(120, 2, 12, 0, short=False)
"""For readers without a terminal."""


def render(document: Document, *, width: int = 80, height: int = 0, colour: bool = False) -> str:
    """The whole screen, ending in a newline. ``width`` in columns, clamped to 40..120. ``height`` in rows, 0 if
    unknown: where the screen is taller, what needs attention comes before the facts, so that a window that shows only
    the beginning shows it."""
    layout, paint = layout_of(width), _Paint(colour)
    tone = _TONES.get(str(document.get("overall")), YELLOW)
    top = [paint(line, tone, BOLD) for line in wrap(verdict(document), layout.width)]
    if not_backed_up(document):
        top += [paint(line, YELLOW, BOLD) for line in wrap(NOT_BACKED_UP, layout.width)]
    facts = [line for row in rows(document, layout) for line in _fact(row, _shares(document), layout, paint)]
    attention = list(_attention(document, layout, paint))
    parts = [part for part in (facts, attention) if part]
    if height and sum(map(len, parts)) + len(parts) + len(top) > height:
        parts.reverse()
    lines = [*top, *(line for part in parts for line in ("", *part))]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _fact(row: "Row", shares: Mapping[str, float], layout: Layout, paint: "_Paint") -> Iterator[str]:
    """The lines of one row, with a bar where the row has a share."""
    label, text, tone = row
    gap = " " * layout.text
    lead = " " * layout.indent + paint(label, DIM) + " " * (layout.label - len(label))
    if label in shares and layout.bar:
        gap += " " * (layout.bar + 1)
        lead += paint(bar(shares[label], layout.bar), tone) + " "
    room = layout.width - len(gap)
    first, *more = wrap(_cut_log(text, room) if label == "log" else text, room) or [""]
    yield lead + paint(first, tone or (DIM if label == "log" else ""))
    yield from (gap + paint(line, tone or (DIM if label == "log" else "")) for line in more)


def _cut_log(text: str, room: int) -> str:
    """A line of the log, cut to two lines: what podwatch itself says is never cut."""
    first, *more = wrap(text, room) or [""]
    return f"{first} {cut(' '.join(more), room)}" if more else first


def _shares(document: Document) -> dict[str, float]:
    """Share from 0 to 1 of each row that has a bar, by label."""
    training, sync = section(document, "training"), section(document, "sync")
    pairs = {
        "progress": (training.get("step"), training.get("target_step")),
        "disk": (section(document, "disk").get("used_ratio"), 1),
        "upload": (sync.get("uploaded_bytes"), sync.get("total_bytes")),
    }
    for gpu in entries(document, "gpus"):
        pairs[f"GPU {gpu.get('index')}"] = (gpu.get("memory_used_bytes"), gpu.get("memory_total_bytes"))
    numbers = (int, float)
    return {
        label: max(0.0, min(1.0, part / whole))
        for label, (part, whole) in pairs.items()
        if isinstance(part, numbers) and isinstance(whole, numbers) and whole > 0
    }


Row = tuple[str, str, str]
"""Label, text, tone."""


def rows(document: Document, layout: Layout = _WHOLE) -> Iterator[Row]:
    """Every fact the document has."""
    name = clean(document.get("run_id") or "")
    if name:
        yield "run", name, ""
    if not document.get("running"):
        seen = from_rfc3339(document.get("snapshot_at"))
        now = now_of(document)
        if seen is None or now is None:
            return
        yield "", f"the values below are {span(now - seen)} old (from {local(seen, now)})", YELLOW
    yield from _training_rows(document)
    alive = section(document, "training").get("alive")
    for gpu in entries(document, "gpus"):
        yield _gpu_row(gpu, alive, layout)
    for server in entries(document, "inference"):
        yield _inference_row(server, alive, layout)
    if disk := section(document, "disk"):
        yield _disk_row(disk)
    if checkpoints := section(document, "checkpoints"):
        yield _checkpoint_row(document, checkpoints)
    if nodes := entries(document, "nodes"):
        yield _nodes_row(document, nodes)
    if sync := section(document, "sync"):
        yield _store_row(document, sync)
        if upload := _uploading(sync):
            yield "upload", upload, ""
    if incident := section(document, "incident"):
        yield _incident_row(document, incident)
    in_trouble = section(document, "training").get("state") in _DOWN and document.get("running")
    if (text := _account(section(document, "account"))) and not in_trouble:
        yield "goodput", text, ""
    if document.get("running"):
        if line := clean(section(document, "training").get("last_log_line") or ""):
            yield "log", line, ""
        yield _podwatch_row(document)


def _training_rows(document: Document) -> Iterator[Row]:
    training = section(document, "training")
    if training.get("step") is not None:
        yield "step", _step(document, training), ""
    if progress := _progress(document, training):
        yield "progress", progress, ""
    if outage := _outage(document, training):
        yield "outage", outage, YELLOW
    if training.get("alive"):
        yield "trainer", _living_trainer(document, training), ""
    elif training.get("alive") is False:
        ended = training.get("exit") or {}
        when = age_of(document, ended.get("at"))
        text = f"ended: {clean(ended['text'])}" if ended.get("text") else "not running"
        yield "trainer", text + (f", {ago(when)}" if when is not None else ""), ""


def _step(document: Document, training: Document) -> str:
    text = f"{training['step']}"
    if training.get("target_step") is not None:
        text += f" of {training['target_step']}"
    if training.get("median_step_seconds"):
        text += f", one every {span(training['median_step_seconds'])}"
    risk, state = training.get("steps_at_risk"), training.get("state")
    if risk is not None and (training.get("trainer_ended_at") or state == "stopped"):
        text += f"; {_steps(risk)} since the newest checkpoint"
    elif risk is not None and state in ("running", "starting"):
        text += f"; if training dies now: {_steps(risk)} lost{_pod_lost(document)}"
    elif risk is not None and state in _DOWN:
        text += f"; {_steps(risk)} lost"
    elif training.get("step_source") == "checkpoint" and risk is None:
        text += "; this is the newest checkpoint; podwatch finds no later step in training's logs"
    return text


def _progress(document: Document, training: Document) -> str:
    """Per cent of the target and the time to finish; empty without a target."""
    step, target = training.get("step"), training.get("target_step")
    if not isinstance(step, int) or not isinstance(target, int) or target <= 0:
        return ""
    text = f"{min(100, 100 * max(0, step) // target)} %"
    finish = section(section(document, "account"), "finish_seconds")
    if step >= target or training.get("state") == "finished" or not finish:
        return text
    left = between(finish["low"], finish["high"])
    return f"{text}, ends in {left}" if training.get("state") == "running" else f"{text}, {left} of training left"


def _outage(document: Document, training: Document) -> str:
    """For how long training has made no progress while it is down; empty if unknown, if it is not down, or if the
    finding about the restart in progress says it."""
    told = any(r.get("verdict") == "restart" and r.get("confirmed") for r in entries(document, "reasons"))
    if training.get("state") not in _DOWN or document.get("overall") == "warning" or told:
        return ""
    if training.get("step") is not None:
        age = age_of(document, training.get("step_at"))
        return "" if age is None else f"no step for {span(age)}"
    if not training.get("exit"):
        return ""  # perhaps nothing was started yet
    saved = age_of(document, section(document, "checkpoints").get("newest_complete_at"))
    return "the last start made no step" + ("" if saved is None else f"; no new checkpoint for {span(saved)}")


def _living_trainer(document: Document, training: Document) -> str:
    parts = [_whose_pid(training)] if training.get("pid") else []
    up = age_of(document, training.get("started_at"))
    parts += [f"up {span(up)}"] if up is not None else []
    parts += [_counted(training["processes"], "process", "processes")] if training.get("processes") else []
    how = {"supervised": "started by podwatch", "attach": "not started by podwatch"}
    if any(r.get("kind") == "supervisor-lost" for r in entries(document, "reasons")):
        parts += ["started by podwatch, its supervisor has ended"]
    elif training.get("supervision") in how:
        parts += [how[training["supervision"]]]
    parts += ["saving now"] if training.get("saving") else []
    down = training.get("state") == "down" or section(document, "recovery").get("phase") == "stopping"
    still = "no longer trains: " if down and training.get("state") in _DOWN else ""
    return still + ", ".join(parts)


def _pod_lost(document: Document) -> str:
    """The steps since the newest checkpoint in the store, if a lost pod costs more than a dead trainer."""
    training, sync = section(document, "training"), section(document, "sync")
    step, last, risk = training["step"], sync.get("last_step"), training["steps_at_risk"]
    unread = last is None and sync.get("saves", 0) is None
    if not sync.get("store_url") or unread or (last or 0) > step:
        return ""
    with_pod = step - (last or 0)
    return f", if the pod is lost: {_steps(with_pod)}" if with_pod > risk else ""


def _whose_pid(training: Document) -> str:
    """The pid of the trainer and of its launcher, if there are both."""
    launcher, pids = training["pid"], training.get("trainer_pids")
    pids = [pid for pid in pids if pid != launcher] if isinstance(pids, list) else []
    if training.get("trainer_ended_at"):
        return f"process ended; its launcher, pid {launcher}, still runs"
    if not pids:
        return f"pid {launcher}"
    return f"pid {pids[0]} (launcher {launcher})" if len(pids) == 1 else f"{len(pids)} trainers below pid {launcher}"


_SHORT_ROLES = {"inference": "infer", "trainer": "train", "shared": "both"}


def _gpu_row(gpu: Document, alive: object, layout: Layout) -> Row:
    """One line in every layout of 48 columns or more: where there is no room for use and heat beside a remark, they
    are left out."""
    label = f"GPU {gpu.get('index')}"
    if gpu.get("state") != "ok":
        detail = clean(gpu.get("detail") or "")
        return label, f"{str(gpu.get('state')).upper()}{f': {detail}' if detail else ''}", RED
    used, base = gpu.get("memory_used_bytes"), gpu.get("baseline_bytes")
    held = alive is not False and gpu.get("role") in ("inference", "shared")  # without a trainer, GPUs are empty
    fallen = held and base is not None and used is not None and used < base / 2
    role = clean(gpu.get("role") or "")
    if layout.short:
        text = (
            f"{_SHORT_ROLES.get(role, role):<5} {_short_gib(used):>4}/{_short_gib(gpu.get('memory_total_bytes'))} GiB"
        )
    else:
        text = f"{role:<10}{gib(used):>9} of {gib(gpu.get('memory_total_bytes'))}"
    remarks = [f"(was {_short_gib(base) if layout.short else gib(base)})"] if fallen else []
    if gpu.get("outdated") and (alive or used):
        remarks.append("(old)" if layout.short else _outdated(alive))
    gap = " " if layout.short else "  "
    room = layout.width - layout.text - layout.bar - 1
    tries = (gap.join([text + _use_and_heat(gpu, layout), *remarks]), gap.join([text, *remarks]))
    fitting = (line for line in tries if len(line) <= room or not remarks)
    return label, next(fitting, gap.join([text, *remarks[-1:]])), RED if fallen else ""


def _short_gib(size_bytes: float | None) -> str:
    return "?" if size_bytes is None else f"{size_bytes / (1 << 30):.{1 if size_bytes < 100 << 30 else 0}f}"


def _use_and_heat(gpu: Document, layout: Layout) -> str:
    busy, heat, short = gpu.get("utilization_percent"), gpu.get("temperature_celsius"), layout.short
    text = "" if busy is None else f" {busy:3.0f} %" if short else f"  {busy:3.0f} % busy"
    if heat is None or layout.width < 48:
        return text
    return text + (f" {heat:.0f} C" if short else f"  {heat:.0f} C")


def _outdated(alive: object) -> str:
    """A remark on a reading from before podwatch stopped or started the trainer."""
    return "(before the start)" if alive else "(before the stop)"


def _inference_row(server: Document, alive: object, layout: Layout) -> Row:
    health = str(server.get("health"))
    url = clean(server.get("url"))
    text = f"{url.removeprefix('http://') if layout.short else url} {health}"
    if server.get("http_status") is not None and health != "ok":
        text += f" (HTTP {server['http_status']})"
    if server.get("requests_running") is not None:
        text += f", {_counted(round(server['requests_running']), 'request')} running"
    if server.get("outdated") and (alive or health == "ok"):
        text += f"  {_outdated(alive)}"
    return "inference", text, "" if health == "ok" or alive is False else RED


def _disk_row(disk: Document) -> Row:
    ratio = float(disk.get("used_ratio") or 0.0)
    text = f"{ratio * 100:.0f} % of {size(disk.get('capacity_bytes'))} used, {size(disk.get('free_bytes'))} free"
    tone = YELLOW if ratio >= float(disk.get("prune_above_ratio") or 1.0) else ""
    if disk.get("next_save_bytes") is not None:
        fits = disk.get("next_save_fits")
        text += f"; next save {size(disk['next_save_bytes'])} {'fits' if fits else 'DOES NOT FIT'}"
        tone = tone if fits else RED
    return "disk", text, tone


def _checkpoint_row(document: Document, checkpoints: Document) -> Row:
    newest = checkpoints.get("newest_complete_step")
    if newest is None:
        return "checkpoint", "none complete on this pod yet", ""
    sets = entries(checkpoints, "sets")
    whole = sum(1 for found in sets if found.get("completeness", "complete") == "complete")
    count = f"{whole} complete" + (f", {len(sets) - whole} incomplete" if len(sets) > whole else "")
    age = ago(age_of(document, checkpoints.get("newest_complete_at")))
    return "checkpoint", f"newest complete: step {newest} ({age}); {count} on this pod", ""


SILENT_SECONDS = 20.0
"""A node that has not reported for this long is shown so; it reports every second."""
REASON = "the reason for the end"


def unreported(document: Document) -> str:
    """``1 of 4 nodes has not reported``; empty if all have."""
    count, seen = document.get("node_count"), len(entries(document, "nodes"))
    if not isinstance(count, int) or seen >= count:
        return ""
    return f"{count - seen} of {count} nodes {'has' if count - seen == 1 else 'have'} not reported"


def _nodes_row(document: Document, nodes: list[dict[str, Any]]) -> Row:
    """The nodes of this run, and which one is the reason for the end of the attempt."""
    texts, colour = [], ""
    for node in nodes:
        silent = node.get("silent_seconds") or 0.0
        step = "" if node.get("step") is None else f" step {node['step']}"
        text = f"{node.get('rank')} {clean(node.get('host') or '')} {clean(node.get('phase') or '')}{step}"
        if node.get("reason"):
            text, colour = f"{text} ({REASON})", RED
        elif silent >= SILENT_SECONDS:
            text, colour = f"{text}, silent for {span(silent)}", colour or YELLOW
        texts.append(text)
    if missing := unreported(document):
        texts, colour = [*texts, missing], colour or YELLOW
    return "nodes", "; ".join(texts), colour


def _store_row(document: Document, sync: Document) -> Row:
    if not sync.get("store_url"):
        return "store", "configured, but podwatch does not use it" if sync.get("refused") else "none configured", YELLOW
    if any(node.get("here") and node.get("rank") for node in entries(document, "nodes")):
        return "store", f"{clean(sync['store_url'])}; node 0 uploads for all nodes", ""
    facts = (
        _newest_stored(document, sync),
        _not_sent(section(document, "counters")),
        _holder(sync),
        _store_trouble(document, sync),
    )
    text = "; ".join(fact for fact in facts if fact)
    return "store", f"{clean(sync['store_url'])}, {text}", RED if sync.get("ok") is False else ""


def _newest_stored(document: Document, sync: Document) -> str:
    last = sync.get("last_step")
    if last is None:
        unread = sync.get("saves", 0) is None
        return "podwatch has not read its content yet" if unread else "nothing stored yet"
    return f"newest stored: step {last} ({ago(age_of(document, sync.get('last_published_at')))})"


def _uploading(sync: Document) -> str:
    """The upload in progress; empty if there is none."""
    if sync.get("uploading_step") is None:
        return ""
    sent, total = sync.get("uploaded_bytes") or 0, sync.get("total_bytes") or 0
    share = f" ({100 * min(1.0, sent / total):.0f} %)" if total else ""
    text = f"step {sync['uploading_step']}: {size(sent)} of {size(total)}{share}"
    if sync.get("ok") is False:
        return f"{text}, continues when the store can be used"
    if sync.get("upload_bytes_per_second") is not None:
        text += f", {size(sync['upload_bytes_per_second'])}/s"
    if sync.get("upload_left_seconds") is not None:
        text += f", {span(sync['upload_left_seconds'])} left"
    return text


def _not_sent(counters: Document) -> str:
    """How many checkpoints never reached the store; empty if all did."""
    skipped, abandoned = counters.get("skipped") or 0, counters.get("abandoned") or 0
    total = (counters.get("published") or 0) + skipped + abandoned
    counts = [f"{skipped} skipped for a newer one"] * bool(skipped) + [f"{abandoned} given up"] * bool(abandoned)
    return f"{skipped + abandoned} of {total} checkpoints never stored ({', '.join(counts)})" if counts else ""


def _holder(sync: Document) -> str:
    """Which other pod holds or may train the run, or when this one publishes; empty if it does."""
    if sync.get("superseded"):
        who = f" {clean(sync['holder'])}" if sync.get("holder") else ""
        return f"SUPERSEDED by pod{who}: this pod no longer uploads checkpoints"
    if sync.get("standing") == "aside":
        return "control.json assigns this run to another pod: this pod does not train it"
    if sync.get("standing") == "watching":
        return f"this pod does not train: pod {clean(sync.get('holder') or 'unknown')} possibly still does"
    return settling(sync)


def settling(sync: Document) -> str:
    """How long this pod's claim of the run settles, if it does; else empty."""
    seconds = sync.get("settles_in_seconds")
    if seconds is None:
        return ""
    return f"this pod's claim of the run is decided in {span(seconds)}, nothing is published before"


_CANNOT = "the store cannot be used: "
"""How the errors of a store in a directory begin (stores/local.py)."""


def _store_trouble(document: Document, sync: Document) -> str:
    """Why the store cannot be used, and when podwatch tries again; empty if it can."""
    if sync.get("ok") is not False:
        return ""
    error = clean(sync.get("error") or "unknown error")
    if error.startswith(_CANNOT):  # a directory that is full, read-only or gone
        word, error = "NOT USABLE", error.removeprefix(_CANNOT)
    else:
        word = "REFUSED" if sync.get("refused") else "NOT REACHABLE"
    text = f"{word}: {error}"
    left = age_of(document, sync.get("next_attempt_at"))
    return text + (f"; next attempt in {span(-left)}" if left is not None and left < 0 else "")


def incident_text(document: Document, incident: Document) -> str:
    """One incident as a story: when, what, what podwatch did, and what it cost."""
    return _incident_row(document, incident)[1]


def _incident_row(document: Document, incident: Document) -> Row:
    opened, now = from_rfc3339(incident.get("opened_at")), now_of(document)
    when = "" if opened is None or now is None else f"{local(opened, now)} ({ago(now - opened)}) "
    text = f"{when}{clean(incident.get('kind'))}: {clean(incident.get('summary'))}"
    done = clean(incident.get("resolution") or "")
    if incident.get("open"):
        done = "still open" if not done else f"still open: {done}"
    if done:
        text += f" -> {done}"
    closed = from_rfc3339(incident.get("closed_at"))
    if incident.get("lost_steps") is not None:
        down = "" if opened is None or closed is None else f", no training for {span(closed - opened)}"
        text += f" ({_steps(incident['lost_steps'])} lost{down})"
    return "last death", text, YELLOW if incident.get("open") else ""


def _account(account: Document) -> str:
    """The share of the time that no failure took, and what the run costs; empty while it is unknown."""
    money, lost_seconds = section(account, "money"), account.get("lost_seconds")
    if account.get("goodput_ratio") is None:
        return ""
    facts, priced = [f"{account['goodput_ratio'] * 100:.0f} %"], money.get("so_far") is not None
    if account.get("failures") and lost_seconds is not None and not priced:
        facts[0] += f", {_counted(account['failures'], 'failure')} cost {span(lost_seconds)}"
    if priced:
        lost = f", {money['lost']:.2f} lost" if money.get("lost") else ""
        facts.append(f"{amount(money['so_far'], money.get('currency'))}{lost}")
    return "; ".join(facts)


def _podwatch_row(document: Document) -> Row:
    daemon, recovery = section(document, "daemon"), section(document, "recovery")
    phase, detail = clean(recovery.get("phase") or "watching"), clean(recovery.get("detail") or "")
    phase = "watching" if phase == "running" else phase  # this row is about podwatch, not about training
    text = f"{phase}{f': {detail}' if detail else ''}"
    if (recovery.get("attempts") or 0) > 1 and not recovery.get("gave_up"):
        text += f" (attempt {recovery['attempts']})"
    if recovery.get("confirmed") is False:
        text += "; the resume is NOT CONFIRMED"
    if daemon.get("mode") == "observe":
        text += "; OBSERVE mode: podwatch only reports restarts and deletions"
    up = age_of(document, daemon.get("started_at"))
    text += "" if up is None else f"; up {span(round(up))}"
    text += f", {clean(daemon['http_url'])}" if daemon.get("http_url") else ""
    return "podwatch", text, ""


def _attention(document: Document, layout: Layout, paint: "_Paint") -> Iterator[str]:
    """The reasons of the verdict; nothing if there is none."""
    reasons = entries(document, "reasons")
    if not reasons:
        return
    only_notes = all(reason.get("severity") == "info" for reason in reasons)
    yield paint(f"{'NOTES' if only_notes else 'NEEDS ATTENTION'} ({len(reasons)})", BOLD)
    for reason in reasons:
        yield from _reason(reason, layout, paint, named=bool(document.get("running")))


def _reason(reason: Document, layout: Layout, paint: "_Paint", *, named: bool) -> Iterator[str]:
    """``named``: the reason is a finding, whose kind is the name of its entry in docs/runbook.md."""
    severity = str(reason.get("severity"))
    tone = {"critical": RED, "warning": YELLOW}.get(severity, "")
    gap = " " * (layout.indent + 10)
    since = float(reason.get("for_seconds") or 0.0)
    first, *rest = wrap(clean(reason.get("summary")), layout.width - len(gap)) or [""]
    yield " " * layout.indent + paint(f"{severity:<10}", tone, BOLD) + first
    yield from (gap + line for line in rest)
    facts = [f"for: {span(since)}"] if since >= 1 and severity != "info" else []
    facts += [f"runbook: {clean(reason.get('kind'))}"] if named and reason.get("kind") else []
    yield from wrap("; ".join(facts), layout.width, first=gap, rest=gap)
    if reason.get("suggestion"):
        do, *more = str(reason["suggestion"]).split("\n")
        yield from wrap(clean(do), layout.width, first=f"{gap}do: ", rest=f"{gap}    ")
        for text in more:  # lines of a log
            yield from wrap(clean(text), layout.width, first=f"{gap}    ", rest=f"{gap}    ")


class _Paint:
    def __init__(self, on: bool) -> None:
        self._on = on

    def __call__(self, text: str, *codes: str) -> str:
        code = "".join(codes)
        return f"{code}{text}{RESET}" if self._on and code and text else text


def _steps(count: object) -> str:
    return "no step" if count == 0 else "1 step" if count == 1 else f"{count} steps"


def _counted(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


# -- monitoring plugin line ------------------------------------------------------------------------------------------
# The status as one line for monitoring plugins: ``PODWATCH OK - text | perfdata``.


def plugin_line(document: Mapping[str, Any]) -> str:
    """One line without newline. ``|`` starts the performance data, so it is replaced in the text."""
    word = str(document.get("overall") or "unknown").upper() if document.get("running") else "UNKNOWN"
    text = verdict(document)
    if not_backed_up(document):
        text += "; NOT BACKED UP"
    training, disk, sync = (document.get(k) or {} for k in ("training", "disk", "sync"))
    now = from_rfc3339(document.get("time"))
    data = []
    if document.get("running") and training.get("step") is not None:
        data.append(f"step={training['step']}")
    for name, at in (("step_age", training.get("step_at")), ("sync_age", sync.get("last_published_at"))):
        then = from_rfc3339(at)
        if document.get("running") and then is not None and now is not None:
            data.append(f"{name}={max(0.0, now - then):.0f}s")
    if document.get("running") and disk.get("used_ratio") is not None:
        data.append(f"disk_used={disk['used_ratio'] * 100:.0f}%;{disk.get('prune_above_ratio', 1) * 100:.0f};;0;100")
    shown = "".join(c if c.isprintable() else " " for c in text).replace("|", "/")
    return f"PODWATCH {word} - {shown}" + (f" | {' '.join(data)}" if data else "")
