"""What an intent in the journal says of its action: enough to finish or to undo it. Pure."""

from dataclasses import dataclass
from typing import Annotated

from podwatch.domain.document import Document, Integer, Many, Strictly, Text, Whole
from podwatch.domain.manifest import Pointer


@dataclass(frozen=True, slots=True)
class StoreIntent(Document):
    """The removal of a save from the store, or its restore: ``staging`` and ``targets`` are its directories, sorted."""

    FILE = "the record of a removal or a restore"

    step: Whole
    save_id: Text
    reason: Text = ""
    staging: Many[Text] = ()
    targets: Many[Text] = ()


@dataclass(frozen=True, slots=True)
class PathToRemove:
    """The identity of a path when its removal was recorded. Device numbers of NFS and FUSE change with each mount, so
    none is kept."""

    path: Text
    inode: Annotated[int, Strictly(0)]
    """Some file systems use all 64 bits."""
    kind: Whole
    """Its type, as ``stat.S_IFMT`` has it."""
    mtime: Integer


@dataclass(frozen=True, slots=True)
class RemovalIntent(Document):
    """A removal from the disk."""

    FILE = "the record of a removal"

    kind: Text
    step: Whole | None
    reason: Text
    paths: Many[PathToRemove]


@dataclass(frozen=True, slots=True)
class PublishIntent(Document):
    """``pointer``: the one that is written; None: the manifest of a checkpoint is, which has no effect by itself."""

    FILE = "the record of a publication"

    step: Whole | None
    pointer: Pointer | None = None
