"""Applies log rules to new log lines, in the thread that reads them. Stateless, so an abandoned thread does no harm.

Each rule is applied only to lines that contain a text it cannot match without, and to their first MATCH_CHARS
characters. A rule whose pattern could take exponential time runs in a child process with a deadline; a rule that is
slow anyway is disabled.
"""

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from podwatch.domain.policy import LogRule
from podwatch.sensors.loglines import LogLine, clean
from podwatch.sensors.logs import FileNews
from podwatch.sensors.patterns import folds, literals, risky

MATCH_CHARS = 1_000
"""Characters of a line that are matched: the message is at the beginning, quotations come later."""
SLOW_SECONDS = 0.1
"""CPU seconds of one search after which the rule is disabled: a usual search takes microseconds."""
LOOK_SECONDS = 0.5
"""CPU seconds per poll for all rules; further lines are skipped and counted."""
APART_SECONDS = 2.0
APART_LINES = 2_000
EXCEPTION_LINES = 60
"""Lines of a JSON line's traceback that are matched, counted from its end, where the exception's name is."""

_APART = """
import json, re, sys
pattern, lines = json.load(sys.stdin)
search = re.compile(pattern).search
json.dump([i for i, line in enumerate(lines) if search(line)], sys.stdout)
"""


@dataclass(frozen=True, slots=True)
class Compiled:
    rule: LogRule
    search: re.Pattern[str]
    needs: tuple[bytes, ...]
    fold: bool
    apart: bool


@dataclass(frozen=True, slots=True)
class Hit:
    """The hits of one rule in one file in one poll. ``line`` is the newest, not scrubbed."""

    rule: str
    path: str
    role: str
    count: int
    line: str


@dataclass(frozen=True, slots=True)
class Found:
    hits: tuple[Hit, ...] = ()
    off: Mapping[str, str] = field(default_factory=dict)
    """Rules that were found too slow in this poll, and the reason."""
    skipped: int = 0
    """Lines that were skipped because the time ran out."""


def prepare(rules: Sequence[LogRule], trusted: Collection[LogRule] = ()) -> tuple[Compiled, ...]:
    """Compile the rules. ``trusted`` are podwatch's own rules, whose patterns are known to be fast (a test measures
    them)."""
    return tuple(
        Compiled(
            rule,
            re.compile(rule.pattern),
            literals(rule.pattern),
            folds(rule.pattern),
            rule not in trusted and risky(rule.pattern),
        )
        for rule in rules
    )


def texts(raw: bytes) -> tuple[str, tuple[str, ...]]:
    """The prefix of a line (torchrun's name), and the texts to match: the line's text, or in JSON mode ``LEVEL
    message`` and the lines of the exception. Never raises."""
    line = clean(raw)
    if not line.text.startswith("{"):
        return line.prefix, (line.text[:MATCH_CHARS],)
    return line.prefix, _json_texts(line)


def _json_texts(line: LogLine) -> tuple[str, ...]:
    try:
        document = json.loads(line.text)
    except (ValueError, RecursionError):
        return (line.text[:MATCH_CHARS],)
    if isinstance(document, dict) and isinstance(document.get("record"), dict):
        document = document["record"]
    if not isinstance(document, dict) or not isinstance(document.get("message"), str):
        return (line.text[:MATCH_CHARS],)
    level = document.get("level")
    if isinstance(level, dict):
        level = level.get("name")
    found = [f"{level if isinstance(level, str) else ''} {document['message']}".strip()]
    exception = document.get("exception")
    if isinstance(exception, str):
        found += exception.splitlines()[-EXCEPTION_LINES:]
    return tuple(text[:MATCH_CHARS] for text in found)


def role_in(*names: str) -> str:
    """The role that writes this file or line."""
    for name in names:
        lowered = name.lower()
        for role in ("orchestrator", "inference", "trainer"):
            if role in lowered:
                return role
    return ""


def scan(news: Sequence[FileNews], rules: Sequence[Compiled]) -> Found:
    """Apply all rules to the lines of one poll. Blocks for at most LOOK_SECONDS of CPU and APART_SECONDS per risky
    rule."""
    hits: list[Hit] = []
    off: dict[str, str] = {}
    skipped = 0
    until = time.thread_time() + LOOK_SECONDS
    for item in news:
        if not item.lines:
            continue
        block = b"\n".join(item.lines)
        folded = block.lower() if any(rule.fold for rule in rules) else b""
        asked = [
            rule
            for rule in rules
            if rule.rule.name not in off and (not rule.needs or _holds(folded if rule.fold else block, rule.needs))
        ]
        for rule in asked:
            found, missed = _ask(rule, item, until, off)
            skipped += missed
            if found is not None:
                hits.append(found)
    return Found(tuple(hits), off, skipped)


def _holds(text: bytes, needs: tuple[bytes, ...]) -> bool:
    return any(need in text for need in needs)


def _ask(rule: Compiled, item: FileNews, until: float, off: dict[str, str]) -> tuple[Hit | None, int]:
    """Apply one rule to one file's new lines: its hit, and the number of skipped lines."""
    if rule.needs:
        lines = [raw for raw in item.lines if _holds(raw.lower() if rule.fold else raw, rule.needs)]
    else:
        lines = list(item.lines)
    if rule.apart:
        lines, rest = lines[-APART_LINES:], lines[:-APART_LINES]
        return _ask_apart(rule, item, lines, off), len(rest)
    count, newest, prefix = 0, "", ""
    for number, raw in enumerate(lines):
        began = time.thread_time()
        if began > until:
            return _hit(rule, item, count, newest, prefix), len(lines) - number
        name, candidates = texts(raw)
        text = next((text for text in candidates if rule.search.search(text)), None)
        if time.thread_time() - began > SLOW_SECONDS:
            off[rule.rule.name] = f"one line took longer than {SLOW_SECONDS:g} s"
            break
        if text is not None:
            count, newest, prefix = count + 1, text, name
    return _hit(rule, item, count, newest, prefix), 0


def _hit(rule: Compiled, item: FileNews, count: int, line: str, prefix: str) -> Hit | None:
    return Hit(rule.rule.name, item.path, role_in(prefix, item.name), count, line) if count else None


def _ask_apart(rule: Compiled, item: FileNews, lines: list[bytes], off: dict[str, str]) -> Hit | None:
    owners: list[tuple[int, str, str]] = []
    for number, raw in enumerate(lines):
        prefix, candidates = texts(raw)
        owners += [(number, prefix, text) for text in candidates]
    question = json.dumps([rule.rule.pattern, [text for _, _, text in owners]]).encode()
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _APART], input=question, capture_output=True, timeout=APART_SECONDS,
            env={}, cwd="/", check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        off[rule.rule.name] = f"its pattern took longer than {APART_SECONDS:g} s"
        return None
    except OSError as error:
        off[rule.rule.name] = f"cannot run its pattern in a child process: {error}"
        return None
    matched: list[int] = []
    with contextlib.suppress(ValueError):
        matched = [i for i in json.loads(done.stdout) if isinstance(i, int) and i < len(owners)]
    if not matched:
        return None
    _, prefix, line = owners[matched[-1]]
    return _hit(rule, item, len({owners[i][0] for i in matched}), line, prefix)
