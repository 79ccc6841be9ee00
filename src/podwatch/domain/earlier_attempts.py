"""What the store keeps of a run for its next attempt: the last verdict, how often attempts failed, bad hosts.

One small object, ``verdict.json``, because an engine starts the next attempt with an empty disk. Times are epoch
seconds of the store's clock.
"""

from dataclasses import dataclass, field
from typing import Annotated

from podwatch.domain.document import Document, Flag, Integer, Label, Many, Real, Whole, shown
from podwatch.domain.engine_and_attempt import NO_INSTANCE, Instance

_Reason = Annotated[str, shown(1000)]
MOST_HOSTS = 64
"""Bad hosts kept, newest first."""


@dataclass(frozen=True, slots=True)
class Host:
    """A machine as it can be recognised again. ``node``: the engine's name of it. ``gpus``: UUIDs of the run's GPUs."""

    machine: Label = ""
    node: Label = ""
    gpus: Many[Label] = ()

    def same_as(self, other: "Host") -> bool:
        """Whether both are the same machine, by the best that both know: a GPU of both, then the engine's name, then
        the machine id, which the containers of one image can share."""
        if self.gpus and other.gpus:
            return not set(self.gpus).isdisjoint(other.gpus)
        if self.node and other.node:
            return self.node == other.node
        return bool(self.machine) and self.machine == other.machine


@dataclass(frozen=True, slots=True)
class BadHost:
    """A machine on which this run failed by a fault of the machine. ``refusals``: starts refused there since then."""

    host: Host
    reason: _Reason
    since_wall: Real
    until_wall: Real
    refusals: Whole = 0


@dataclass(frozen=True, slots=True)
class Suspect:
    """A machine whose faults could all pass. ``faults``: attempts in a row that ended by one."""

    host: Host
    faults: Whole


@dataclass(frozen=True, slots=True)
class LastEnd:
    """How the last attempt ended. ``outcome``, ``blame``: of job/exit_code.py. ``step``: its newest step."""

    code: Integer
    outcome: Label
    reason: _Reason
    blame: Label
    wall: Real
    step: Whole | None = None
    host: Label = ""
    instance: Instance = NO_INSTANCE


@dataclass(frozen=True, slots=True)
class OpenAttempt:
    """An attempt that started training and has not ended as far as the store shows. ``id``: its process. ``progress``:
    it made progress, so that its end counts as no failure even if it leaves no verdict."""

    id: Label
    wall: Real
    host: Label = ""
    progress: Flag = False


@dataclass(frozen=True, slots=True)
class RunVerdict(Document):
    """``digest``: of the command and configuration that everything but ``bad_hosts`` is about. ``failures``: attempts
    in a row that ended by a failure and made no step above ``best_step``; ``first_failure_wall``: the end of the first
    of them. ``lineage``: the one that ``best_step`` belongs to. ``retried``: the engine's job whose ``--retry`` was
    carried out. ``suspect``: of a run over several nodes."""

    KIND = "podwatch-verdict"
    FILE = "verdict.json"

    digest: Label = ""
    last: LastEnd | None = None
    failures: Whole = 0
    first_failure_wall: Real | None = None
    not_before_wall: Real | None = None
    best_step: Whole | None = None
    lineage: Label = ""
    attempt: OpenAttempt | None = None
    bad_hosts: Many[BadHost] = ()
    retried: _Reason = ""
    suspect: Suspect | None = None
    run_id: Label = field(default="", compare=False)
    written_at: Label = field(default="", compare=False)
