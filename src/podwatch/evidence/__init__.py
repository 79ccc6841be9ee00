"""Writes scrubbed incident bundles: the state of the pod at the time of a failure."""

from podwatch.domain.secrets import scrub, scrub_argv, secret_values
from podwatch.evidence.bundle import capture
from podwatch.evidence.highlights import decisive, since
from podwatch.evidence.plain import plain

__all__ = ["capture", "decisive", "plain", "scrub", "scrub_argv", "secret_values", "since"]
