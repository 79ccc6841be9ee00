"""What the status says of a store that fails, and of a clock that is wrong."""

import pytest

from podwatch.app.backup_findings import backup_findings
from podwatch.domain.facts import StoreFacts
from podwatch.domain.finding import FindingKind, Severity

KEY = "store refuses the key: https://api.backblazeb2.com"


@pytest.mark.parametrize(
    ("refused", "severity", "says"),
    [(True, Severity.CRITICAL, "NOT BACKED UP: store refuses the key"), (False, Severity.WARNING, "cannot be used")],
)
def test_a_refusal_is_critical_and_trouble_that_passes_is_not(refused: bool, severity: Severity, says: str) -> None:
    state = StoreFacts(store_url="b2://bucket", ok=False, error=KEY, refused=refused)
    (finding,) = backup_findings(state, (), now=10.0, wall=1000.0, max_lag=7200.0, since=0.0)
    assert (finding.kind, finding.severity) == (FindingKind.STORE_UNAVAILABLE, severity)
    assert says in finding.summary
    assert ("podwatch sync" in finding.suggestion) is refused


def test_the_error_of_a_directory_is_not_prefixed_twice() -> None:
    error = "the store cannot be used: No space left on device (file:///x)"
    state = StoreFacts(store_url="file:///x", ok=False, error=error)
    (finding,) = backup_findings(state, (), now=10.0, wall=1000.0, max_lag=7200.0, since=0.0)
    assert finding.summary == error


def test_a_wrong_clock_is_a_warning_beside_a_working_store() -> None:
    state = StoreFacts(store_url="b2://bucket", ok=True, clock_skew=-1500.0)
    (finding,) = backup_findings(state, (), now=10.0, wall=1000.0, max_lag=7200.0, since=0.0)
    assert (finding.kind, finding.severity) == (FindingKind.CLOCK_WRONG, Severity.WARNING)
    assert "25 min behind the store's" in finding.summary
