"""Findings about a living trainer that ask for its restart. Nothing else in this package can ask for one, except the
end of the launcher (``exits.py``), after which there is nothing to kill."""

from collections.abc import Iterable, Sequence

from podwatch.detection.window import Signal
from podwatch.domain.finding import Evidence, Finding, FindingKind, Severity, Verdict


def agreeing(signals: Iterable[Signal]) -> list[Signal]:
    """The signals whose window was armed and has failed for its whole time."""
    return [s for s in signals if s.window is not None and s.window.counts()]


def names(signals: Iterable[Signal]) -> str:
    return ", ".join(s.name for s in agreeing(signals))


def judged(
    kind: FindingKind,
    summary: str,
    since: float,
    first: Signal,
    second: Sequence[Signal],
    *,
    subject: str,
    waits: str = "",
    alone: str = "",
    more: Sequence[Evidence] = (),
    worse: bool = False,
) -> Finding:
    """A verdict if ``first`` and one of ``second`` are armed, failing windows; otherwise a warning.

    ``waits``: why podwatch does not act yet, as the suggestion; empty: it acts now. ``alone``: the suggestion without a
    second signal. ``worse``: critical even then."""
    dead = bool(agreeing((first,)) and agreeing(second))
    return Finding(
        kind,
        Severity.CRITICAL if dead or worse else Severity.WARNING,
        summary,
        since,
        suggestion=waits if dead else alone,
        verdict=Verdict.RESTART if dead else Verdict.NONE,
        confirmed=dead and not waits,
        evidence=(first.evidence, *(s.evidence for s in second), *more),
        subject=subject,
    )
