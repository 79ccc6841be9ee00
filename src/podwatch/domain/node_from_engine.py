"""Which node of the run this is, from the engine's variables and ``[nodes]`` (docs/nodes.md). Pure.

Sources of the variables: Slurm ``srun(1)``, the pages "environment variables" of SkyPilot and dstack, Kubernetes
"Indexed Job". JobSet sets no variables of its own: its manifest passes the labels by the downward API.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from podwatch.domain.errors import ConfigurationError
from podwatch.domain.secrets import scrub

MOST_NODES: Final = 1024
_FIX: Final = (
    "correct the engine's variables, or set [nodes] rank and count (PODWATCH_NODES__RANK, PODWATCH_NODES__COUNT)"
)


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
"""As in ``domain.engine_and_attempt``, the engine that starts the nodes comes before the one that it runs on. An
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
