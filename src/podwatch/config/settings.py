"""Every setting podwatch has, with its default and the reason for the default.

The models are the single source: ``config show`` and ``config init`` print from them, docs/configuration.md lists
them. Loading (files, environment, flags, suggestions) is loading.py's job.
"""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from podwatch.config.units import Duration, Ratio, Size
from podwatch.domain.policy import GIB
from podwatch.domain.remote import DEFAULT_PART_SIZE, valid_run_id

LayoutName = Literal["prime-rl", "hf", "custom"]


class Section(BaseModel):
    """Unknown keys are errors; a loaded section never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class TrainerSettings(Section):
    layout: LayoutName = Field(
        "prime-rl",
        description="how the trainer lays out its checkpoints; prime-rl's two generations are told apart by themselves",
    )
    output_dir: Path = Field(..., description="the trainer's output directory (it need not exist yet)")
    checkpoint_dir: Path | None = Field(
        None, description="where checkpoints/ lies if not under output_dir (prime-rl: ckpt.output_dir)"
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
    stop_grace: Duration = Field(30.0, description="SIGTERM to SIGKILL; prime-rl answers SIGTERM within seconds")
    save_grace: Duration = Field(600.0, description="the same while a save is in flight: 47 GB take minutes")
    logs: tuple[str, ...] = Field((), description="globs of log files with step lines, under output_dir or absolute")
    resume_attempts: int = Field(2, ge=1, description="proven failed loads of a step before the one before is taken")
    startup_patience: Duration = Field(
        70 * 60.0, description="start to first step; vLLM's own engine timeout is 4200 s in prime-rl"
    )

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


class HangSettings(Section):
    floor: Duration = Field(25 * 60.0, description="prime-rl may wait 2 x 720 s for one weight update")
    k: float = Field(6.0, ge=2, description="times the learned median step; five times slower is slow, not hung")
    agree: Duration = Field(
        600.0, gt=0, description="idle GPUs, or flat tokens, must hold this long to agree; healthy steps pause for less"
    )


class CustomLayoutSettings(Section):
    """``layout = "custom"``: patterns are relative to output_dir; ``{step}`` stands for the number."""

    step_dir: str = Field("checkpoints/step_{step}", description="where one step lies, with {step} in one segment")
    required: tuple[str, ...] = Field((), description="globs inside the step directory that must each match a file")
    optional: tuple[str, ...] = Field((), description="globs that are removed with the step but not uploaded")
    ahead: tuple[str, ...] = Field((), description="more paths with {step} to set aside when they are ahead of N")
    last: str = Field("", description="glob of the file that is written last, if there is one")

    @field_validator("step_dir")
    @classmethod
    def _one_step(cls, value: str) -> str:
        if value.count("{step}") != 1 or value.startswith("/") or ".." in value.split("/"):
            raise ValueError("must be relative to output_dir and contain {step} exactly once")
        return value


class CheckpointSettings(Section):
    rescan: Duration = Field(10.0, gt=0, description="a rescan is the truth; events only make it come sooner")
    settle: Duration = Field(5.0, ge=0, description="a set with a strong marker must be unchanged this long")
    settle_weak: Duration = Field(60.0, ge=0, description="the same where the layout has no marker")
    custom: CustomLayoutSettings | None = Field(None, description='a section; needed for layout = "custom"')


class SyncSettings(Section):
    store: str = Field("", description='"b2://bucket[/prefix]" or "file:///path"; empty: NOT BACKED UP')
    part_size: Size = Field(DEFAULT_PART_SIZE, description="B2's recommended part size; 5 MB to 5 GB")
    connections: int = Field(
        4, ge=1, le=32, description="parallel connections; more only help where each one is bound by its latency"
    )
    sweep: Duration = Field(600.0, description="look for anything not stored yet; completions are sent at once")
    max_lag: Duration = Field(2 * 3600.0, description="nothing new in the store for this long is critical")
    keep_last: int = Field(
        3, ge=1, description="newest sets kept in the store: one to resume from, two to step back to"
    )
    keep_every: int = Field(10, ge=0, description="every n-th save is a milestone and stays; 0: none")
    heartbeat: Duration = Field(60.0, ge=30, description="sign of life in the store; B2 punishes faster")

    @field_validator("store")
    @classmethod
    def _scheme(cls, value: str) -> str:
        if value and not value.startswith(("b2://", "file://")):
            raise ValueError('must be "b2://bucket[/prefix]", "file:///path" or empty')
        return value

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
    on_give_up: Literal["stay", "exit"] = Field(
        "stay", description='"exit" ends podwatch with 86 so that an outer engine can move the job'
    )


class HttpSettings(Section):
    enabled: bool = Field(True, description="health, status and metrics for probes, and the trainer's progress pings")
    host: str = Field("127.0.0.1", description="no control goes through HTTP, but nobody outside needs it either")
    port: int = Field(9477, ge=0, le=65535, description="if taken, the next free one; 0: any")


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
    http: HttpSettings = Field(default_factory=HttpSettings)
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
