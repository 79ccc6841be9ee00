"""The log rules that come with podwatch (``log_rules.toml``), and the findings for rules that matched often enough.
They support verdicts and never cause one.
"""

import tomllib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.resources import files

from pydantic import TypeAdapter

from podwatch.detection.observe import Turn
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity
from podwatch.domain.snapshot import LogMatch
from podwatch.domain.trainer_log import BAD, NEAR, RAISED, STAMP, LogRule, TrainerLog


@cache
def general() -> tuple[LogRule, ...]:
    """The rules for programs that many trainers use."""
    table = tomllib.loads(files(__package__).joinpath("log_rules.toml").read_text())
    parts = {**table["parts"], "BAD": BAD, "NEAR": NEAR, "RAISED": RAISED, "STAMP": STAMP}
    for rule in table["rules"]:
        for _ in range(2):  # a part can be made of others
            for name, part in parts.items():
                rule["pattern"] = rule["pattern"].replace(f"%{name}%", part)
    return TypeAdapter(tuple[LogRule, ...]).validate_python(table["rules"])


def shipped(trainers: Iterable[TrainerLog]) -> tuple[LogRule, ...]:
    """The general rules and the known errors of ``trainers``."""
    return (*general(), *(rule for trainer in trainers for rule in trainer.errors))


def effective(own: Sequence[LogRule], trainers: Iterable[TrainerLog] = ()) -> tuple[LogRule, ...]:
    """The rules that come with podwatch and the configured ones (``own``), which replace those of the same name."""
    mine = {rule.name: rule for rule in own}
    found = [mine.pop(rule.name, rule) for rule in shipped(trainers)]
    return (*found, *mine.values())


def log_rules(turn: Turn) -> Iterator[Finding]:
    """Each rule that matched often enough. It stays raised until its window contains no match."""
    reading, start = turn.snapshot.logs, turn.start
    if not reading.ok or reading.value is None:
        return
    rules = {rule.name: rule for rule in turn.policies.log_rules}
    matches = {match.rule: match for match in reading.value}
    for name in start.raised.keys() - matches.keys():
        del start.raised[name]
    for match in matches.values():
        rule = rules.get(match.rule)
        if rule is None or not turn.trains:
            continue
        if match.count >= rule.count or (match.count and match.rule in start.raised):
            start.raised.setdefault(match.rule, match.first_at)
            yield _finding(rule, match, turn.at)
        else:
            start.raised.pop(match.rule, None)


def _finding(rule: LogRule, match: LogMatch, at: float) -> Finding:
    who = f"the {match.role}'s log" if match.role else "the trainer's log"
    times = f"{match.count} times in {rule.within / 60:.0f} minutes" if match.count > 1 else "once"
    return Finding(
        FindingKind.LOG_RULE,
        Severity.CRITICAL if rule.critical else Severity.WARNING,
        f"{rule.says or f'log rule {rule.name}'} ({rule.name}, {times} in {who}): {match.line}",
        match.first_at,
        suggestion=rule.fix,
        evidence=(Evidence(f"log: {rule.name}", match.line, Agreement.AGREES, max(0.0, at - match.first_at)),),
        subject=rule.name,
    )
