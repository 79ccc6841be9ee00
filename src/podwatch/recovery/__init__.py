"""Carry out a recovery: stop, prepare, start, confirm."""

from podwatch.recovery.recovery import Recovery
from podwatch.recovery.run_file import RunFile
from podwatch.recovery.state import CatalogueReader, Phase, RecoveryState

__all__ = ["CatalogueReader", "Phase", "Recovery", "RecoveryState", "RunFile"]
