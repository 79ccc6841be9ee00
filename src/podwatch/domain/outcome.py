"""How a run ended, as heartbeat, status, verdict and incidents say it."""

from enum import StrEnum

ENDS_ON_ITS_OWN = "training ends on its own"
"""Ends recovery's detail while a requested stop has nothing left to stop."""


class Outcome(StrEnum):
    """How a run, or this pod's part in it, ended. The values are stable: heartbeat, status and incidents show them."""

    FINISHED = "finished"
    GAVE_UP = "gave-up"
    """Recovery is exhausted here, or the command never worked."""
    STOPPED = "stopped"
    """An operator stopped the run."""
    PREEMPTED = "preempted"
    """The engine, or the machine's owner, ended the job before the run was finished."""
    SUPERSEDED = "superseded"
    """Another pod has taken the run over."""
    HELD = "held"
    """Another living pod holds the run; this one never trained."""
    BLOCKED = "blocked"
    """Training could not start here: held GPU memory, a store that does not answer."""
    BAD_HOST = "bad-host"
    """This machine, or that of another node of the run, is on its list of bad hosts; training was not started."""
    REFUSED = "refused"
    """An earlier verdict of this run forbids a new start."""
    FAILED = "failed"
    """podwatch itself cannot run: usage, permission, configuration, or an internal error."""
