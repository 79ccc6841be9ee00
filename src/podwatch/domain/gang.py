"""One run over several nodes: which node this podwatch guards, and what the nodes report (docs/nodes.md). Pure.

Sources of the variables: Slurm ``srun(1)``, the pages "environment variables" of SkyPilot and dstack, Kubernetes
"Indexed Job". JobSet sets no variables of its own: its manifest passes the labels by the downward API.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from podwatch.domain.earlier_attempts import Host, parse_host
from podwatch.domain.errors import ConfigurationError
from podwatch.domain.secrets import scrub

MOST_NODES: Final = 1024
LONGEST_TEXT: Final = 1000
_FIX: Final = (
    "correct the engine's variables, or set [nodes] rank and count (PODWATCH_NODES__RANK, PODWATCH_NODES__COUNT)"
)


# -- which node this is ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """This node in its gang. ``count`` is at least 2. ``attempt``: the engine's job and the number of its attempt,
    the same text on every node; where an engine does not number attempts, the job alone; empty if it names neither.
    ``source``: where rank and count come from, in words."""

    rank: int
    count: int
    attempt: str = ""
    source: str = ""

    @property
    def leads(self) -> bool:
        """Rank 0 claims the run, chooses the step, prepares and uploads."""
        return self.rank == 0

    def __str__(self) -> str:
        return f"node {self.rank} of {self.count}"


@dataclass(frozen=True, slots=True)
class _Engine:
    """Names of variables. ``attempt``: those whose values together name one attempt; all nodes have the same values.
    ``only_with``: without this variable the engine did not start one podwatch on each node. ``tasks``: the number of
    processes that it started."""

    name: str
    rank: str
    count: tuple[str, ...]
    attempt: tuple[str, ...]
    only_with: str = ""
    tasks: str = ""


_ENGINES: Final = (
    _Engine(
        "Slurm",
        "SLURM_NODEID",
        ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
        ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        only_with="SLURM_STEP_ID",  # set by srun; the batch script of a job of several nodes runs on one of them
        tasks="SLURM_STEP_NUM_TASKS",
    ),
    _Engine("dstack", "DSTACK_NODE_RANK", ("DSTACK_NODES_NUM",), ("DSTACK_RUN_ID",)),
    _Engine("SkyPilot", "SKYPILOT_NODE_RANK", ("SKYPILOT_NUM_NODES",), ("SKYPILOT_TASK_ID",)),
    _Engine("Kubernetes", "JOB_COMPLETION_INDEX", (), ("JOBSET_NAME", "KUBERNETES_JOB_NAME", "JOBSET_RESTART_ATTEMPT")),
)
"""In the order of ``domain.engine_and_attempt``: the engine that starts the nodes comes before the one that it runs on. An
Indexed Job does not tell its number of completions: ``[nodes] count`` does."""


def place_of(environ: Mapping[str, str], rank: int | None = None, count: int | None = None) -> Place | None:
    """The node that this podwatch guards; None for a run on one node. ``rank``, ``count``: as configured, which takes
    precedence over the engine's variables; ``count`` 1 makes it a run on one node. Raises ConfigurationError for values
    that contradict each other."""
    if count == 1:
        if rank:
            raise ConfigurationError(f"[nodes] rank is {rank}, but count is 1", where="[nodes]", fix=_FIX)
        return None
    engine = next((one for one in _ENGINES if _speaks(one, environ)), None)
    source = "[nodes]"
    known_rank, known_count = rank, count
    if engine is not None:
        if known_rank is None:
            known_rank, source = _number(environ, engine.rank), engine.name
        if known_count is None:
            name = next((one for one in engine.count if environ.get(one)), "")
            if name:
                known_count, source = _number(environ, name), engine.name
                _one_each(environ, engine, known_count)
    if known_count == 1:
        return None
    if known_count is None:
        if rank is None:
            return (
                None  # an engine that numbers its processes, but not of one run: an Indexed Job without [nodes] count
            )
        raise ConfigurationError("[nodes] rank is set, but the number of nodes is not known", where="[nodes]", fix=_FIX)
    if known_rank is None:
        text = f"the run has {known_count} nodes, but the rank of this one is not known"
        raise ConfigurationError(text, where="[nodes]", fix=_FIX)
    if not 2 <= known_count <= MOST_NODES:
        raise ConfigurationError(f"a run cannot have {known_count} nodes", where=source, fix=_FIX)
    if not 0 <= known_rank < known_count:
        text = f"the rank of this node is {known_rank}, but the run has {known_count} nodes (0 to {known_count - 1})"
        raise ConfigurationError(text, where=source, fix=_FIX)
    return Place(known_rank, known_count, _attempt(environ, engine), source)


def _speaks(engine: _Engine, environ: Mapping[str, str]) -> bool:
    return bool(environ.get(engine.rank)) and (not engine.only_with or bool(environ.get(engine.only_with)))


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "").strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 6):
        raise ConfigurationError(f"Invalid value for {name}: {scrub(text[:40])!r} (expected a number)", fix=_FIX)
    return int(text)


def _one_each(environ: Mapping[str, str], engine: _Engine, count: int) -> None:
    tasks = _number(environ, engine.tasks) if engine.tasks and environ.get(engine.tasks) else count
    if count > 1 and tasks != count:
        raise ConfigurationError(
            f"{engine.name} started {tasks} processes on {count} nodes, but each node has one podwatch",
            where=engine.tasks,
            fix="start one process per node (--ntasks-per-node=1); the training command starts the others",
        )


def _attempt(environ: Mapping[str, str], engine: _Engine | None) -> str:
    if engine is None:
        return ""
    values = [environ.get(name, "") for name in engine.attempt]
    if not any(values):
        return ""
    return ":".join((engine.name.lower(), *(value or "0" for value in values)))[:200]


# -- what the nodes tell each other ----------------------------------------------------------------------------------
# Data from a shared directory is never trusted: parsing drops what is not what it should be.

SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class GangRecord:
    """Written by rank 0 alone, after it has confirmed that it holds the run. ``generation``: that of its claim.
    ``members``: the process of each node of this attempt (``Report.process``). ``ready``: everything is prepared, and
    every node starts training from ``step`` (None: from the beginning). ``files``: a hash of the files of that
    checkpoint as rank 0 sees them; empty if there is none, and in the record of an older podwatch. ``prepare``: where
    each node has a disk of its own, the number of the order to bring ``step`` there before anything starts; 0: none;
    ``save_id``: which save of it."""

    generation: int
    attempt: str
    count: int
    members: tuple[str, ...] = ()
    ready: bool = False
    step: int | None = None
    files: str = ""
    prepare: int = 0
    save_id: str = ""


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
    nothing of it trains any more, and its podwatch ends. ``machine``: what it runs on. Where each node has a disk of
    its own: ``prepared`` is the newest order of the record that it has carried out, ``listing`` identifies its list of
    checkpoints (domain/node_files.py), and ``looked`` is the newest mark of node 0's that it
    had read before it looked at its disk."""

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
    prepared: int = 0
    listing: str = ""
    looked: int = 0

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
        _whole(found.get("prepare")) or 0,
        _text(found.get("save_id")),
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
        _whole(found.get("prepared")) or 0,
        _text(found.get("listing")),
        _whole(found.get("looked")) or 0,
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
