"""A checkpoint in the store, in the two shapes that it has: what the store shows now, and what this pod's journal
recorded when it was published. They differ because the store can lose what the journal knows, and the reverse."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from podwatch.domain.errors import IntegrityError
from podwatch.domain.manifest import Manifest, ManifestRef, Pointer
from podwatch.domain.run import valid_ids


@dataclass(frozen=True, slots=True)
class StoredSave:
    """What the store shows. ``named``: the pointer names it; ``generation`` and ``seq`` are then the pointer's, else 0.
    ``uploaded_wall``: when the manifest was stored (epoch seconds of the store). ``problem``: why the manifest cannot
    be used; ``manifest`` is None then, and where only its facts are known. ``optional``: parts that no resume needs are
    stored beside it."""

    step: int
    save_id: str
    lineage: str = ""
    seq: int = 0
    generation: int = 0
    uploaded_wall: float = 0.0
    total_bytes: int = 0
    named: bool = False
    problem: str = ""
    optional: bool = False
    ref: ManifestRef | None = None
    manifest: Manifest | None = None
    wandb: Mapping[str, str] = field(default_factory=dict)
    """The ids of the trainer's W&B run, as far as they are valid."""

    @property
    def key(self) -> tuple[int, str]:
        return self.step, self.save_id

    @property
    def content(self) -> Manifest:
        """Raises IntegrityError where the manifest cannot be used."""
        if self.manifest is None:
            raise IntegrityError(self.problem or "the manifest was not read", where=f"step {self.step}")
        return self.manifest


def stored_save(
    manifest: Manifest, ref: ManifestRef, uploaded_wall: float, pointer: Pointer | None = None
) -> StoredSave:
    """A checkpoint whose manifest was read and checked. ``pointer``: the one that names it, None if none does."""
    return StoredSave(
        manifest.step,
        manifest.save_id,
        manifest.lineage,
        pointer.seq if pointer is not None else 0,
        pointer.generation if pointer is not None else 0,
        uploaded_wall,
        manifest.total_bytes,
        named=pointer is not None,
        ref=ref,
        manifest=manifest,
        wandb=valid_ids(manifest.wandb) or valid_ids(pointer.wandb if pointer is not None else {}),
    )


@dataclass(frozen=True, slots=True)
class PublishedSave:
    """What the journal records of one checkpoint whose manifest is verified in the store and was named by our pointer
    (or came from there). Its fields are those of the record in the database.

    ``wall`` is epoch seconds. ``restored`` means that it was fetched from the store, so it need not be sent again.
    """

    step: int
    save_id: str
    lineage: str
    generation: int
    seq: int
    manifest_key: str
    manifest_file_id: str
    manifest_sha1: str
    manifest_size: int
    total_bytes: int
    wall: float
    restored: bool = False

    @property
    def ref(self) -> ManifestRef:
        return ManifestRef(self.manifest_key, self.manifest_file_id, self.manifest_sha1, self.manifest_size)


@dataclass(frozen=True, slots=True)
class KnownSaves:
    """The saves in the store that retention knows on one pod, as its heartbeat hands them to the next pod, oldest
    first. Their order was right when the pointer had this (generation, seq): a later step back can move one."""

    generation: int
    seq: int
    saves: tuple[PublishedSave, ...]


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A save in the store's inventory. ``save_id``: as the store names it; ``here``: as this pod names the same save,
    empty where it does not have it. ``wall``: when it was stored, by the store's clock. ``whole``: it can be restored.
    ``milestone``: retention keeps it for good."""

    step: int
    save_id: str
    lineage: str = ""
    generation: int = 0
    seq: int = 0
    total_bytes: int = 0
    wall: float = 0.0
    pinned: bool = False
    exports: bool = False
    milestone: bool = False
    whole: bool = True
    here: str = ""

    @property
    def key(self) -> tuple[int, str]:
        return (self.step, self.save_id)
