"""Are the run's directories the ones that podwatch may work in? While they are not, it changes nothing (promise 9).

Sensing, detection and adoption continue: they only look. Uploads, publications, deletions, quarantine, restores and
starts of training wait, because each of them would read or write in a directory that another user chose.
"""

from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.system.clock import Clock
from podwatch.system.pinned import RootReplaced
from podwatch.system.workspace import Workspace


class RootWatch:
    """``look`` blocks: call it in a worker, at each rescan. The rest is for the event loop."""

    def __init__(self, workspace: Workspace, clock: Clock) -> None:
        self._workspace, self._clock = workspace, clock
        self._found: Finding | None = None
        self._was_blocked = False

    def look(self) -> None:
        try:
            self._workspace.check()
        except RootReplaced as error:
            since = self._found.since if self._found is not None else self._clock.monotonic()
            where = f" ({error.where})" if error.where else ""
            text = f"{error.what}{where}: podwatch starts, uploads, moves and deletes nothing until this is repaired"
            self._found = Finding(FindingKind.DIRECTORY_REPLACED, Severity.CRITICAL, text, since, error.fix)
        else:
            self._found = None

    def blocked_reason(self) -> str:
        """Why nothing may be changed now; empty where it may."""
        found = self._found
        return "" if found is None else found.summary

    def findings(self) -> tuple[Finding, ...]:
        found = self._found
        return () if found is None else (found,)

    def repaired(self) -> bool:
        """True once after each repair."""
        was, self._was_blocked = self._was_blocked, self._found is not None
        return was and not self._was_blocked
