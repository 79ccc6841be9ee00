"""Hits of the log rules since the start of training: how many within each rule's window, and the newest line."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from podwatch.domain.policy import LogRule
from podwatch.domain.reading import Reading, SensorState, observed, unobserved
from podwatch.domain.snapshot import LogMatch
from podwatch.sensors.logs import FileNews
from podwatch.sensors.logscan import Found, prepare, scan
from podwatch.system.clock import Clock

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
    every line is read once. ``scrub`` removes secrets from the line that is shown."""

    name = "logs"

    def __init__(
        self,
        clock: Clock,
        rules: Sequence[LogRule],
        *,
        trusted: Sequence[LogRule] = (),
        scrub: Callable[[str], str] = lambda text: text,
        followed: bool = True,
    ) -> None:
        """``trusted`` are rules whose patterns are known to be fast. ``followed``: there is a log to follow."""
        self._clock, self._trusted, self._scrub, self._followed = clock, trusted, scrub, followed
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
            seen.last_at, seen.line = now, self._scrub(hit.line)[:LINE_SHOWN]
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
