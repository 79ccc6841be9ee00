"""The state of the checkpoint of one step, from poll to poll.

A checkpoint is complete when its layout's rule holds, two polls saw the same files, nothing changed for the settle time
of its marker (``settle_time``), and, if it is from before a reboot, the structural check found no damage.

The structural check (``inspect``) reads header and tail of each file, and every record inside DCP shards. It finds
files that are missing, truncated or never written. It cannot find flipped bits, swapped or single lost pages inside
tensor data, nor a truncated pickle of the old format: the hashes taken during upload do that.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from podwatch.checkpoints import checkpoint_identity
from podwatch.checkpoints.checkpoint_identity import Guard, Shape, belongs, guard_of, holds, own_files
from podwatch.checkpoints.expected_files import Expected, Ledger
from podwatch.checkpoints.formats import dcp, torch_zip
from podwatch.checkpoints.formats.files import HOLE_FROM, can_check, check_file, has_hole
from podwatch.checkpoints.layouts.base import Judgement, Layout, Marker, PartDir, PartFiles
from podwatch.checkpoints.reboot_check import RebootCheck
from podwatch.checkpoints.scan import Scan, scan_part
from podwatch.checkpoints.settle_time import SettleTimes
from podwatch.domain.checkpoint import CheckpointSet, Completeness
from podwatch.system.clock import Clock

BLIND = (
    "the structural check does not find flipped bits or lost pages inside tensor data; "
    "`podwatch checkpoints verify --deep` compares every byte with the hashes taken at upload"
)


@dataclass(frozen=True, slots=True)
class Inspection:
    """``problems``: damage. ``notes``: suspicious or unknown, but no proof of damage."""

    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    files: int = 0
    """Number of files whose structure was checked."""


@dataclass(frozen=True, slots=True)
class StructureHints:
    """The first file with unwritten ranges and the first of the old torch format; empty where there is none."""

    hole: str = ""
    legacy: str = ""


def find_odd(found: Sequence[PartFiles], judgement: Judgement) -> StructureHints:
    """Examine each file that a resume needs, once per save. Files that vanish meanwhile are skipped."""
    hole = legacy = ""
    for part, file in own_files(found, judgement):
        path = Path(part.part.path) / file.path
        try:
            if not hole and file.size >= HOLE_FROM and has_hole(path):
                hole = f"{file.part}/{file.path}"
            if not legacy and torch_zip.is_torch_name(path.name) and torch_zip.is_legacy(path):
                legacy = f"{file.part}/{file.path}"
        except OSError:
            continue
    return StructureHints(hole, legacy)


def inspect(found: Sequence[PartFiles], judgement: Judgement) -> Inspection:
    """Check every file of a checkpoint that is uploaded or needed for a resume. Blocks; never raises OSError."""
    problems = [] if judgement.whole else [judgement.reason]
    notes: list[str] = []
    leftovers = frozenset(judgement.leftovers)
    checked = unknown = 0
    for part in found:
        if not part.present or not (part.part.required or part.part.uploaded):
            continue
        name, root = part.part.name, Path(part.part.path)
        for file in part.files:
            if not belongs(file, leftovers):
                continue
            path = root / file.path
            try:
                if path.name == dcp.INDEX:
                    checked += 1
                    problems += [f"{name}: {p}" for p in dcp.check_records(path.parent)]
                elif can_check(path.name) or dcp.is_shard(path.name):
                    checked += 1
                    if problem := check_file(path):
                        problems.append(f"{name}: {file.path} {problem}")
                else:
                    unknown += 1
                notes += _oddities(name, file.path, path, file.size)
            except OSError as error:
                problems.append(f"{name}: {file.path} cannot be read: {error.strerror}")
    if unknown:
        notes.append(f"{unknown} files have a format without a structure that podwatch can check")
    return Inspection(tuple(dict.fromkeys(problems)), tuple(dict.fromkeys(notes)), checked)


def _oddities(part: str, name: str, path: Path, size: int) -> list[str]:
    found = []
    if size >= HOLE_FROM and has_hole(path):
        found.append(
            f"{part}: {name} has ranges that were never written: preallocated and not filled, or a sparse copy"
        )
    if torch_zip.is_torch_name(path.name) and torch_zip.is_legacy(path):
        found.append(f"{part}: {name} has the old torch format: only its size shows whether it is truncated")
    return found


CUT_OFF_FACTOR = 5
"""Number of long settle times that a checkpoint newer than the newest complete one must be unchanged before it counts
as interrupted: ranks that wait for slow storage look the same."""
DEEPER_BUDGET = 20.0
"""Seconds per rescan for checks after a reboot, newest checkpoint first; the others are checked at the next rescan."""
CHECKED_DEEPER = "suspect after a reboot: being checked deeper"
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
    judgement: Judgement
    set: CheckpointSet
    quiet: float = 0.0
    settled: bool = False
    moving: bool = False
    odd: StructureHints | None = None
    suspect: bool = False
    was: str = ""
    """The ``save_id`` with which it was last complete."""

    def wait(self, need: float, reason: str) -> None:
        """Record that it is complete except for the settle time: ``need`` seconds without a change."""
        self.set = replace(self.set, reason=reason, settles_in=max(0.0, need - self.quiet))

    def as_before(self) -> bool:
        """Whether its guard is unchanged. Lists no directory."""
        return holds(self.guard, [p.path for p in self.set.parts])


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


StoredSaves = Callable[[], Collection[tuple[int, str]]]
"""(step, save_id) of every save that the store holds. Can block."""


class CompletenessChecker:
    """Judges single checkpoints for one ``Catalogue``, which keeps the results. Blocks; one thread at a time."""

    def __init__(
        self,
        layout: Layout,
        clock: Clock,
        windows: SettleTimes,
        expected: Expected,
        ledger: Ledger,
        *,
        boots: RebootCheck | None,
        stored: StoredSaves,
        roots: Sequence[Path],
    ) -> None:
        self._layout = layout
        self._roots = roots
        self._clock = clock
        self._windows = windows
        self._expected, self._ledger = expected, ledger
        self._boots, self._stored = boots, stored
        self._ids: Mapping[int, frozenset[str]] | None = None
        self._shapes: dict[Shape, Shape] = {}
        self.slow = False
        """The filesystem is a network filesystem, which shows changes late."""
        self.writers_ended = False
        """Every process that could write here was seen to end: on a local filesystem no settle time is needed."""
        self.problem = ""
        """The first read error since ``begin``."""

    def begin(self, *, slow: bool, writers_ended: bool = False) -> None:
        """Start a new rescan: the journal is read again."""
        self.slow, self.problem, self._ids = slow, "", None
        self.writers_ended = writers_ended and not slow

    def end(self, states: Collection[Known]) -> None:
        """Finish the rescan: data that equal checkpoints share is kept once."""
        self._shapes = {k.guard.shape: k.guard.shape for k in states}

    def scan(self, parts: Sequence[PartDir]) -> list[Scan]:
        return [scan_part(p, self._roots) for p in parts]

    def judge(self, step: int, found: Sequence[PartFiles], was: str) -> Judgement:
        """The layout's judgement. A save that was complete stays the same save when files are added to it: it is not
        uploaded again for an evaluation that was written into it hours later. ``was``: its ``save_id`` then."""
        judgement = self._layout.judge(step, found)
        ids = self._stored_ids().get(step, frozenset()) | ({was} if was else set())
        if ids and not (judgement.whole and checkpoint_identity.save_id(found, judgement) in ids):
            for fewer, added in checkpoint_identity.without_additions(found):
                before = self._layout.judge(step, fewer)
                if before.whole and checkpoint_identity.save_id(fewer, before) in ids:
                    judgement = replace(before, leftovers=(*before.leftovers, *added))
                    break
        return judgement if judgement.problems else replace(judgement, problems=checkpoint_identity.NOTHING)

    def examine(self, step: int, parts: Sequence[PartDir], known: Known | None) -> Known:
        """Read one step file by file; ``known`` is the result of the last time. Never raises for what is on disk."""
        seen = self._identify(step, parts, known)
        earlier = self._reuse(seen)
        if earlier is not None and earlier.settled:
            return earlier
        return self._state(seen, known, self._judge_now(seen, earlier, known.was if known is not None else ""))

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
        )

    def _reuse(self, seen: _Seen) -> Known | None:
        """The last result if its judgement still describes these files: they are the same, all were read, and no
        tracker changed. The sizes of a settled one follow its by-products."""
        known = seen.before
        if known is None or seen.error:
            return None
        if not known.set.complete and any(s.outside for s in seen.scans):
            return None  # a link changes no file
        guard = self._guard(seen.scans, known.judgement)
        if known.judgement.rests_on and guard != known.guard:
            return None  # a tracker changed
        if known.settled and guard != known.guard:  # a by-product was added or removed: the save does not change
            described = checkpoint_identity.describe(seen.step, self._layout.name, seen.found, known.judgement)
            kept = known.set
            known.set = replace(described, completeness=kept.completeness, save_id=kept.save_id, reason=kept.reason)
            known.guard = guard
        return known

    def _judge_now(self, seen: _Seen, earlier: Known | None, was: str) -> Judgement:
        """The judgement of what is there now: that of ``earlier`` where it was settled content, else the layout's; with
        read errors and lost files, which no layout sees."""
        # What could not be read may be readable now: setting its mode right changes no name, size or mtime.
        if earlier is not None and not earlier.judgement.unreadable and earlier.quiet >= _SETTLED_CONTENT:
            judgement = earlier.judgement
        else:
            judgement = self.judge(seen.step, seen.found, was)
        if seen.error:
            return replace(judgement, whole=False, unreadable=True, reason=f"cannot be read: {seen.error}")
        own = checkpoint_identity.own_files(seen.found, judgement)
        if judgement.deleted and self._ledger.left_of(seen.step, own):
            left = ", ".join(p.part.name for p in seen.found if p.present) or "nothing"
            reason = f"it was deleted, not by podwatch; what is left: {left}"
            return replace(judgement, whole=False, damaged=False, pending=False, remainder=True, reason=reason)
        if lost := self._ledger.lost(seen.step, own):
            return replace(judgement, whole=False, damaged=True, reason=lost)
        outside = next((s.outside for s in seen.scans if s.outside and s.found.part.required), "")
        if outside and not judgement.whole:  # what it lacks can be behind the link
            reason = f"{judgement.reason} ({outside} is a symbolic link, and podwatch does not follow it)"
            return replace(judgement, unreadable=True, damaged=False, reason=reason)
        return judgement

    def _state(self, seen: _Seen, known: Known | None, judgement: Judgement) -> Known:
        """The state that follows from the judgement, from how long nothing changed, and from what was known."""
        step, found = seen.step, seen.found
        described = checkpoint_identity.describe(step, self._layout.name, found, judgement)
        guard = self._guard(seen.scans, judgement)
        state = Known(seen.fingerprint, seen.since, seen.polls, guard, judgement, described, seen.quiet)
        state.odd = seen.before.odd if seen.before is not None else None
        state.was = known.was if known is not None else ""
        trusted = known is not None and known.settled and known.set.complete and judgement.whole
        if trusted and checkpoint_identity.save_id(found, judgement) == state.was:  # its own files are unchanged
            state.set = replace(described, completeness=Completeness.COMPLETE, save_id=state.was, reason="")
            state.settled = True
            return state
        if judgement.whole and (lacks := self._believe(state, step, found, seen.changed)):
            state.set = replace(state.set, reason=lacks)
        elif judgement.whole:
            return state
        return self._not_whole(state, begun=bool(seen.changed) and not judgement.pending)

    def check_suspects(self, steps: Mapping[int, Sequence[PartDir]], states: Mapping[int, Known]) -> None:
        """Run the hole test and the medium check on checkpoints from before a reboot, newest first, as time allows."""
        end = self._clock.monotonic() + DEEPER_BUDGET
        for step in sorted((s for s, k in states.items() if k.suspect and not k.settled), reverse=True):
            if self._clock.monotonic() >= end:
                return
            state = states[step]
            found = tuple(s.found for s in self.scan(steps[step]))
            save_id = checkpoint_identity.save_id(found, state.judgement)
            problems = inspect(found, state.judgement).problems
            hole = state.odd.hole if state.odd is not None else ""
            if problems:
                reason = f"damaged by the reboot: {problems[0]}"
                state.set = replace(
                    state.set, completeness=Completeness.DAMAGED, reason=reason, settles_in=None, unclear=True
                )
                state.settled = True
            elif hole and self._boots is not None and not self._boots.was_sparse(save_id):
                reason = (
                    f"suspect after a reboot: {hole} has ranges that were never written (lost, or a sparse copy: then "
                    "copy it with cp --sparse=never)"
                )
                state.set = replace(state.set, reason=reason, settles_in=None, unclear=True)
                state.settled = True  # stays WRITING: not used, and not removed as a leftover
            else:
                self._complete(state, step, found, save_id)

    # -- inside -------------------------------------------------------------------------------------------------

    def _believe(self, state: Known, step: int, found: tuple[PartFiles, ...], changed: float) -> str:
        """Set COMPLETE if all conditions hold; otherwise return what it lacks compared with earlier saves."""
        judgement, windows = state.judgement, self._windows
        save_id = checkpoint_identity.save_id(found, judgement)
        # A checkpoint that an earlier podwatch found complete, unchanged since, needs no settle time again.
        known = self._boots is not None and self._boots.knows(save_id)
        settled = self.writers_ended or known or save_id in self._stored_ids().get(step, ())
        need = 0.0 if settled else windows.need(judgement.marker, slow=self.slow)
        state.moving = judgement.marker is not Marker.COMMIT
        if state.polls < 2 or state.quiet < need:
            state.wait(need, f"all files present: complete after {need:.0f} s without a change")
            return ""
        if state.odd is None:
            state.odd = find_odd(found, judgement)
        odd = state.odd
        weak = judgement.marker is Marker.NONE or bool(odd.legacy)
        longer = 0.0 if settled and not odd.hole else windows.need(Marker.NONE, slow=self.slow)
        if (weak or odd.hole) and state.quiet < longer:
            what = f"{odd.hole} has ranges that were never written" if odd.hole else f"{odd.legacy} has no end to check"
            state.wait(longer, f"all files present, but {what}: complete after {longer:.0f} s without a change")
            return ""
        if weak:
            patience = windows.longest(slow=self.slow) * CUT_OFF_FACTOR
            lacks = self._expected.lacks(
                step, checkpoint_identity.own_files(found, judgement), settled=state.quiet >= patience
            )
            if lacks:
                return lacks
        if self._boots is not None and self._boots.suspect(save_id, changed) and (step, save_id) not in self._stored():
            state.suspect, state.moving = True, False
            state.set = replace(state.set, reason=CHECKED_DEEPER, settles_in=0.0)
        else:
            self._complete(state, step, found, save_id)
        return ""

    def _complete(self, state: Known, step: int, found: tuple[PartFiles, ...], save_id: str) -> None:
        """The last check: set COMPLETE only if these are still the files that were judged."""
        again = tuple(s.found for s in self.scan([p.part for p in found]))
        if checkpoint_identity.fingerprint(again) != state.fingerprint:
            return
        state.set = replace(state.set, completeness=Completeness.COMPLETE, save_id=save_id, reason="", settles_in=None)
        state.settled, state.moving, state.was = True, False, save_id
        odd = state.odd or StructureHints()
        self._ledger.note(step, checkpoint_identity.own_files(found, state.judgement))
        if state.judgement.marker is Marker.NONE or odd.legacy:
            self._expected.note(step, checkpoint_identity.own_files(found, state.judgement))
        if self._boots is not None:
            self._boots.passed(save_id, deeper=state.suspect, sparse=bool(odd.hole))
        state.suspect, state.odd = False, None

    def _not_whole(self, state: Known, *, begun: bool) -> Known:
        judgement = state.judgement
        long_quiet = self._windows.longest(slow=self.slow)
        if judgement.unreadable:
            state.set = replace(state.set, unclear=True)
            return state  # stays WRITING: a checkpoint that cannot be observed must not be removed
        state.moving = begun and state.quiet < long_quiet
        if state.polls >= 2 and (state.quiet >= long_quiet or not begun):
            final = Completeness.DAMAGED if judgement.damaged else Completeness.INCOMPLETE
            # A volume that is not mounted looks like deleted checkpoints: no fresh start without the operator.
            unclear = judgement.damaged or judgement.remainder
            state.set = replace(state.set, completeness=final, unclear=unclear, remainder=judgement.remainder)
        return state

    def _guard(self, scans: Sequence[Scan], judgement: Judgement) -> Guard:
        guard = guard_of(scans, [str(p) for p in judgement.rests_on])
        return Guard(self._shapes.setdefault(guard.shape, guard.shape), guard.stamp)

    def _stored_ids(self) -> Mapping[int, frozenset[str]]:
        """The ids of stored saves, read from the journal once per rescan."""
        ids = self._ids
        if ids is None:
            found: dict[int, set[str]] = {}
            for step, save_id in self._stored():
                found.setdefault(step, set()).add(save_id)
            ids = self._ids = {step: frozenset(few) for step, few in found.items()}
        return ids
