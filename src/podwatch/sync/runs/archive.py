"""Archive a finished run: keep only the newest checkpoint, or the milestones too (rules: policy/store_retention.py).

Blocking. The order makes every interruption harmless: the list of removals is written to the store first
(archive.json), each checkpoint loses its manifest before its objects, and the next archive of the run finishes an
interrupted one. Never touched: objects without podwatch's mark, the checkpoint that the pointer names, and any run
on which a podwatch is still active.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Literal

from podwatch.domain.document import Document, Label, Many, Real, RunId, SaveId, Whole
from podwatch.domain.errors import Busy, HostError, IntegrityError
from podwatch.domain.manifest import Keys, Pointer
from podwatch.domain.stored_checkpoint import StoredSave
from podwatch.policy.store_retention import Decision, Keep, Leftover, abandoned_uploads, plan_archive, sign_of_life
from podwatch.stores.base import CannotDelete, ObjectStore, StoredObject, Upload, store_time
from podwatch.sync.inventory import inventory
from podwatch.sync.last_heartbeat import last_heartbeat
from podwatch.sync.publish_and_pointer import read_pointer
from podwatch.sync.verify_stored import verify_save
from podwatch.system.clock import Clock

# -- archive.json -----------------------------------------------------------------------------------------------------
# What an archive removes, written before the first removal, and the result. The intent is in the store, not in a
# journal: the pod that archives need not be the pod that trained, and any pod can finish an interrupted archive.


@dataclass(frozen=True, slots=True)
class ArchivedSave:
    step: Whole
    save_id: SaveId


@dataclass(frozen=True, slots=True)
class ArchiveRecord(Document):
    """``removing``: the checkpoints to remove. ``generation``, ``seq``: of the pointer at the decision. ``keep``:
    ``latest`` or ``milestones``."""

    KIND = "podwatch-archive"
    FILE = "archive.json"
    LARGEST = 4 << 20

    run_id: RunId
    keep: Label
    generation: Whole
    seq: Whole
    wall: Real
    host: Label
    removing: Many[ArchivedSave] = ()
    state: Literal["begun", "done"] = "begun"

    @property
    def pointer(self) -> tuple[int, int]:
        return self.generation, self.seq

    @property
    def done(self) -> bool:
        return self.state == "done"


def read_record(store: ObjectStore, keys: Keys) -> ArchiveRecord | None:
    """None if there is none, or it cannot be read (it is then ignored). Raises RemoteError."""
    try:
        data = store.get_bytes(keys.archive, limit=ArchiveRecord.LARGEST)
        record = None if data is None else ArchiveRecord.from_bytes(data)
    except IntegrityError:
        return None
    return record if record is not None and record.run_id == keys.run_id else None


def write_record(store: ObjectStore, keys: Keys, record: ArchiveRecord) -> StoredObject:
    return store.put_bytes(keys.archive, record.to_bytes())


# -- archive ----------------------------------------------------------------------------------------------------------

FINISHED = frozenset({"finished", "stopped", "released", "preempted", ""})
"""Last reported states after which archiving needs no warning. A podwatch that reported ``restarting`` left training
running and did not come back."""


@dataclass(frozen=True, slots=True)
class ArchivePlan:
    """``leftovers``: prefixes of checkpoints without a manifest, left by an interrupted archive; ``uploads``:
    unfinished uploads that nothing will finish; ``last_word``: the last state that the run's podwatch reported."""

    keep: Keep
    pointer: Pointer
    decisions: tuple[Decision, ...]
    leftovers: tuple[tuple[int, str], ...] = ()
    uploads: tuple[Leftover, ...] = ()
    last_word: str = ""

    @property
    def going(self) -> tuple[StoredSave, ...]:
        return tuple(d.save for d in self.decisions if not d.stays)

    @property
    def freed_bytes(self) -> int:
        return sum(save.total_bytes for save in self.going)

    @property
    def nothing(self) -> bool:
        return not (self.going or self.leftovers or self.uploads)


class Archiver:
    """``forget`` is called with each checkpoint before its removal: this pod's journal must not list it as stored."""

    def __init__(
        self,
        store: ObjectStore,
        keys: Keys,
        clock: Clock,
        *,
        host: str = "",
        forget: Callable[[int, str], None] = lambda step, save_id: None,
    ) -> None:
        self._store, self._keys, self._clock, self._host, self._forget = store, keys, clock, host, forget

    def look(self, keep: Keep, *, keep_every: int, pins: Collection[int] = ()) -> ArchivePlan:
        """What an archive would remove. Raises Busy while a podwatch is active on the run, IntegrityError when the
        newest checkpoint cannot be determined or is damaged, RemoteError for store trouble."""
        self._refuse_alive()
        pointer = self._pointer()
        found, problem = inventory(self._store, self._keys)
        now = store_time(self._store, self._clock.wall())
        if problem:
            raise IntegrityError(f"latest.json cannot be used: {problem}", where=self._where, fix="do not archive")
        named = next((s for s in found if s.named), None)
        if named is None:
            raise IntegrityError("latest.json names no checkpoint", where=self._where, fix="do not archive")
        if reasons := verify_save(self._store, named):
            raise IntegrityError(
                f"the newest checkpoint, step {named.step}, is damaged: {'; '.join(reasons[:3])}",
                where=self._where,
                fix="keep the others; find an undamaged one with `podwatch store verify`",
            )
        stored = self._store.stat(self._keys.latest)
        last, pinned = self._last()
        decisions = plan_archive(
            found,
            keep,
            keep_every=keep_every,
            pins={*pins, *pinned},
            pointer_wall=stored.uploaded_wall if stored is not None else now,
            now_wall=now,
        )
        there = {(s.step, s.save_id) for s in found}
        uploads = abandoned_uploads(self._store.unfinished(f"{self._keys.root}/"), (), now)
        return ArchivePlan(keep, pointer, decisions, self._cut_off(there), uploads, last)

    def _last(self) -> tuple[str, Collection[int]]:
        """How the run's podwatch left, and the steps pinned there. Raises IntegrityError if its heartbeat cannot be
        read: without it, pinned checkpoints would be deleted."""
        found = last_heartbeat(self._store, self._keys)
        if found is None:
            return "", ()
        if not found[0].readable:
            raise IntegrityError(
                "the run's last heartbeat cannot be read: it says which checkpoints are pinned",
                where=f"{self._store.url}/{self._keys.heartbeat}",
                fix="use the version of podwatch that wrote it, or a newer one",
            )
        return found[0].left_as, ()

    def may_delete(self) -> str:
        """Why the key cannot delete; empty if it can."""
        return next((warning for warning in self._store.check() if isinstance(warning, CannotDelete)), "")

    def carry_out(self, plan: ArchivePlan) -> None:
        """Remove it. Raises Busy when a podwatch became active on the run or its pointer moved, RemoteError. A repeated
        call continues an interrupted one."""
        self._refuse_alive()
        removing = (*((s.step, s.save_id) for s in plan.going), *plan.leftovers)
        saves = tuple(ArchivedSave(step, save_id) for step, save_id in removing)
        record = ArchiveRecord(
            self._keys.run_id, str(plan.keep), *plan.pointer.order, self._clock.wall(), self._host, saves
        )
        written = write_record(self._store, self._keys, record)
        for step, save_id in removing:
            now = self._pointer()
            if now != plan.pointer or (step, save_id) == (now.step, now.save_id):
                raise Busy(
                    "latest.json changed while the run was archived",
                    where=self._where,
                    fix="this run continues elsewhere; objects not removed yet stay",
                )
            self._forget(step, save_id)
            self._remove(step, save_id)
        for upload in plan.uploads:
            self._store.cancel_large(Upload(upload.key, upload.identifier))
        done = replace(record, wall=self._clock.wall(), removing=(), state="done")
        write_record(self._store, self._keys, done)
        if self._store.versioned:
            self._store.delete(written)

    # -- below --------------------------------------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        return f"{self._store.url}/{self._keys.root}"

    def _pointer(self) -> Pointer:
        pointer = read_pointer(self._store, self._keys)
        if pointer is None:
            raise HostError(
                "the run has no latest.json, so its newest checkpoint is not known",
                where=self._where,
                fix="`podwatch runs list` shows the runs in the store",
            )
        return pointer

    def _refuse_alive(self) -> None:
        walls = list(signs(self._store, self._keys))
        age = sign_of_life(walls, store_time(self._store, self._clock.wall()))
        if age is not None:
            raise Busy(
                f"podwatch is active on run {self._keys.run_id}: its last heartbeat is {age:.0f} s old",
                where=self._where,
                fix="stop podwatch there, wait 15 minutes, then archive",
            )

    def _cut_off(self, there: Collection[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
        """Checkpoints that an interrupted archive left without a manifest but with objects."""
        stored = self._store.stat(self._keys.archive)
        record = read_record(self._store, self._keys) if stored is not None and stored.ours else None
        if record is None or record.done:
            return ()
        named = [(save.step, save.save_id) for save in record.removing]
        return tuple(save for save in named if save not in there and self._left_of(*save))

    def _left_of(self, step: int, save_id: str) -> bool:
        return any(o.ours is not False for o in self._store.list(self._keys.save(step, save_id)))

    def _remove(self, step: int, save_id: str) -> None:
        """Delete all versions of our objects: deleting only the newest of a name would make an older one visible."""
        manifest = self._keys.manifest(step, save_id)
        versions = [v for v in self._store.identify(self._store.versions(self._keys.save(step, save_id))) if v.ours]
        for version in sorted(versions, key=lambda v: v.key != manifest):
            self._store.delete(version)


def signs(store: ObjectStore, keys: Keys) -> list[float]:
    """Store times of the last heartbeats and leases of this run. Raises RemoteError."""
    beat = store.stat(keys.heartbeat)
    walls = [beat.uploaded_wall] if beat is not None else []
    return walls + [claim.uploaded_wall for claim in store.list(keys.claims)]
