"""The digest: the state of the run in one message, and what changed since the last one. Pure.

The facts are the rows of the status document.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from podwatch.domain.document import Document, Integer, Real, Whole
from podwatch.domain.event import Change, Notice, Topic
from podwatch.domain.finding import Severity
from podwatch.domain.snapshot import TrainingMetrics
from podwatch.domain.times import ago, amount, from_rfc3339, span

SHOWN: Final = {"reward": "reward", "kl": "KL"}
"""Metrics of training in a digest, and their names there."""
RECENT_STEPS: Final = 20
"""A metric is the mean of its last values: those of single steps scatter."""


@dataclass(frozen=True, slots=True)
class Totals(Document):
    """What the next digest compares with. ``wall``: epoch seconds. None: unknown."""

    FILE = "last digest"

    wall: Real
    step: Whole | None = None
    failures: Whole | None = None
    lost_seconds: Real | None = None
    steps_lost: Integer | None = None
    lost_money: Real | None = None
    reward: Real | None = None
    kl: Real | None = None


def totals(document: Mapping[str, Any], metrics: Mapping[str, float], wall: float) -> Totals:
    """``document``: the status; ``metrics``: as from ``recent``."""
    account, step = document.get("account") or {}, document["training"]["step"]
    return Totals(
        wall,
        step,
        account.get("failures"),
        account.get("lost_seconds"),
        account.get("steps_lost"),
        (account.get("money") or {}).get("lost"),
        metrics.get("reward"),
        metrics.get("kl"),
    )


def recent(steps: Sequence[TrainingMetrics]) -> dict[str, float]:
    """The mean of the last values of each metric that a digest shows; without those that have none."""
    found = {}
    for name in SHOWN:
        of_steps = [value for step in steps for key, value in step.values if key == name]
        values = [value for value in of_steps if math.isfinite(value)][-RECENT_STEPS:]
        if values:
            found[name] = sum(values) / len(values)
    return found


def notice(document: Mapping[str, Any], now: Totals, before: Totals) -> Notice:
    """The digest of ``document``, with what changed since ``before``."""
    problems = _problems(document)
    since = f"since the last digest, {ago(now.wall - before.wall)}"
    changed = [
        _steps(now, before, since),
        _failures(document, now, before, since),
        *(_metric(name, getattr(now, name), getattr(before, name)) for name in SHOWN),
    ]
    progress = _facts(document).get("progress")
    title = "digest" if now.step is None else f"digest: step {now.step}"
    if progress:
        title += f", {progress}"
    do = "; ".join(dict.fromkeys(str(p["suggestion"]).partition("\n")[0] for p in problems if p["suggestion"]))
    wall = from_rfc3339(document["time"]) or now.wall
    return Notice(
        Topic.DIGEST,
        Change.HAPPENED,
        Severity.INFO,
        title,
        text(document, changed),
        str(Topic.DIGEST),
        wall,
        do=do or "nothing",
    )


def text(document: Mapping[str, Any], changed: Sequence[str] = ()) -> str:
    """The state of the run in a few sentences, a line each, with those about what ``changed``."""
    facts = _facts(document)
    lines = [
        f"{document['headline']}.",
        f"{document['not_backed_up']}." if document["not_backed_up"] else "",
        f"Progress: {facts['progress']}." if "progress" in facts else "",
        *changed,
        *(
            f"{label.capitalize()}: {facts[label]}."
            for label in ("disk", "checkpoint", "store", "upload")
            if label in facts
        ),
        f"Goodput so far: {facts['goodput']}." if "goodput" in facts else "",
        *(f"Open ({problem['severity']}): {problem['summary']}." for problem in _problems(document)),
    ]
    return "\n".join(line for line in lines if line)


def _facts(document: Mapping[str, Any]) -> dict[str, str]:
    return {row["label"]: row["text"] for row in document["rows"]}


def _problems(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [reason for reason in document["reasons"] if reason["severity"] != "info"]


def _steps(now: Totals, before: Totals, since: str) -> str:
    if now.step is None or before.step is None:
        return ""
    made = now.step - before.step
    way = f"{made} steps made" if made >= 0 else f"{-made} steps back"
    return f"{way} {since}."


def _failures(document: Mapping[str, Any], now: Totals, before: Totals, since: str) -> str:
    """Failures and what they cost; counted anew where the journal was lost."""
    if now.failures is None or before.failures is None or not document.get("account"):
        return ""
    count = now.failures - before.failures
    if count < 0:
        return ""
    if count == 0:
        return f"No failure {since}."
    text = f"{count} failure{'' if count == 1 else 's'} {since}"
    if now.lost_seconds is not None and before.lost_seconds is not None:
        text += f": {span(max(0.0, now.lost_seconds - before.lost_seconds))} lost"
    if now.steps_lost is not None and before.steps_lost is not None and now.steps_lost > before.steps_lost:
        text += f", {now.steps_lost - before.steps_lost} steps lost"
    if now.lost_money is not None and before.lost_money is not None:
        currency = document["account"]["money"]["currency"]
        text += f", {amount(max(0.0, now.lost_money - before.lost_money), currency)}"
    return f"{text}."


def _metric(name: str, now: float | None, before: float | None) -> str:
    if now is None:
        return ""
    trend = "" if before is None else f" ({before:.3g} at the last digest)"
    return f"{SHOWN[name].capitalize() if name != 'kl' else SHOWN[name]}: {now:.3g}{trend}."
