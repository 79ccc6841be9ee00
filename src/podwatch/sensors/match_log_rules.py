"""Applies log rules to new log lines, in the thread that reads them, and counts their hits since the start of training.

Each rule is applied only to lines that contain a text it cannot match without, and to their first MATCH_CHARS
characters. A rule whose pattern could take exponential time runs in a child process with a deadline; a rule that is
slow anyway is disabled. ``scan`` is stateless, so an abandoned thread does no harm.
"""

import contextlib
import importlib
import json
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from podwatch.domain.secrets import scrub
from podwatch.domain.snapshot import LogMatch, Reading, SensorState, observed, unobserved
from podwatch.domain.thresholds import LogRule
from podwatch.sensors.log_tail import FileNews, LogLine, clean
from podwatch.system.clock import Clock

# -- cost of a pattern -----------------------------------------------------------------------------------------------
# Which text a regular expression requires and how much time it can take, read from its parse tree. Pure. Python's
# ``re`` cannot be interrupted and holds the interpreter while it runs: one bad pattern on one long line would stop
# the whole daemon, including its watchdog. So a pattern that could take exponential time is recognized before it
# runs.

MANY = 200
"""A repeat of more than this many counts as unbounded; a shorter one is a constant factor."""
NESTED = 16
"""The same for a repeat inside a repeat, where the factors multiply."""
MAX_DEGREE = 2
"""Unbounded repeats in sequence: with the search's own start position that is the third power of the line's length, at
worst a second for the 1,000 characters that are matched."""
LITERAL = 3
"""Minimum length: shorter fixed text is in nearly every line and saves nothing."""


def risky(pattern: str) -> bool:
    """Whether the pattern could take more than about a second on a line. True also where that is unknown."""
    try:
        parser = importlib.import_module("re._parser")
        return _degree(parser.parse(pattern)) > MAX_DEGREE
    except (ImportError, AttributeError, ValueError, TypeError, KeyError, RecursionError, re.error):
        return True


class _Endless(ValueError):  # noqa: N818
    """The pattern takes exponential time, or its cost is unknown."""


def _degree(tree: Iterable[tuple[Any, Any]]) -> int:
    total = 0
    for operation, value in tree:
        name = str(operation)
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            _, most, body = value
            inner = _degree(body)
            if int(most) > NESTED and (inner or _ambiguous(body)):
                raise _Endless("a repeat inside a repeat")
            total += inner + (int(most) > MANY)
        elif name == "BRANCH":
            total += max(_degree(branch) for branch in value[1])
        elif name == "SUBPATTERN":
            total += _degree(value[3])
        elif name in ("ASSERT", "ASSERT_NOT"):
            total += _degree(value[1])
        elif name == "ATOMIC_GROUP":
            total += _degree(value)
        elif name not in ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT", "CATEGORY"):
            raise _Endless(name)  # a reference back, a condition
    return total


def _ambiguous(tree: Iterable[tuple[Any, Any]]) -> bool:
    """Whether it can match the same text in more than one way. Repeated, the time then doubles with every character."""
    for operation, value in tree:
        name = str(operation)
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            if value[0] != value[1] or _ambiguous(value[2]):
                return True
        elif name == "BRANCH" or (name == "SUBPATTERN" and _ambiguous(value[3])):
            return True
    return False


def literals(pattern: str) -> tuple[bytes, ...]:
    """Fixed texts of which every match contains at least one, lower-case where the pattern ignores case (see
    ``folds``). Empty where none is long enough."""
    try:
        parser = importlib.import_module("re._parser")
        tree = parser.parse(pattern)
        found = _best(tree)
    except (ImportError, AttributeError, ValueError, TypeError, RecursionError, re.error):
        return ()
    if folds(pattern):
        found = frozenset(text.lower() for text in found)
    return tuple(sorted(text.encode() for text in found))


def folds(pattern: str) -> bool:
    """Whether the pattern or a part of it ignores case."""
    return re.compile(pattern).flags & re.IGNORECASE != 0 or re.search(r"\(\?[a-zA-Z]*i", pattern) is not None


def _best(tree: Iterable[tuple[Any, Any]]) -> frozenset[str]:
    """The candidate whose shortest text is the longest."""
    candidates: list[frozenset[str]] = []
    run = ""
    for operation, value in tree:
        name = str(operation)
        character = chr(value) if name == "LITERAL" else ""
        # JSON escapes these characters, so they cannot be searched in the raw bytes.
        if character and character.isascii() and character.isprintable() and character not in '"\\/':
            run += character
            continue
        candidates.append(frozenset({run}))
        run = ""
        if name == "SUBPATTERN":
            candidates.append(_best(value[3]))
        elif name == "BRANCH":
            branches = [_best(branch) for branch in value[1]]
            candidates.append(frozenset().union(*branches) if all(branches) else frozenset())
        elif name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT") and value[0] >= 1:
            candidates.append(_best(value[2]))
    candidates.append(frozenset({run}))
    good = [c for c in candidates if c and min(map(len, c)) >= LITERAL]
    return max(good, key=lambda c: min(map(len, c)), default=frozenset())


# -- scan of new lines -----------------------------------------------------------------------------------------------

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


# -- sensor ----------------------------------------------------------------------------------------------------------

SILENT_SECONDS = 60.0
"""Seconds without a read after which the reading is BLIND: the disk or the progress sensor hangs."""
BUCKETS = 60
"""Buckets of a rule's window in which hits are counted: limits the memory used by many hits."""
LINE_SHOWN = 300


@dataclass(slots=True)
class _Seen:
    """The hits of one rule since the start. ``files`` has (from, hits) of every file, oldest first."""

    first_at: float
    last_at: float
    line: str = ""
    files: dict[str, deque[tuple[float, int]]] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)

    def count(self, now: float, within: float) -> tuple[int, str]:
        """Hits within the window in the file that has the most, and the role that writes that file: a line that a
        launcher copies from one log to another must not count twice."""
        best, role = 0, ""
        for path, hits in self.files.items():
            while hits and hits[0][0] <= now - within:
                hits.popleft()
            total = sum(n for _, n in hits)
            # Of two files with the same lines, prefer the one that shows which role wrote them.
            if total > best or (total == best and total and self.roles[path] and not role):
                best, role = total, self.roles[path]
        return best, role


class LogRulesSensor:
    """Receives lines from the sensor that follows the logs (``look`` in its thread, ``take`` on the loop), so that
    every line is read once. The line that is shown has no secrets."""

    name = "logs"

    def __init__(
        self,
        clock: Clock,
        rules: Sequence[LogRule],
        *,
        trusted: Sequence[LogRule] = (),
        followed: bool = True,
    ) -> None:
        """``trusted`` are rules whose patterns are known to be fast. ``followed``: there is a log to follow."""
        self._clock, self._trusted, self._followed = clock, trusted, followed
        self._seen: dict[str, _Seen] = {}
        self._off: dict[str, str] = {}
        self._skipped = 0
        self._looked_at: float | None = None
        self.configure(rules)

    def configure(self, rules: Sequence[LogRule]) -> None:
        """Use new rules from the next poll on; a disabled rule is enabled again. Counts are kept."""
        self._rules = {rule.name: rule for rule in rules}
        self._compiled = prepare(rules, self._trusted)
        self._off = {}

    async def start(self) -> None:
        """Nothing of its own runs."""

    async def stop(self) -> None:
        """Nothing of its own runs."""

    def look(self, news: Sequence[FileNews]) -> Found:
        off = self._off
        return scan(news, [rule for rule in self._compiled if rule.rule.name not in off])

    def take(self, found: Found, now: float) -> None:
        self._looked_at = now
        if found.off:
            self._off = {**self._off, **found.off}
        self._skipped += found.skipped
        for hit in found.hits:
            rule = self._rules.get(hit.rule)
            if rule is None:
                continue  # the configuration was changed meanwhile
            seen = self._seen.setdefault(hit.rule, _Seen(now, now))
            seen.last_at, seen.line = now, scrub(hit.line)[:LINE_SHOWN]
            hits = seen.files.setdefault(hit.path, deque())
            seen.roles[hit.path] = hit.role
            if hits and now - hits[-1][0] < rule.within_seconds / BUCKETS:
                hits[-1] = (hits[-1][0], hits[-1][1] + hit.count)
            else:
                hits.append((now, hit.count))

    def looked(self, now: float) -> None:
        """Note that the files were readable, but the lines belong to an earlier start."""
        self._looked_at = now

    def reset(self) -> None:
        """Forget all hits: training was started."""
        self._seen = {}
        self._skipped = 0

    def latest(self) -> Reading[tuple[LogMatch, ...]]:
        now = self._clock.monotonic()
        if not self._followed:
            return unobserved(SensorState.ABSENT, now, "no log is followed ([trainer] logs)")
        if self._looked_at is None:
            return unobserved(SensorState.PENDING, now, "not observed yet")
        silence = now - self._looked_at
        if silence > SILENT_SECONDS:
            return unobserved(SensorState.BLIND, now, f"podwatch has not read the logs for {silence:.0f} s")
        reading = observed(self._matches(now), self._looked_at)
        if not self._skipped:
            return reading
        detail = f"{self._skipped} lines were not checked: they arrived too fast"
        return Reading(reading.state, reading.at, reading.value, detail)

    def _matches(self, now: float) -> tuple[LogMatch, ...]:
        found = []
        for name, seen in sorted(self._seen.items()):
            rule = self._rules.get(name)
            if rule is not None and name not in self._off:
                count, role = seen.count(now, rule.within_seconds)
                found.append(LogMatch(name, role, count, seen.first_at, seen.last_at, seen.line))
        found += [LogMatch(name, "", 0, now, now, "", why) for name, why in sorted(self._off.items())]
        return tuple(found)
