"""What the nodes of one run tell each other: a record of node 0, a report of each other node (docs/nodes.md). Pure."""

from dataclasses import dataclass, field, replace
from typing import Annotated, TypeVar

from podwatch.domain.document import (
    Document,
    Flag,
    Integer,
    Label,
    Many,
    Real,
    Size,
    Text,
    Whole,
    matching,
    read_as,
    shown,
    strictly,
)
from podwatch.domain.earlier_attempts import Host
from podwatch.domain.engine_and_attempt import MOST_NODES
from podwatch.domain.errors import IntegrityError
from podwatch.domain.secrets import scrub

N = TypeVar("N", bound="_NodeDocument")
_Told = Annotated[str, shown(1000), read_as(scrub)]
_Rank = Annotated[int, strictly(0, MOST_NODES - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _NodeDocument(Document):
    run_id: Label = field(default="", compare=False)
    schema_version: Annotated[int, strictly(1, 1)] = field(default=1, compare=False)


@dataclass(frozen=True, slots=True)
class GangRecord(_NodeDocument):
    """Written by rank 0 alone, after it has confirmed that it holds the run. ``generation``: that of its claim.
    ``members``: the process of each node of this attempt (``Report.process``). ``ready``: everything is prepared, and
    every node starts training from ``step`` (None: from the beginning). ``files``: a hash of the files of that
    checkpoint as rank 0 sees them; empty if there is none."""

    FILE = "record of node 0"

    generation: Whole
    attempt: Label
    count: Whole
    members: Many[Label] = ()
    ready: Flag = False
    step: Whole | None = None
    files: Label = ""

    def __post_init__(self) -> None:
        if len(self.members) > MOST_NODES:
            raise ValueError(f"members: more than {MOST_NODES}")


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """Why a node cannot continue. ``blame``: of job/exit_code.py. ``log``: the log line that explains it. ``echo``:
    by its logs, only because another node is gone. ``broken``: the node's machine is, so that another one is needed."""

    kind: Label
    summary: _Told
    blame: Label = "unknown"
    log: _Told = ""
    echo: Flag = False
    broken: Flag = False


@dataclass(frozen=True, slots=True)
class GangEnd:
    """How the attempt ended, decided by rank 0: every node ends with this ``outcome`` and ``blame``. ``rank``: the node
    that is the reason; None if no node is. ``machine``: that node's, if it is to blame; ``broken``: another one is
    needed, else its fault can pass."""

    outcome: Label
    reason: _Told
    blame: Label = "unknown"
    rank: _Rank | None = None
    machine: Host | None = None
    broken: Flag = False


@dataclass(frozen=True, slots=True)
class Report(_NodeDocument):
    """What a node says of itself, every few seconds. ``process``: its podwatch's process, which differs between two
    attempts. ``follows``: the generation that it trains in; 0 before. ``step``, ``step_age``: the newest step that it
    has seen in this start, and how many seconds ago. ``end``: of rank 0 alone. ``agreed``: it knows the end. ``left``:
    nothing of it trains any more, and its podwatch ends. ``machine``: what it runs on."""

    FILE = "report of a node"

    rank: _Rank
    process: Annotated[str, matching(r"\S{1,200}")]
    attempt: Label = ""
    host: Label = ""
    follows: Whole = 0
    beat: Whole = 0
    phase: Label = ""
    step: Whole | None = None
    step_age: Real | None = None
    failure: NodeFailure | None = None
    finished: Flag = False
    end: GangEnd | None = None
    agreed: Flag = False
    left: Flag = False
    machine: Host = field(default_factory=Host)

    @property
    def name(self) -> str:
        return f"node {self.rank} ({self.host})" if self.host else f"node {self.rank}"


@dataclass(frozen=True, slots=True)
class NodeView(Document):
    """A node as status shows it."""

    rank: Whole
    host: Text
    phase: Text
    """As recovery.phase, of that node."""
    step: Integer | None
    silent_seconds: Size
    """Without a new report."""
    reason: Flag = False
    """It is the reason for the end of this attempt."""
    here: Flag = False
    """The node that answers."""


def document(said: GangRecord | Report, run_id: str) -> bytes:
    return replace(said, run_id=run_id).to_bytes()


def parse_record(data: bytes, run_id: str) -> GangRecord | None:
    """What ``document`` wrote; None for anything else."""
    return _of_run(GangRecord, data, run_id)


def parse_report(data: bytes, run_id: str) -> Report | None:
    """As ``parse_record``."""
    return _of_run(Report, data, run_id)


def _of_run(kind: type[N], data: bytes, run_id: str) -> N | None:
    try:
        found = kind.from_bytes(data)
    except IntegrityError:
        return None
    return found if found.run_id == run_id else None
