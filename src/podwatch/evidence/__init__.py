"""Capture and scrub incident bundles: what the pod looked like at the moment of death."""

from podwatch.evidence.bundle import capture
from podwatch.evidence.plain import plain
from podwatch.evidence.scrub import scrub, secret_values

__all__ = ["capture", "plain", "scrub", "secret_values"]
