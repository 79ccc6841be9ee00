"""What podwatch knows, as the parts of its documents: HTTP, control socket and command line show the same."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podwatch.domain.account_document import (
    AccountDocument,
    AccountTotals,
    CauseDocument,
    Finish,
    LossDocument,
    MoneyDocument,
)
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.document import Document, Many, of
from podwatch.domain.errors import IntegrityError
from podwatch.domain.event import Event, Incident
from podwatch.domain.finding import Evidence, Finding
from podwatch.domain.run import Pause
from podwatch.domain.status_document import (
    CheckpointDocument,
    EventDocument,
    FindingDocument,
    IncidentDocument,
    InspectionDocument,
    PauseDocument,
    StoredDocument,
)
from podwatch.domain.stored_checkpoint import StoredCheckpoint
from podwatch.report.run_cost import Account, Loss, Price

SCHEMA_VERSION = 1


def pause_document(pause: Pause | None) -> PauseDocument | None:
    return None if pause is None else of(PauseDocument, pause)


def event_document(event: Event) -> dict[str, Any]:
    """One event, as in ``podwatch events --json``."""
    return of(EventDocument, event, at=event.wall).to_json()


def account_totals(account: Account | None) -> AccountTotals | None:
    """What the run costs. Amounts are null without ``[cost] per_hour``."""
    if account is None:
        return None
    run, finish = account.run, account.finish
    return AccountTotals(
        since=run.since,
        total_seconds=round(run.seconds, 1),
        goodput_ratio=_rounded(account.goodput, 4),
        failures=run.failures,
        lost_seconds=_rounded(run.lost_seconds, 1),
        steps_lost=run.steps_lost,
        finish_seconds=None if finish is None else Finish(round(finish.low), round(finish.high)),
        money=of(
            MoneyDocument,
            account.price,
            so_far=_rounded(run.so_far, 2),
            lost=_rounded(run.lost, 2),
            at_end=_rounded(account.at_end, 2),
        ),
    )


def account_document(account: Account | None) -> AccountDocument | None:
    """The same with what each cause has cost."""
    totals = account_totals(account)
    if account is None or totals is None:
        return None
    causes = tuple(
        of(CauseDocument, loss_document(loss, account.price), cause=cause, times=loss.times)
        for cause, loss in sorted(account.causes.items())
    )
    return of(AccountDocument, totals, causes=causes)


def loss_document(loss: Loss, price: Price) -> LossDocument:
    return LossDocument(
        without_training_seconds=round(loss.idle, 1),
        lost_training_seconds=_rounded(loss.training, 1),
        steps_lost=loss.steps,
        money=_rounded(price.of(loss.seconds), 2),
        currency=price.currency,
    )


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def incident_document(incident: Incident, account: Account | None = None) -> IncidentDocument:
    """One incident. ``account``: for its cost."""
    loss = None if account is None else account.incidents.get(incident.id)
    return of(
        IncidentDocument,
        incident,
        opened_at=incident.opened_wall,
        closed_at=incident.closed_wall,
        open=incident.closed_wall is None,
        cost=None if loss is None or account is None else loss_document(loss, account.price),
        evidence=_evidence(incident.evidence),
    )


@dataclass(frozen=True, slots=True)
class KeptEvidence(Document):
    """The evidence of an incident, as the journal has it."""

    evidence: Many[Evidence]


def _evidence(text: str) -> tuple[Evidence, ...] | str:
    """What cannot be read stays text."""
    try:
        return KeptEvidence.from_bytes(b'{"evidence": %b}' % (text or "[]").encode()).evidence
    except IntegrityError:
        return text


def checkpoint_document(
    found: CheckpointSet,
    *,
    stored: frozenset[tuple[int, str]] | None = None,
    pins: Mapping[int, str] | None = None,
    uploading_step: int | None = None,
    held: Sequence[str] = (),
) -> CheckpointDocument:
    """One checkpoint. ``stored`` is None where it is unknown (no daemon was asked). ``held``: reasons besides a pin
    that protect it from removal."""
    pin = (pins or {}).get(found.step)
    return of(
        CheckpointDocument,
        found,
        held_back=found.held,
        changed_at=found.changed_wall,
        stored=None if stored is None else (found.step, found.save_id) in stored,
        uploading=uploading_step == found.step,
        pinned=pin,
        held_by=(*([f"pinned: {pin}"] if pin is not None else ()), *held),
    )


def inventory_document(saved: StoredCheckpoint) -> StoredDocument:
    """One checkpoint in the store's inventory."""
    here = bool(saved.here)
    return of(StoredDocument, saved, size_bytes=saved.total_bytes, stored_at=saved.wall, here=here, restored=None)


def inspection_document(step: int, problems: Sequence[str], notes: Sequence[str], files: int) -> dict[str, Any]:
    return InspectionDocument(step, not problems, tuple(problems), tuple(notes), files).to_json()


def finding_document(finding: Finding, *, since_wall: float | None, for_seconds: float) -> FindingDocument:
    return of(FindingDocument, finding, since=since_wall, for_seconds=round(max(0.0, for_seconds), 1))
