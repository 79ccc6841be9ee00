"""The status document, and what it shares with other documents: finding, event, incident, checkpoint, pause.

Times are epoch seconds here and RFC 3339 in JSON. What a text describes below a field stands in its published schema.
Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from podwatch.domain.account_document import AccountDocument, LossDocument
from podwatch.domain.checkpoint import Completeness, PartState
from podwatch.domain.document import At, Document, Flag, Integer, Positive, Real, Size, Text, Whole
from podwatch.domain.finding import Evidence, Severity, Verdict
from podwatch.domain.lease import HeartbeatEnd, LeaseAction
from podwatch.domain.nodes import NodeView
from podwatch.domain.snapshot import Desired, GpuState, Health, Liveness, SensorState, Supervision

# -- findings, events, incidents -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FindingDocument(Document):
    kind: Text
    """A finding's kind (docs/events.md), or podwatch-not-found, podwatch-stopped, podwatch-died or
    podwatch-silent."""
    severity: Severity
    subject: Text
    """The object of the finding, such as gpu0; can be empty."""
    summary: Text
    suggestion: Text
    """The fix."""
    verdict: Verdict
    confirmed: Flag
    """A corroborating signal agrees; it matters for kinds that can lead to a restart."""
    since: At
    for_seconds: Size
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True)
class EventDocument(Document):
    """One line of `podwatch events --json`; an item of GET /events."""

    id: Whole
    at: At
    name: Text
    severity: Severity
    message: Text
    fields: Mapping[Text, Text | Flag | Integer | Real | None]


@dataclass(frozen=True, slots=True)
class IncidentDocument(Document):
    id: Whole
    kind: Text
    opened_at: At
    """When the failure began."""
    closed_at: At
    open: Flag
    summary: Text
    resolution: Text
    """What podwatch did."""
    resumed_step: Whole | None
    lost_steps: Whole | None
    bundle: Text
    """Directory with the logs and readings of that time."""
    cost: LossDocument | None
    evidence: tuple[Evidence, ...] | Text
    """As in a reason; text if it could not be parsed."""


# -- checkpoints -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckpointDocument(Document):
    step: Whole
    completeness: Completeness
    reason: Text
    held_back: Text
    """Why this complete checkpoint is neither published nor resumed from unless a command names it; empty if it is not
    held back."""
    size_bytes: Whole
    file_count: Whole
    changed_at: At
    save_id: Text
    stored: Flag | None
    """Published in the store; null if unknown."""
    uploading: Flag
    pinned: Text | None
    """Why it is pinned, else null."""
    held_by: tuple[Text, ...]
    """What protects it from deletion, pins included."""
    parts: tuple[PartState, ...]


@dataclass(frozen=True, slots=True)
class StoredDocument(Document):
    """One checkpoint in the store. Of one that only a listing of the store shows, no more than its name is known."""

    step: Whole
    save_id: Text
    here: Flag
    """It is on this pod, too."""
    size_bytes: Whole | None = None
    stored_at: At = None
    lineage: Text | None = None
    generation: Whole | None = None
    """Of the life of podwatch that published it."""
    pinned: Flag | None = None
    """It has a pin in the store, which every pod obeys."""
    restored: Flag | None = None


@dataclass(frozen=True, slots=True)
class InspectionDocument(Document):
    """Result of the structural check of one checkpoint. ``notes`` are no proof of damage."""

    step: Whole
    sound: Flag
    reasons: tuple[Text, ...]
    notes: tuple[Text, ...]
    files_checked: Whole


# -- podwatch and training -------------------------------------------------------------------------------------------


class Overall(StrEnum):
    OK = "ok"
    WARNING = "warning"
    CRITICAL = "critical"
    UNKNOWN = "unknown"


class TrainingState(StrEnum):
    RUNNING = "running"
    STARTING = "starting"
    RECOVERING = "recovering"
    DOWN = "down"
    STOPPED = "stopped"
    EVALUATING = "evaluating"
    FINISHED = "finished"
    GAVE_UP = "gave-up"
    BLOCKED = "blocked"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class PauseDocument(Document):
    since: At
    until: At
    """Null: until unpause."""
    by: Text
    reason: Text
    held_by: Text
    """The processes that hold the GPUs, for which the pause continues after its end."""


@dataclass(frozen=True, slots=True)
class Capabilities(Document):
    """What this pod's filesystem and kernel report about files being written."""

    filesystem: Text = ""
    """Empty: unknown."""
    slow: Flag = False
    """It shows changes of sizes and times late: settle times are doubled."""
    inotify: Flag | None = None
    """Events are available, else checkpoints are found by rescans alone; null: could not be tested."""


@dataclass(frozen=True, slots=True)
class DaemonDocument(Document):
    version: Text
    pid: Whole
    mode: Literal["act", "observe"]
    live: Flag
    """The sensing loop turned within its deadline, as GET /livez."""
    desired: Desired
    pause: PauseDocument | None
    """Maintenance: podwatch ends and starts no process; null when not paused."""
    opening: Text
    started_at: At
    last_turn_at: At
    """When the sensing loop last ran."""
    armed: tuple[Text, ...]
    second_signals: tuple[Text, ...]
    """The corroborating signals that can confirm a death on this pod."""
    http_url: Text
    config_path: Text
    output_dir: Text
    state_dir: Text
    layout: Text
    layout_because: Text
    """Why layout "auto" chose this one; empty if the configuration names it."""
    capabilities: Capabilities | None
    """What this pod's filesystem and kernel report about files being written; null: not tested."""


@dataclass(frozen=True, slots=True)
class ExitDocument(Document):
    code: Integer | None
    signal: Integer | None
    at: At
    text: Text


@dataclass(frozen=True, slots=True)
class TrainingDocument(Document):
    state: TrainingState
    """Running: alive, with a step since it was started. Starting: alive, no step yet, no failure. Recovering: down, or
    restarted after a failure and without a step yet; podwatch restarts it now, or at recovery.next_try_at. Down: down,
    or alive after a confirmed death, and podwatch has not acted yet. Stopped: by podwatch stop-training. Evaluating:
    stopped for an evaluation, podwatch starts it again. Finished: training is done. Gave-up: down, and podwatch has
    stopped restarting. Blocked: a start waits, because something holds the GPUs or ports, or a process here possibly
    becomes the trainer. Unknown: could not be observed."""
    alive: Flag | None
    """The launcher is alive; null: could not be observed."""
    supervision: Supervision
    pid: Integer | None
    trainer_pids: tuple[Integer, ...]
    """Processes with the trainer's role, at most 64; pid is the launcher's, which can be one of them."""
    start_ticks: Integer | None
    boot_id: Text
    started_at: At
    exit: ExitDocument | None
    processes: Whole | None
    step: Whole | None
    """Newest training step of this start."""
    step_at: At
    step_source: Text | None
    last_sign_at: At
    """Newest progress report, with or without a step number."""
    step_late: Flag
    """No new step for more than three times the usual step time."""
    trainer_ended_at: At
    """When the trainer process was first missing while its launcher is alive and the desired state is running."""
    target_step: Whole | None
    median_step_seconds: Size | None
    steps_at_risk: Whole | None
    """Steps lost if training died now."""
    saving: Flag
    log_path: Text
    last_log_line: Text
    """Of training's log, without secrets; at most 300 characters."""


@dataclass(frozen=True, slots=True)
class RecoveryView(Document):
    """The state of recovery."""

    phase: Text = "watching"
    """Watching while no operation is in progress."""
    active: Flag = False
    """podwatch is stopping, preparing, starting or confirming."""
    waiting: Flag = False
    """The next attempt is due at next_try_at."""
    blocked: Flag = False
    gave_up: Flag = False
    evaluating: Flag = False
    """Training is stopped for an evaluation, or starts again after it."""
    detail: Text = ""
    resumed_step: Whole | None = None
    confirmed: Flag | None = None
    """Null while a resume waits for its first step, false if no step was read in time."""
    attempts: Whole = 0
    next_try_at: At = None


@dataclass(frozen=True, slots=True)
class LearnedValue(Document):
    """``value`` is null before the first observation."""

    value: Size | None
    observations: Whole


@dataclass(frozen=True, slots=True)
class LearnedGpu(Document):
    index: Whole
    baseline_bytes: Whole | None


@dataclass(frozen=True, slots=True)
class LearnedDocument(Document):
    step_seconds: LearnedValue
    """Median time per step."""
    startup_seconds: LearnedValue
    """Median time from a start to its first step."""
    save_seconds: LearnedValue
    """Median time of a save."""
    save_interval_seconds: LearnedValue
    """Median time from one complete save to the next."""
    gpus: tuple[LearnedGpu, ...]


# -- the pod ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GpuDocument(Document):
    index: Whole
    uuid: Text
    name: Text
    state: GpuState
    role: Literal["inference", "trainer", "shared", "none"]
    memory_used_bytes: Whole | None
    memory_total_bytes: Whole | None
    baseline_bytes: Whole | None
    """Learned while healthy."""
    utilization_percent: Real | None
    temperature_celsius: Real | None
    mig: Flag
    ecc_uncorrected: Whole | None
    throttled: tuple[Text, ...]
    """Reasons why heat or power limits the clocks; empty: none."""
    detail: Text
    outdated: Flag
    """Read before podwatch last stopped, started or attached to the trainer."""


@dataclass(frozen=True, slots=True)
class ServerDocument(Document):
    url: Text
    health: Health
    http_status: Integer | None
    requests_running: Real | None
    requests_waiting: Real | None
    generation_tokens_total: Real | None
    liveness: Liveness | None
    """prime-rl's /liveness; null if the server has no such route, or was not queried recently."""
    asleep: Flag | None
    """vLLM's sleep mode; null if the server does not report it."""
    """A router answers for the engines behind it."""
    discovered: Flag
    """Found in the process tree, not configured."""
    outdated: Flag
    """Read before podwatch last stopped, started or attached to the trainer."""


@dataclass(frozen=True, slots=True)
class RoomDocument(Document):
    path: Text
    capacity_bytes: Whole
    used_bytes: Whole
    free_bytes: Whole
    used_ratio: Size
    inodes_total: Whole
    inodes_free: Whole


@dataclass(frozen=True, slots=True)
class DiskDocument(RoomDocument):
    prune_above_ratio: Size
    next_save_bytes: Whole | None
    next_save_fits: Flag | None


@dataclass(frozen=True, slots=True)
class OtherDiskDocument(RoomDocument):
    role: Text
    """Output, temp, state, or the name of a checkpoint's part."""


@dataclass(frozen=True, slots=True)
class FilesDocument(Document):
    pid: Whole
    name: Text
    open: Whole
    limit: Whole


@dataclass(frozen=True, slots=True)
class XidDocument(Document):
    gpu: Integer | None
    code: Whole


@dataclass(frozen=True, slots=True)
class HostDocument(Document):
    memory_total_bytes: Whole
    memory_available_bytes: Whole
    swap_total_bytes: Whole
    swap_used_bytes: Whole
    shm_total_bytes: Whole | None
    shm_used_bytes: Whole | None
    container_limit_bytes: Whole | None
    container_used_bytes: Whole | None
    """The trainer's memory group, page cache left out."""
    oom_kills: Whole | None
    files: FilesDocument | None
    """The process nearest to its limit of open files."""
    files_unreadable: Whole
    xids_watched: Flag
    """podwatch can receive XIDs on this machine."""
    xids: tuple[XidDocument, ...]


@dataclass(frozen=True, slots=True)
class LogRuleDocument(Document):
    rule: Text
    role: Text
    count: Whole
    """Within the rule's window."""
    first_at: At
    last_at: At
    line: Text


@dataclass(frozen=True, slots=True)
class FiguresDocument(Document):
    step: Whole
    source: Text
    values: Mapping[Text, Real | Text]
    """Reward, entropy, kl, grad_norm, loss; nan and inf are text, because JSON has no such numbers."""


@dataclass(frozen=True, slots=True)
class SensorDocument(Document):
    name: Text
    state: SensorState
    detail: Text
    age_seconds: Size | None
    """Null before the first reading."""


# -- the store, the nodes, the whole ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckpointsDocument(Document):
    newest_complete_step: Whole | None
    newest_complete_at: At
    sets: tuple[CheckpointDocument, ...]


@dataclass(frozen=True, slots=True)
class SyncDocument(Document):
    store_url: Text
    """Empty: NOT BACKED UP."""
    ok: Flag | None
    """Null: not tested yet."""
    error: Text
    refused: Flag
    """Retrying does not help: the key, the cap, the bucket or the configuration is wrong."""
    next_attempt_at: At
    """While the store fails: when podwatch retries."""
    clock_skew_seconds: Integer | None
    """How far this machine's clock is ahead of the store's; null: not known."""
    last_step: Whole | None
    last_published_at: At
    saves: Whole | None
    """Checkpoints of this run in the store; null until read from the journal or the store."""
    uploading_step: Whole | None
    uploaded_bytes: Whole
    total_bytes: Whole
    upload_bytes_per_second: Whole | None
    """Of the upload in flight, over the last seconds; null: none, or not measured yet."""
    upload_left_seconds: Whole | None
    """Remaining time at that rate; null: not known, or nothing is being sent."""
    superseded: Flag
    """Another pod holds this run now."""
    calls: Mapping[Text, Whole]
    """To the store since podwatch started, by class: a is free, b and c are up to 2,500 a day."""
    standing: Literal["alone"] | LeaseAction
    """Whether this pod holds the run in the store (docs/two-pods.md); alone: no store."""
    generation: Whole
    """Of the holder."""
    settles_in_seconds: Whole | None
    """Until this pod's claim of the run is decided: what is sent meanwhile is published then; null: none settles."""
    holder: Text
    """The other pod, if another pod holds the run."""


@dataclass(frozen=True, slots=True)
class CountersDocument(Document):
    turns: Whole
    restarts: Whole
    published: Whole
    uploaded_bytes: Whole
    skipped: Whole
    """Checkpoints that were never uploaded because a newer one was uploaded instead."""
    abandoned: Whole
    """Uploads of checkpoints that were given up."""
    pruned: Whole
    incidents: Mapping[Text, Whole]
    events: Mapping[Text, Whole]
    """By name."""


# -- in words ----------------------------------------------------------------------------------------------------------


class Tone(StrEnum):
    NONE = ""
    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True)
class Row(Document):
    """One fact in words."""

    label: Text
    text: Text
    tone: Tone = Tone.NONE
    share: Size | None = None
    """From 0 to 1, where a bar can show it."""


@dataclass(frozen=True, slots=True)
class Status(Document):
    """podwatch status --json, GET /status and status.json. Unknown fields are allowed everywhere. Prose: docs/json.md.

    Without a daemon, the parts from ``daemon`` on are those of its last document, if there is one.
    """

    KIND = "podwatch-status"
    FILE = "status.json"
    LARGEST = 16 << 20

    running: Flag
    """A daemon answered."""
    time: At
    run_id: Text
    overall: Overall
    reasons: tuple[FindingDocument, ...]
    """Worst first."""
    headline: Text = ""
    """One sentence about the state of training."""
    not_backed_up: Text = ""
    """A warning to show below the headline; empty where a store is configured."""
    rows: tuple[Row, ...] = ()
    """The facts below in words, for people; ages are those at ``time``."""
    daemon: DaemonDocument | None = None
    training: TrainingDocument | None = None
    recovery: RecoveryView | None = None
    learned: LearnedDocument | None = None
    """Learned from this run, kept across restarts, reset when the run or its GPUs change."""
    gpus: tuple[GpuDocument, ...] = ()
    inference: tuple[ServerDocument, ...] = ()
    disk: DiskDocument | None = None
    other_disks: tuple[OtherDiskDocument, ...] = ()
    """File systems beside that of disk, one entry per role; empty before the first reading. Two roles can share one."""
    host: HostDocument | None = None
    """Null before the first reading."""
    log_rules: tuple[LogRuleDocument, ...] = ()
    """Log rules with a match in this start, or disabled."""
    figures: FiguresDocument | None = None
    """The trainer's own metrics."""
    checkpoints: CheckpointsDocument | None = None
    sync: SyncDocument | None = None
    end: HeartbeatEnd | None = None
    """How the run ended here, or this pod's part in it (docs/jobs.md); null while it has not."""
    incident: IncidentDocument | None = None
    nodes: tuple[NodeView, ...] = ()
    """The nodes of a run over several nodes that have reported, by rank; empty for a run on one node."""
    node_count: Positive = 1
    """How many nodes the run has."""
    account: AccountDocument | None = None
    sensors: tuple[SensorDocument, ...] = ()
    counters: CountersDocument | None = None
    snapshot_at: At = None
    """When the daemon wrote this document; null where a daemon answered."""
    training_alive: Flag | None = None
    """The launcher of the last document is still alive; null: not known, or a daemon answered."""
