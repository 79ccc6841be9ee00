"""Notices that a directory of the run, or of podwatch beside it, was replaced, and blocks every change in it."""

from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.system.clock import Clock
from podwatch.system.own_directories import Workspace
from podwatch.system.pinned_directories import RootReplaced


class RootWatch:
    """Checks that the run's directories are the pinned ones; while one is replaced, podwatch changes nothing in them.

    Sensing, detection and adoption continue, because they only read. Uploads, publications, deletions, quarantine,
    restores and starts of training wait: they would read or write in a directory that another user chose.

    Call ``check`` in a worker at each rescan: it blocks. The other methods are for the event loop."""

    def __init__(self, workspace: Workspace, clock: Clock) -> None:
        self._workspace, self._clock = workspace, clock
        self._found: Finding | None = None
        self._was_blocked = False

    def check(self) -> None:
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
        """Why mutations are blocked; empty if they are not."""
        found = self._found
        return "" if found is None else found.summary

    def findings(self) -> tuple[Finding, ...]:
        found = self._found
        return () if found is None else (found,)

    def repaired(self) -> bool:
        """True once after each repair."""
        was, self._was_blocked = self._was_blocked, self._found is not None
        return was and not self._was_blocked
