"""What the nodes of one run tell each other: a record of node 0, a report of each other node (docs/nodes.md). Pure."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from podwatch.domain.earlier_attempts import Host, parse_host
from podwatch.domain.node_from_engine import MOST_NODES
from podwatch.domain.secrets import scrub

LONGEST_TEXT: Final = 1000


# Data from a shared directory is never trusted: parsing drops what is not what it should be.

SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class GangRecord:
    """Written by rank 0 alone, after it has confirmed that it holds the run. ``generation``: that of its claim.
    ``members``: the process of each node of this attempt (``Report.process``). ``ready``: everything is prepared, and
    every node starts training from ``step`` (None: from the beginning). ``files``: a hash of the files of that
    checkpoint as rank 0 sees them; empty if there is none."""

    generation: int
    attempt: str
    count: int
    members: tuple[str, ...] = ()
    ready: bool = False
    step: int | None = None
    files: str = ""


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """Why a node cannot continue. ``blame``: of policy/exit_code.py. ``log``: the log line that explains it. ``echo``:
    by its logs, only because another node is gone. ``broken``: the node's machine is, so that another one is needed."""

    kind: str
    summary: str
    blame: str = "unknown"
    log: str = ""
    echo: bool = False
    broken: bool = False


@dataclass(frozen=True, slots=True)
class GangEnd:
    """How the attempt ended, decided by rank 0: every node ends with this ``outcome`` and ``blame``. ``rank``: the node
    that is the reason; None if no node is. ``machine``: that node's, if it is to blame; ``broken``: another one is
    needed, else its fault can pass."""

    outcome: str
    reason: str
    blame: str = "unknown"
    rank: int | None = None
    machine: Host | None = None
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """What a node says of itself, every few seconds. ``process``: its podwatch's process, which differs between two
    attempts. ``follows``: the generation that it trains in; 0 before. ``step``, ``step_age``: the newest step that it
    has seen in this start, and how many seconds ago. ``end``: of rank 0 alone. ``agreed``: it knows the end. ``left``:
    nothing of it trains any more, and its podwatch ends. ``machine``: what it runs on."""

    rank: int
    process: str
    attempt: str = ""
    host: str = ""
    follows: int = 0
    beat: int = 0
    phase: str = ""
    step: int | None = None
    step_age: float | None = None
    failure: NodeFailure | None = None
    finished: bool = False
    end: GangEnd | None = None
    agreed: bool = False
    left: bool = False
    machine: Host = field(default_factory=Host)

    @property
    def name(self) -> str:
        return f"node {self.rank} ({self.host})" if self.host else f"node {self.rank}"


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as status shows it. ``silent``: seconds without a new report. ``reason``: it is the reason for the end of
    this attempt. ``here``: the node that shows it."""

    rank: int
    host: str
    phase: str
    step: int | None
    silent: float
    reason: bool = False
    here: bool = False


def document(told: GangRecord | Report, run_id: str) -> bytes:
    head = {"schema_version": SCHEMA_VERSION, "run_id": run_id}
    return (json.dumps({**head, **asdict(told)}, sort_keys=True) + "\n").encode()


def parse_record(data: bytes, run_id: str) -> GangRecord | None:
    """What ``document`` wrote; None for anything else."""
    found = _object(data, run_id)
    generation, count = _whole(found.get("generation")), _whole(found.get("count"))
    members = found.get("members")
    if generation is None or count is None or not isinstance(members, list) or len(members) > MOST_NODES:
        return None
    return GangRecord(
        generation,
        _text(found.get("attempt")),
        count,
        tuple(_text(one) for one in members),
        found.get("ready") is True,
        _whole(found.get("step")),
        _text(found.get("files")),
    )


def parse_report(data: bytes, run_id: str) -> Report | None:
    """As ``parse_record``."""
    found = _object(data, run_id)
    rank, process = _whole(found.get("rank")), _text(found.get("process"))
    if rank is None or rank >= MOST_NODES or not process:
        return None
    age = found.get("step_age")
    failure, end = found.get("failure"), found.get("end")
    return Report(
        rank,
        process,
        _text(found.get("attempt")),
        _text(found.get("host")),
        _whole(found.get("follows")) or 0,
        _whole(found.get("beat")) or 0,
        _text(found.get("phase")),
        _whole(found.get("step")),
        float(age) if isinstance(age, int | float) and not isinstance(age, bool) and 0 <= age < 1e9 else None,
        _failure(failure) if isinstance(failure, dict) else None,
        found.get("finished") is True,
        _end(end) if isinstance(end, dict) else None,
        found.get("agreed") is True,
        found.get("left") is True,
        parse_host(found.get("machine")),
    )


def _failure(found: dict[str, Any]) -> NodeFailure:
    kind, summary, blame, log = (_text(found.get(name)) for name in ("kind", "summary", "blame", "log"))
    return NodeFailure(kind, summary, blame, log, found.get("echo") is True, found.get("broken") is True)


def _end(found: dict[str, Any]) -> GangEnd:
    outcome, reason, blame = (_text(found.get(name)) for name in ("outcome", "reason", "blame"))
    machine = None if found.get("machine") is None else parse_host(found["machine"])
    return GangEnd(outcome, reason, blame, _whole(found.get("rank")), machine, found.get("broken") is True)


def _object(data: bytes, run_id: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and found.get("run_id") == run_id else {}


def _text(value: object) -> str:
    return scrub(value[:LONGEST_TEXT]) if isinstance(value, str) else ""


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else None
