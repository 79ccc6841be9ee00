"""Log rules that matched often enough, as findings. They support verdicts (``second.logs``) and never ask for one."""

from dataclasses import dataclass

from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity
from podwatch.domain.policy import LogRule
from podwatch.domain.snapshot import LogMatch
from podwatch.judgement.detectors.base import Look, Turn
from podwatch.judgement.learned import Learned


@dataclass(frozen=True, slots=True)
class LogRulesState:
    """Rules that are raised, and since when. One stays raised until its window shows no hit any more."""

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
        suggestion="make its pattern simpler (no repeat inside a repeat, fewer .*), then reload",
        evidence=(Evidence(f"log: {rule.name}", match.error, Agreement.UNAVAILABLE),),
        subject=rule.name,
    )
