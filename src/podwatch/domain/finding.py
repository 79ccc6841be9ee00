"""Findings about a snapshot, with evidence that the operator can check."""

from dataclasses import dataclass
from enum import StrEnum

from podwatch.domain.secrets import scrub


class Severity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class FindingKind(StrEnum):
    """Stable names; docs/json.md lists them."""

    SILENT_DEATH = "silent-death"
    TRAINER_EXITED = "trainer-exited"
    REQUIRED_CHILD_EXITED = "required-child-exited"
    HANG = "hang"
    FINISHED = "finished"
    NODE_FAILED = "node-failed"
    """Another node of this run failed, so that all of its nodes end."""
    GPU_LOST = "gpu-lost"
    SENSOR_BLIND = "sensor-blind"
    NO_SECOND_SIGNAL = "no-second-signal"
    DISK_HIGH = "disk-high"
    DISK_NO_ROOM = "disk-no-room"
    INODES_LOW = "inodes-low"
    NOT_BACKED_UP = "not-backed-up"
    SYNC_LAGGING = "sync-lagging"
    UPLOADS_SLOW = "uploads-slow"
    """Uploads do not keep pace with the saves: the CPU is busy, or the uplink is slower than the saves."""
    STORE_UNAVAILABLE = "store-unavailable"
    GAVE_UP = "gave-up"
    POD_NOT_ENDED = "pod-not-ended"
    """The configured command did not end this rented machine, which is still billed."""
    HOOK_FAILING = "hook-failing"
    """A configured hook failed several times in a row."""
    EVALUATION_FAILING = "evaluation-failing"
    """Evaluations failed several times in a row."""
    EVALUATION_WAITING = "evaluation-waiting"
    """Training cannot be stopped for an evaluation that is due."""
    BLOCKED = "blocked"
    RESUMED_WRONG = "resumed-wrong"
    STEPPED_BACK = "stepped-back"
    """Training continues from an older checkpoint than the newest complete one, which failed to load."""
    GOING_BACKWARDS = "going-backwards"
    """Training began again below a step that it had made, within one start."""
    RESUME_UNCONFIRMED = "resume-unconfirmed"
    """No step number could be read since the resume, within the start-up patience."""
    CONFIG_STALE = "config-stale"
    RESTART_IMPOSSIBLE = "restart-impossible"
    """A restart could not resume with the present trainer.command and trainer.resume_args."""
    SAVES_NOTHING = "saves-nothing"
    """The command saves no checkpoints, or only at the end of training."""
    NOT_COMPLETE = "checkpoints-not-complete"
    """The layout's completeness rule rejects two or more consecutive saves."""
    FOREIGN_CHECKPOINTS = "foreign-checkpoints"
    COMMAND_CHANGED = "command-changed"
    AMBIGUOUS_TRAINERS = "ambiguous-trainers"
    TWO_WRITERS = "two-writers"
    """A second trainer writes or wrote into output_dir: podwatch holds back the checkpoints of that time."""
    EARLIER_BRANCH = "earlier-branch"
    """Checkpoints of a branch that training has left are on this pod; podwatch keeps the newest of them for now."""
    IMPLAUSIBLE_STEP = "implausible-step"
    """A step directory whose number no training of this run can have reached: podwatch does not use it."""
    UNGUARDED = "unguarded"
    SUPERVISOR_LOST = "supervisor-lost"
    """The supervisor of a trainer that podwatch started has ended, and the trainer still runs."""
    GPU_MIG = "gpu-mig"
    GPU_FAULT = "gpu-fault"
    """An XID of the driver, uncorrected ECC errors among them."""
    GPU_THROTTLED = "gpu-throttled"
    FILES_LOW = "files-low"
    MEMORY_LOW = "memory-low"
    OUT_OF_MEMORY = "out-of-memory"
    """The kernel killed a process of the run because memory ran out."""
    SHM_LOW = "shm-low"
    CHECKPOINT_OVERDUE = "checkpoint-overdue"
    LOG_RULE = "log-rule"
    TRAINING_HEALTH = "training-health"
    MEMORY_MAY_FALL = "memory-may-fall"
    """Sleep mode: empty device memory is no evidence, so the silent-death verdict is off."""
    CLOCK_WRONG = "clock-wrong"
    """This machine's clock is far from the store's."""
    LOOP_STALLED = "loop-stalled"
    PAUSED = "paused"
    SUPERSEDED = "superseded"
    """Another pod holds the run, or control.json says so: this pod neither trains nor publishes."""
    NOTIFY_FAILING = "notify-failing"
    DIRECTORY_REPLACED = "directory-replaced"
    """A directory of the run, or podwatch's own beside it, was replaced: podwatch changes nothing in it."""
    STATE_UNAVAILABLE = "state-unavailable"
    """run.json, the state database or the directory beside output_dir cannot be used."""


DEATHS = (
    FindingKind.TRAINER_EXITED,
    FindingKind.SILENT_DEATH,
    FindingKind.REQUIRED_CHILD_EXITED,
    FindingKind.HANG,
)
"""Findings that mean training is down, best explanation first: an exit explains more than memory, memory more than a
hang."""
NOTHING = "nothing, podwatch restarts training"
"""Suggestion while podwatch repairs."""


class Verdict(StrEnum):
    """The action that a finding requests. Only RESTART kills, and only if ``confirmed``; STOP ends training cleanly
    after its next save, if configured ([training] stop)."""

    NONE = "none"
    RESTART = "restart"
    FINISH = "finish"
    STOP = "stop"


class Agreement(StrEnum):
    """Whether a signal supports the finding. UNAVAILABLE (not observable) never counts as agreement."""

    AGREES = "agrees"
    DISAGREES = "disagrees"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One signal behind a finding: its name, its value in words, and the seconds over which it was observed."""

    signal: str
    value: str
    agreement: Agreement
    window_seconds: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", scrub(self.value))


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. ``since``: the monotonic second at which the condition began. ``summary``: what happened and what
    podwatch does; ``suggestion``: what the operator does. Secrets are removed from its text here."""

    kind: FindingKind
    severity: Severity
    summary: str
    since: float
    suggestion: str = ""
    verdict: Verdict = Verdict.NONE
    confirmed: bool = False
    evidence: tuple[Evidence, ...] = ()
    subject: str = ""
    """The object concerned, such as ``gpu0`` or ``step 40``; distinguishes findings of one kind."""

    def __post_init__(self) -> None:
        for name in ("summary", "suggestion", "subject"):
            object.__setattr__(self, name, scrub(getattr(self, name)))

    @property
    def key(self) -> str:
        return f"{self.kind}:{self.subject}" if self.subject else str(self.kind)


def counted(number: int, noun: str, plural: str = "") -> str:
    """``number`` and ``noun`` in singular or plural. ``plural``: needed if it is not ``noun`` plus ``s``."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"
