"""The run: which one it is, what is wanted of it, where its line of descent stands."""

from dataclasses import dataclass, field

from podwatch.domain.snapshot import Desired

RECORD_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Lineage:
    """A line of training history (DESIGN section 2). A step back on purpose or a fresh start opens a new one.

    ``id`` is random; ``parent`` and ``parent_step`` say where it left the older line (empty and None for a fresh run).
    ``left_step`` is the newest checkpoint of the line that an operator's own start left, ``opened_wall`` (epoch
    seconds) when that start was made: for the status. None and 0 where podwatch opened it, or an older podwatch did.
    """

    id: str
    parent: str = ""
    parent_step: int | None = None
    left_step: int | None = None
    opened_wall: float = 0.0


@dataclass(frozen=True, slots=True)
class EarlierSave:
    """A checkpoint on this pod that ``lineage`` saved and that the run has left behind. ``changed_wall`` (epoch
    seconds) and ``save_id`` (empty for one that was not complete) tell it from the same step saved again."""

    step: int
    save_id: str
    changed_wall: float
    lineage: str


@dataclass(frozen=True, slots=True)
class StartRecord:
    """One start of the trainer, as recorded before it happened.

    ``config_digests`` maps the small files named in the command to their SHA-256; ``environment_names`` are names
    only, never values (promise 11).
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
    """``[trainer] command`` as it was configured then, each flag scrubbed together with its value; empty in a record of
    an older podwatch."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The one small file beside output_dir: enough to go on from when the container's own disk is gone."""

    run_id: str
    lineage: Lineage
    desired: Desired = Desired.RUNNING
    last_start: StartRecord | None = None
    first_seen_wall: float = 0.0
    """When podwatch first guarded this output_dir; sets older than this go only once they are in the store."""
    wandb: dict[str, str] = field(default_factory=dict)
    stop_above: int | None = None
    """With ``desired`` stopped: training may go on until a complete set above this step is here (-1: any set)."""
    stop_of: str = ""
    """The start that is still to be stopped, because it is stopped or finished; empty once it has ended."""
    desired_wall: float = 0.0
    """When ``desired`` changed last: a trainer that a person started later says what they want now."""
    earlier: tuple[EarlierSave, ...] = ()
    """Checkpoints on this pod that are not of the present lineage although they are here."""
    schema_version: int = RECORD_SCHEMA_VERSION
