"""Where this podwatch runs, from the environment variables that each engine or provider sets: its name for this job or
machine, the attempt (docs/jobs.md), and which node of the run this is (docs/nodes.md). Pure.

Sources: Slurm ``sbatch(1)`` and ``srun(1)``; the pages "environment variables" of SkyPilot, dstack, Vast.ai and RunPod;
Ray's job submission; Kubernetes "Indexed Job". A Kubernetes pod gets nothing of its own but its host name: its manifest
sets KUBERNETES_JOB_NAME, KUBERNETES_POD_UID and KUBERNETES_NODE_NAME by the downward API, and that of a JobSet its
labels.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Final

from podwatch.domain.document import matching
from podwatch.domain.errors import ConfigurationError
from podwatch.domain.secrets import scrub

MOST_NODES: Final = 1024
_FIX: Final = (
    "correct the engine's variables, or set [nodes] rank and count (PODWATCH_NODES__RANK, PODWATCH_NODES__COUNT)"
)
_TEXT: Final = re.compile(r"[\x21-\x7e]{1,200}")
_Name = Annotated[str, matching(r"[\x21-\x7e]{0,200}")]


@dataclass(frozen=True, slots=True)
class Instance:
    """``provider``: a name of ``_ENGINES`` in small letters, or empty. ``id``: the engine's id of the job, the same for
    all its attempts, or the provider's id of the machine. ``attempt``: differs between two attempts of one job; empty
    if the engine does not number them. ``node``: the engine's name of the machine; empty if it gives none. ``label``:
    what `podwatch controller` named the machine, from LABEL_VARIABLE."""

    provider: _Name = ""
    id: _Name = ""
    attempt: _Name = ""
    node: _Name = ""
    label: _Name = ""

    @property
    def job(self) -> tuple[str, str]:
        return self.provider, self.id

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


NO_INSTANCE: Final = Instance()
LABEL_VARIABLE: Final = "PODWATCH_LABEL"


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
    """Names of variables, in the order in which they are tried. ``form``: of the id, where other software sets the
    variable too. ``only_with``: a variable that shows that this is the engine. ``first``: the attempt where its
    variable is not set. ``grace``: seconds that the engine allows between its signal and SIGKILL, by default.

    Of a run over several nodes: ``rank`` and ``count`` of this node. ``gang``: those whose values together name one
    attempt; all nodes have the same values. ``each_with``: without this variable the engine did not start one podwatch
    on each node. ``tasks``: the number of processes that it started."""

    name: str
    ids: tuple[str, ...]
    attempts: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    grace: float = 10.0
    first: str = ""
    form: str = ""
    only_with: str = ""
    rank: str = ""
    count: tuple[str, ...] = ()
    gang: tuple[str, ...] = ()
    each_with: str = ""
    tasks: str = ""


_ENGINES: Final = (
    _Engine(
        "Slurm", ("SLURM_JOB_ID",), ("SLURM_RESTART_COUNT",), ("SLURMD_NODENAME",), 30.0, first="0",
        rank="SLURM_NODEID", count=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
        gang=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        each_with="SLURM_STEP_ID",  # set by srun; the batch script of a job of several nodes runs on one of them
        tasks="SLURM_STEP_NUM_TASKS",
    ),
    _Engine(
        "dstack", ("DSTACK_RUN_ID",), ("DSTACK_JOB_ID",),
        rank="DSTACK_NODE_RANK", count=("DSTACK_NODES_NUM",), gang=("DSTACK_RUN_ID",),
    ),
    _Engine(
        "SkyPilot", ("SKYPILOT_TASK_ID",), grace=30.0,
        rank="SKYPILOT_NODE_RANK", count=("SKYPILOT_NUM_NODES",), gang=("SKYPILOT_TASK_ID",),
    ),
    _Engine("Ray", ("RAY_JOB_SUBMISSION_ID", "RAY_JOB_ID"), grace=3.0),
    _Engine("Vast", ("CONTAINER_ID",), form=r"\d{1,18}"),
    _Engine("RunPod", ("RUNPOD_POD_ID",)),
    _Engine(
        "Kubernetes", ("KUBERNETES_JOB_NAME", "POD_NAME", "HOSTNAME"), ("KUBERNETES_POD_UID",),
        ("KUBERNETES_NODE_NAME",), 30.0, only_with="KUBERNETES_SERVICE_HOST",
        rank="JOB_COMPLETION_INDEX", gang=("JOBSET_NAME", "KUBERNETES_JOB_NAME", "JOBSET_RESTART_ATTEMPT"),
    ),
)  # fmt: skip
"""An engine first, then the provider of its machine: the engine decides what an exit code does, and starts the nodes.
Kubernetes last: the others run on it. An Indexed Job does not tell its number of completions: ``[nodes] count``
does."""
OTHER_GRACE: Final = 10.0
"""Of `docker stop`, the shortest of the rest; a shell has none."""


def instance(environ: Mapping[str, str]) -> Instance:
    """The instance that ``environ`` describes; empty texts where it names none."""
    found, label = _known(environ), _first(environ, (LABEL_VARIABLE,))
    if found is None:
        return Instance(label=label)
    attempt = _first(environ, found.attempts) or found.first
    return Instance(found.name.lower(), _first(environ, found.ids), attempt, _first(environ, found.nodes), label)


def grace_seconds(environ: Mapping[str, str]) -> float:
    """Seconds that the engine allows between its signal and SIGKILL: its default, which its operator can change."""
    found = _known(environ)
    return OTHER_GRACE if found is None else found.grace


def _known(environ: Mapping[str, str]) -> _Engine | None:
    for known in _ENGINES:
        name = _first(environ, known.ids)
        if name and re.fullmatch(known.form or ".*", name) and (not known.only_with or environ.get(known.only_with)):
            return known
    return None


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((environ[name] for name in names if _TEXT.fullmatch(environ.get(name, ""))), "")


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
    return bool(environ.get(engine.rank)) and (not engine.each_with or bool(environ.get(engine.each_with)))


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
    values = [environ.get(name, "") for name in engine.gang]
    if not any(values):
        return ""
    return ":".join((engine.name.lower(), *(value or "0" for value in values)))[:200]
