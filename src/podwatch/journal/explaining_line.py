"""Chooses the lines of the logs that explain why a program ended. Pure functions."""

import re
from collections.abc import Mapping, Sequence
from typing import Final

PER_LOG: Final = 6
IN_ALL: Final = 24
_TROUBLE: Final = re.compile(
    r"\b(?:ERROR|CRITICAL|FATAL|Traceback|Killed|Aborted|core dumped|Segmentation fault|No space left on device|"
    r"out of memory|Too many open files|Xid)\b|\b\w{1,60}(?:Error|Exception|Interrupt)\b(?::|$)|CUDA error|NCCL|"
    r"\berror: ",
)
"""Lines that report an error: log levels, exceptions, signals and errors of the system."""
_BEST: Final = (
    re.compile(r"^\s*(?:\[[^\]]*\]:?\s*)?[\w.]*(?:Error|Exception|Interrupt): \S|^[\w./-]+: error: \S"),
    re.compile(r"Killed|Aborted|core dumped|Segmentation fault|No space left|out of memory|Too many open|Xid|CUDA err"),
)
_CONSEQUENCE: Final = re.compile(
    r"CalledProcessError|ChildFailedError|Connection(?:Refused|Reset|Aborted)?Error|BrokenPipeError|DistNetworkError|"
    r"(?:exit|return)(?:ed with)?[ -]?(?:code|status)|non-zero exit"
)
LAST_LINES: Final = 60


def highlights(logs: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """(log, line) pairs, at most ``IN_ALL``: the last ``PER_LOG`` error lines of each log. Logs without any give
    their last line, which shows where each program was at a silent death. A line in two logs counts once: launchers
    print the lines of their children."""
    trouble: list[tuple[str, str]] = []
    quiet: list[tuple[str, str]] = []
    seen: set[str] = set()
    for name, lines in logs.items():
        wanted = list(dict.fromkeys(line.rstrip() for line in lines if _TROUBLE.search(line)))[-PER_LOG:]
        trouble += [(name, line) for line in wanted if line not in seen]
        seen.update(wanted)
    for name, lines in logs.items():
        last = next((line.rstrip() for line in reversed(lines) if line.strip()), "")
        if last and last not in seen and not any(_TROUBLE.search(line) for line in lines):
            quiet.append((name, last))
            seen.add(last)
    return (trouble + quiet)[:IN_ALL]


def decisive(logs: Mapping[str, Sequence[str]]) -> tuple[str, str] | None:
    """(log, line) of the line that best explains why a program ended, from the last ``LAST_LINES`` of each log: an
    error message before an error of the system, before a line of level ERROR. Lines that only report the end of
    another process rank last. None without an error line."""
    best: tuple[int, str, str] | None = None
    for name, lines in logs.items():
        for line in reversed(lines[-LAST_LINES:]):
            rank = _rank(line)
            if rank is not None and (best is None or rank < best[0]):
                best = (rank, name, line.strip())
    return None if best is None else best[1:]


def _rank(line: str) -> int | None:
    if not _TROUBLE.search(line) or "Traceback" in line:
        return None
    kind = next((rank for rank, pattern in enumerate(_BEST) if pattern.search(line)), len(_BEST))
    return kind + len(_BEST) + 1 if _CONSEQUENCE.search(line) else kind


def since(before: Sequence[str], lines: Sequence[str]) -> tuple[str, ...]:
    """``lines`` of a log without the content of the earlier reading ``before``: a trainer that appends to its log
    still has the error of the previous start in it. Both are the end of the log at their time: the same start may have
    left both. A crash loop repeats its lines, so all of ``before`` is looked for, its last lines are not enough."""
    old, now = tuple(before), tuple(lines)
    if not old:
        return now
    for end in range(len(old), len(now) + 1):
        if now[end - len(old) : end] == old:
            return now[end:] if end < len(now) or len(old) < len(now) else _last_period(now)
    for end in range(min(len(old), len(now)), 0, -1):
        if old[-end:] == now[:end]:
            return now[end:]
    return now


def _last_period(lines: tuple[str, ...]) -> tuple[str, ...]:
    """The last repetition in a window that has nothing but repetitions: it looks the same after each. Else empty."""
    for size in range(1, len(lines) // 2 + 1):
        if lines[size:] == lines[:-size]:
            return lines[-size:]
    return ()
