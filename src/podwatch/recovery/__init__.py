"""Carry out a recovery: stop, prepare, start, confirm."""

from podwatch.recovery.recovery import Recovery
from podwatch.recovery.state import CatalogueReader, Phase, RecordHolder, RecoveryState, RestoreSource

__all__ = ["CatalogueReader", "Phase", "RecordHolder", "Recovery", "RecoveryState", "RestoreSource"]
