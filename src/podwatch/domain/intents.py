"""What an intent in the journal says of its action: enough to finish or to undo it. Pure."""

from dataclasses import dataclass

from podwatch.domain.document import Document, Many, Text, Whole
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
class PublishIntent(Document):
    """``pointer``: the one that is written; None: the manifest of a checkpoint is, which has no effect by itself."""

    FILE = "the record of a publication"

    step: Whole | None
    pointer: Pointer | None = None
