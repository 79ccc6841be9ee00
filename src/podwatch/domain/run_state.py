"""What a decision about the run needs, in one small document: run.json in the state directory.

The journal only remembers; it can vanish. A copy of this document beside output_dir lets a podwatch that lost its state
directory continue. Every field has a default, unknown fields are ignored, and fields are only added.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from podwatch.domain.document import Document, Flag, Integer, Label, Many, Real, RunId, Text, Texts, Whole
from podwatch.domain.run import Lineage, Pause, StartRecord
from podwatch.domain.snapshot import Desired
from podwatch.domain.starts import StartedBy, TrainerStart, changed_start, find_start, older_branches, opener_of


@dataclass(frozen=True, slots=True)
class RestartHistory:
    """What the decision whether to restart remembers (recovery/restart_budget.py). Times are monotonic seconds of one
    boot."""

    ever_worked: Flag = False
    """This command has made a step at least once."""
    streak_count: Whole = 0
    streak_started_at: Real | None = None
    tries_without_step: Whole = 0
    """Consecutive attempts without a step, of a command that never worked."""
    failed_loads: tuple[tuple[Whole, Whole], ...] = ()
    """(step, proven failed loads) since the last step that was made."""
    step_backs: Whole = 0
    working_since: Real | None = None
    """First step after the last failure."""
    last_step_at: Real | None = None
    gave_up_at: Real | None = None

    @property
    def gave_up(self) -> bool:
        return self.gave_up_at is not None

    def shifted(self, by: float) -> "RestartHistory":
        """The same with every time moved from the monotonic clock of one boot to that of another."""
        moved = {
            name: value + by
            for name in ("streak_started_at", "working_since", "last_step_at", "gave_up_at")
            if (value := getattr(self, name)) is not None
        }
        return replace(self, **moved)


@dataclass(frozen=True, slots=True)
class WrittenAt:
    """When and where the document was written. ``monotonic`` counts in the boot ``boot`` of the machine ``machine``."""

    machine: Text = ""
    boot: Text = ""
    monotonic: Real = 0.0
    wall: Real = 0.0


@dataclass(frozen=True, slots=True)
class Stopping:
    """The stop of a trainer that is carried out now; recorded before its first signal, so that the next podwatch
    finishes it. ``pid``, ``ticks`` and ``boot`` identify an attached trainer's launcher."""

    start_id: Text
    why: Text = ""
    pid: Whole = 0
    ticks: Whole = 0
    boot: Text = ""


@dataclass(frozen=True, slots=True)
class WonClaim:
    """The lease that this pod won last: a restarted podwatch continues with it."""

    generation: Whole
    nonce: Text
    boot: Text = ""
    process: Text = ""
    job: tuple[Text, ...] = ()


@dataclass(frozen=True, slots=True)
class RunState(Document):
    """All fields but ``run_id`` have a default."""

    KIND = "podwatch-run-state"
    FILE = "run.json"

    run_id: RunId
    counter: Whole = 0
    """Counts the edits: of two documents of one run the higher one is newer, whatever the clocks say."""
    written: WrittenAt = WrittenAt()

    adopted: Text = ""
    """The start during which the operator adopted what is older than every start (--adopt-existing); empty if nobody
    did."""
    wandb: Texts = field(default_factory=dict)

    desired: Desired = Desired.RUNNING
    desired_wall: Real = 0.0
    """When ``desired`` last changed: a trainer that an operator started later overrides it."""
    stop_above: Integer | None = None
    """With ``desired`` stopped: training continues until a complete checkpoint above this step exists (-1: any)."""
    stop_cancelled_for: Text = ""
    """The start whose stop the operator cancelled: no finding stops it again."""
    requested: Flag = False
    """The operator's last request is not carried out yet: neither a pause before it nor mode observe prevents it."""
    despite_store: Flag = False
    """An operator started training while the store did not answer; holds until it answers."""
    clean: Flag = False
    """What an old run left is to be moved to quarantine, so that the next start is fresh."""
    evaluation: Text = ""
    """What training is stopped to evaluate; empty once it is started again."""
    attach: Text = ""
    """The start of the process that the operator named as the trainer: it needs no other tie."""
    ignored: tuple[Text, ...] = ()
    """Starts that the operator declared not to be this run's training (``podwatch start --ignore PID``)."""
    pause: Pause | None = None
    pins: Mapping[int, Label] = field(default_factory=dict)
    executed: Texts = field(default_factory=dict)
    """Ids of the last request of each kind that arrived as a flag of `podwatch run`: each is executed once, although an
    init passes it to every daemon that it starts."""

    last_start: StartRecord | None = None
    starts: Many[TrainerStart] = ()
    """Oldest first; the first one is the moment at which podwatch began to guard the run."""
    stopping: Stopping | None = None
    yielded: Flag = False
    """This pod lost the run and stopped its trainer; a trainer attached since then belongs to the operator."""

    wanted: Whole | None = None
    fresh: Flag = False
    """With ``wanted``: the next start as the operator requested it; cleared once that start was seen to run."""
    below: Whole | None = None
    """The next start must come from a step below this one (a step back that was decided)."""
    history: RestartHistory = RestartHistory()
    next_try_wall: Real | None = None
    refused: Mapping[int, Text] = field(default_factory=dict)
    """Steps that no start chooses by itself, with the reason."""
    gpu_base: Mapping[int, Integer] = field(default_factory=dict)
    """NVML index -> bytes in use before our trainer started."""

    ping_token: Text = ""
    """Part of the address to which the trainer sends its progress."""
    writer_id: Text = ""
    """Names this pod in the store."""
    stored: Flag = False
    """A whole save of this run was seen in the store."""
    claim: WonClaim | None = None

    @property
    def lineage(self) -> Lineage:
        """The branch that is trained now."""
        if not self.starts:
            return Lineage("")
        branch = self.starts[-1].branch
        opener, parent = opener_of(branch, self.starts)
        if opener is None:
            return Lineage(branch)
        by_operator = opener.left_step is not None
        return Lineage(branch, parent, opener.from_step, opener.left_step, opener.wall if by_operator else 0.0)

    @property
    def ancestry(self) -> Mapping[str, int]:
        """Older branches, each with its last step that belongs to the current one."""
        return older_branches(self.starts)

    def start(self, start_id: str) -> TrainerStart | None:
        return find_start(start_id, self.starts)

    def with_start(self, start_id: str, **changes: Any) -> Self:
        """With this start changed, if it is recorded."""
        return replace(self, starts=changed_start(self.starts, start_id, **changes))

    @property
    def started_from(self) -> int | None:
        """The step of podwatch's last start; None if that was fresh, or there was none."""
        return next((s.from_step for s in reversed(self.starts) if s.by is StartedBy.PODWATCH), None)

    @property
    def ended_wall(self) -> float | None:
        """Epoch second at which our last trainer ended; a process that already ran then is not its successor. None
        while it is watched, and before the first one."""
        return next((s.ended for s in reversed(self.starts) if s.trains and s.seen), None)

    @property
    def guarded_since(self) -> float:
        """The begin of the first start on this pod: older checkpoints are deleted only if they are in the store."""
        return min((s.wall for s in self.starts if s.by is not StartedBy.OTHER_POD), default=0.0)

    def pinned(self, step: int, reason: str) -> Self:
        return replace(self, pins={**self.pins, step: reason})

    def unpinned(self, *steps: int) -> Self:
        return replace(self, pins={step: reason for step, reason in self.pins.items() if step not in steps})

    def here(self, machine: str, boot: str, monotonic: float, wall: float) -> Self:
        """What of it is still true on this machine in this boot."""
        before = self.written
        if (before.machine, before.boot) == (machine, boot) and before.monotonic <= monotonic:
            return self
        age = max(0.0, wall - before.wall)
        gone: dict[str, Any] = {
            "history": self.history.shifted(monotonic - before.monotonic - age),
            "gpu_base": {},
            "starts": tuple(s if s.ended is None else replace(s, ended=0.0) for s in self.starts),
            "ignored": (),
        }
        if before.machine != machine:
            # Another pod's claim would let two pods train; its processes and its maintenance are not here.
            gone |= {
                "claim": None,
                "writer_id": "",
                "ping_token": "",
                "stopping": None,
                "pause": None,
                "requested": False,
                "attach": "",
                "stop_cancelled_for": "",
            }
        return replace(self, **gone)

    def as_a_copy(self, own: Self | None) -> Self:
        """What of a copy beside output_dir may decide: nothing that names a program, a directory or a user, and nothing
        that names this podwatch or its processes: a machine and a boot id prove nothing, because containers of one
        image on one host share them. Those are as in ``own``, the file in the state directory."""
        start = self.last_start
        if start is not None:
            known = None if own is None else own.last_start
            same = known is not None and known.start_id == start.start_id
            bare = replace(start, argv=(), cwd="", user="", environment_names=(), config_digests=(), command=())
            start = known if same else bare
        return replace(
            self,
            last_start=start,
            claim=None if own is None else own.claim,
            writer_id="" if own is None else own.writer_id,
            ping_token="" if own is None else own.ping_token,
            stopping=None if own is None else own.stopping,
            gpu_base={} if own is None else own.gpu_base,
        )
