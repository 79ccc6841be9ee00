"""Log rules as findings."""

from podwatch.config.settings import Policies
from podwatch.domain.finding import Finding, Severity, Verdict
from podwatch.domain.snapshot import LogMatch, Reading, SensorState, Snapshot, observed, unobserved
from podwatch.domain.trainer_log import LogRule
from tests.drivers.detection import RuleAlone

POLICIES = Policies(
    log_rules=(
        LogRule("storm", "x", count=20, says="many", fix="do this", supports=("hang",)),
        LogRule("fatal", "y", critical=True),
    )
)


class Desk:
    def __init__(self) -> None:
        self.rule = RuleAlone("log-rules")
        self.findings: dict[str, Finding] = {}

    def see(self, *matches: LogMatch, reading: Reading[tuple[LogMatch, ...]] | None = None) -> set[str]:
        snapshot = Snapshot(at=100.0, wall=100.0, logs=reading or observed(matches, 100.0))
        self.findings = {f.key: f for f in self.rule.ask(snapshot, POLICIES)}
        assert all(f.verdict is Verdict.NONE and not f.confirmed for f in self.findings.values())
        return set(self.findings)


def storm(count: int) -> LogMatch:
    return LogMatch("storm", "orchestrator", count, 10.0, 90.0, "ERROR lost")


def test_a_storm_is_told_from_its_count_on_and_until_it_is_over() -> None:
    desk = Desk()
    assert desk.see() == set()
    assert desk.see(storm(19)) == set()
    assert desk.see(storm(20)) == {"log-rule:storm"}
    finding = desk.findings["log-rule:storm"]
    assert (finding.severity, finding.since, finding.suggestion) == (Severity.WARNING, 10.0, "do this")
    assert "20 times" in finding.summary
    assert "ERROR lost" in finding.summary
    assert desk.see(storm(3)) == {"log-rule:storm"}, "it does not flap about its count"
    assert desk.see(storm(0)) == set()
    assert desk.see(storm(3)) == set()


def test_one_line_is_enough_where_the_rule_says_so() -> None:
    desk = Desk()
    assert desk.see(LogMatch("fatal", "", 1, 90.0, 90.0, "dead")) == {"log-rule:fatal"}
    assert desk.findings["log-rule:fatal"].severity is Severity.CRITICAL


def test_a_rule_that_nobody_knows_is_ignored() -> None:
    assert Desk().see(LogMatch("gone", "", 9, 0.0, 0.0)) == set()


def test_blind_is_silent_and_forgets_nothing() -> None:
    desk = Desk()
    desk.see(storm(30))
    assert desk.see(reading=unobserved(SensorState.BLIND, 100.0, "hung")) == set()
    assert desk.see(storm(3)) == {"log-rule:storm"}
