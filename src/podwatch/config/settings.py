"""Every setting of podwatch, with its default, its meaning and, where it is not plain, the reason for the default.

``config show``, ``config init`` and docs/configuration.md are generated from these models; ``loading.py`` reads files,
environment and flags. Long because it is one list, read from top to bottom.
"""

import json
import os
import pwd
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticKnownError

from podwatch.config import plugins
from podwatch.config.command_directory import resolved
from podwatch.config.store_kinds import EXAMPLES, KINDS
from podwatch.config.units import GIB, parse_duration, parse_ratio, parse_size
from podwatch.domain.engine_and_attempt import MOST_NODES
from podwatch.domain.event import Topic
from podwatch.domain.lease import CLAIM_WAIT_SECONDS, PATIENCE_SECONDS, REFUSAL_SECONDS
from podwatch.domain.safe_names import valid_run_id
from podwatch.domain.trainer_log import LogRule

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

HookEvent = Literal[
    "checkpoint", "published", "milestone", "finished", "ended", "started", "restarted", "incident", "gave-up",
    "superseded", "preempted", "damaged", "check",
]  # fmt: skip
NoticeTopic = Literal["findings", "restarts", "gave-up", "needs-operator", "finished"]


Duration = Annotated[float, BeforeValidator(parse_duration)]
Size = Annotated[int, BeforeValidator(parse_size)]
Ratio = Annotated[float, BeforeValidator(parse_ratio)]


REFUSED: JsonDict = {"reload": "refused"}
"""Mark of a setting with which podwatch refuses a reload that changes it: another run, or another place."""
LIVE: JsonDict = {"reload": "live"}
"""Mark of a setting, or of a section, that is read at each turn, at each start of training, when it is needed, or by a
command only. All others, and those that are marked ``AT_START`` in such a section, wait for podwatch's next start."""
AT_START: JsonDict = {"reload": "at start"}
FIXED: JsonDict = {"fixed": True}
"""Mark of a value that no file, variable or flag sets: pods that disagree about it would break the protocol between
them, or nobody has a reason to change it. Tests set it (``test_times.py``)."""


def setting(value: Any, description: str, *, mark: JsonDict | None = None, **limits: Any) -> Any:
    """A field with a default. Without a mark that of its section counts."""
    return Field(value, json_schema_extra=mark, description=description, **limits)


live = partial(setting, mark=LIVE)
at_start = partial(setting, mark=AT_START)
refused = partial(setting, mark=REFUSED)
fixed = partial(setting, mark=FIXED)
"""A ``FIXED`` field stands among the settings because a section is the argument of the functions that judge."""


class Section(BaseModel):
    """One table of the configuration. The first line of a section's text stands above it in every listing.
    ``directory`` in the context of the validation makes relative paths absolute."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")

    @field_validator("*", mode="after")
    @classmethod
    def _absolute(cls, value: object, info: ValidationInfo) -> object:
        """Make paths absolute: the daemon's working directory is ``/``."""
        return resolved(value, (info.context or {}).get("directory", "")) if isinstance(value, Path) else value


class TrainerSettings(Section):
    """The training that podwatch starts, watches and resumes (docs/trainer.md)."""

    layout: str = refused("auto", "layout of the checkpoints; auto: detected from command and output_dir")
    output_dir: Path = Field(..., json_schema_extra=REFUSED, description="the trainer's output directory")
    checkpoint_dir: Path | None = refused(
        None, "parent of the step directories (prime-rl: of checkpoints/), if not the usual one"
    )
    command: tuple[str, ...] = live((), "argv of a fresh start, without resume flags and without a shell")
    cwd: Path | None = live(None, "its working directory; default: output_dir's parent")
    env: dict[str, str] = Field(
        default_factory=dict, json_schema_extra=LIVE, description="extra environment variables; no secrets"
    )
    env_file: Path | None = live(None, "file with secrets as NAME=value lines; mode 0600")
    user: str = live("", "run training as this user; default: podwatch's own")
    nofile: int = live(65_536, "open-file limit for training", ge=1024)
    resume_args: str | tuple[str, ...] = live(
        "auto", 'what makes the command resume: "auto", "none", or a list with {step} and {checkpoint}'
    )
    max_steps: int | None = live(None, "target step, if command and its config do not name one", ge=1)
    supervise: Literal["auto", "start", "attach"] = live(
        "auto", '"auto": attach to running training, else start it; "start": never attach; "attach": never start'
    )
    start_before: tuple[tuple[str, ...], ...] = live(
        (), 'commands before each start, such as [["ray", "start", "--head"]]'
    )
    stop_also: tuple[tuple[str, ...], ...] = live((), "commands after each stop, for processes outside training's tree")
    stop_grace: Duration = live(30.0, "time from SIGTERM to SIGKILL")
    save_grace: Duration = live(600.0, "the same during a save")
    logs: tuple[str, ...] = setting((), "globs of log files with step lines, under output_dir or absolute")
    resume_attempts: int = fixed(2, "failed loads of a checkpoint before podwatch tries the previous one", ge=1)
    # VLLM_ENGINE_READY_TIMEOUT_S is 4200 s at prime-rl's HEAD.
    startup_patience: Duration = live(70 * 60.0, "longest time to the first step")

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
    """GPU memory shows a silent death."""

    inference: tuple[int, ...] = setting((), "NVML indices that hold the inference engine")
    trainer: tuple[int, ...] = setting((), "NVML indices that hold the trainer")
    poll: Duration = fixed(2.0, "time between two reads of GPU memory", gt=0)
    # Four polls: longer than any observed dip during a weight swap, and short enough for a verdict in 15 s.
    hold: Duration = live(8.0, "memory gone for this long is a silent death", gt=0)
    # A bare CUDA context and a driver take 0.3-0.7 GiB; a loaded model takes far more.
    floor: Size = live(GIB, "a dedicated GPU with less in use counts as empty")
    deadline: Duration = fixed(5.0, "a slower NVML call makes the GPU sensor blind", gt=0)
    # A start on a full GPU fails.
    release_wait: Duration = live(60.0, "after a stop: longest wait for free GPU memory, then `blocked`")
    release_margin: Size = fixed(GIB, "a GPU is free if it uses at most this much more than before training")

    @property
    def shared(self) -> tuple[int, ...]:
        """Inference GPUs that also hold a trainer: there, a death is a fall by the engine's share, not to zero."""
        return tuple(sorted(set(self.inference) & set(self.trainer)))

    @property
    def loaded(self) -> int:
        """Bytes in use; with less, no model was loaded."""
        return 2 * self.floor

    @property
    def blind_after(self) -> float:
        """Seconds without a reading after which a sensor is blind."""
        return max(30.0, 5 * self.poll + self.deadline)


class InferenceSettings(Section):
    """The inference server corroborates a silent death or a hang."""

    urls: tuple[str, ...] = setting((), 'inference servers, for example ["http://127.0.0.1:8000"]')
    timeout: Duration = fixed(2.0, "a slower answer counts as a timeout", gt=0)
    poll: Duration = fixed(5.0, "time between two reads of /health and /metrics", gt=0)
    sleep: Literal["auto", "yes", "no"] = live(
        "auto", '"yes": the engine releases its memory between phases; "auto": detected'
    )


class HangSettings(Section):
    """Training that is alive but makes no step (docs/detection.md)."""

    model_config = ConfigDict(json_schema_extra=LIVE)

    # prime-rl waits up to 2 x 720 s for a weight update without any progress.
    floor: Duration = setting(
        25 * 60.0, "shortest time without a step that can be a hang; below 25m, other signals count sooner too"
    )
    # A step five times slower than the median is slow, not hung.
    k: float = fixed(6.0, "a hang also needs this many median gaps between signs of progress", ge=2)


PATTERN_ERRORS = (re.error, OverflowError, RecursionError)
"""What compiling an operator's pattern can raise."""
STEP_FIELD = re.compile(r"\{step(?::0(\d)d?)?\}")
"""``{step}``, or ``{step:06d}`` with a width."""


class CustomLayoutSettings(Section):
    """``layout = "custom"``: the table of a trainer, as layouts.toml has it. Patterns are relative to output_dir;
    ``{step}`` is the number, with or without leading zeros."""

    parts: dict[str, tuple[str, ...]] = setting(
        {"checkpoint": ("checkpoints/step_{step}",)},
        "path of one step, such as ckpt_{step}.pt or ckpt_{step:06d}.pt; of several parts a table",
    )
    require: tuple[str | tuple[str, ...], ...] = setting(
        (), "globs in the step directory that must each match a file; of a list inside, one must"
    )
    last: dict[str, tuple[str, ...]] = setting(
        {}, "glob of the file that the trainer writes last; or a table of it and the files that it follows"
    )
    not_part: tuple[str, ...] = setting((), "globs of files that are deleted with the step but not uploaded")
    also_ahead: tuple[str, ...] = setting(
        (), "more paths with {step} to quarantine when they are ahead of the resume step"
    )
    table: dict[str, Any] = setting({}, "any other key of a trainer's table in layouts.toml (docs/contributing.md)")
    step_line: str = setting("", "regular expression of a step's log line; its first group is the number")
    processes: dict[Literal["trainer", "orchestrator", "inference", "engine"], tuple[str, ...]] = setting(
        {}, "role of a process: regular expressions for its command line; engine: what holds the model"
    )

    @field_validator("processes")
    @classmethod
    def _say_something(cls, value: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        for pattern in [pattern for patterns in value.values() for pattern in patterns]:
            try:
                matches_all = re.compile(pattern).search("") is not None
            except PATTERN_ERRORS as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
            if matches_all:
                raise ValueError(f"{pattern!r} matches every process")
        return value

    @field_validator("parts", "last", mode="before")
    @classmethod
    def _one_entry(cls, value: object, info: ValidationInfo) -> object:
        """A text alone stands for one entry: the path of a part, or a file that every other one must precede."""
        if isinstance(value, str) and value:
            value = {"checkpoint": value} if info.field_name == "parts" else {value: "*"}
        if isinstance(value, Mapping):
            return {name: [inner] if isinstance(inner, str) else inner for name, inner in value.items()}
        return value or {}

    @field_validator("parts")
    @classmethod
    def _one_step(cls, value: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        for path in [path for paths in value.values() for path in paths]:
            found = STEP_FIELD.findall(path)
            if len(found) != 1 or path.count("{") != 1 or path.startswith("/") or ".." in path.split("/"):
                raise ValueError("must be relative to output_dir and contain {step} exactly once")
        if not any(value.values()):
            raise ValueError("must name the path of one step")
        return value

    @field_validator("step_line")
    @classmethod
    def _one_group(cls, value: str) -> str:
        if not value:
            return value
        try:
            groups = re.compile(value).groups
        except PATTERN_ERRORS as error:
            raise ValueError(f"is not a regular expression: {error}") from error
        if groups < 1:
            raise ValueError(r"must have a group for the number, such as step (\d+)")
        return value


class CheckpointSettings(Section):
    rescan: Duration = fixed(10.0, "longest time between two scans", gt=0)
    settle: Duration = fixed(5.0, "a checkpoint with a strong marker must be unchanged this long", ge=0)
    settle_weak: Duration = fixed(60.0, "the same for a layout without a marker", ge=0)
    settle_tracker: Duration = fixed(15.0, "the same where a last file or a tracker file is the marker", ge=0)
    custom: CustomLayoutSettings | None = refused(None, 'a section; required for layout = "custom"')


class SyncSettings(Section):
    """Copies of checkpoints outside this pod (docs/store.md)."""

    store: str = refused("", f"{EXAMPLES} (an installed package can add more); empty: NOT BACKED UP")
    s3_endpoint: str = setting("", "for s3://: the service's address, if it is not AWS")
    s3_region: str = setting("", 'for s3://: the region ("auto" for R2)')
    s3_profile: str = setting("", "for s3://: the AWS profile, instead of keys in the environment")
    s3_addressing: Literal["auto", "path", "virtual"] = setting(
        "auto", "for s3://: the bucket in the path or in the host name; auto: the latter on AWS"
    )
    # 47 GB are 470 objects; a kill loses at most this for each connection.
    part_size: Size = fixed(
        100_000_000, "larger files are stored in pieces of this size", ge=5_000_000, le=5_000_000_000
    )
    connections: int = setting(8, "parallel connections of an upload or a restore", ge=1, le=64)
    max_rate: Size | None = setting(None, "upload limit in bytes per second")
    upload_gap: Duration = fixed(0.0, "shortest time between the starts of two uploads", ge=0)
    sweep: Duration = fixed(600.0, "time between two searches for unstored checkpoints")
    max_lag: Duration = live(7200.0, "nothing new in the store for this long is critical")
    keep_last: int = setting(3, "number of newest checkpoints kept in the store", ge=1)
    keep_every: int = setting(10, "every n-th checkpoint is a milestone and is kept; 0: none", ge=0)
    extra: tuple[str, ...] = setting(
        (), 'paths below output_dir to upload with milestones and the final checkpoint, such as ["final"]'
    )
    # A 32B model in bf16 fits; a mistyped path does not fill the bucket.
    extra_max: Size = fixed(100_000_000_000, "`extra` above this size is not uploaded", ge=0)
    artefacts: bool = setting(True, "also upload configuration, ends of logs and incident bundles")
    artefacts_every: Duration = fixed(900.0, "time between two uploads of log ends", ge=60)
    artefacts_log: Size = fixed(256_000, "size of the end of each log to upload", ge=1000, le=5_000_000)
    # B2 throttles faster writes; other pods wait for five missed ones (holder_patience).
    heartbeat: Duration = fixed(60.0, "time between two heartbeats in the store", ge=5, le=100)
    holder_patience: Duration = fixed(
        PATIENCE_SECONDS, "time without a heartbeat until podwatch takes over another pod's run"
    )
    # 30 s of a confirmation, 60 s of a write, 10 s of margin.
    claim_wait: Duration = fixed(CLAIM_WAIT_SECONDS, "time from a claim to its decision", ge=0)
    # By then all of B2's servers know a new key or bucket.
    refusal_wait: Duration = fixed(
        REFUSAL_SECONDS,
        "if the store refuses access and training cannot start: time until podwatch exits with 77",
        ge=0,
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
        if value and not (separator and plugins.known(plugins.STORES, scheme, KINDS)):
            raise ValueError(f"must be {EXAMPLES}, or empty")
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


class DiskSettings(Section):
    """Disk space for the next checkpoint (docs/disk.md)."""

    model_config = ConfigDict(json_schema_extra=LIVE)

    prune_above: Ratio = setting(0.85, "podwatch deletes old checkpoints above this disk usage")
    prune_to: Ratio = setting(0.75, "... and stops at this disk usage")
    margin: float = fixed(1.1, "space kept free for the next save: its predicted size times this", ge=1.0)
    capacity: Size | None = at_start(None, "real capacity, if an overlay shows the host's disk")
    on_full: Literal["stay", "stop"] = setting(
        "stay", 'if the next save cannot fit: "stop" ends training cleanly before it, "stay" does not'
    )

    @model_validator(mode="after")
    def _order(self) -> "DiskSettings":
        if self.prune_to >= self.prune_above:
            raise ValueError("prune_to must be below prune_above")
        return self


class RecoverySettings(Section):
    """How often to restart, and how long to wait."""

    model_config = ConfigDict(json_schema_extra=LIVE)

    budget_restarts: int = setting(5, "podwatch gives up when this number and budget_time are both used up", ge=1)
    budget_time: Duration = setting(7200.0, "see budget_restarts")
    backoff_min: Duration = fixed(10.0, "first pause between restarts")
    backoff_max: Duration = fixed(600.0, "longest pause between restarts")
    calm: Duration = fixed(1800.0, "the counters restart from zero after this long without a failure")
    retry_after_give_up: Duration = setting(3600.0, "one attempt this often after giving up; 0: never")
    preempt_grace: Duration = setting(
        3.0, "at a preemption: time to announce it, end training, and store what it saves at SIGTERM", ge=1, le=600
    )
    on_give_up: Literal["stay", "exit"] = setting(
        "stay", '"exit": podwatch exits when it gives up, with 65 (the command is at fault) or 86'
    )
    on_finished: Literal["stay", "exit"] = setting(
        "stay", '"exit": podwatch exits when the last checkpoint is stored, with 0 (69: not everything is)'
    )
    final_sync: Duration = setting(7200.0, "longest time to store the last checkpoint", ge=0)
    # Longer than a takeover (holder_patience + claim_wait), because each exit uses up an attempt of the engine.
    standby: Duration = fixed(900.0, "job mode: longest wait for another pod or what blocks a start; then 86", ge=0)
    end_grace: Duration | None = at_start(
        None, "job mode: from SIGTERM until podwatch kills training; default: 0.85 of the engine's", ge=1, le=3600
    )
    # As many as the restarts of one machine: an attempt has used those up already, and each next one rents a machine.
    job_attempts: int = fixed(5, "job mode: attempts in a row without progress before 65 instead of 86", ge=2)
    bad_host_for: Duration = fixed(
        86_400.0, "job mode: no attempt starts on a machine for this long after its fault; 0: off"
    )


class NodesSettings(Section):
    """One run on several machines (docs/nodes.md).

    One podwatch on each, with `run --job`."""

    rank: int | None = refused(None, "number of this node, from 0; default: from the engine's variables", ge=0)
    count: int | None = refused(None, "number of nodes; default: from the engine's variables", ge=1, le=MOST_NODES)
    # Engines start the nodes of a job minutes apart.
    wait: Duration = fixed(600.0, "a start waits this long for the other nodes, then ends with 86", ge=1)
    # Longer than the attribute cache of NFS (60 s), and than a restart of podwatch takes.
    silence: Duration = fixed(90.0, "a node that has not reported for this long is gone, and all nodes end", ge=5)

    @property
    def several(self) -> bool:
        """Whether there are several nodes; ``daemon.entry`` sets rank and count from the engine's variables."""
        return (self.count or 1) > 1


class EndPodSettings(Section):
    """A command that ends the rented machine with the run (docs/pods.md).

    Not used in job mode, where the engine ends it."""

    model_config = ConfigDict(json_schema_extra=LIVE)

    command: tuple[str, ...] = setting(
        (), "argv, without a shell; runs once the final sync is done or its time is over"
    )
    env_file: Path | None = setting(None, "file with the provider's key; mode 0600")
    timeout: Duration = fixed(60.0, "the command is killed after this time", gt=0)
    tries: int = fixed(5, "most runs of the command for one end", ge=1)


def _real_argv(value: object) -> object:
    if isinstance(value, str):
        raise ValueError('must be a list of arguments, for example ["python3", "/root/evaluate.py"]; no shell runs it')
    if isinstance(value, list | tuple) and (not value or not value[0]):
        raise ValueError("is empty; it needs at least the program")
    if isinstance(value, list | tuple) and any("\0" in str(argument) for argument in value):
        raise ValueError("contains a NUL character")
    return value


_CHILD_NAME = r"^[a-z0-9][a-z0-9-]{0,40}$"


class HookSettings(Section):
    """``[[hooks]]``: a command that podwatch runs after an event, or `podwatch check` (docs/hooks.md)."""

    name: str = Field(..., pattern=_CHILD_NAME, description="lower-case name, unique")
    on: tuple[HookEvent, ...] = Field(
        ..., min_length=1, description="events after which it runs; check: by `podwatch check`"
    )
    command: tuple[str, ...] = Field(..., description="argv, without a shell")
    cwd: Path | None = setting(None, "working directory; default: that of training")
    env_file: Path | None = setting(None, "file with its NAME=value lines; mode 0600")
    user: str = setting("", "run it as this user; default: trainer.user, else podwatch's own")
    timeout: Duration = setting(3600.0, "podwatch then ends the command and all that it started", gt=0)
    coalesce: bool = setting(True, "of several waiting events of one kind run only the newest")
    retries: int = setting(0, "further attempts after a failure; the first after 10 s", ge=0, le=8)

    @field_validator("command", mode="before")
    @classmethod
    def _argv(cls, value: object) -> object:
        return _real_argv(value)


class EvaluationSettings(Section):
    """A command that evaluates checkpoints (docs/hooks.md).

    Empty ``command``: none."""

    command: tuple[str, ...] = setting(
        (), "argv, without a shell, with {checkpoint}, {weights}, {step}, {run_id} and {output}"
    )
    every_saves: int = setting(0, "evaluate every N-th complete checkpoint; 0: no", ge=0)
    every_steps: int = setting(0, "evaluate the first complete checkpoint in each N steps; 0: no", ge=0)
    at_end: bool = setting(False, "evaluate the last checkpoint of a finished run")
    gpus: Literal["none", "stop-training"] = setting(
        "none", '"none": on the CPU; "stop-training": on those of training, which stops'
    )
    metric: str = setting(
        "", 'number that decides which checkpoint is the best and is kept, such as "results.gsm8k.acc"'
    )
    lower_is_better: bool = setting(False, "the metric is a loss or an error")
    timeout: Duration = setting(3600.0, "podwatch then ends it and all that it started", gt=0)
    coalesce: bool = fixed(True, "of several waiting checkpoints evaluate only the newest")
    # A full disk costs training.
    reserve: Size = fixed(5_000_000_000, "space that an evaluation must leave free besides the next save", ge=0)
    dir: Path | None = setting(
        None, "place for outputs and fetched checkpoints, never under output_dir; default: below state_dir"
    )
    cwd: Path | None = setting(None, "working directory; default: that of training")
    env_file: Path | None = setting(None, "file with its NAME=value lines; mode 0600")
    user: str = setting("", "run it as this user; default: trainer.user, else podwatch's own")

    @field_validator("command", mode="before")
    @classmethod
    def _argv(cls, value: object) -> object:
        return value if value in ((), []) else _real_argv(value)

    def as_hook(self, command: tuple[str, ...] = ()) -> HookSettings:
        """This in the form of ``[[hooks]]``, which the same code examines and starts. ``command``: with its
        placeholders replaced."""
        return HookSettings(
            name="evaluation",
            on=("check",),
            command=command or self.command,
            cwd=self.cwd,
            env_file=self.env_file,
            user=self.user,
            timeout=self.timeout,
        )


class ResourceSettings(Section):
    """When a resource counts as scarce, and a checkpoint as overdue."""

    files_above: Ratio = fixed(0.8, "warn above this share of the open-file limit")
    memory_above: Ratio = fixed(0.95, "warn above this share of host or container memory")
    shm_above: Ratio = fixed(0.9, "warn above this share of /dev/shm")
    overdue: float = fixed(3.0, "a checkpoint is overdue after this many save intervals", ge=1)
    overdue_floor: Duration = fixed(
        3600.0, "... and never sooner than this; before two intervals are known, this times overdue"
    )


class LogRuleSettings(Section):
    """``[[log_rules]]``: your own patterns for the trainer's logs. A match corroborates a verdict; it never restarts
    training alone."""

    name: str = Field(..., pattern=r"^[a-z0-9][a-z0-9-]{0,40}$", description="lower-case name that findings show")
    pattern: str = Field(..., min_length=1, max_length=500, description="Python regular expression, matched per line")
    count: int = setting(1, "number of matches ...", ge=1)
    within: Duration = setting(600.0, "... within this time that raise the finding", gt=0)
    critical: bool = setting(False, "raise a critical finding instead of a warning")
    says: str = setting("", "what the finding means")
    fix: str = setting("", "what the operator must do")
    supports: tuple[Literal["silent-death", "hang", "required-child-exited"], ...] = setting(
        (), "verdicts that a match corroborates, together with a signal that can confirm alone"
    )

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except PATTERN_ERRORS as error:
            raise ValueError(f"is not a regular expression: {error}") from error
        return value


class TrainingHealthSettings(Section):
    """Warnings about the health of the training itself."""

    model_config = ConfigDict(json_schema_extra=LIVE)

    stop: bool = setting(False, "stop training after the next save when a rule matches; else only warn")
    # RL rewards change slowly: with fewer steps, every plateau of a healthy run would be reported.
    plateau_steps: int = setting(200, "warn when the reward is flat for this many steps; 0: off", ge=0)
    entropy_below: float | None = setting(0.05, "warn below this entropy")
    kl_above: float | None = setting(0.5, "warn above this KL divergence")
    grad_norm_above: float | None = setting(5.0, "warn above this gradient norm")
    metrics_file: str = at_start("", "JSON-lines file with the metrics; default: the layout's")


class RecordSettings(Section):
    """Recorded sensor data (docs/detection.md)."""

    enabled: bool = setting(True, "record the sensor data for `podwatch replay`")
    max_size: Size = fixed(32_000_000, "size of all recordings; the oldest part is deleted first", ge=1_000_000)


class HttpSettings(Section):
    """The page (docs/notifications.md), health, status and metrics."""

    enabled: bool = refused(True, "the page, health, status, metrics, and the trainer's progress pings")
    host: str = refused("127.0.0.1", "address to listen on; beyond loopback it needs password_file")
    port: int = refused(9477, "port; if it is taken, the next free one; 0: any", ge=0, le=65535)
    password_file: Path | None = refused(None, "file with the HTTP password; mode 0600")


class NotifySettings(Section):
    """Where podwatch sends notices (docs/notifications.md)."""

    command: tuple[str, ...] = setting((), "argv, without a shell, that receives each notice as JSON on stdin")
    user: str = setting("", "run command as this user; default: trainer.user, else podwatch's own")
    urls: tuple[str, ...] = setting(
        (), 'channels, each with its lowest severity: "critical https://..."; with a key: in urls_file'
    )
    urls_file: Path | None = setting(None, "file with more URLs, one per line; mode 0600")
    digest: Duration = setting(0.0, 'time between two digests, such as "24h"; 0: none', ge=0)
    events: tuple[NoticeTopic, ...] = setting(
        ("findings", "restarts", "gave-up", "needs-operator", "finished"), "topics to send"
    )
    min_severity: Literal["warning", "critical"] = setting("critical", "lowest severity of a finding that is sent")
    remind: Duration = fixed(
        3600.0, "time until a lasting critical finding is repeated, then twice as long; 0: never", ge=0
    )
    per_hour: int = fixed(20, "most notices per hour, half of them for critical ones", ge=2)
    timeout: Duration = fixed(20.0, "time limit of one attempt; up to 8 attempts", gt=0, le=300)
    heartbeat_urls: tuple[str, ...] = setting(
        (), "dead-man's switch: URLs that are called; with a key: in heartbeat_urls_file"
    )
    heartbeat_urls_file: Path | None = setting(None, "file with more such URLs, one per line; mode 0600")
    heartbeat_every: Duration = fixed(60.0, "time between two calls of heartbeat_urls", ge=5, le=3600)

    @property
    def topics(self) -> frozenset[Topic]:
        """The topics to send: ``findings`` includes ``needs-operator``."""
        chosen = frozenset(Topic(name) for name in self.events)
        return chosen | {Topic.NEEDS_OPERATOR} if Topic.FINDINGS in chosen else chosen

    @field_validator("digest")
    @classmethod
    def _rarely(cls, value: float) -> float:
        if 0 < value < 3600:
            raise ValueError('shorter than 1h: write for example "24h", or 0 for none')
        return value

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
            if not re.match(r"((info|warning|critical) +)?[a-z][a-z0-9+.-]*://.", url):
                raise ValueError(f"number {number} is not a URL: it needs a scheme such as https:// or ntfy://")
        return value


class WandbSettings(Section):
    """Podwatch's own run in the training's W&B project.

    Written by a separate process (docs/notifications.md)."""

    enabled: bool = setting(False, "write podwatch's own W&B run; needs 90 MB of memory")
    project: str = setting("", "W&B project; default: training's own")
    entity: str = setting("", "W&B entity; default: the entity of the key")
    every: Duration = fixed(300.0, "time between two rows of metrics", ge=10)
    python: Path | None = setting(None, "a Python with wandb; default: podwatch's own, with podwatch[wandb]")
    user: str = setting("", "run it as this user; default: trainer.user, else podwatch's own")


class CostSettings(Section):
    """What this machine costs (docs/runs.md)."""

    per_hour: float | None = setting(None, "price of one hour of this machine; with it podwatch shows money", ge=0)
    currency: str = setting("", 'text behind an amount, for example "EUR"', max_length=8)


class LogSettings(Section):
    """Podwatch's own log."""

    format: Literal["auto", "console", "json", "journal"] = setting(
        "auto", "journal under systemd, console on a terminal, JSON lines otherwise"
    )
    level: Literal["debug", "info", "warning", "error"] = setting("info", "lowest severity that is logged")


OperatorsCommand = HookSettings | EvaluationSettings | NotifySettings | WandbSettings
"""A section that has a ``user``."""


def _is_another(user: str) -> bool:
    """Whether this is another user than podwatch's own. One that does not exist is reported where it is needed."""
    try:
        return bool(user) and pwd.getpwnam(user).pw_uid != os.geteuid()
    except KeyError:
        return True


class Settings(Section):
    """The configuration of one run."""

    run_id: str = Field(
        ..., json_schema_extra=REFUSED, description="name of the run here and in the store; letters, digits, . _ -"
    )
    mode: Literal["act", "observe"] = live(
        "act", '"observe": uploads checkpoints, but only reports restarts and deletions'
    )
    state_dir: Path = refused(
        Path("/var/lib/podwatch"), "database, lock and sockets; on local disk, never under output_dir"
    )
    trainer: TrainerSettings
    gpu: GpuSettings = GpuSettings()
    inference: InferenceSettings = InferenceSettings()
    hang: HangSettings = HangSettings()
    checkpoints: CheckpointSettings = CheckpointSettings()
    sync: SyncSettings = SyncSettings()
    disk: DiskSettings = DiskSettings()
    recovery: RecoverySettings = RecoverySettings()
    nodes: NodesSettings = NodesSettings()
    end_pod: EndPodSettings = EndPodSettings()
    resources: ResourceSettings = ResourceSettings()
    log_rules: tuple[LogRuleSettings, ...] = live((), "tables with patterns for the trainer's logs")
    hooks: tuple[HookSettings, ...] = setting(
        (), "tables with commands to run after an event, or by `podwatch check` (docs/hooks.md)"
    )
    evaluation: EvaluationSettings = EvaluationSettings()
    training: TrainingHealthSettings = TrainingHealthSettings()
    record: RecordSettings = RecordSettings()
    http: HttpSettings = HttpSettings()
    notify: NotifySettings = NotifySettings()
    wandb: WandbSettings = WandbSettings()
    cost: CostSettings = CostSettings()
    log: LogSettings = LogSettings()

    @field_validator("run_id")
    @classmethod
    def _run_id(cls, value: str) -> str:
        if not valid_run_id(value):
            raise ValueError("expected 1 to 128 letters, digits, '.', '_' or '-', starting with a letter or digit")
        return value

    @field_validator("hooks")
    @classmethod
    def _unique(cls, value: tuple[HookSettings, ...]) -> tuple[HookSettings, ...]:
        names = [one.name for one in value]
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise ValueError(f"two of them have the name {twice!r}; each needs its own")
        return value

    @model_validator(mode="after")
    def _together(self) -> "Settings":
        if self.trainer.layout == "custom" and self.checkpoints.custom is None:
            raise ValueError('layout = "custom" needs a [checkpoints.custom] section')
        output, state = self.trainer.output_dir, self.state_dir
        if state == output or output in state.parents:
            raise ValueError("state_dir must not be inside trainer.output_dir: trainers wipe it or refuse to start")
        if (place := self.evaluation.dir) is not None and (output == place or output in place.parents):
            raise ValueError("evaluation.dir must not be inside trainer.output_dir: trainers wipe it")
        if place is None and (self.evaluation.user or (self.evaluation.command and _is_another(self.trainer.user))):
            user = self.evaluation.user or f"{self.trainer.user}, as trainer.user says,"
            raise ValueError(
                f"an evaluation that runs as {user} needs evaluation.dir: a directory that this user can enter"
            )
        return self

    @property
    def trains_as_another(self) -> bool:
        """Whether training runs as another user than podwatch."""
        return _is_another(self.trainer.user)

    def user_of(self, command: "OperatorsCommand") -> str:
        """The user that the operator's command runs as; empty: podwatch's own. The training user's, where there is one:
        what lies in the directories of training, such as a module that the command imports, is that user's choice."""
        return command.user or self.trainer.user

    def outranks_training(self, command: "OperatorsCommand") -> bool:
        """Whether the command has podwatch's own rights, and training those of another user."""
        return self.trains_as_another and not _is_another(self.user_of(command))


class Policies(BaseModel):
    """By what the pure functions judge a run: sections of the settings, and what the trainer's command adds to them."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    gpu: GpuSettings = GpuSettings()
    inference: InferenceSettings = InferenceSettings()
    hang: HangSettings = HangSettings()
    disk: DiskSettings = DiskSettings()
    resources: ResourceSettings = ResourceSettings()
    training: TrainingHealthSettings = TrainingHealthSettings()
    startup_patience: float = TrainerSettings.model_fields["startup_patience"].default
    nofile: int = TrainerSettings.model_fields["nofile"].default
    log_rules: tuple[LogRule, ...] = ()
    max_steps: int | None = None
    """Target step; None if neither the settings nor the command say."""
    save_interval_steps: int | None = None
    """Steps between saves as configured in the command; None if it does not say."""
    steps_in_use: int = 2
    """By-products of this many steps below the newest complete checkpoint stay."""
    clean_exit_finishes: bool = False
    """Exit code 0 means that training is finished here: one of several nodes, of which rank 0 judges the whole."""

    def for_recording(self) -> dict[str, Any]:
        """As JSON, without what judges nothing: a URL can hold a password."""
        secret = {"training": {"metrics_file"}, "inference": {"urls"}}
        text = self.model_dump_json(exclude=secret)  # a number that is not finite is a text only there
        return cast("dict[str, Any]", json.loads(text))
