"""Step directories that training of this run cannot have written: evidence, finding, and the operator's decisions.

The rule is in ``policy.resume``. The evidence is kept in the journal, so that a restarted podwatch does not
accept a directory that it rejected before.
"""

from dataclasses import replace
from typing import Any

from podwatch.checkpoints.held_back import HeldBack
from podwatch.checkpoints.layouts.base import StepSeen
from podwatch.domain.checkpoint import CheckpointSet, HeldAs
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.domain.run import RunRecord
from podwatch.domain.snapshot import ProgressSource, Snapshot
from podwatch.journal import AsyncJournal, Journal
from podwatch.policy.resume import NO_TRAINING, StepEvidence

KEY = "implausible-steps"
"""Journal key of the highest trained step, and of the implausible checkpoints."""
KEEP_EVERY = 60.0
"""Seconds between two writes of the trained step to the journal; a step that is a minute old changes no result."""
_OWN = (ProgressSource.STEP_LINE, ProgressSource.HEARTBEAT)


class Implausible:
    """Call ``turn`` at each turn of the sensing loop, then ``findings``; neither blocks. ``turn`` updates ``held``."""

    def __init__(self, held: HeldBack, journal: AsyncJournal, target: int | None) -> None:
        self._held, self._journal, self._target = held, journal, target
        self._named: tuple[int, str] | None = None
        self._kept_at = float("-inf")
        self._since: dict[tuple[int, str], float] = {}
        self._kept = journal.sync.learned(KEY)
        held.explain(replace(recalled(self._kept), target=target))

    def turn(
        self,
        snapshot: Snapshot,
        sets: tuple[CheckpointSet, ...],
        *,
        step_seconds: float | None,
        record: RunRecord | None,
        fetched: frozenset[tuple[int, str]],
    ) -> None:
        """Update the evidence. ``fetched``: (step, save_id) of checkpoints that were restored from the store."""
        old = self._held.evidence
        own = [s.step for s in snapshot.progress_of_start if s.source in _OWN and s.trained and s.step is not None]
        highest = max(own, default=-1)
        new = replace(old, target=self._target, step_seconds=step_seconds, believed=old.believed | fetched)
        if old.trained is None or highest > old.trained:
            new = replace(new, trained=highest if highest >= 0 else None, trained_wall=snapshot.wall)
        started = record.last_start.step if record is not None and record.last_start is not None else None
        for one in sets:
            if one.held_as is not HeldAs.IMPLAUSIBLE or not one.complete:
                continue
            if one.step == started:  # training started from it, so the operator named it
                new = replace(new, believed=new.believed | {(one.step, one.save_id)})
            else:
                new = replace(new, doubted=new.doubted | {(one.step, one.save_id)})
        self._held.explain(new)
        if new.doubted != old.doubted or new.believed != old.believed or snapshot.at - self._kept_at >= KEEP_EVERY:
            self._keep(new, snapshot.at)

    def release(self, found: CheckpointSet) -> None:
        """Accept this checkpoint: the operator named it."""
        evidence = self._held.evidence
        self._held.explain(replace(evidence, believed=evidence.believed | {(found.step, found.save_id)}))
        self._keep(self._held.evidence, self._kept_at)

    def findings(self, sets: tuple[CheckpointSet, ...], now: float) -> tuple[Finding, ...]:
        """``now`` monotonic."""
        odd = {(s.step, s.save_id): s for s in sets if s.held_as is HeldAs.IMPLAUSIBLE}
        self._since = {key: self._since.get(key, now) for key in odd}
        return tuple(
            Finding(
                FindingKind.IMPLAUSIBLE_STEP,
                Severity.WARNING,
                f"the checkpoint of step {one.step} cannot be this run's: {one.held.partition(': ')[2]}. podwatch does"
                " not resume from it, upload it or delete it; the next start moves it to quarantine",
                self._since[key],
                f"move it out of the checkpoint directory; if it is this run's, `podwatch start --step {one.step}`"
                f" resumes from it, and `podwatch sync --step {one.step}` uploads it",
                subject=f"step {one.step}",
            )
            for key, one in odd.items()
        )

    def _keep(self, evidence: StepEvidence, now: float) -> None:
        document = {
            "trained": evidence.trained,
            "trained_wall": evidence.trained_wall,
            "step_seconds": evidence.step_seconds,
            "believed": sorted([step, save_id] for step, save_id in evidence.believed),
            "doubted": sorted([step, save_id] for step, save_id in evidence.doubted),
        }
        self._kept_at = now
        if document != self._kept:
            self._kept = document
            self._journal.post(Journal.learn, KEY, document)


def recalled(document: Any) -> StepEvidence:
    """The evidence in the journal's ``document``; empty evidence if it cannot be read."""
    try:
        trained, seconds = document["trained"], document["step_seconds"]
        return StepEvidence(
            trained=None if trained is None else int(trained),
            trained_wall=float(document["trained_wall"]),
            step_seconds=None if seconds is None else float(seconds),
            believed=frozenset((int(step), str(save_id)) for step, save_id in document["believed"]),
            doubted=frozenset((int(step), str(save_id)) for step, save_id in document["doubted"]),
        )
    except (KeyError, TypeError, ValueError):
        return StepEvidence()


def believed_progress(seen: tuple[StepSeen, ...], sets: tuple[CheckpointSet, ...]) -> tuple[StepSeen, ...]:
    """``seen`` without implausible steps. A layout reports the highest checkpoint directory; if that is not of the
    current lineage, or not scanned yet, the newest checkpoint of the lineage replaces it."""
    line = {s.step: s for s in sets if s.of_line}
    odd = {s.step for s in sets if s.held_as is HeldAs.IMPLAUSIBLE}
    newest = max(line, default=None)
    found = []
    for one in seen:
        if "checkpoint" not in one.role:
            if one.step not in odd and one.step < NO_TRAINING:
                found.append(one)
        elif one.step in line:
            found.append(one)
        elif newest is not None:
            found.append(StepSeen(one.role, newest, line[newest].changed_wall))
    return tuple(found)
