"""The lines of an incident's logs that a reader wants first: why something ended, not how well it ran before."""

import re
from collections.abc import Mapping, Sequence
from typing import Final

PER_LOG: Final = 6
IN_ALL: Final = 24
_TROUBLE: Final = re.compile(
    r"\b(?:ERROR|CRITICAL|FATAL|Traceback|Killed|Aborted|core dumped|Segmentation fault|No space left on device|"
    r"out of memory|Too many open files|Xid)\b|\b\w{1,60}(?:Error|Exception|Interrupt)\b(?::|$)|CUDA error|NCCL",
)
"""A program's own words for trouble: levels, exceptions, signals and the system's refusals."""


def highlights(logs: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """(log, line) pairs, at most ``IN_ALL``: the last ``PER_LOG`` lines of each log that name trouble. Logs without
    any give their last line, so that a silent death shows where each program was. Repeated lines count once."""
    trouble: list[tuple[str, str]] = []
    quiet: list[tuple[str, str]] = []
    for name, lines in logs.items():
        wanted = list(dict.fromkeys(line.rstrip() for line in lines if _TROUBLE.search(line)))[-PER_LOG:]
        trouble += [(name, line) for line in wanted]
        last = next((line.rstrip() for line in reversed(lines) if line.strip()), "")
        if not wanted and last:
            quiet.append((name, last))
    return (trouble + quiet)[:IN_ALL]
