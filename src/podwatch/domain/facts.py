"""What podwatch knows at one moment: each turn of the loop begins with new ``Facts`` for all that decide or report."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.errors import PodwatchError
from podwatch.domain.lease import Decision
from podwatch.domain.process import FoundTree
from podwatch.domain.run_state import RunState
from podwatch.domain.snapshot import Reading, SensorState, Snapshot, unobserved
from podwatch.domain.stored_checkpoint import StoredCheckpoint


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """The store, the lease and the upload in flight at one moment, for status, findings and metrics. The defaults are
    those of a run without a store. ``ok`` is None until the store has answered or failed for the first time."""

    store_url: str = ""
    ok: bool | None = None
    error: str = ""
    refused: bool = False
    """The store refuses podwatch (key, cap, bucket, configuration): waiting does not help."""
    locked_out: PodwatchError | None = None
    """Its refusal, where that alone keeps this pod from training and lasts."""
    next_attempt_wall: float | None = None
    """While it fails: the time of the next try, in epoch seconds."""
    clock_skew: float | None = None
    """Seconds that this machine's clock is ahead of the store's; None: not known."""
    last_step: int | None = None
    last_published_wall: float | None = None
    uploading_step: int | None = None
    uploaded_bytes: int = 0
    total_bytes: int = 0
    superseded: bool = False
    lease: Decision | None = None
    """Whether this pod holds the run's lease; None without a store."""
    settles_in: float | None = None
    """Seconds until this pod's claim is decided: nothing is published before; None while none settles."""
    checkpoints: tuple[StoredCheckpoint, ...] = ()
    """Every save in this store's inventory, in the order of publication."""
    surplus: frozenset[tuple[int, str]] = frozenset()
    """(step, save_id) of this pod's checkpoints that are not in the store, and that retention would delete from it."""
    listed: bool = False
    """The store was listed since podwatch started."""
    abandoned_in_a_row: int = 0
    warnings: tuple[str, ...] = ()
    upload_rate: float | None = None
    """Of the upload in flight, in bytes per second; None without one, or before its first figures."""
    upload_seconds: float | None = None
    """How long the last upload took."""
    save_seconds: float | None = None
    """From one save to the next, as known then."""
    skipped: int = 0
    """Checkpoints that the last publications skipped for a newer one."""
    calls: Mapping[str, int] = field(default_factory=dict)
    """Calls to the store since podwatch started, by class (A free, B, C)."""

    @property
    def unread(self) -> bool:
        """A store is configured, and it is not known yet what it has."""
        return bool(self.store_url) and not self.listed

    @property
    def saves(self) -> int | None:
        """Whole checkpoints of this run in the store; None until the store was listed."""
        return sum(save.whole for save in self.checkpoints) if self.listed else None

    @property
    def stored(self) -> frozenset[tuple[int, str]]:
        """(step, save_id), as this pod names them, of its checkpoints that are whole in this store."""
        return frozenset((save.step, save.here) for save in self.checkpoints if save.whole and save.here)

    @property
    def newest_of(self) -> Mapping[str, int]:
        """Lineage -> its newest step in the store."""
        found = dict[str, int]()
        for save in self.checkpoints:
            if save.whole:
                found[save.lineage] = max(save.step, found.get(save.lineage, -1))
        return found

    @property
    def upload_left_seconds(self) -> float | None:
        """Remaining seconds at the current rate; None without an upload or without progress."""
        if self.uploading_step is None or not self.upload_rate:
            return None
        return max(0, self.total_bytes - self.uploaded_bytes) / self.upload_rate


@dataclass(frozen=True, slots=True)
class Trainer:
    """The tree of the last start, which podwatch supervises or has attached to. ``lives``: anything of it does, its
    supervisor included. ``ended_wall``: when its launcher ended (epoch seconds), None while that lives. ``ended_at``:
    since when podwatch has seen that nothing of it lives (monotonic). ``finish_line``: it printed its own.
    ``unconfirmed``: no step number was seen within the start-up patience."""

    start_id: str
    pid: int
    lives: bool = True
    attached: bool = False
    ended_wall: float | None = None
    ended_at: float | None = None
    finish_line: bool = False
    unconfirmed: bool = False


@dataclass(frozen=True, slots=True)
class PodSearch:
    """What a search of the pod's processes found. ``trees``: what may train this run and is not its trainer.
    ``lock_holder``: who holds the run lock while no trainer of the run is seen, as a sentence; empty if nobody does."""

    trees: tuple[FoundTree, ...] = ()
    lock_holder: str = ""


@dataclass(frozen=True, slots=True)
class PendingEvaluation:
    """Evaluations that need training's GPUs. ``due``: they can run now, as files, disk and the time since the last save
    are. ``idle``: no training was wanted when they were asked for, so nothing stops for them."""

    title: str
    due: bool = False
    idle: bool = False


@dataclass(frozen=True, slots=True)
class NodesOfRun:
    """This node's part in a run over several nodes. ``follows``: the leader has chosen ``step``, and prepared it."""

    follows: bool = False
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Inventory:
    """What the store has of this run, as a start sees it. ``trouble``: why it did not answer."""

    saves: tuple[StoredCheckpoint, ...] = ()
    trouble: str = ""


NOT_SEARCHED: Reading[PodSearch] = unobserved(SensorState.PENDING, float("-inf"), "the pod was not searched yet")
NOT_MEASURED: Reading[tuple[str, ...]] = unobserved(SensorState.PENDING, float("-inf"), "not measured yet")


@dataclass(frozen=True, slots=True)
class Facts:
    """``pod``: what the sensors read at the last turn. The rest is as of the moment at which this was built.
    ``checkpoints``: those on this pod, by step. ``store``: None without a store."""

    pod: Snapshot
    run: RunState
    checkpoints: tuple[CheckpointSet, ...] = ()
    unreadable: str = ""
    """Why the checkpoints cannot be read now; empty if they can."""
    store: StoreFacts | None = None
    pins: Mapping[int, str] = field(default_factory=dict)
    """Steps that stay, because the operator or a file of the trainer names them, each with the reason."""
    resume_sources: frozenset[int] = frozenset()
    """Steps from which training is, or may be, resumed."""
    reading: frozenset[int] = frozenset()
    """Steps that a hook or an evaluation reads."""
    keep_all: str = ""
    """Why podwatch may delete no checkpoint now; empty if it may."""
    save_seconds: float = 0.0
    """The median duration of a save, as learned; 0 before the first."""

    # What a decision about training needs beside that.

    trainer: Trainer | None = None
    """None: nothing of the last start is known to run, and its end is recorded."""
    acting: str = ""
    """The action that is carried out now; empty if none is."""
    unwritable: str = ""
    """Why a start or a stop cannot be recorded now; empty if it can."""
    search: Reading[PodSearch] = NOT_SEARCHED
    held: Reading[tuple[str, ...]] = NOT_MEASURED
    """What holds GPU memory or ports that training needs."""
    free_since: float = float("-inf")
    """Since when nothing of ours lives (monotonic): older readings show what the last trainer held."""
    evaluation: PendingEvaluation | None = None
    nodes: NodesOfRun | None = None
    """None for a run on one node."""
    inventory: Inventory | None = None
    """None: the store has not been asked since the last trainer ended."""
    question: tuple[str, str] | None = None
    """What the last action has found that only an operator can decide, and what they can do; None after a request."""
    misfits: Mapping[int, str] = field(default_factory=dict)
    """Steps of checkpoints here that the configured command cannot load, with the reason."""
    behind_links: frozenset[int] = frozenset()
    """Steps that seem to be behind a symbolic link, which podwatch does not follow."""
    doubt: str = ""
    """Why podwatch cannot be sure which checkpoints are this run's; empty if it is."""
    last_step: int | None = None
    """Of the training: its target, where that is known."""
