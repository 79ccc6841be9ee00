"""The page at ``/``: the status document, the last incidents and the last log lines as one HTML page (docs/page.md).

Pure. Every value is text: only ``tag`` makes HTML (html.py). The facts are the document's rows. The script
replaces the parts that changed; without it the page shows everything at each reload.
"""

import base64
import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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


def render(
    document: Document,
    *,
    incidents: Sequence[tuple[str, bool]] = (),
    log: Sequence[str] = (),
    history: Html | None = None,
) -> str:
    """The whole page. ``document`` and ``incidents`` (newest first) as in docs/json.md; ``log`` without secrets, oldest
    line first; ``history`` as ``history_of`` made it, None to leave it out."""
    overall = str(document.get("overall"))
    word, run = _WORDS.get(overall, "UNKNOWN"), document.get("run_id") or "podwatch"
    facts = entries(document, "rows")
    icon = f"data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 8 8'><circle cx='4' cy='4' r='4' \
fill='%23{_ICONS.get(overall, '555555')}'/></svg>"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", f"{word} · {run}"),
        tag("link", rel="icon", href=icon),
        tag("style", Html(STYLE)),
    )
    main = tag(
        "main",
        _verdict(document, word),
        _part("needs", "Needs you", _needs(document)),
        _part("progress", "Progress", _progress(facts)),
        tag("div", _nodes(document), id="nodes", data_part=True),
        _part("machine", "GPUs and disk", _machine(facts)),
        _part("checkpoints", "Checkpoints", _checkpoints(document, facts)),
        _part("incidents", "Incidents", _incidents(incidents)),
        _part("log", "Last log lines", _log(log)),
        _part("history", "The last 24 h", history) if history is not None else "",
        _part("more", "More", _facts(facts, without=_ELSEWHERE)),
    )
    body = tag("body", tag("p", "", id="stale", role="status"), main, tag("script", Html(SCRIPT)))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def history_of(moments: Sequence[Moment], now: float, stamp: str) -> Html:
    """The plots. The script names ``stamp`` when it asks again, and gets them only if they are newer."""
    return tag("div", plots(moments, now), data_stamp=stamp)


_ELSEWHERE: Final = frozenset(
    ("step", "progress", "outage", "disk", "checkpoint", "store", "upload", "last death", "log", "run", "nodes")
)
"""Rows that have a part of their own here; GPUs too."""


def _part(name: str, title: str, content: Html) -> Html:
    heading = tag("h2", title, id=f"{name}-title")
    return tag("section", heading, tag("div", content, id=name, data_part=True), aria_labelledby=f"{name}-title")


def _verdict(document: Document, word: str) -> Html:
    shown = from_rfc3339(document.get("time"))
    said, warning = document.get("headline"), document.get("not_backed_up")
    at = "" if shown is None else f"as of {local(shown, shown)} (the pod's clock)"
    return tag(
        "header",
        tag(
            "div",
            tag("p", document.get("run_id") or "", class_="run"),
            tag(
                "h1",
                tag("span", word, id="overall"),
                ": ",
                prose(said),
                class_=f"verdict {word.lower()}",
            ),
            tag("p", prose(warning), class_="verdict warning") if warning else "",
            tag("p", at, tag("span", "; reload the page for newer values", class_="nojs"), class_="small"),
            id="verdict",
            data_part=True,
        ),
    )


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


# -- style and script ------------------------------------------------------------------------------------------------

STYLE: Final = """
:root{--bg:#fff;--fg:#1b1f24;--dim:#57606a;--line:#d0d7de;--card:#f6f8fa;--bar:#1f6feb;--bad:#b00020;--warn:#7a4b00;
--warnbar:#c27c00}
@media (prefers-color-scheme:dark){:root{--bg:#0f1216;--fg:#e6e9ed;--dim:#a3adb8;--line:#3a424c;--card:#191e24;
--bar:#58a6ff;--bad:#ff8a8f;--warn:#f2b84b;--warnbar:#f2b84b}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:1rem/1.45 system-ui,sans-serif}
main,#stale{max-width:46rem;margin:0 auto;padding:0 1rem}
p,ul,dl,pre,table{margin:.4rem 0}
h2{font-size:1.05rem;margin:1.5rem 0 .3rem;border-bottom:1px solid var(--line)}
.run{font-weight:600;margin-top:1rem;overflow-wrap:anywhere}
.verdict{font-size:1.25rem;line-height:1.35;margin:.4rem 0;padding:.7rem .9rem;border-radius:.5rem;color:#fff;
background:#4b535c;overflow-wrap:anywhere;font-weight:600}
.verdict.ok{background:#116329}.verdict.critical{background:#b00020}.verdict.warning{background:#ffd35c;color:#221700}
.small,dt,th{color:var(--dim);font-size:.875rem}
dl{display:grid;grid-template-columns:6.2rem 1fr;gap:.35rem .6rem}
dt{padding-top:.1rem}dd{margin:0;overflow-wrap:anywhere}
.bad>p>strong,.bad>td>strong,dd.bad{color:var(--bad)}.warn>p>strong,.warn>td>strong,dd.warn{color:var(--warn)}
.bar{display:block;width:100%;height:.6rem;margin-top:.25rem;border-radius:.3rem;background:var(--line);fill:var(--bar)}
.bar.bad{fill:var(--bad)}.bar.warn{fill:var(--warnbar)}
.cards{list-style:none;padding:0}
.cards li{background:var(--card);border-left:.3rem solid var(--line);border-radius:.3rem;padding:.1rem .7rem;
margin:.5rem 0;overflow-wrap:anywhere}
#incidents li{padding:.5rem .7rem}
.cards li.bad{border-color:var(--bad)}.cards li.warn{border-color:var(--warnbar)}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.25rem .5rem .25rem 0;border-bottom:1px solid var(--line);vertical-align:top;
font-variant-numeric:tabular-nums}
td{font-size:.9375rem}td:nth-child(2){overflow-wrap:anywhere}#nodes td:nth-child(2){min-width:6.5rem}
@media (max-width:18rem){dl{grid-template-columns:1fr;gap:0 .6rem}.wide{overflow-x:auto}}
figure{margin:.9rem 0 0}figcaption{font-size:.875rem;overflow-wrap:anywhere}
.chart{display:block;width:100%;height:3.2rem;background:var(--card);border:1px solid var(--line);
border-radius:.25rem}
.line{fill:none;stroke-width:1.5px;stroke:var(--bar)}
.axis{display:flex;justify-content:space-between;color:var(--dim);font-size:.875rem}
code,pre{font:.875rem/1.4 ui-monospace,monospace}
code{user-select:all;-webkit-user-select:all;background:var(--card);border:1px solid var(--line);border-radius:.25rem;
padding:.05rem .3rem}
.verdict code{background:none;border-color:currentColor}
pre{background:var(--card);padding:.6rem;border-radius:.3rem;white-space:pre-wrap;overflow-wrap:anywhere}
.copy{display:none;font:inherit;font-size:.875rem;margin-left:.4rem;padding:.25rem .7rem;min-height:1.9rem;
color:var(--fg);background:var(--bg);border:1px solid var(--dim);border-radius:.3rem}
.js .copy{display:inline-block}.js .nojs{display:none}
:focus-visible{outline:3px solid var(--bar);outline-offset:2px}
#stale{font-weight:600;color:var(--bad)}
"""

SCRIPT: Final = """
(() => {
'use strict';
document.documentElement.classList.add('js');
const stale = document.getElementById('stale');
let seen = Date.now(), busy = false;
function put(fresh) {
  const word = document.getElementById('overall').textContent;
  for (const part of document.querySelectorAll('[data-part]')) {
    const next = fresh.getElementById(part.id);
    if (!next || next.innerHTML === part.innerHTML) continue;
    const held = part.contains(document.activeElement) && document.activeElement.getAttribute('aria-label');
    part.replaceChildren(...next.childNodes);
    if (held) for (const one of part.querySelectorAll('button'))
      if (one.getAttribute('aria-label') === held) { one.focus(); break; }
  }
  document.title = fresh.title;
  const icon = fresh.querySelector('link[rel=icon]');
  if (icon) document.querySelector('link[rel=icon]').href = icon.href;
  if (document.getElementById('overall').textContent !== word)
    stale.textContent = document.querySelector('h1').textContent;
  else if (stale.dataset.lost) stale.textContent = '';
  delete stale.dataset.lost;
}
function lost() {
  const seconds = Math.round((Date.now() - seen) / 1000);
  if (seconds < 15) return;
  const age = seconds < 120 ? seconds + ' s' : Math.round(seconds / 60) + ' min';
  stale.dataset.lost = '1';
  stale.textContent = 'No answer from podwatch for ' + age + ': the values below are old.';
}
async function look() {
  const chosen = getSelection();
  if (busy || document.hidden || (chosen && !chosen.isCollapsed)) return;
  busy = true;
  try {
    const drawn = document.querySelector('[data-stamp]');
    const address = location.origin + location.pathname + '?drawn=' + (drawn ? drawn.dataset.stamp : '');
    const answer = await fetch(address, {cache: 'no-store', signal: AbortSignal.timeout(8000)});
    if (!answer.ok) throw new Error();
    const fresh = new DOMParser().parseFromString(await answer.text(), 'text/html');
    if (!fresh.getElementById('overall')) throw new Error();
    seen = Date.now();
    put(fresh);
  } catch { lost(); } finally { busy = false; }
}
document.addEventListener('click', async (event) => {
  const button = event.target.closest('button.copy');
  if (!button) return;
  try { await navigator.clipboard.writeText(button.dataset.copy); button.textContent = 'Copied'; }
  catch { getSelection().selectAllChildren(button.previousElementSibling); }
});
document.addEventListener('visibilitychange', look);
addEventListener('pageshow', look);
addEventListener('online', look);
setInterval(look, 10000);
})();
"""


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def headers() -> Iterator[tuple[str, str]]:
    """The response headers of the page: the browser runs only this style and this script, and asks only podwatch."""
    yield (
        "Content-Security-Policy",
        f"default-src 'none'; style-src {_hash(STYLE)}; script-src {_hash(SCRIPT)}; connect-src 'self'; img-src data:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    )
    yield "Referrer-Policy", "no-referrer"
    yield "X-Frame-Options", "DENY"
    yield "Cross-Origin-Opener-Policy", "same-origin"
    yield "Cross-Origin-Resource-Policy", "same-origin"
