"""Publish a save: intent, pieces, then ownership confirmed, the save's objects listed and compared, manifest, pointer,
``latest.json``. Blocking.

Readers see nothing before the pointer. A crash at any point leaves an intent or a manifest that no pointer names: the
next publication uses it, or a sweep removes it a day later. A request whose answer is lost may still be carried out
later; so the manifest of a save has the same bytes each time, and no name of a pointer is used twice.
"""

import contextlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from podwatch.domain.checkpoint import FileEntry
from podwatch.domain.document import of
from podwatch.domain.errors import IntegrityError, PodwatchError, RemoteError
from podwatch.store.documents import RunPointer, SaveIntent, SaveManifest, manifest_hash
from podwatch.store.interfaces import Author, Ownership, Permit, list_save, read_or_none
from podwatch.store.inventory import SaveKey, Stored, missing_objects
from podwatch.store.keys import INTENT, MANIFEST, RunKeys
from podwatch.store.objects.base import Objects
from podwatch.store.objects.errors import LeaseUnsettled as LeaseUnsettled
from podwatch.store.pointers import highest_pointer
from podwatch.system.clock import Clock


class LeaseLost(PodwatchError):  # noqa: N818
    """Another pod holds the run: publish, upload and delete nothing more."""


class PiecesMissing(IntegrityError):  # noqa: N818
    """``names``: objects of the save, or its intent, that the store does not show as they were sent."""

    def __init__(self, names: list[str], *, where: str) -> None:
        what = f"{len(names)} uploaded object(s) are missing or different in the store"
        super().__init__(what, where=where, fix="podwatch sends them again")
        self.names = tuple(names)


@dataclass(slots=True)
class Publisher:
    """One per life of podwatch. ``named``: when its own pointers last named a save, in boottime: a listing may not
    show them yet."""

    store: Objects
    keys: RunKeys
    lease: Ownership
    clock: Clock
    nonce: Callable[[], str] = lambda: secrets.token_hex(4)
    named: dict[SaveKey, float] = field(default_factory=dict)
    _seq: int = 0
    _manifests: dict[SaveKey, tuple[SaveManifest, bytes]] = field(default_factory=dict)

    def begin(self, intent: SaveIntent) -> None:
        """Before the first piece of a save is sent, unless the store has this intent already."""
        self.store.put(self.keys.save(*intent.key) + INTENT, intent.to_bytes())

    def publish(self, intent: SaveIntent, hashes: Mapping[str, str], author: Author, *, newest: bool = True) -> Stored:
        """``hashes``: of the objects that this pod has sent, by name. Not ``newest``: it is stored without becoming the
        newest. Raises PiecesMissing, LeaseLost, LeaseUnsettled or what the store raises."""
        permit = self.lease.confirm(self.store)
        folder = self.keys.save(*intent.key)
        there = list_save(self.store, folder)
        sent = [replace(piece, hash=hashes[piece.name]) for piece in intent.objects() if piece.name in hashes]
        lacks = [piece.name for piece in intent.objects() if piece.name not in hashes] + missing_objects(sent, there)
        lacks += [INTENT] if INTENT not in there else []
        if lacks:
            raise PiecesMissing(lacks, where=f"{self.store.url}/{folder}")
        seq = self._next_seq(permit, author)
        order = (permit.generation, seq if newest else 0)
        manifest, data = self._manifest(intent, hashes, author, order, exists=MANIFEST in there)
        if MANIFEST not in there or read_or_none(self.store, folder + MANIFEST, SaveManifest) != data:
            self.store.put(folder + MANIFEST, data, until=permit.until)
        saved = Stored.of(manifest, manifest_hash(data), self.clock.wall(), there)
        if newest:
            self._point(saved, len(data), author, permit, seq)
        return saved

    def repoint(self, save: Stored | None, author: Author) -> None:
        """Make a save that is whole in the store the newest, as after a step back; None: no save is, after a deliberate
        fresh start. Raises as ``publish``, and IntegrityError for a save that is not whole any more."""
        permit = self.lease.confirm(self.store)
        size = 0
        if save is not None:
            size = self._check(save)
        self._point(save, size, author, permit, self._next_seq(permit, author))

    def _check(self, save: Stored) -> int:
        """The size of its manifest, after a look at each of its objects."""
        folder = self.keys.save(*save.key)
        data = read_or_none(self.store, folder + MANIFEST, SaveManifest) or b""
        if save.manifest is None or manifest_hash(data) != save.hash:
            raise IntegrityError("the manifest is not in the store any more", where=f"{self.store.url}/{folder}")
        if lacks := missing_objects(save.manifest.objects(), list_save(self.store, folder)):
            raise PiecesMissing(lacks, where=f"{self.store.url}/{folder}")
        return len(data)

    def _manifest(
        self, intent: SaveIntent, hashes: Mapping[str, str], author: Author, order: tuple[int, int], *, exists: bool
    ) -> tuple[SaveManifest, bytes]:
        """The same bytes each time: those of an earlier try, or of an earlier life if it lists the same objects."""
        key, files = intent.key, intent.hashed(hashes)
        if key not in self._manifests and exists and (earlier := self._earlier(intent, files)) is not None:
            self._manifests[key] = earlier
        if key not in self._manifests:
            manifest = of(
                SaveManifest, intent, generation=order[0], seq=order[1], created_at=self.clock.wall(), files=files,
                writer_id=author.writer_id, lineage=author.lineage, start_id=author.start_id,
                from_step=author.from_step, world_size=author.world_size, config_digest=author.config_digest,
                train_command=author.train_command, wandb=author.wandb,
            )  # fmt: skip
            self._manifests[key] = (manifest, manifest.to_bytes())
        return self._manifests[key]

    def _earlier(self, intent: SaveIntent, files: tuple[FileEntry, ...]) -> tuple[SaveManifest, bytes] | None:
        try:
            data = read_or_none(self.store, self.keys.save(*intent.key) + MANIFEST, SaveManifest) or b""
            manifest = SaveManifest.from_bytes(data)
        except IntegrityError:
            return None
        same = (manifest.run_id, *manifest.key, manifest.files) == (intent.run_id, *intent.key, files)
        return (manifest, data) if same else None

    def _next_seq(self, permit: Permit, author: Author) -> int:
        """Never lower than that of any pointer, and used once in this life, whether or not its request succeeds.
        Raises LeaseLost where a pointer shows that another pod has this run."""
        found = highest_pointer(self.store, self.keys, claimed=permit.generation)
        if found is not None:
            foreign = found.generation == permit.generation and found.writer_id != author.writer_id
            if found.generation > permit.generation or foreign:
                what = f"another pod has published generation {found.generation} of this run"
                raise LeaseLost(what, where=self.keys.pointers, fix="podwatch run --take-over")
            self._seq = max(self._seq, found.seq)
        self._seq += 1
        return self._seq

    def _point(self, save: Stored | None, size: int, author: Author, permit: Permit, seq: int) -> None:
        pointer = RunPointer(
            self.keys.run_id, permit.generation, seq, None if save is None else save.step, author.writer_id,
            self.clock.wall(), lineage=author.lineage, layout=author.layout, host=author.host, wandb=author.wandb,
            save_id="" if save is None else save.save_id, manifest_hash="" if save is None else save.hash,
            manifest_size=size, total_bytes=0 if save is None else save.total_bytes,
        )  # fmt: skip
        if save is not None:
            self.named[save.key] = self.clock.boottime()
        data = pointer.to_bytes()
        self.store.put(self.keys.pointer(permit.generation, seq, self.nonce()), data, until=permit.until)
        with contextlib.suppress(RemoteError):  # a copy, which can be one save behind: the pointer decides
            self.store.put(self.keys.latest, data, until=permit.until)
