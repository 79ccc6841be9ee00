"""The state of the checkpoint of one step, from poll to poll.

A checkpoint is complete when its layout's rule holds, two polls saw the same files, nothing changed for the settle time
of its marker (``settle_time``), and, if it is from before a reboot, it has no range that was never written.

An inspection reads header and tail of each file, and every record inside DCP shards. It finds files that are missing,
truncated or never written. It cannot find flipped bits, swapped or single lost pages inside tensor data, nor a
truncated pickle of the old format: the hashes taken during upload do that.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from podwatch.checkpoints import checkpoint_identity
from podwatch.checkpoints.checkpoint_identity import Guard, guard_of, holds
from podwatch.checkpoints.inspection import Inspection, InspectionOutcome
from podwatch.checkpoints.layout import Layout
from podwatch.checkpoints.records import (
    CheckpointRecord,
    CheckpointRecords,
    RecordedFile,
    agree,
    is_left_of,
    is_suspect,
    lacking,
    lost_files,
)
from podwatch.checkpoints.scan import Scan, scan_part
from podwatch.checkpoints.settle_time import SettleTimes
from podwatch.checkpoints.shapes import PartDir, PartFiles
from podwatch.checkpoints.table import SaveEnd
from podwatch.domain.checkpoint import CheckpointSet, Completeness
from podwatch.system.clock import Clock

BLIND = (
    "the structural check does not find flipped bits or lost pages inside tensor data; "
    "`podwatch checkpoints verify --deep` compares every byte with the hashes taken at upload"
)


CUT_OFF_FACTOR = 5
"""Number of long settle times that a checkpoint newer than the newest complete one must be unchanged before it counts
as interrupted: ranks that wait for slow storage look the same."""
_SETTLED_CONTENT = 3.0
"""Seconds. A checkpoint that was unchanged for this long when it was judged, with the same sizes and mtimes now, is not
judged again."""
_SERVER_CLOCK = 900.0
"""Seconds by which the clock of a network filesystem's server can be behind this pod's: then a file that was just
written seems to be minutes old."""


@dataclass(slots=True)
class Known:
    """Digests and times of one step, kept between polls; never its file list."""

    fingerprint: bytes
    since: float
    polls: int
    guard: Guard
    judgement: Inspection
    set: CheckpointSet
    quiet: float = 0.0
    settled: bool = False
    moving: bool = False
    ended: bool = False
    """Every process that could write these files was seen to end since they were found."""
    was: str = ""
    """The ``save_id`` with which it was last complete."""

    def wait(self, need: float, reason: str) -> None:
        """Record that it is complete except for the settle time: ``need`` seconds without a change."""
        self.set = replace(self.set, reason=reason, settles_in=max(0.0, need - self.quiet))

    def as_before(self) -> bool:
        """Whether its guard is unchanged. Lists no directory."""
        return holds(self.guard)


@dataclass(frozen=True, slots=True)
class _Seen:
    """One step as it is on disk now."""

    step: int
    scans: Sequence[Scan]
    found: tuple[PartFiles, ...]
    fingerprint: bytes
    error: str
    """Why something of it could not be read."""
    before: Known | None
    """The result of the last time if the files are the same as then."""
    since: float
    """When these files were first seen, monotonic seconds, and in how many polls."""
    polls: int
    changed: float
    """Epoch seconds of the newest change in a required part; 0 if nothing is there."""
    quiet: float
    """Seconds without a change."""
    ended: bool
    """As ``Known.ended``: said now, or before of the same files."""


def _in_a_row(
    step: int,
    files: tuple[RecordedFile, ...],
    other: int,
    complete: Iterable[tuple[int, tuple[RecordedFile, ...]]],
    ends: SaveEnd,
) -> bool:
    """Whether no complete save between these two steps has other kinds of files."""
    low, high = sorted((step, other))
    return all(agree(files, between, ends=ends) for at, between in complete if low < at < high)


class CompletenessChecker:
    """Judges single checkpoints for one ``Catalogue``, which keeps the results. Blocks; one thread at a time."""

    def __init__(
        self,
        layout: Layout,
        clock: Clock,
        windows: SettleTimes,
        records: CheckpointRecords,
        *,
        roots: Sequence[Path],
    ) -> None:
        self._layout = layout
        self._roots = roots
        self._clock = clock
        self._windows = windows
        self._records = records
        self._refused: tuple[int, tuple[RecordedFile, ...]] | None = None
        """The last save that lacked what those before it have."""
        self.slow = False
        """The filesystem is a network filesystem, which shows changes late."""
        self.writers_ended = False
        """Every process that could write here was seen to end: on a local filesystem what is here needs no settle time,
        in this rescan and in later ones."""
        self.problem = ""
        """The first read error since ``begin``."""

    def begin(self, *, slow: bool, writers_ended: bool = False) -> None:
        """Start a new rescan: records that another command wrote are read."""
        self._records.begin(self._layout.name)
        self.slow, self.problem = slow, ""
        self.writers_ended = writers_ended and not slow

    def scan(self, parts: Sequence[PartDir]) -> list[Scan]:
        return [scan_part(p, self._roots) for p in parts]

    def judge(self, step: int, found: Sequence[PartFiles]) -> Inspection:
        """The layout's judgement. A save that was complete stays the same save when files are added to it: it is not
        uploaded again for an evaluation that was written into it hours later."""
        record, added = self._records.same_save(step, checkpoint_identity.all_files(found)), tuple[str, ...]()
        if record is not None:
            found, added = checkpoint_identity.without_additions(found, record)
        judgement = self._layout.judge(step, found)
        if record is not None:
            judgement = judgement.accepted()
        return replace(judgement, leftovers=(*judgement.leftovers, *added)) if added else judgement

    def examine(self, step: int, parts: Sequence[PartDir], known: Known | None) -> Known:
        """Read one step file by file; ``known`` is the result of the last time. Never raises for what is on disk."""
        seen = self._identify(step, parts, known)
        earlier = self._reuse(seen)
        if earlier is not None and earlier.settled and not (earlier.judgement.lacks and seen.ended > earlier.ended):
            return earlier
        return self._state(seen, known, self._judge_now(seen, earlier))

    def _identify(self, step: int, parts: Sequence[PartDir], known: Known | None) -> _Seen:
        """Read the step's directories and compare them with the last time."""
        scans = self.scan(parts)
        found = tuple(s.found for s in scans)
        error = next((s.error for s in scans if s.error), "")
        if error:
            self.problem = self.problem or f"step {step}: {error}"
        fingerprint = checkpoint_identity.fingerprint(found)
        now = self._clock.monotonic()
        before = known if known is not None and known.fingerprint == fingerprint else None
        changed = max((s.changed_ns for s in scans if s.found.part.required), default=0) / 1e9
        # Old files need no wait after a restart of podwatch; ctime, because copies set mtime back.
        age = self._clock.wall() - changed - (_SERVER_CLOCK if self.slow else 0.0)
        since = before.since if before is not None else now
        return _Seen(
            step,
            scans,
            found,
            fingerprint,
            error,
            before,
            since=since,
            polls=before.polls + 1 if before is not None else 1,
            changed=changed,
            quiet=max(now - since, age if changed else 0.0),
            ended=self.writers_ended or (before is not None and before.ended and not self.slow),
        )

    def _reuse(self, seen: _Seen) -> Known | None:
        """The last result if its judgement still describes these files: they are the same, all were read, and no
        tracker changed. The sizes of a settled one follow its by-products."""
        known = seen.before
        if known is None or seen.error:
            return None
        if not known.set.complete and any(s.outside for s in seen.scans):
            return None  # a link changes no file
        guard = guard_of(seen.scans, known.judgement.rests_on)
        if known.judgement.rests_on and guard != known.guard:
            return None  # a tracker changed
        if known.settled and guard != known.guard:  # a by-product was added or removed: the save does not change
            described = checkpoint_identity.describe(seen.step, self._layout.name, seen.found, known.judgement)
            kept = known.set
            known.set = replace(described, completeness=kept.completeness, save_id=kept.save_id, reason=kept.reason)
            known.guard = guard
        return known

    def _judge_now(self, seen: _Seen, earlier: Known | None) -> Inspection:
        """The judgement of what is there now: that of ``earlier`` where it was settled content, else the layout's; with
        read errors and lost files, which no layout sees."""
        # What could not be read may be readable now: setting its mode right changes no name, size or mtime.
        if earlier is not None and not earlier.judgement.unreadable and earlier.quiet >= _SETTLED_CONTENT:
            judgement = earlier.judgement
        else:
            judgement = self.judge(seen.step, seen.found)
        if seen.error:
            return replace(judgement, outcome=InspectionOutcome.UNKNOWN, reason=f"cannot be read: {seen.error}")
        own = checkpoint_identity.recorded(checkpoint_identity.own_files(seen.found, judgement))
        # What has no answer says nothing of what is lost: a file system with errors lists less than there is.
        before = None if judgement.unreadable else self._records.of(seen.step)
        if before is not None and judgement.deleted and is_left_of(before, own):
            left = ", ".join(p.part.name for p in seen.found if p.present) or "nothing"
            reason = f"it was deleted; what is left: {left}"
            outcome = InspectionOutcome.NOT_COMPLETE
            return replace(judgement, outcome=outcome, pending=False, remainder=True, reason=reason)
        if before is not None and (lost := lost_files(before, own)):
            return replace(judgement, outcome=InspectionOutcome.DAMAGED, reason=lost)
        judgement = self._compare(seen, judgement, own)
        outside = next((s.outside for s in seen.scans if s.outside and s.found.part.required), "")
        if outside and not judgement.whole:  # what it lacks can be behind the link
            reason = f"{judgement.reason} ({outside} is a symbolic link, and podwatch does not follow it)"
            return replace(judgement, outcome=InspectionOutcome.UNKNOWN, reason=reason)
        return judgement

    def _state(self, seen: _Seen, known: Known | None, judgement: Inspection) -> Known:
        """The state that follows from the judgement, from how long nothing changed, and from what was known."""
        step, found = seen.step, seen.found
        described = checkpoint_identity.describe(step, self._layout.name, found, judgement)
        guard = guard_of(seen.scans, judgement.rests_on)
        state = Known(
            seen.fingerprint, seen.since, seen.polls, guard, judgement, described, seen.quiet, ended=seen.ended
        )
        state.was = known.was if known is not None else ""
        if judgement.unreadable and not any(s.outside for s in seen.scans):
            state.set = replace(state.set, unanswered=1 + (known.set.unanswered if known is not None else 0))
        trusted = known is not None and known.settled and known.set.complete and judgement.whole
        if trusted and checkpoint_identity.save_id(found, judgement) == state.was:  # its own files are unchanged
            state.set = replace(described, completeness=Completeness.COMPLETE, save_id=state.was, reason="")
            state.settled = True
            return state
        if judgement.whole:
            self._believe(state, step, found, seen.changed)
            return state
        return self._not_whole(state, begun=bool(seen.changed) and not judgement.pending)

    # -- inside -------------------------------------------------------------------------------------------------

    def _believe(self, state: Known, step: int, found: tuple[PartFiles, ...], changed: float) -> None:
        """Set COMPLETE if all conditions hold."""
        judgement, windows = state.judgement, self._windows
        save_id = checkpoint_identity.save_id(found, judgement)
        own = checkpoint_identity.recorded(checkpoint_identity.own_files(found, judgement))
        # A checkpoint that was found complete before, unchanged since, needs no settle time again.
        record = self._records.same_save(step, own)
        settled = state.ended or record is not None
        # Where nothing shows the end of a file, the marker is NONE.
        need = 0.0 if settled and not judgement.hole else windows.need(judgement.ends, slow=self.slow)
        state.moving = judgement.ends is not SaveEnd.COMMIT
        if state.polls < 2 or state.quiet < need:
            odd = f", but {judgement.hole} has ranges that were never written" if judgement.hole else ""
            odd = odd or (f", but {judgement.unsized} has no end to check" if judgement.unsized else "")
            state.wait(need, f"all files present{odd}: complete after {need:.0f} s without a change")
            return
        if judgement.hole and is_suspect(record, self._records.boot_id, before_boot=changed < self._records.boot_wall):
            reason = (
                f"suspect after a reboot: {judgement.hole} has ranges that were never written (lost, or a sparse copy: "
                "then copy it with cp --sparse=never)"
            )
            state.set = replace(state.set, reason=reason, settles_in=None, unclear=True)
            state.settled, state.moving = True, False  # stays WRITING: not used, and not removed as a leftover
        else:
            self._complete(state, step, found, save_id)

    def _compare(self, seen: _Seen, judgement: Inspection, own: tuple[RecordedFile, ...]) -> Inspection:
        """A save must have every kind of file that the saves before it have. Two that agree are what the trainer saves
        now; one alone that differs was interrupted, or it waits for the next one. What was found complete once is not
        compared again."""
        if not (judgement.whole or judgement.lacks) or self._records.same_save(seen.step, own) is not None:
            return judgement
        ends, files = judgement.ends, self._layout.compared(own)
        before = (self._compared(r) for r in self._records.before(seen.step))
        reason = judgement.unusual or lacking(seen.step, files, before, ends=ends)
        if not reason or (seen.ended and ends is not SaveEnd.NONE):  # its end is marked: nothing more comes
            return judgement.accepted()
        waited = seen.quiet >= self._patience(ends)
        others = [(r.step, self._compared(r).files) for r in self._records.all]
        left = {r.step for r in self._records.all if r.deleted}
        speaks = [one for one in others if one[0] > seen.step and one[0] not in left]
        if waited and self._refused is not None and self._refused[0] != seen.step:
            speaks.append(self._refused)
        if judgement.unusual:  # the one before may do without it, too
            speaks += [one for one in others if one[0] < seen.step][-1:]
        if judgement.unusual or ends is SaveEnd.NONE:
            # A resume needs what is missing, or it was cut off: only two in a row show that training saves no more.
            speaks = [one for one in speaks if _in_a_row(seen.step, files, one[0], others, ends)]
        if any(agree(files, other, ends=ends) for _, other in speaks):
            return judgement.accepted()
        if waited:
            self._refused = seen.step, files
        return replace(judgement, outcome=InspectionOutcome.NOT_COMPLETE, lacks=True, reason=reason)

    def _compared(self, record: CheckpointRecord) -> CheckpointRecord:
        return replace(record, files=self._layout.compared(record.files))

    def _patience(self, ends: SaveEnd) -> float:
        """Seconds without a change after which no more files are expected of a save that lacks some."""
        longest = self._windows.longest(slow=self.slow)
        return longest * CUT_OFF_FACTOR if ends is SaveEnd.NONE else longest

    def _complete(self, state: Known, step: int, found: tuple[PartFiles, ...], save_id: str) -> None:
        """The last check: set COMPLETE only if these are still the files that were judged; and record it."""
        again = tuple(s.found for s in self.scan([p.part for p in found]))
        if checkpoint_identity.fingerprint(again) != state.fingerprint:
            return
        state.set = replace(state.set, completeness=Completeness.COMPLETE, save_id=save_id, reason="", settles_in=None)
        state.settled, state.moving, state.was = True, False, save_id
        self._records.note(self._record(state, step, found))

    def _record(self, state: Known, step: int, found: tuple[PartFiles, ...]) -> CheckpointRecord:
        judgement = state.judgement
        own = checkpoint_identity.recorded(checkpoint_identity.own_files(found, judgement))
        new = CheckpointRecord(
            step,
            state.set.save_id,
            self._layout.name,
            self._records.boot_id,
            own,
            state.set.changed_wall,
            {p.name: p.size_bytes for p in state.set.parts if p.size_bytes},
            state.set.file_count,
            ends=judgement.ends,
            sparse=bool(judgement.hole),
        )
        before = self._records.same_save(step, own)
        if before is None or before.save_id != new.save_id:
            return new
        parts = {**before.parts, **{n: max(size, before.parts.get(n, 0)) for n, size in new.parts.items()}}
        count = max(before.file_count, new.file_count)
        return replace(
            before, boot_id=new.boot_id, parts=parts, file_count=count, ends=new.ends, sparse=new.sparse, deleted=False
        )

    def _not_whole(self, state: Known, *, begun: bool) -> Known:
        judgement = state.judgement
        long_quiet = self._windows.longest(slow=self.slow)
        if judgement.unreadable:
            state.set = replace(state.set, unclear=True)
            return state  # stays WRITING: a checkpoint that cannot be observed must not be removed
        state.moving = begun and state.quiet < long_quiet
        if judgement.lacks and (judgement.unusual or judgement.ends is not SaveEnd.NONE):
            # It stays WRITING: kept until another save agrees with it.
            if state.polls >= 2 and state.quiet >= self._patience(judgement.ends):
                state.set, state.settled = replace(state.set, unclear=True), True
            return state
        enough = self._patience(judgement.ends) if judgement.lacks else long_quiet
        if state.polls >= 2 and (state.quiet >= enough or not begun):
            final = Completeness.DAMAGED if judgement.damaged else Completeness.INCOMPLETE
            # A volume that is not mounted looks like deleted checkpoints: no fresh start without the operator.
            unclear = judgement.damaged or judgement.remainder
            state.set = replace(state.set, completeness=final, unclear=unclear, remainder=judgement.remainder)
        return state
