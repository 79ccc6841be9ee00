"""Remove old checkpoints from the store: the manifest before its objects, only ours, each removal an intent.

judgement/remote_retention.py decides what may be removed; this module removes it, and finishes after a crash.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from podwatch.domain.errors import IntegrityError, RemoteError
from podwatch.domain.intent import IntentKind, IntentState
from podwatch.domain.policy import RemotePolicy
from podwatch.domain.remote import Keys
from podwatch.journal.journal import Journal
from podwatch.judgement.remote_retention import StoredSave, plan_remote
from podwatch.stores.base import ObjectStore, StoredObject
from podwatch.sync.publish import Confirm, named_by_others, read_pointer


@dataclass(frozen=True, slots=True)
class RemotePruned:
    """``removed`` are (step, save_id, reason); ``warning``: why nothing more could be removed, if so."""

    removed: tuple[tuple[int, str, str], ...] = ()
    warning: str = ""


class RemoteRetention:
    """Blocking. Never touches a checkpoint that the pointer names at this moment. Before any deletion ``confirm`` must
    confirm that this pod still holds the lease."""

    def __init__(
        self,
        store: ObjectStore,
        keys: Keys,
        journal: Journal,
        policy: RemotePolicy,
        wall: Callable[[], float],
        *,
        writer_id: str,
        confirm: Confirm,
        kept: Callable[[Iterable[StoredSave]], Collection[tuple[int, str]]] = lambda saves: (),
    ) -> None:
        """``kept`` names checkpoints that must stay, whatever the policy decides."""
        self._store, self._keys, self._journal, self._policy, self._wall = store, keys, journal, policy, wall
        self._writer_id, self._confirm, self._kept = writer_id, confirm, kept

    def carry_out(self, *, own_generation: int | None = None) -> RemotePruned:
        """Finish what a crash interrupted, then remove what may be removed. Raises RemoteError for store trouble,
        Superseded when another pod has taken the lease; a key that cannot delete is not an error."""
        removed: list[tuple[int, str, str]] = []
        try:
            self._confirm(self._store)
            for intent in self._journal.open_intents(IntentKind.REMOTE_DELETE):
                step, save_id = int(str(intent.data["step"])), str(intent.data["save_id"])
                if save_id in self._named():
                    self._journal.settle(intent.id, IntentState.UNDONE, "the pointer names it again")
                    continue
                self._remove(step, save_id)
                self._journal.settle(intent.id, IntentState.DONE, "finished after a restart")
                removed.append((step, save_id, str(intent.data.get("reason", ""))))
            others = frozenset[str]()
            if own_generation is not None and own_generation > 1:
                # Another pod may have published, and may be restoring what it named.
                others = named_by_others(self._store, self._keys, self._writer_id)
            published = self._journal.published()
            plan = plan_remote(
                published,
                self._named() | others,
                self._journal.pins(),
                self._policy,
                self._wall(),
                own_generation=own_generation,
                kept=self._kept(published),
            )
            for item in plan:
                self._confirm(self._store)
                if item.save_id in self._named():
                    continue
                data = {"step": item.step, "save_id": item.save_id, "reason": item.reason}
                intent = self._journal.open_intent(IntentKind.REMOTE_DELETE, data)
                try:
                    self._remove(item.step, item.save_id)
                except RemoteError as error:
                    if not error.transient:
                        self._journal.settle(intent.id, IntentState.FAILED, error.what)
                    raise
                self._journal.settle(intent.id, IntentState.DONE)
                removed.append((item.step, item.save_id, item.reason))
        except RemoteError as error:
            if error.transient or isinstance(error, IntegrityError):
                raise
            return RemotePruned(tuple(removed), f"old checkpoints stay in the store: {error.what}")
        return RemotePruned(tuple(removed))

    def _named(self) -> frozenset[str]:
        pointer = read_pointer(self._store, self._keys)
        return frozenset() if pointer is None or not pointer.save_id else frozenset({pointer.save_id})

    def _remove(self, step: int, save_id: str) -> None:
        """Remove all our objects below the checkpoint's prefix, its manifest first: a reader must not trust a
        remainder.
        """
        manifest_key = self._keys.manifest(step, save_id)
        known = next((p for p in self._journal.published() if (p.step, p.save_id) == (step, save_id)), None)
        if known is not None:
            self._store.delete(
                StoredObject(manifest_key, known.manifest_size, file_id=known.manifest_file_id, ours=True)
            )
        # With versions, deleting one makes the previous one visible (a part sent twice around a crash).
        for _ in range(100):
            objects = [o for o in self._store.list(self._keys.save(step, save_id)) if o.ours]
            for item in sorted(objects, key=lambda o: o.key != manifest_key):
                self._store.delete(item)
            if not objects or not self._store.versioned:
                break
        self._journal.forget_save(step, save_id)
