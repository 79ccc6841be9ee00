"""Writes scrubbed incident bundles: the state of the pod at the time of a failure."""

from podwatch.domain.secrets import scrub, scrub_argv
from podwatch.incidents.bundle import capture, plain
from podwatch.incidents.explaining_line import decisive, since

__all__ = ["capture", "decisive", "plain", "scrub", "scrub_argv", "since"]
