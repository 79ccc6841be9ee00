"""Every setting of podwatch, with its default and the reason for the default.

``config show``, ``config init`` and docs/configuration.md are generated from these models. ``loading.py`` reads files,
environment and flags.
"""

import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticKnownError

from podwatch.config import plugins
from podwatch.config.directory import resolved
from podwatch.config.units import Duration, Ratio, Size
from podwatch.domain.manifest import DEFAULT_PART_SIZE, valid_run_id
from podwatch.domain.policy import (
    GIB,
    DetectionPolicy,
    DiskPolicy,
    LogRule,
    NoticePolicy,
    RemotePolicy,
    ResourcePolicy,
    RestartPolicy,
    TrainingPolicy,
)
from podwatch.policy.lease import Timing

# The default of a threshold stands once, in its policy, with the reason beside it.
_DETECTION, _RESTART, _DISK = DetectionPolicy(), RestartPolicy(), DiskPolicy()
_REMOTE, _RESOURCES, _TRAINING = RemotePolicy(), ResourcePolicy(), TrainingPolicy()
_LEASE, _NOTICES, _LOG_RULE = Timing(), NoticePolicy(), LogRule("", "")

LAYOUTS = (
    "auto",
    "prime-rl",
    "verl",
    "torchtitan",
    "dcp",
    "hf",
    "accelerate",
    "lightning",
    "deepspeed",
    "openrlhf",
    "skyrl",
    "nemo-rl",
    "nemo",
    "megatron",
    "orbax",
    "open-instruct",
    "runner",
    "custom",
)
"""podwatch's own values of ``trainer.layout``; installed packages can add more."""
STORE_SCHEMES = ("b2", "file")
"""The same for the scheme of ``sync.store``."""

NoticeTopic = Literal["findings", "restarts", "gave-up", "disk", "store", "superseded", "preempted", "finished"]


class Section(BaseModel):
    """A frozen model that rejects unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @field_validator("*", mode="after")
    @classmethod
    def _absolute(cls, value: object) -> object:
        """Make paths absolute: the daemon's working directory is ``/``."""
        return resolved(value) if isinstance(value, Path) else value


class TrainerSettings(Section):
    layout: str = Field(
        "auto",
        description="how the trainer lays out its checkpoints (list: docs/layouts.md; an installed package can add"
        " more); auto decides from the command and output_dir, reports the reason, and stops with an error if several"
        " layouts fit",
    )
    output_dir: Path = Field(..., description="the trainer's output directory (it need not exist yet)")
    checkpoint_dir: Path | None = Field(
        None,
        description="checkpoint directory, if it is not at its usual place under output_dir (prime-rl:"
        " ckpt.output_dir, the parent of checkpoints/; other layouts: the parent of the step directories)",
    )
    command: tuple[str, ...] = Field((), description="argv of a fresh start, without resume flags; not run by a shell")
    cwd: Path | None = Field(None, description="working directory of the command; default: output_dir's parent")
    env: dict[str, str] = Field(default_factory=dict, description="extra environment variables; no secrets")
    env_file: Path | None = Field(None, description="file with secrets as NAME=value lines; mode 0600")
    user: str = Field("", description="run training as this user; default: podwatch's own")
    nofile: int = Field(65_536, ge=1024, description="open-file limit for training; vLLM wants 65,536")
    resume_args: str | tuple[str, ...] = Field(
        "auto",
        description='arguments that make the command resume: "auto" (by layout and version), "none", or a list;'
        " podwatch replaces {step} and {checkpoint}",
    )
    max_steps: int | None = Field(None, ge=1, description="target step, if neither the command nor its config gives it")
    supervise: Literal["auto", "keeper", "attach"] = Field(
        "auto",
        description='"auto": adopt or attach to running training, else start it; "keeper": only training that podwatch'
        ' starts; "attach": never start training',
    )
    start_before: tuple[tuple[str, ...], ...] = Field(
        (),
        description="commands to run before each start, each a list of arguments; podwatch ends the processes that they"
        ' leave running together with training, for example [["ray", "start", "--head", "--port=6399"]]',
    )
    stop_also: tuple[tuple[str, ...], ...] = Field(
        (),
        description="commands to run after training has stopped, to end processes outside its process tree; they must"
        " be safe to run twice, and can end unrelated processes (`ray stop` ends every Ray of the user)",
    )
    stop_grace: Duration = Field(30.0, description="time from SIGTERM to SIGKILL; prime-rl ends within seconds")
    save_grace: Duration = Field(600.0, description="time from SIGTERM to SIGKILL during a save: 47 GB take minutes")
    logs: tuple[str, ...] = Field((), description="globs of log files with step lines, under output_dir or absolute")
    resume_attempts: int = Field(
        _RESTART.resume_attempts,
        ge=1,
        description="proven failed loads of a checkpoint before podwatch tries the previous one",
    )
    startup_patience: Duration = Field(
        _DETECTION.startup_patience_seconds,
        description="time from start to first step; prime-rl sets vLLM's engine timeout to 4200 s",
    )

    @field_validator("layout")
    @classmethod
    def _layout(cls, value: str) -> str:
        if value != "auto" and not plugins.known(plugins.LAYOUTS, value, LAYOUTS):
            names = ", ".join(repr(name) for name in (*LAYOUTS, *plugins.names(plugins.LAYOUTS)))
            raise PydanticKnownError("literal_error", {"expected": f"{names} or a name that an installed package adds"})
        return value

    @field_validator("start_before", "stop_also")
    @classmethod
    def _no_empty_command(cls, value: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
        if any(not command or not command[0] for command in value):
            raise ValueError('must be a list of commands, each a list of arguments: [["ray", "stop"]]')
        return value

    @field_validator("command", mode="before")
    @classmethod
    def _argv(cls, value: object) -> object:
        if isinstance(value, str):
            raise ValueError('must be a list of arguments, for example ["uv", "run", "rl", "@", "config.toml"]')
        return value


class GpuSettings(Section):
    inference: tuple[int, ...] = Field((), description="NVML indices that hold the inference engine")
    trainer: tuple[int, ...] = Field((), description="NVML indices that hold the trainer")
    poll: Duration = Field(2.0, gt=0, description="time between two reads of GPU memory; four fit into hold")
    hold: Duration = Field(
        _DETECTION.hold_seconds, gt=0, description="memory must stay gone this long to count as a silent death"
    )
    floor: Size = Field(
        _DETECTION.memory_floor_bytes,
        description="a dedicated GPU with less than this in use counts as empty: a bare context uses 0.3-0.7 GiB",
    )
    deadline: Duration = Field(5.0, gt=0, description="an NVML call slower than this makes the GPU sensor blind")
    release_wait: Duration = Field(
        60.0,
        description="after a stop, wait this long for GPU memory to be released, then the state is `blocked`: a start"
        " on a full GPU fails",
    )
    release_margin: Size = Field(
        GIB, description="a GPU counts as free when it uses at most this much more than before training"
    )


class InferenceSettings(Section):
    urls: tuple[str, ...] = Field((), description='inference servers, for example ["http://127.0.0.1:8000"]')
    timeout: Duration = Field(2.0, gt=0, description="a slower answer counts as a timeout")
    poll: Duration = Field(
        5.0, gt=0, description="time between two reads of /health and /metrics; slower than gpu.poll is enough"
    )
    discover: bool = Field(
        True, description="if urls is empty, find the servers by their ports in the trainer's process tree"
    )
    liveness: Literal["auto", "off"] = Field(
        "auto", description="also read prime-rl's /liveness if the server has it: only it shows a hung engine"
    )
    sleep: Literal["auto", "yes", "no"] = Field(
        "auto",
        description='"yes": the engine sleeps between phases and releases its memory, so podwatch does not judge silent'
        ' deaths by memory; "auto": detect it by --enable-sleep-mode in its command and by /is_sleeping',
    )


class HangSettings(Section):
    floor: Duration = Field(
        _DETECTION.hang_floor_seconds,
        description="shortest time without a step that can be a hang; a weight update of prime-rl can take 2 x 720 s",
    )
    k: float = Field(
        _DETECTION.hang_k,
        ge=2,
        description="a hang needs this many learned median step times without a step; five times slower is slow, not"
        " hung",
    )
    agree: Duration = Field(
        _DETECTION.hang_agree_seconds,
        gt=0,
        description="idle GPUs or flat token counters corroborate a hang after this long; pauses of healthy steps are"
        " shorter",
    )


STEP_FIELD = re.compile(r"\{step(?::0(\d)d?)?\}")
"""``{step}``, or ``{step:06d}`` with a width."""


class CustomLayoutSettings(Section):
    """``layout = "custom"``: patterns are relative to output_dir; ``{step}`` is the number, with or without
    leading zeros."""

    step_dir: str = Field(
        "checkpoints/step_{step}",
        description="path of one step: a directory, or a file such as ckpt_{step}.pt; {step} in exactly one segment,"
        " {step:06d} if a restore must write six digits",
    )
    required: tuple[str, ...] = Field((), description="globs inside the step directory that must each match a file")
    optional: tuple[str, ...] = Field(
        (), description="globs of files that podwatch deletes with the step but does not upload"
    )
    ahead: tuple[str, ...] = Field(
        (), description="more paths with {step} to quarantine when they are ahead of the resume step"
    )
    last: str = Field("", description="glob of the file that the trainer writes last, if there is one")
    step_line: str = Field(
        "", description="regular expression of the log line that reports a finished step; its first group is the number"
    )
    trainer_processes: tuple[str, ...] = Field(
        (),
        description="regular expressions; a process below the launcher whose command line matches one is the trainer:"
        " podwatch then sees its end while the launcher lives",
    )
    orchestrator_processes: tuple[str, ...] = Field((), description="the same for the process that drives rollouts")
    inference_processes: tuple[str, ...] = Field(
        (), description="the same for the inference server; podwatch then finds its port automatically"
    )
    engine_processes: tuple[str, ...] = Field(
        (), description="the same for the processes that hold the model's GPU memory, if the server does not"
    )

    @field_validator("trainer_processes", "orchestrator_processes", "inference_processes", "engine_processes")
    @classmethod
    def _says_something(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            try:
                matches_all = re.compile(pattern).search("") is not None
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
            if matches_all:
                raise ValueError(f"{pattern!r} matches every process")
        return value

    @field_validator("step_dir")
    @classmethod
    def _one_step(cls, value: str) -> str:
        found = STEP_FIELD.findall(value)
        if len(found) != 1 or value.count("{") != 1 or value.startswith("/") or ".." in value.split("/"):
            raise ValueError("must be relative to output_dir and contain {step} exactly once")
        return value

    @field_validator("step_line")
    @classmethod
    def _one_group(cls, value: str) -> str:
        if not value:
            return value
        try:
            groups = re.compile(value).groups
        except re.error as error:
            raise ValueError(f"is not a regular expression: {error}") from error
        if groups < 1:
            raise ValueError(r"must have a group for the number, such as step (\d+)")
        return value


class CheckpointSettings(Section):
    rescan: Duration = Field(10.0, gt=0, description="time between two rescans; file events only trigger one sooner")
    settle: Duration = Field(5.0, ge=0, description="a checkpoint with a strong marker must be unchanged this long")
    settle_weak: Duration = Field(60.0, ge=0, description="the same for a layout without a marker")
    settle_tracker: Duration = Field(
        15.0, ge=0, description="the same where a file written last, or a tracker file beside the steps, is the marker"
    )
    leases: bool = Field(
        False,
        description="use kernel read leases to see whether a file is still open for writing, only for layouts without a"
        " marker: a lease can briefly delay the trainer's own open",
    )
    custom: CustomLayoutSettings | None = Field(None, description='a section; required for layout = "custom"')


class SyncSettings(Section):
    store: str = Field(
        "",
        description='"b2://bucket[/prefix]" or "file:///path" (an installed package can add more); empty: NOT'
        " BACKED UP",
    )
    part_size: Size = Field(DEFAULT_PART_SIZE, description="B2's recommended part size; 5 MB to 5 GB")
    connections: int = Field(
        4, ge=1, le=32, description="parallel connections at first: enough to fill two cores or a fast uplink"
    )
    connections_max: int = Field(
        32,
        ge=1,
        le=64,
        description="podwatch adds connections up to this while more of them raise the speed",
    )
    max_rate: Size | None = Field(None, description="upload limit in bytes per second, to leave bandwidth to training")
    upload_gap: Duration = Field(
        0.0,
        ge=0,
        description="shortest time between the starts of two uploads; podwatch skips the checkpoints in between",
    )
    sweep: Duration = Field(
        600.0,
        description="time between two searches for checkpoints that are not stored; new ones are uploaded immediately",
    )
    max_lag: Duration = Field(
        _REMOTE.max_lag_seconds, description="no new checkpoint in the store for this long is critical"
    )
    keep_last: int = Field(
        _REMOTE.keep_last,
        ge=1,
        description="number of newest checkpoints kept in the store: one to resume from, two to step back to",
    )
    keep_every: int = Field(
        _REMOTE.keep_every, ge=0, description="every n-th checkpoint is a milestone and is kept; 0: none"
    )
    optional_parts: Literal["milestones", "all", "none"] = Field(
        "milestones",
        description="which checkpoints are uploaded with the parts that no resume needs (prime-rl's exported weights):"
        " milestones and the final one, all, or none; they are a third of the bytes, needed only to use the model",
    )
    extra: tuple[str, ...] = Field(
        (),
        description="files and directories below output_dir to upload with milestones and the final checkpoint, for"
        ' example the exported model: ["final"]; never links or key files',
    )
    extra_max: Size = Field(
        100_000_000_000,
        ge=0,
        description="podwatch does not upload `extra` if it is larger than this: a 32B model in bf16 fits, a mistyped"
        " path does not fill the bucket",
    )
    artefacts: bool = Field(
        True,
        description="also upload the files named in the command, the ends of logs and the incident bundles, scrubbed of"
        " secrets, so that they survive the pod",
    )
    artefacts_every: Duration = Field(
        900.0, ge=60, description="time between two uploads of log ends (sooner after an incident)"
    )
    artefacts_log: Size = Field(
        256_000, ge=1000, le=5_000_000, description="bytes of the end of each log to upload: a night's warnings"
    )
    heartbeat: Duration = Field(
        60.0,
        ge=5,
        le=100,
        description="time between two heartbeats in the store; B2 throttles faster writes, other pods wait for three"
        " missed ones",
    )
    holder_patience: Duration = Field(
        _LEASE.patience,
        description="podwatch takes over another pod's run after no heartbeat for this long (five missed ones)",
    )
    claim_wait: Duration = Field(
        _LEASE.claim_wait,
        ge=0,
        description="time from a claim in B2 to its decision: 30 s of a confirmation, 60 s of a write, 10 s of margin",
    )
    refusal_wait: Duration = Field(
        _LEASE.refusal,
        ge=0,
        description="if the store refuses access (key, cap, bucket) and training cannot start, podwatch exits with"
        " code 77 after this long: by then all of B2's servers know a new key or bucket",
    )

    @model_validator(mode="after")
    def _patience(self) -> "SyncSettings":
        if self.holder_patience < 2 * self.heartbeat:
            raise ValueError("holder_patience must be at least two heartbeats; otherwise a living pod loses its run")
        return self

    @field_validator("store")
    @classmethod
    def _scheme(cls, value: str) -> str:
        scheme, separator, _ = value.partition("://")
        if value and not (separator and plugins.known(plugins.STORES, scheme, STORE_SCHEMES)):
            raise ValueError('must be "b2://bucket[/prefix]", "file:///path" or empty')
        return value

    @field_validator("extra")
    @classmethod
    def _extra(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        clean = tuple(dict.fromkeys(p.rstrip("/") for p in value))
        for path in clean:
            if not path or path.startswith("/") or any(s in ("", ".", "..") for s in path.split("/")):
                raise ValueError(f"{path!r} must be a path below output_dir, without . and ..")
            if any(other != path and path.startswith(f"{other}/") for other in clean):
                raise ValueError(f"{path!r} is inside another entry of the list")
        return clean

    @field_validator("part_size")
    @classmethod
    def _part(cls, value: int) -> int:
        if not 5_000_000 <= value <= 5_000_000_000:
            raise ValueError("must be between 5MB and 5GB (B2's limits for a part)")
        return value


class DiskSettings(Section):
    prune_above: Ratio = Field(
        _DISK.prune_above,
        description="podwatch starts to delete old checkpoints above this disk usage: prime-rl does not check free"
        " space, and a full disk kills the run",
    )
    prune_to: Ratio = Field(
        _DISK.prune_to, description="podwatch stops deleting at this disk usage: ten points of hysteresis"
    )
    margin: float = Field(
        _DISK.margin, ge=1.0, description="space kept free for the next save = its predicted size x this"
    )
    capacity: Size | None = Field(None, description="real capacity, if an overlay shows the host's disk")
    lead: Duration = Field(
        _DISK.lead_seconds,
        ge=0,
        description="podwatch deletes a checkpoint that is not in the store at the earliest this long before the next"
        " save: its upload can still finish",
    )
    on_full: Literal["stay", "stop"] = Field(
        "stay",
        description='if the next save cannot fit: "stop" ends training cleanly before it, "stay" lets training continue'
        " and crash; podwatch reports both as critical",
    )

    @model_validator(mode="after")
    def _order(self) -> "DiskSettings":
        if self.prune_to >= self.prune_above:
            raise ValueError("prune_to must be below prune_above")
        return self


class RecoverySettings(Section):
    budget_restarts: int = Field(
        _RESTART.budget_restarts,
        ge=1,
        description="podwatch gives up only when this number of restarts and budget_time are both used up",
    )
    budget_time: Duration = Field(_RESTART.budget_seconds, description="see budget_restarts")
    backoff_min: Duration = Field(
        _RESTART.backoff_min_seconds, description="first pause between restarts: some faults pass"
    )
    backoff_max: Duration = Field(
        _RESTART.backoff_max_seconds, description="longest pause between restarts: an idle pod costs money"
    )
    calm: Duration = Field(
        _RESTART.calm_seconds, description="the counters restart from zero after this long without a failure"
    )
    retry_after_give_up: Duration = Field(
        _RESTART.retry_after_give_up_seconds,
        description="after giving up, podwatch makes one attempt this often; 0: never",
    )
    preempt_grace: Duration = Field(
        3.0,
        ge=1,
        le=600,
        description="at a preemption podwatch writes the heartbeat and sends training SIGTERM within this time: the"
        " shortest notice of a provider is 5 s",
    )
    on_give_up: Literal["stay", "exit"] = Field(
        "stay", description='"exit": podwatch exits with code 86 when it gives up, so that an engine can move the job'
    )


class ResourceSettings(Section):
    files_above: Ratio = Field(
        _RESOURCES.files_above,
        description="warn above this share of the open-file limit: vLLM's sockets grow with load",
    )
    memory_above: Ratio = Field(
        _RESOURCES.memory_above,
        description="warn above this share of host or container memory; the kernel kills near 100 %",
    )
    shm_above: Ratio = Field(
        _RESOURCES.shm_above, description="warn above this share of /dev/shm: when it is full, NCCL and vLLM die"
    )
    overdue: float = Field(
        _RESOURCES.checkpoint_overdue_k,
        ge=1,
        description="a checkpoint is overdue after this many save intervals (learned, else configured)",
    )
    overdue_floor: Duration = Field(
        _RESOURCES.checkpoint_overdue_floor_seconds, description="a checkpoint is never overdue sooner than this"
    )


class LogRuleSettings(Section):
    """``[[log_rules]]``: your own patterns for the trainer's logs. A match corroborates a verdict; it never restarts
    training alone."""

    name: str = Field(..., pattern=r"^[a-z0-9][a-z0-9-]{0,40}$", description="lower-case name that findings show")
    pattern: str = Field(..., min_length=1, max_length=500, description="Python regular expression, matched per line")
    count: int = Field(_LOG_RULE.count, ge=1, description="number of matches ...")
    within: Duration = Field(_LOG_RULE.within_seconds, gt=0, description="... within this time that raise the finding")
    critical: bool = Field(False, description="raise a critical finding instead of a warning")
    says: str = Field("", description="what the finding means")
    fix: str = Field("", description="what the operator must do")
    supports: tuple[Literal["silent-death", "hang", "required-child-exited"], ...] = Field(
        (), description="verdicts that a match corroborates, together with a signal that can confirm alone"
    )

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"is not a regular expression: {error}") from error
        return value


class TrainingHealthSettings(Section):
    stop: bool = Field(False, description="stop training after the next save when a rule matches; else only warn")
    plateau_steps: int = Field(
        _TRAINING.plateau_steps or 0, ge=0, description="warn when the reward is flat for this many steps; 0: off"
    )
    plateau_stop_steps: int = Field(
        _TRAINING.plateau_stop_steps,
        ge=0,
        description="with stop: end training after this many steps without improvement",
    )
    entropy_below: float | None = Field(
        _TRAINING.entropy_below, description="warn below this entropy: a collapsed policy does not explore"
    )
    kl_above: float | None = Field(
        _TRAINING.kl_above, description="warn above this KL divergence: the policy has left its reference"
    )
    grad_norm_above: float | None = Field(
        _TRAINING.grad_norm_above, description="warn above this gradient norm: an exploding update"
    )
    steps: int = Field(_TRAINING.steps, ge=1, description="number of consecutive steps before a warning")
    metrics_file: str = Field("", description="JSON-lines file with the metrics; default: the layout's metrics.jsonl")
    metrics_url: str = Field("", description="the trainer's own /metrics, for example http://127.0.0.1:9090")


class RecordSettings(Section):
    enabled: bool = Field(True, description="record the sensor data, so that `podwatch replay` can judge it again")
    max_size: Size = Field(
        32_000_000, ge=1_000_000, description="size of all recordings on disk; podwatch deletes the oldest part first"
    )


class HttpSettings(Section):
    enabled: bool = Field(True, description="health, status and metrics for probes, and the trainer's progress pings")
    host: str = Field("127.0.0.1", description="address to listen on; HTTP only reads, and only this machine needs it")
    port: int = Field(9477, ge=0, le=65535, description="port; if it is taken, the next free one; 0: any")


class NotifySettings(Section):
    """Where podwatch sends notices (docs/notifications.md)."""

    command: tuple[str, ...] = Field(
        (), description="argv that receives each notice as JSON on stdin and in PODWATCH_*; not run by a shell"
    )
    urls: tuple[str, ...] = Field(
        (),
        description="an https:// URL receives the JSON by POST; other schemes (ntfy, tgram, slack, mailto...) need"
        " podwatch[notify]; put a URL that contains a key into urls_file",
    )
    urls_file: Path | None = Field(None, description="file with more URLs, one per line; mode 0600")
    events: tuple[NoticeTopic, ...] = Field(
        ("findings", "restarts", "gave-up", "disk", "store", "superseded", "preempted", "finished"),
        description="topics to send: each is rare or needs an operator",
    )
    min_severity: Literal["warning", "critical"] = Field(
        "critical", description="lowest severity of a finding that is sent: a warning can wait until the morning"
    )
    remind: Duration = Field(
        _NOTICES.remind_seconds,
        ge=0,
        description="podwatch repeats the notice of a critical finding that lasts after this time, then after twice as"
        " long; 0: never",
    )
    per_hour: int = Field(
        _NOTICES.per_hour, ge=2, description="most notices per hour; half of them are reserved for critical ones"
    )
    timeout: Duration = Field(20.0, gt=0, le=300, description="time limit of one attempt; up to 8 attempts")
    heartbeat_urls: tuple[str, ...] = Field(
        (),
        description="dead-man's switch: podwatch calls these while the run is well, so that a service such as"
        " healthchecks.io reports their silence; put a URL that contains a key into heartbeat_urls_file",
    )
    heartbeat_urls_file: Path | None = Field(None, description="file with more such URLs, one per line; mode 0600")
    heartbeat_every: Duration = Field(60.0, ge=5, le=3600, description="time between two calls of heartbeat_urls")

    @field_validator("heartbeat_urls")
    @classmethod
    def _web(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for number, url in enumerate(value, start=1):
            if not re.match(r"https?://[^/]", url):
                raise ValueError(f"number {number} is not a web address: it starts with https:// or http://")
        return value

    @field_validator("urls")
    @classmethod
    def _schemes(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for number, url in enumerate(value, start=1):
            if not re.match(r"[a-z][a-z0-9+.-]*://.", url):
                raise ValueError(f"number {number} is not a URL: it needs a scheme such as https:// or ntfy://")
        return value


class WandbSettings(Section):
    """podwatch's own W&B run, written by a separate process (docs/notifications.md)."""

    enabled: bool = Field(
        False, description="write podwatch's own W&B run; off by default: a third-party server, and 90 MB of memory"
    )
    project: str = Field("", description="W&B project; default: training's own, from WANDB_PROJECT, command or files")
    entity: str = Field("", description="W&B entity; default: the entity of the key")
    every: Duration = Field(300.0, ge=10, description="time between two rows of metrics; they change slowly")
    alerts: bool = Field(True, description="also send the notices of [notify] events as W&B alerts")
    python: Path | None = Field(
        None, description="a Python with wandb, such as the trainer's; default: podwatch's own, with podwatch[wandb]"
    )


class LogSettings(Section):
    format: Literal["auto", "console", "json", "journal"] = Field(
        "auto", description="journal under systemd, console on a terminal, JSON lines otherwise"
    )
    level: Literal["debug", "info", "warning", "error"] = Field("info", description="lowest severity that is logged")


class Settings(Section):
    """The configuration of one run."""

    run_id: str = Field(..., description="name of the run here and in the store; letters, digits, . _ -")
    mode: Literal["act", "observe"] = Field(
        "act", description='"observe": upload checkpoints, but only report restarts and deletions'
    )
    state_dir: Path = Field(
        Path("/var/lib/podwatch"),
        description="directory for database, lock and sockets; on local disk, never under output_dir",
    )
    trainer: TrainerSettings
    gpu: GpuSettings = Field(default_factory=GpuSettings)
    inference: InferenceSettings = Field(default_factory=InferenceSettings)
    hang: HangSettings = Field(default_factory=HangSettings)
    checkpoints: CheckpointSettings = Field(default_factory=CheckpointSettings)
    sync: SyncSettings = Field(default_factory=SyncSettings)
    disk: DiskSettings = Field(default_factory=DiskSettings)
    recovery: RecoverySettings = Field(default_factory=RecoverySettings)
    resources: ResourceSettings = Field(default_factory=ResourceSettings)
    log_rules: tuple[LogRuleSettings, ...] = Field(
        (),
        description="a list of tables, each a pattern for the trainer's logs, with the keys"
        " name, pattern, count, within, critical, says, fix, supports",
    )
    training: TrainingHealthSettings = Field(default_factory=TrainingHealthSettings)
    record: RecordSettings = Field(default_factory=RecordSettings)
    http: HttpSettings = Field(default_factory=HttpSettings)
    notify: NotifySettings = Field(default_factory=NotifySettings)
    wandb: WandbSettings = Field(default_factory=WandbSettings)
    log: LogSettings = Field(default_factory=LogSettings)

    @field_validator("run_id")
    @classmethod
    def _run_id(cls, value: str) -> str:
        if not valid_run_id(value):
            raise ValueError("expected 1 to 128 letters, digits, '.', '_' or '-', starting with a letter or digit")
        return value

    @model_validator(mode="after")
    def _together(self) -> "Settings":
        if self.trainer.layout == "custom" and self.checkpoints.custom is None:
            raise ValueError('layout = "custom" needs a [checkpoints.custom] section')
        output, state = self.trainer.output_dir, self.state_dir
        if state == output or output in state.parents:
            raise ValueError("state_dir must not be inside trainer.output_dir: trainers wipe it or refuse to start")
        return self
