"""One word for the whole run, and the exit code that `podwatch status` ends with."""

from collections.abc import Iterable
from typing import Literal

from podwatch.domain.errors import ExitCode
from podwatch.domain.finding import Finding, Severity

Overall = Literal["ok", "warning", "critical", "unknown"]

_EXIT: dict[str, ExitCode] = {
    "ok": ExitCode.OK,
    "warning": ExitCode.STATUS_WARNING,
    "critical": ExitCode.STATUS_CRITICAL,
    "unknown": ExitCode.STATUS_UNKNOWN,
}


def overall(findings: Iterable[Finding], *, known: bool = True) -> Overall:
    """The worst severity. ``known`` is false when nothing was observed yet: unknown, unless something critical is."""
    severities = {f.severity for f in findings}
    if Severity.CRITICAL in severities:
        return "critical"
    if not known:
        return "unknown"
    return "warning" if Severity.WARNING in severities else "ok"


def exit_code(state: Overall) -> ExitCode:
    return _EXIT[state]
