"""The page at ``/``: the template page.html, filled with the status document, the last incidents and the last log lines
(docs/page.md).

Every value is text: only ``tag`` and the template make HTML (html.py). The facts are the document's rows. The script
replaces the parts that changed; without it the page shows everything at each reload.
"""

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from string import Template
from typing import Any, Final

from podwatch.domain.times import from_rfc3339, local, span
from podwatch.report.html import Html, escaped, joined, tag
from podwatch.report.status_screen import Document, entries
from podwatch.report.terminal_text import BEFORE_UNIT, NO_BREAK

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
    return Template((files("podwatch.report") / "page.html").read_text("utf-8"))


def render(
    document: Document,
    *,
    incidents: Sequence[tuple[str, bool]] = (),
    log: Sequence[str] = (),
) -> str:
    """The whole page. ``document`` and ``incidents`` (newest first) as in docs/json.md; ``log`` without secrets, oldest
    line first."""
    overall, shown = str(document.get("overall")), from_rfc3339(document.get("time"))
    word, warning = _WORDS.get(overall, "UNKNOWN"), document.get("not_backed_up")
    return _template().substitute(
        word=word,
        tone=word.lower(),
        icon=_ICONS.get(overall, "555555"),
        run=escaped(document.get("run_id") or "podwatch"),
        headline=prose(document.get("headline") or ""),
        warning=tag("p", prose(warning), class_="verdict warning") if warning else "",
        at="" if shown is None else escaped(f"as of {local(shown, shown)} (the pod's clock)"),
        needs=_needs(document),
        facts=_facts(entries(document, "rows")),
        incidents=_incidents(incidents),
        log=_log(log),
    )


_ELSEWHERE: Final = frozenset(("last death", "log", "run"))
"""Rows that have a part of their own here."""


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


def _facts(facts: Sequence[Document]) -> Html:
    """Every row with its bar, in the order of the document."""
    lines = (
        joined(
            tag("dt", row["label"]),
            tag("dd", prose(_one_line(row)), bar(row["share"], _tone(row) or ""), class_=_tone(row)),
        )
        for row in facts
        if row["label"] not in _ELSEWHERE
    )
    return tag("dl", *lines) if facts else tag("p", "Nothing observed yet.")


def _one_line(row: Document) -> str:
    """The row's text; the terminal's columns are separated by a dot here."""
    return re.sub(" {2,}", " · ", str(row["text"]))


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
