"""The run: its identity, its desired state and its lineage."""

from dataclasses import dataclass, field

from podwatch.domain.snapshot import Desired

RECORD_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Lineage:
    """A branch of the training history. A step back on purpose or a fresh start opens a new one.

    ``id`` is random; ``parent`` and ``parent_step`` say where it left the older lineage (empty and None for a fresh
    run). For the status: ``left_step`` is the newest checkpoint of the lineage that an operator's own start left, and
    ``opened_wall`` (epoch seconds) the time of that start; None and 0 if podwatch opened the lineage, or an older
    podwatch recorded it.
    """

    id: str
    parent: str = ""
    parent_step: int | None = None
    left_step: int | None = None
    opened_wall: float = 0.0


@dataclass(frozen=True, slots=True)
class EarlierSave:
    """A checkpoint on this pod that ``lineage`` saved and that the run has left behind. ``changed_wall`` (epoch
    seconds) and ``save_id`` (empty if it was not complete) distinguish it from the same step saved again."""

    step: int
    save_id: str
    changed_wall: float
    lineage: str


@dataclass(frozen=True, slots=True)
class StartRecord:
    """One start of the trainer, recorded before it happens.

    ``config_digests`` maps the small files named in the command to their SHA-256; ``environment_names`` are names
    only, never values.
    """

    start_id: str
    wall: float
    argv: tuple[str, ...]
    cwd: str
    user: str = ""
    step: int | None = None
    environment_names: tuple[str, ...] = ()
    config_digests: tuple[tuple[str, str], ...] = ()
    command: tuple[str, ...] = ()
    """``[trainer] command`` as configured at that time, without secrets; empty in a record of an older podwatch."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The small file beside output_dir: enough to continue if the container's own disk is lost."""

    run_id: str
    lineage: Lineage
    desired: Desired = Desired.RUNNING
    last_start: StartRecord | None = None
    first_seen_wall: float = 0.0
    """When podwatch first guarded this output_dir; older checkpoints are deleted only if they are in the store."""
    wandb: dict[str, str] = field(default_factory=dict)
    stop_above: int | None = None
    """With ``desired`` stopped: training continues until a complete checkpoint above this step exists (-1: any)."""
    stop_of: str = ""
    """The start that podwatch still has to stop, because the run is stopped or finished; empty once it has ended."""
    desired_wall: float = 0.0
    """When ``desired`` last changed: a trainer that an operator started later overrides it."""
    earlier: tuple[EarlierSave, ...] = ()
    """Checkpoints on this pod that do not belong to the current lineage."""
    schema_version: int = RECORD_SCHEMA_VERSION
