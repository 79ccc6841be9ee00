"""Every setting podwatch has, with its default and the reason for the default.

The models are the single source: ``config show`` and ``config init`` print from them, docs/configuration.md lists
them. Loading (files, environment, flags, suggestions) is loading.py's job.
"""

import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from podwatch.config.directory import resolved
from podwatch.config.units import Duration, Ratio, Size
from podwatch.domain.policy import GIB
from podwatch.domain.remote import DEFAULT_PART_SIZE, valid_run_id

LayoutName = Literal[
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
]

NoticeTopic = Literal["findings", "restarts", "gave-up", "disk", "store", "superseded", "preempted", "finished"]


class Section(BaseModel):
    """Unknown keys are errors; a loaded section never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @field_validator("*", mode="after")
    @classmethod
    def _absolute(cls, value: object) -> object:
        """A daemon works in ``/``: a path must not depend on where it is used."""
        return resolved(value) if isinstance(value, Path) else value


class TrainerSettings(Section):
    layout: LayoutName = Field(
        "auto",
        description="how the trainer lays out its checkpoints; auto finds out from the command and output_dir, says"
        " why, and asks if several fit; docs/layouts.md lists them",
    )
    output_dir: Path = Field(..., description="the trainer's output directory (it need not exist yet)")
    checkpoint_dir: Path | None = Field(
        None,
        description="where checkpoints lie if not at their usual place under output_dir (prime-rl: ckpt.output_dir, in"
        " which checkpoints/ lies; others: the directory of the step directories itself)",
    )
    command: tuple[str, ...] = Field((), description="argv of a fresh start, without any resume flag; never a shell")
    cwd: Path | None = Field(None, description="working directory of the command; default: output_dir's parent")
    env: dict[str, str] = Field(default_factory=dict, description="extra environment, no secrets")
    env_file: Path | None = Field(None, description="NAME=value lines with the secrets; mode 0600")
    user: str = Field("", description="run training as this user; default: podwatch's own")
    nofile: int = Field(65_536, ge=1024, description="open-file limit for training; vLLM wants 65,536")
    resume_args: str | tuple[str, ...] = Field(
        "auto", description='"auto" (by layout and version), "none", or a list; {step} and {checkpoint} are replaced'
    )
    max_steps: int | None = Field(None, ge=1, description="target step, if neither the command nor its config tells")
    supervise: Literal["auto", "keeper", "attach"] = Field("auto", description="adopt, attach or start")
    start_before: tuple[tuple[str, ...], ...] = Field(
        (),
        description="commands run before each start, each a list of arguments; what they leave running belongs to this"
        ' start and ends with it, so a Ray head started here is ours: [["ray", "start", "--head", "--port=6399"]]',
    )
    stop_also: tuple[tuple[str, ...], ...] = Field(
        (),
        description="commands run after training was stopped, for what was started outside its tree and has to end"
        " with it; they may run twice, and podwatch cannot tell what else they end (`ray stop` ends every Ray of the"
        " user)",
    )
    stop_grace: Duration = Field(30.0, description="SIGTERM to SIGKILL; prime-rl answers SIGTERM within seconds")
    save_grace: Duration = Field(600.0, description="the same while a save is in flight: 47 GB take minutes")
    logs: tuple[str, ...] = Field((), description="globs of log files with step lines, under output_dir or absolute")
    resume_attempts: int = Field(2, ge=1, description="proven failed loads of a step before the one before is taken")
    startup_patience: Duration = Field(
        70 * 60.0, description="start to first step; vLLM's own engine timeout is 4200 s in prime-rl"
    )

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
    poll: Duration = Field(2.0, gt=0, description="four polls fit into hold")
    hold: Duration = Field(8.0, gt=0, description="memory must stay gone this long before it is called a death")
    floor: Size = Field(GIB, description="below this a GPU of its own counts as empty: a bare context is 0.3-0.7 GiB")
    deadline: Duration = Field(5.0, gt=0, description="an NVML call slower than this makes the sensor blind")
    release_wait: Duration = Field(
        60.0, description="wait for GPU memory to fall after a stop, then 'blocked': a start on a full GPU fails"
    )
    release_margin: Size = Field(GIB, description="this much above the memory used before training counts as free")


class InferenceSettings(Section):
    urls: tuple[str, ...] = Field((), description='inference servers, for example ["http://127.0.0.1:8000"]')
    timeout: Duration = Field(2.0, gt=0, description="answers slower than this count as a timeout")
    poll: Duration = Field(5.0, gt=0, description="/health and /metrics; cheap, but no need at the GPU's rhythm")
    discover: bool = Field(
        True, description="where urls is empty, ask the servers found in the trainer's process tree by their ports"
    )
    liveness: Literal["auto", "off"] = Field(
        "auto", description="also ask prime-rl's /liveness where the server has it: it alone sees a hung engine"
    )
    sleep: Literal["auto", "yes", "no"] = Field(
        "auto",
        description='"yes": the engine sleeps between phases and its memory falls on purpose (no silent-death verdict);'
        ' "auto": by --enable-sleep-mode in its command and /is_sleeping',
    )


class HangSettings(Section):
    floor: Duration = Field(25 * 60.0, description="prime-rl may wait 2 x 720 s for one weight update")
    k: float = Field(6.0, ge=2, description="times the learned median step; five times slower is slow, not hung")
    agree: Duration = Field(
        600.0, gt=0, description="idle GPUs, or flat tokens, must hold this long to agree; healthy steps pause for less"
    )


STEP_FIELD = re.compile(r"\{step(?::0(\d)d?)?\}")
"""``{step}``, or ``{step:06d}`` with a width."""


class CustomLayoutSettings(Section):
    """``layout = "custom"``: patterns are relative to output_dir; ``{step}`` stands for the number, with or without
    leading zeros."""

    step_dir: str = Field(
        "checkpoints/step_{step}",
        description="where one step is: a directory, or a file such as ckpt_{step}.pt; {step} in one segment,"
        " {step:06d} if a restore must write six digits",
    )
    required: tuple[str, ...] = Field((), description="globs inside the step directory that must each match a file")
    optional: tuple[str, ...] = Field((), description="globs that are removed with the step but not uploaded")
    ahead: tuple[str, ...] = Field((), description="more paths with {step} to set aside when they are ahead of N")
    last: str = Field("", description="glob of the file that is written last, if there is one")
    step_line: str = Field(
        "", description="regular expression of a log line that says a step is done; its first group is the number"
    )
    trainer_processes: tuple[str, ...] = Field(
        (),
        description="regular expressions: a process below the launcher whose command line matches one is the trainer,"
        " so that its end is seen while the launcher lives",
    )
    orchestrator_processes: tuple[str, ...] = Field((), description="the same for what drives rollouts and batches")
    inference_processes: tuple[str, ...] = Field(
        (), description="the same for the inference server, whose port is then found by itself"
    )
    engine_processes: tuple[str, ...] = Field(
        (), description="the same for the processes that hold the model's GPU memory, if the server is another one"
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
    rescan: Duration = Field(10.0, gt=0, description="a rescan is the truth; events only make it come sooner")
    settle: Duration = Field(5.0, ge=0, description="a set with a strong marker must be unchanged this long")
    settle_weak: Duration = Field(60.0, ge=0, description="the same where the layout has no marker")
    settle_tracker: Duration = Field(
        15.0, ge=0, description="the same where a file written last, or a tracker beside the steps, is the marker"
    )
    leases: bool = Field(
        False,
        description="ask the kernel by read leases whether a file is still open for writing; for an instant this can"
        " delay the trainer's own open, so only where the layout has no marker",
    )
    custom: CustomLayoutSettings | None = Field(None, description='a section; needed for layout = "custom"')


class SyncSettings(Section):
    store: str = Field("", description='"b2://bucket[/prefix]" or "file:///path"; empty: NOT BACKED UP')
    part_size: Size = Field(DEFAULT_PART_SIZE, description="B2's recommended part size; 5 MB to 5 GB")
    connections: int = Field(
        4, ge=1, le=32, description="parallel connections to begin with: enough to fill two cores or a fast line"
    )
    connections_max: int = Field(
        32, ge=1, le=64, description="they grow to this where more help: where each is bound by latency or a cap"
    )
    max_rate: Size | None = Field(None, description="bytes per second at most, so that training keeps its line")
    upload_gap: Duration = Field(
        0.0, ge=0, description="at least this long between the starts of two uploads; saves in between are skipped"
    )
    sweep: Duration = Field(600.0, description="look for anything not stored yet; completions are sent at once")
    max_lag: Duration = Field(2 * 3600.0, description="nothing new in the store for this long is critical")
    keep_last: int = Field(
        3, ge=1, description="newest sets kept in the store: one to resume from, two to step back to"
    )
    keep_every: int = Field(10, ge=0, description="every n-th save is a milestone and stays; 0: none")
    optional_parts: Literal["milestones", "all", "none"] = Field(
        "milestones",
        description="which saves carry what no resume needs (prime-rl's weights): milestones and the final one, all of"
        " them, or none; a third of a set's bytes, worth it where a model may be taken from",
    )
    extra: tuple[str, ...] = Field(
        (),
        description="files and directories below output_dir that milestones and the final save carry, too, e.g. the"
        ' exported model: ["final"]; no links, no key files',
    )
    extra_max: Size = Field(
        100_000_000_000,
        ge=0,
        description="more than this in `extra` is not sent: a 32B model in bf16 fits, a mistyped path does not fill the"
        " bucket",
    )
    artefacts: bool = Field(
        True,
        description="also store the files that the command names, ends of logs and incident bundles, scrubbed of"
        " secrets: what is left to read when the pod is gone",
    )
    artefacts_every: Duration = Field(
        900.0, ge=60, description="so much of a log is lost with a pod at most; sooner after an incident"
    )
    artefacts_log: Size = Field(
        256_000, ge=1000, le=5_000_000, description="end of each log that is stored: a night's warnings, a few cents"
    )
    heartbeat: Duration = Field(
        60.0, ge=5, le=100, description="sign of life in the store; B2 punishes faster, others wait for three of them"
    )
    holder_patience: Duration = Field(
        300.0, description="another pod's heartbeat is watched this long before its run is taken over: five missed ones"
    )
    claim_wait: Duration = Field(
        100.0, ge=0, description="from a claim to its decision in B2: a confirmation's 30 s, a write's 60 s, 10 more"
    )
    refusal_wait: Duration = Field(
        60.0, ge=0, description="a pod that may not train because the store refuses it (key, cap, bucket) ends"
        " with exit code 77 after this long: what was made a moment ago is known to all of B2's servers by then"
    )  # fmt: skip

    @model_validator(mode="after")
    def _patience(self) -> "SyncSettings":
        if self.holder_patience < 2 * self.heartbeat:
            raise ValueError("holder_patience must be at least two heartbeats, or a living pod loses its run")
        return self

    @field_validator("store")
    @classmethod
    def _scheme(cls, value: str) -> str:
        if value and not value.startswith(("b2://", "file://")):
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
                raise ValueError(f"{path!r} lies in another of them already")
        return clean

    @field_validator("part_size")
    @classmethod
    def _part(cls, value: int) -> int:
        if not 5_000_000 <= value <= 5_000_000_000:
            raise ValueError("must be between 5MB and 5GB (B2's limits for a part)")
        return value


class DiskSettings(Section):
    prune_above: Ratio = Field(
        0.85, description="start to remove: prime-rl never looks at free space, and a full disk kills the run"
    )
    prune_to: Ratio = Field(0.75, description="stop removing: ten points of hysteresis")
    margin: float = Field(1.1, ge=1.0, description="room for the next save = its predicted size x this")
    capacity: Size | None = Field(None, description="real capacity where an overlay shows the host's disk")
    lead: Duration = Field(
        300.0, ge=0, description="what is not in the store goes only so long before the next save: uploads may end"
    )
    on_full: Literal["stay", "stop"] = Field(
        "stay",
        description='"stop" ends training cleanly before a save that cannot fit, instead of letting it crash; podwatch'
        " reports both as critical",
    )

    @model_validator(mode="after")
    def _order(self) -> "DiskSettings":
        if self.prune_to >= self.prune_above:
            raise ValueError("prune_to must be below prune_above")
        return self


class RecoverySettings(Section):
    budget_restarts: int = Field(5, ge=1, description="give up only when this count and budget_time are both used up")
    budget_time: Duration = Field(2 * 3600.0, description="see budget_restarts")
    backoff_min: Duration = Field(10.0, description="first pause between restarts, so that a passing fault can pass")
    backoff_max: Duration = Field(600.0, description="longest pause between restarts: an idle pod costs money")
    calm: Duration = Field(1800.0, description="after this long without a failure the counters start from zero")
    retry_after_give_up: Duration = Field(3600.0, description="one try this often after giving up; 0: never")
    preempt_grace: Duration = Field(
        3.0,
        ge=1,
        le=600,
        description="at a preemption everything is said and training is told within this: the shortest notice is 5 s",
    )
    on_give_up: Literal["stay", "exit"] = Field(
        "stay", description='"exit" ends podwatch with 86 so that an outer engine can move the job'
    )


class ResourceSettings(Section):
    files_above: Ratio = Field(0.8, description="open files against the limit: vLLM and its sockets grow with load")
    memory_above: Ratio = Field(0.95, description="host or container memory; the kernel kills near 100 %")
    shm_above: Ratio = Field(0.9, description="/dev/shm: NCCL and vLLM die with a bus error when it is full")
    overdue: float = Field(
        3.0, ge=1, description="no save for this many intervals (learned, else configured) is overdue"
    )
    overdue_floor: Duration = Field(3600.0, description="and never sooner than this")


class LogRuleSettings(Section):
    """``[[log_rules]]``: your own patterns for the trainer's logs; they support a verdict and never kill alone."""

    name: str = Field(..., pattern=r"^[a-z0-9][a-z0-9-]{0,40}$", description="lower-case name, shown in findings")
    pattern: str = Field(..., min_length=1, max_length=500, description="Python regular expression, per line")
    count: int = Field(1, ge=1, description="so many hits ...")
    within: Duration = Field(600.0, gt=0, description="... within this time raise it")
    critical: bool = Field(False, description="critical instead of a warning")
    says: str = Field("", description="what it means")
    fix: str = Field("", description="what to do")
    supports: tuple[Literal["silent-death", "hang", "required-child-exited"], ...] = Field(
        (), description="verdicts that it may support as one more signal, beside those that can confirm alone"
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
    stop: bool = Field(False, description="stop training after the next save when a rule holds; else only warn")
    plateau_steps: int = Field(200, ge=0, description="reward does not move for so many steps: a warning; 0: off")
    plateau_stop_steps: int = Field(300, ge=0, description="with stop: so many steps without improvement end training")
    entropy_below: float | None = Field(0.05, description="a collapsed policy explores nothing any more")
    kl_above: float | None = Field(0.5, description="the policy has left its reference")
    grad_norm_above: float | None = Field(5.0, description="an exploding update")
    steps: int = Field(5, ge=1, description="steps in a row before it is told")
    metrics_file: str = Field("", description="JSON lines with the figures; default: the layout's metrics.jsonl")
    metrics_url: str = Field("", description="the trainer's own /metrics, for example http://127.0.0.1:9090")


class RecordSettings(Section):
    enabled: bool = Field(True, description="keep what was sensed, so that `podwatch replay` can judge it again")
    max_size: Size = Field(32_000_000, ge=1_000_000, description="on disk in all; the oldest part goes first")


class HttpSettings(Section):
    enabled: bool = Field(True, description="health, status and metrics for probes, and the trainer's progress pings")
    host: str = Field("127.0.0.1", description="no control goes through HTTP, but nobody outside needs it either")
    port: int = Field(9477, ge=0, le=65535, description="if taken, the next free one; 0: any")


class NotifySettings(Section):
    """Who hears what happened while nobody looked (docs/notifications.md)."""

    command: tuple[str, ...] = Field(
        (), description="argv that gets each notice as JSON on stdin and in PODWATCH_*; never a shell"
    )
    urls: tuple[str, ...] = Field(
        (),
        description="https://... gets a POST of the JSON; other schemes (ntfy, tgram, slack, mailto...) need"
        " podwatch[notify]; what has a key in it belongs into urls_file",
    )
    urls_file: Path | None = Field(None, description="more of them, one a line, in a file with mode 0600")
    events: tuple[NoticeTopic, ...] = Field(
        ("findings", "restarts", "gave-up", "disk", "store", "superseded", "preempted", "finished"),
        description="what is told: all of it is either rare or needs a person",
    )
    min_severity: Literal["warning", "critical"] = Field(
        "critical", description="least severity of a finding that is told: a warning can wait for the morning"
    )
    remind: Duration = Field(
        3600.0, ge=0, description="a critical finding that lasts is told again after this, then twice as long; 0: never"
    )
    per_hour: int = Field(20, ge=2, description="notices at most; half of them are kept for what is critical")
    timeout: Duration = Field(20.0, gt=0, le=300, description="for one attempt; then it is tried again, up to 8 times")

    @field_validator("urls")
    @classmethod
    def _schemes(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for number, url in enumerate(value, start=1):
            if not re.match(r"[a-z][a-z0-9+.-]*://.", url):
                raise ValueError(f"number {number} is not a URL: it needs a scheme such as https:// or ntfy://")
        return value


class WandbSettings(Section):
    """podwatch's own W&B run beside the training's, in a process of its own (docs/notifications.md)."""

    enabled: bool = Field(False, description="off: W&B is somebody else's server, and its client needs 90 MB beside us")
    project: str = Field("", description="default: the training's own, by WANDB_PROJECT, its command or its files")
    entity: str = Field("", description="default: the one of the key")
    every: Duration = Field(300.0, ge=10, description="one row of figures this often; they change slowly")
    alerts: bool = Field(True, description="what [notify] events would tell becomes a W&B alert too")
    python: Path | None = Field(
        None, description="a Python with wandb, such as the trainer's own; default: podwatch's, with podwatch[wandb]"
    )


class LogSettings(Section):
    format: Literal["auto", "console", "json", "journal"] = Field(
        "auto", description="journal under systemd, console on a terminal, JSON lines otherwise"
    )
    level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severity that is logged")


class Settings(Section):
    """The whole configuration of one run."""

    run_id: str = Field(..., description="names the run here and in the store; letters, digits, . _ -")
    mode: Literal["act", "observe"] = Field("act", description='"observe" syncs but only reports kills and deletions')
    state_dir: Path = Field(
        Path("/var/lib/podwatch"), description="database, lock and sockets; on local disk, never under output_dir"
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
        description="a list of tables, each a pattern for the trainer's logs:"
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
            raise ValueError("use 1 to 128 letters, digits, '.', '_' or '-', starting with a letter or digit")
        return value

    @model_validator(mode="after")
    def _together(self) -> "Settings":
        if self.trainer.layout == "custom" and self.checkpoints.custom is None:
            raise ValueError('layout = "custom" needs a [checkpoints.custom] section')
        output, state = self.trainer.output_dir, self.state_dir
        if state == output or output in state.parents:
            raise ValueError("state_dir must not lie under trainer.output_dir: trainers wipe it or refuse to start")
        return self
