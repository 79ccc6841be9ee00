"""Carry out a recovery: stop, prepare, start, confirm."""

from podwatch.recovery.recovery import Recovery
from podwatch.recovery.state import CatalogueDoor, Phase, RecordHolder, RecoveryState, RestoreDoor

__all__ = ["CatalogueDoor", "Phase", "RecordHolder", "Recovery", "RecoveryState", "RestoreDoor"]
