"""The page at ``/``: the template page.html, filled with the status document, the last incidents and the last log lines
(docs/page.md).

Every value is text: only ``tag`` and the template make HTML (html.py). The facts are the document's rows. The script
replaces the parts that changed; without it the page shows everything at each reload.
"""

import base64
import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from string import Template
from typing import Any, Final

from podwatch.domain.times import ago, from_rfc3339, local, size, span
from podwatch.recording.last_day import Moment
from podwatch.reporting.html import Html, escaped, joined, tag
from podwatch.reporting.plots import plots
from podwatch.reporting.rows import REASON, SILENT_SECONDS, unreported
from podwatch.reporting.status_screen import Document, entries
from podwatch.reporting.terminal_text import BEFORE_UNIT, NO_BREAK

CHECKPOINTS_SHOWN: Final = 6
LOG_LINES: Final = 15
MAX_LINE: Final = 500
"""Characters of a log line."""

# -- words and bars ---------------------------------------------------------------------------------------------------


def prose(text: object, *, copy: bool = False) -> Html:
    """Text in which `...` is a command; with ``copy`` one of podwatch's own gets a button that copies it. A number and
    its unit stay on one line."""
    whole = BEFORE_UNIT.sub(NO_BREAK, str(text))
    parts = whole.split("`")
    if len(parts) % 2 == 0:
        return escaped(whole)
    return joined(*(_command(part, copy=copy) if number % 2 else part for number, part in enumerate(parts)))


def _command(text: str, *, copy: bool) -> Html:
    text = text.replace(NO_BREAK, " ")
    code = tag("code", text)
    if not copy or not text.startswith("podwatch "):
        return code
    return joined(code, tag("button", "Copy", type="button", class_="copy", aria_label=f"Copy {text}", data_copy=text))


def bar(ratio: object, tone: str = "") -> Html:
    """A bar for a share from 0 to 1; empty for anything else. The text beside it has the figures."""
    if not isinstance(ratio, int | float) or ratio != ratio:
        return Html("")
    width = f"{100 * min(1.0, max(0.0, ratio)):.1f}"
    rect = tag("rect", width=width, height="4")
    return tag(
        "svg", rect, class_=f"bar {tone}".strip(), viewBox="0 0 100 4", preserveAspectRatio="none", aria_hidden="true"
    )


# -- parts of the page -----------------------------------------------------------------------------------------------

_WORDS = {"ok": "OK", "warning": "WARNING", "critical": "CRITICAL"}
_ICONS = {"ok": "116329", "warning": "e3a008", "critical": "b00020"}


@cache
def _template() -> Template:
    return Template((files("podwatch.reporting") / "page.html").read_text("utf-8"))


def render(
    document: Document,
    *,
    incidents: Sequence[tuple[str, bool]] = (),
    log: Sequence[str] = (),
    history: Html | None = None,
) -> str:
    """The whole page. ``document`` and ``incidents`` (newest first) as in docs/json.md; ``log`` without secrets, oldest
    line first; ``history`` as ``history_of`` made it, None to leave it out."""
    overall, shown = str(document.get("overall")), from_rfc3339(document.get("time"))
    word, facts, warning = _WORDS.get(overall, "UNKNOWN"), entries(document, "rows"), document.get("not_backed_up")
    return _template().substitute(
        word=word,
        tone=word.lower(),
        icon=_ICONS.get(overall, "555555"),
        run=escaped(document.get("run_id") or "podwatch"),
        headline=prose(document.get("headline") or ""),
        warning=tag("p", prose(warning), class_="verdict warning") if warning else "",
        at="" if shown is None else escaped(f"as of {local(shown, shown)} (the pod's clock)"),
        needs=_needs(document),
        progress=_progress(facts),
        nodes=_nodes(document),
        machine=_machine(facts),
        checkpoints=_checkpoints(document, facts),
        incidents=_incidents(incidents),
        log=_log(log),
        history="" if history is None else _part("history", "The last 24 h", history),
        more=_facts(facts, without=_ELSEWHERE),
    )


def history_of(moments: Sequence[Moment], now: float, stamp: str) -> Html:
    """The plots. The script names ``stamp`` when it asks again, and gets them only if they are newer."""
    return tag("div", plots(moments, now), data_stamp=stamp)


_ELSEWHERE: Final = frozenset(
    ("step", "progress", "outage", "disk", "checkpoint", "store", "upload", "last death", "log", "run", "nodes")
)
"""Rows that have a part of their own here; GPUs too."""


def _part(name: str, title: str, content: Html) -> Html:
    heading = tag("h2", title, id=f"{name}-title")
    part = tag("div", content, id=name, data_part=True)
    return tag("section", heading, part, aria_labelledby=f"{name}-title", id=f"{name}-part")


def _needs(document: Document) -> Html:
    reasons = entries(document, "reasons")
    if not reasons:
        return tag("p", "Nothing. No problem is open.")
    return tag("ul", *map(_reason, reasons), class_="cards")


def _reason(reason: Mapping[str, Any]) -> Html:
    severity = str(reason.get("severity"))
    tone = {"critical": "bad", "warning": "warn"}.get(severity, "")
    since = reason.get("for_seconds")
    known = isinstance(since, int | float) and since >= 1 and severity != "info"
    lasting = f" (for {span(since)})" if known and since is not None else ""
    do, *more = str(reason.get("suggestion") or "").split("\n")
    return tag(
        "li",
        tag("p", tag("strong", severity), " ", prose(reason.get("summary") or ""), lasting),
        tag("p", tag("b", "Do: "), prose(do, copy=True), class_="do") if do else "",
        tag("pre", "\n".join(more)) if more else "",
        class_=tone or None,
    )


def _progress(facts: Sequence[Document]) -> Html:
    """The share of the target with its bar, then the facts about steps."""
    done = (joined(tag("p", tag("strong", prose(row["text"]))), _bar(row)) for row in _labelled(facts, "progress"))
    shown = _labelled(facts, "step", "outage")
    return joined(*done, _facts(shown)) if shown else tag("p", "No step seen yet.")


def _labelled(facts: Sequence[Document], *labels: str) -> list[Document]:
    return [row for row in facts if row["label"] in labels]


def _bar(row: Document) -> Html:
    return bar(row["share"], _tone(row) or "")


def _nodes(document: Document) -> Html:
    """The nodes of a run over several nodes; empty for a run on one node."""
    nodes = entries(document, "nodes")
    if not nodes:
        return Html("")
    table = _table(("node", "host", "phase", "step", "last report"), map(_node, nodes), "Nodes of this run")
    missing = unreported(document.get("node_count") or 0, len(nodes))
    content = joined(tag("p", missing, class_="small") if missing else "", table)
    return tag("section", tag("h2", "Nodes", id="nodes-title"), content, aria_labelledby="nodes-title")


def _node(node: Mapping[str, Any]) -> Html:
    silent, reason = node.get("silent_seconds"), bool(node.get("reason"))
    age = BEFORE_UNIT.sub(NO_BREAK, ago(silent)) if isinstance(silent, int | float) else "?"
    quiet = isinstance(silent, int | float) and silent >= SILENT_SECONDS
    state = tag("td", str(node.get("phase") or ""), tag("strong", f"; {REASON}") if reason else "")
    name = f"{node.get('rank')} (here)" if node.get("here") else node.get("rank")
    step = "?" if node.get("step") is None else node["step"]
    cells = (tag("td", node.get("host") or ""), state, tag("td", step), tag("td", tag("strong", age) if quiet else age))
    return tag("tr", tag("th", name, scope="row"), *cells, class_="bad" if reason else "warn" if quiet else None)


def _table(heads: Sequence[str], lines: Iterable[Html], label: str) -> Html:
    """Within its own width on a narrow screen: reached by keyboard, scrolled there."""
    first = tag("tr", *(tag("th", head, scope="col") for head in heads))
    table = tag("table", tag("thead", first), tag("tbody", *lines))
    return tag("div", table, class_="wide", role="region", tabindex="0", aria_label=label)


def _machine(facts: Sequence[Document]) -> Html:
    shown = [row for row in facts if row["label"] == "disk" or row["label"].startswith("GPU ")]
    if not shown:
        return tag("p", "Nothing observed yet.")
    lines = (
        joined(
            tag("dt", row["label"]),
            tag("dd", prose(re.sub(" {2,}", " · ", row["text"])), _bar(row), class_=_tone(row)),
        )
        for row in shown
    )
    return tag("dl", *lines)


def _checkpoints(document: Document, facts: Sequence[Document]) -> Html:
    found = entries(document.get("checkpoints") or {}, "sets")[-CHECKPOINTS_SHOWN:][::-1]
    now = from_rfc3339(document.get("time"))
    lines = []
    for one in found:
        at, why = from_rfc3339(one.get("changed_at")), one.get("reason")
        state = str(one.get("completeness") or "complete") + (f": {why}" if why else "")
        age = "?" if at is None or now is None else BEFORE_UNIT.sub(NO_BREAK, ago(now - at))
        stored = one.get("stored")
        where = "uploading" if one.get("uploading") else "yes" if stored is True else "no" if stored is False else "?"
        weight = size(_number(one)).replace(" ", NO_BREAK)
        cells = (f"{state}; pinned" if one.get("pinned") is not None else state, age, weight, where)
        lines.append(tag("tr", tag("th", one.get("step"), scope="row"), *(tag("td", cell) for cell in cells)))
    heads = ("step", "on this pod", "saved", "size", "in the store")
    table = _table(heads, lines, "Checkpoints on this pod") if lines else ""
    return joined(_facts(_labelled(facts, "checkpoint", "store", "upload")), table)


def _number(one: Mapping[str, Any]) -> float | None:
    value = one.get("size_bytes")
    return value if isinstance(value, int | float) else None


def _incidents(incidents: Sequence[tuple[str, bool]]) -> Html:
    if not incidents:
        return tag("p", "None: podwatch has handled no failure of this run.")
    cards = (tag("li", prose(text), class_="warn" if still_open else None) for text, still_open in incidents)
    more = tag("p", "Evidence and logs of one: ", tag("code", "podwatch incidents ID"), class_="small")
    return joined(tag("ul", *cards, class_="cards"), more)


def _log(lines: Sequence[str]) -> Html:
    if not lines:
        return tag("p", "No line read yet.")
    return tag("pre", "\n".join(line.replace("\n", " ")[:MAX_LINE] for line in lines[-LOG_LINES:]))


def _facts(facts: Sequence[Document], without: Collection[str] = ()) -> Html:
    shown = [row for row in facts if row["label"] not in without]
    shown = [row for row in shown if not (without and row["label"].startswith("GPU "))]
    lines = (joined(tag("dt", row["label"]), tag("dd", prose(row["text"]), class_=_tone(row))) for row in shown)
    return tag("dl", *lines) if shown else Html("")


def _tone(row: Document) -> str | None:
    return {"critical": "bad", "warning": "warn"}.get(str(row["tone"]))


def _hash(element: str) -> str:
    """Of the one element with this name in the template."""
    text = _template().template.partition(f"<{element}>")[2].partition(f"</{element}>")[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def headers() -> Iterator[tuple[str, str]]:
    """The response headers of the page: the browser runs only this style and this script, and asks only podwatch."""
    style, script = _hash("style"), _hash("script")
    yield (
        "Content-Security-Policy",
        f"default-src 'none'; style-src {style}; script-src {script}; connect-src 'self'; img-src data:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    )
    yield "Referrer-Policy", "no-referrer"
    yield "X-Frame-Options", "DENY"
    yield "Cross-Origin-Opener-Policy", "same-origin"
    yield "Cross-Origin-Resource-Policy", "same-origin"
