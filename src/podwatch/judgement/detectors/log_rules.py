"""Findings for log rules that matched often enough. They support verdicts (``second.logs``) and never cause one."""

from dataclasses import dataclass

from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity
from podwatch.domain.policy import LogRule
from podwatch.domain.snapshot import LogMatch
from podwatch.judgement.detectors.base import Look, Turn
from podwatch.judgement.learned import Learned


@dataclass(frozen=True, slots=True)
class LogRulesState:
    """The raised rules, with the time they were raised. A rule stays raised until its window contains no match."""

    raised: tuple[tuple[str, float], ...] = ()


class LogRulesDetector:
    name = "log-rules"
    kinds = (FindingKind.LOG_RULE,)
    needs = ("logs",)
    second: tuple[str, ...] = ()
    survives_restart = False

    def initial(self) -> LogRulesState:
        return LogRulesState()

    def armed(self, state: LogRulesState, learned: Learned) -> tuple[str, ...]:
        return ()

    def advance(self, state: LogRulesState, look: Look) -> Turn[LogRulesState]:
        reading = look.snapshot.logs
        if not reading.ok or reading.value is None:
            return Turn(state, look.learned)
        if not reading.value:
            return Turn(state if not state.raised else LogRulesState(), look.learned)
        rules = {rule.name: rule for rule in look.policies.log_rules}
        raised = dict(state.raised)
        findings = []
        for match in reading.value:
            rule = rules.get(match.rule)
            if rule is None:
                continue
            if match.error:
                findings.append(_off(rule, match, look.snapshot.at))
            elif not look.trains:
                continue
            elif match.count >= rule.count or (match.count and match.rule in raised):
                raised.setdefault(match.rule, match.first_at)
                findings.append(_found(rule, match, look.snapshot.at))
            else:
                raised.pop(match.rule, None)
        seen = {match.rule for match in reading.value}
        return Turn(
            LogRulesState(tuple(sorted((name, at) for name, at in raised.items() if name in seen))),
            look.learned,
            tuple(findings),
        )


DETECTOR = LogRulesDetector()


def _found(rule: LogRule, match: LogMatch, at: float) -> Finding:
    who = f"the {match.role}'s log" if match.role else "the trainer's log"
    times = f"{match.count} times in {rule.within_seconds / 60:.0f} minutes" if match.count > 1 else "once"
    return Finding(
        FindingKind.LOG_RULE,
        Severity.CRITICAL if rule.critical else Severity.WARNING,
        f"{rule.says or f'log rule {rule.name}'} ({rule.name}, {times} in {who}): {match.line}",
        match.first_at,
        suggestion=rule.fix,
        evidence=(Evidence(f"log: {rule.name}", match.line, Agreement.AGREES, max(0.0, at - match.first_at)),),
        subject=rule.name,
    )


def _off(rule: LogRule, match: LogMatch, at: float) -> Finding:
    return Finding(
        FindingKind.LOG_RULE,
        Severity.WARNING,
        f"log rule {rule.name} is switched off: {match.error}",
        at,
        suggestion="simplify its pattern (no nested repetition, fewer .*), then reload podwatch's configuration",
        evidence=(Evidence(f"log: {rule.name}", match.error, Agreement.UNAVAILABLE),),
        subject=rule.name,
    )
