"""Lay out the status document as text: the headline, then the facts, then what the operator must do; or as one line for
monitoring plugins. The daemon words it; here it gets its place.

Pure. The document can be of any version of the daemon: unknown and missing fields are ignored. Control characters are
removed from every value, because the trainer wrote some of them.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from podwatch.domain.times import from_rfc3339, span
from podwatch.report.terminal_text import bar, columns_of, cut, wrap

GREEN, YELLOW, RED, BOLD, DIM, RESET = "\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[1m", "\x1b[2m", "\x1b[0m"
_TONES = {"ok": GREEN, "warning": YELLOW, "critical": RED, "unknown": YELLOW}

Document = Mapping[str, Any]


def clean(value: object) -> str:
    """One line without control characters."""
    text = "" if value is None else str(value)
    return "".join(c if c.isprintable() else " " for c in text).strip()


def entries(document: Document, key: str) -> list[dict[str, Any]]:
    value = document.get(key)
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []


def headline(document: Document) -> str:
    return clean(document.get("headline")) or "STATE OF TRAINING UNKNOWN: this status was not written by this podwatch"


class Layout(NamedTuple):
    """How the facts are set in a width: columns before the label, of the label, of a bar (0: no bars)."""

    width: int
    indent: int
    label: int
    bar: int


def layout_of(width: int) -> Layout:
    """The layout for a terminal of ``width`` columns, clamped to 40..120."""
    width = max(40, min(width, 120))
    if width >= 77:
        return Layout(width, 2, 12, 24 if width >= 100 else 10)
    return Layout(width, 0, 11, min(10, width - 44) if width >= 49 else 0)


def render(document: Document, *, width: int = 80, height: int = 0, colour: bool = False) -> str:
    """The whole screen, ending in a newline. ``width`` in columns, clamped to 40..120. ``height`` in rows, 0 if
    unknown: where the screen is taller, what needs attention comes before the facts, so that a window that shows only
    the beginning shows it."""
    layout, paint = layout_of(width), _Paint(colour)
    tone = _TONES.get(str(document.get("overall")), YELLOW)
    top = [paint(line, tone, BOLD) for line in wrap(headline(document), layout.width)]
    top += [paint(line, YELLOW, BOLD) for line in wrap(clean(document.get("not_backed_up")), layout.width)]
    facts = [line for row in entries(document, "rows") for line in _fact(row, layout, paint)]
    attention = list(_attention(document, layout, paint))
    parts = [part for part in (facts, attention) if part]
    if height and sum(map(len, parts)) + len(parts) + len(top) > height:
        parts.reverse()
    lines = [*top, *(line for part in parts for line in ("", *part))]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _fact(row: Document, layout: Layout, paint: "_Paint") -> Iterator[str]:
    """The lines of one row, with a bar where it has a share."""
    label, share = clean(row.get("label")), row.get("share")
    tone = _TONES.get(str(row.get("tone")), DIM if label == "log" else "")
    gap = " " * (layout.indent + layout.label)
    lead = " " * layout.indent + paint(label, DIM) + " " * (layout.label - columns_of(label))
    if isinstance(share, int | float) and layout.bar:
        gap += " " * (layout.bar + 1)
        lead += paint(bar(share, layout.bar), tone) + " "
    room = layout.width - len(gap)
    text = clean(row.get("text"))
    first, *more = wrap(_cut_log(text, room) if label == "log" else text, room) or [""]
    yield lead + paint(first, tone)
    yield from (gap + paint(line, tone) for line in more)


def _cut_log(text: str, room: int) -> str:
    """A line of the log, cut to two lines: what podwatch itself says is never cut."""
    first, *more = wrap(text, room) or [""]
    return f"{first} {cut(' '.join(more), room)}" if more else first


def _attention(document: Document, layout: Layout, paint: "_Paint") -> Iterator[str]:
    """The reasons of the overall state; nothing if there is none."""
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


def plugin_line(document: Document) -> str:
    """The status as one line for monitoring plugins, without newline: ``PODWATCH OK - text | perfdata``. ``|`` starts
    the performance data, so it is replaced in the text."""
    running = bool(document.get("running"))
    word = str(document.get("overall") or "unknown").upper() if running else "UNKNOWN"
    text = headline(document) + ("; NOT BACKED UP" if document.get("not_backed_up") else "")
    training, disk, sync = (document.get(k) or {} for k in ("training", "disk", "sync"))
    now = from_rfc3339(document.get("time"))
    data = []
    if running and training.get("step") is not None:
        data.append(f"step={training['step']}")
    for name, at in (("step_age", training.get("step_at")), ("sync_age", sync.get("last_published_at"))):
        then = from_rfc3339(at)
        if running and then is not None and now is not None:
            data.append(f"{name}={max(0.0, now - then):.0f}s")
    if running and disk.get("used_ratio") is not None:
        data.append(f"disk_used={disk['used_ratio'] * 100:.0f}%;{disk.get('prune_above_ratio', 1) * 100:.0f};;0;100")
    return f"PODWATCH {word} - {text.replace('|', '/')}" + (f" | {' '.join(data)}" if data else "")
