"""Inspects a checkpoint in staging, before anything can resume from it, and makes its record."""

import time
from collections.abc import Callable, Sequence

from podwatch.checkpoints import checkpoint_identity
from podwatch.checkpoints.inspection import Inspection
from podwatch.checkpoints.layout import Layout
from podwatch.checkpoints.records import CheckpointRecord, RecordSource
from podwatch.checkpoints.shapes import PartDir, PartFiles
from podwatch.domain.errors import HostError, IntegrityError
from podwatch.store.documents import SaveManifest
from podwatch.system.procfs import boot_id

INSPECTIONS = 3
PAUSE_SECONDS = 2.0


class StagedDamaged(IntegrityError):  # noqa: N818
    """It has the hashes of the store and is no checkpoint: it was damaged when it was stored."""


class NotInspected(HostError):  # noqa: N818
    """No inspection gave an answer: nothing is known of the checkpoint. What was fetched stays in staging."""


def inspect_staged(
    layout: Layout, manifest: SaveManifest, parts: Sequence[PartDir], wait: Callable[[float], object] = time.sleep
) -> CheckpointRecord:
    """Its record. ``parts``: where each part lies now. Raises StagedDamaged where the checkpoint is not whole,
    NotInspected where each of several inspections gave no answer. Blocking."""
    for count in range(INSPECTIONS):
        if count:
            wait(PAUSE_SECONDS)
        with layout.reading():
            found, judgement = layout.inspect_staged(manifest.step, parts)
        if judgement.whole:
            return _record(manifest, found, judgement)
        if not judgement.unreadable:
            raise StagedDamaged(f"the checkpoint of step {manifest.step} is damaged in the store: {judgement.reason}")
    what = f"step {manifest.step} was fetched, and no inspection of it gave an answer: {judgement.reason}"
    raise NotInspected(what, fix=f"`podwatch start --step {manifest.step}` resumes from it all the same")


def _record(manifest: SaveManifest, found: tuple[PartFiles, ...], judgement: Inspection) -> CheckpointRecord:
    """As the catalogue makes one of the same files in their place."""
    own = checkpoint_identity.recorded(checkpoint_identity.own_files(found, judgement))
    sizes = {p.part.name: sum(f.size for f in p.files) for p in found}
    return CheckpointRecord(
        manifest.step, checkpoint_identity.save_id(found, judgement), manifest.layout, boot_id(), own,
        max((f.mtime_ns for f in own), default=0) / 1e9, {name: size for name, size in sizes.items() if size},
        len(manifest.files), source=RecordSource.RESTORED, start_id=manifest.start_id or manifest.save_id,
        branch=manifest.lineage, ends=judgement.ends, sparse=bool(judgement.hole),
    )  # fmt: skip
