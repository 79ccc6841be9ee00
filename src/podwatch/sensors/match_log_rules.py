"""Applies log rules to new log lines, in the thread that reads them, and counts their hits since the start of training.

A rule sees the first MATCH_CHARS characters of a line. ``scan`` is stateless, so an abandoned thread does no harm.
"""

import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from podwatch.domain.secrets import scrub
from podwatch.domain.snapshot import LogMatch, Reading, SensorState, observed, unobserved
from podwatch.domain.trainer_log import LogRule
from podwatch.sensors.log_tail import SILENT_SECONDS, FileNews, LogLine, LogReader, silent
from podwatch.system.clock import Clock

# -- scan of new lines -----------------------------------------------------------------------------------------------

MATCH_CHARS = 1_000
"""Characters of a line that are matched: the message is at the beginning, quotations come later."""
LOOK_SECONDS = 0.5
"""CPU seconds per poll for all rules; further lines are skipped and counted."""
EXCEPTION_LINES = 60
"""Lines of a JSON line's traceback that are matched, counted from its end, where the exception's name is."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The hits of one rule in one file in one poll. ``line`` is the newest, not scrubbed."""

    rule: str
    path: str
    role: str
    count: int
    line: str


@dataclass(frozen=True, slots=True)
class RuleHits:
    hits: tuple[Hit, ...] = ()
    skipped: int = 0
    """Lines that were skipped because the time ran out."""


def prepare(rules: Sequence[LogRule]) -> dict[str, re.Pattern[str]]:
    """The compiled patterns by the rules' names."""
    return {rule.name: re.compile(rule.pattern) for rule in rules}


def texts(line: LogLine) -> tuple[str, ...]:
    """The texts to match: the line's text, or in JSON mode ``LEVEL message`` and the lines of the exception."""
    if not (line.level or line.message or line.exception):
        return (line.text[:MATCH_CHARS],)
    found = (f"{line.level} {line.message}".strip(), *line.exception.splitlines()[-EXCEPTION_LINES:])
    return tuple(text[:MATCH_CHARS] for text in found)


def role_in(*names: str) -> str:
    """The role that writes this file or line."""
    for name in names:
        lowered = name.lower()
        for role in ("orchestrator", "inference", "trainer"):
            if role in lowered:
                return role
    return ""


def scan(news: Sequence[FileNews], patterns: Mapping[str, re.Pattern[str]]) -> RuleHits:
    """Apply all rules to the lines of one poll. Blocks for about LOOK_SECONDS of CPU."""
    hits: list[Hit] = []
    skipped = 0
    until = time.thread_time() + LOOK_SECONDS
    for item in news:
        found: dict[str, tuple[int, str, str]] = {}
        for number, line in enumerate(item.lines):
            if time.thread_time() > until:
                skipped += len(item.lines) - number
                break
            candidates = texts(line)
            for name, pattern in patterns.items():
                text = next((text for text in candidates if pattern.search(text)), None)
                if text is not None:
                    count = found[name][0] if name in found else 0
                    found[name] = (count + 1, text, line.prefix)
        for name, (count, text, prefix) in found.items():
            hits.append(Hit(name, item.path, role_in(prefix, item.name), count, text))
    return RuleHits(tuple(hits), skipped)


# -- sensor ----------------------------------------------------------------------------------------------------------

BUCKETS = 60
"""Buckets of a rule's window in which hits are counted: limits the memory used by many hits."""
LINE_SHOWN = 300


@dataclass(slots=True)
class _RuleCount:
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


class LogRulesSensor(LogReader[RuleHits]):
    """Receives lines from the sensor that follows the logs (``look`` in its thread, ``take`` on the loop), so that
    every line is read once. The line that is shown has no secrets."""

    name = "logs"

    def __init__(
        self,
        clock: Clock,
        rules: Sequence[LogRule],
        *,
        followed: bool = True,
    ) -> None:
        """``followed``: there is a log to follow."""
        super().__init__(clock)
        self._followed = followed
        self._seen: dict[str, _RuleCount] = {}
        self._skipped = 0
        self.configure(rules)

    def configure(self, rules: Sequence[LogRule]) -> None:
        """Use new rules from the next poll on. Counts are kept."""
        self._rules = {rule.name: rule for rule in rules}
        self._patterns = prepare(rules)

    def look(self, news: Sequence[FileNews]) -> RuleHits:
        return scan([item for item in news if not item.figures], self._patterns)

    def count(self, found: RuleHits, now: float) -> None:
        self._skipped += found.skipped
        for hit in found.hits:
            rule = self._rules.get(hit.rule)
            if rule is None:
                continue  # the configuration was changed meanwhile
            seen = self._seen.setdefault(hit.rule, _RuleCount(now, now))
            seen.last_at, seen.line = now, scrub(hit.line)[:LINE_SHOWN]
            hits = seen.files.setdefault(hit.path, deque())
            seen.roles[hit.path] = hit.role
            if hits and now - hits[-1][0] < rule.within / BUCKETS:
                hits[-1] = (hits[-1][0], hits[-1][1] + hit.count)
            else:
                hits.append((now, hit.count))

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
        if (silence := self.silence(now)) > SILENT_SECONDS:
            return unobserved(SensorState.BLIND, now, silent(silence))
        reading = observed(self._matches(now), self._looked_at)
        if not self._skipped:
            return reading
        detail = f"{self._skipped} lines were not checked: they arrived too fast"
        return Reading(reading.state, reading.at, reading.value, detail)

    def _matches(self, now: float) -> tuple[LogMatch, ...]:
        found = []
        for name, seen in sorted(self._seen.items()):
            rule = self._rules.get(name)
            if rule is not None:
                count, role = seen.count(now, rule.within)
                found.append(LogMatch(name, role, count, seen.first_at, seen.last_at, seen.line))
        return tuple(found)
