"""Where this podwatch runs: the engine or provider, its name for this job or machine, and the attempt; read from the
environment variables that each sets (docs/jobs.md). Pure.

Sources: Slurm ``sbatch(1)``; the pages "environment variables" of SkyPilot, dstack, Vast.ai and RunPod; Ray's job
submission. A Kubernetes pod gets nothing of its own but its host name: its manifest sets KUBERNETES_JOB_NAME,
KUBERNETES_POD_UID and KUBERNETES_NODE_NAME by the downward API.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Final

from podwatch.domain.document import Form

_TEXT: Final = re.compile(r"[\x21-\x7e]{1,200}")
_Name = Annotated[str, Form(r"[\x21-\x7e]{0,200}")]


@dataclass(frozen=True, slots=True)
class Instance:
    """``provider``: a name of ``_KNOWN``, or empty. ``id``: the engine's id of the job, the same for all its attempts,
    or the provider's id of the machine. ``attempt``: differs between two attempts of one job; empty if the engine does
    not number them. ``node``: the engine's name of the machine; empty if it gives none. ``label``: what `podwatch
    controller` named the machine, from LABEL_VARIABLE."""

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
class _Known:
    """Names of variables, in the order in which they are tried. ``form``: of the id, where other software sets the
    variable too. ``only_with``: a variable that shows that this is the provider. ``first``: the attempt where its
    variable is not set. ``grace``: seconds that the engine allows between its signal and SIGKILL, by default."""

    provider: str
    ids: tuple[str, ...]
    attempts: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    grace: float = 10.0
    first: str = ""
    form: str = ""
    only_with: str = ""


_KNOWN: Final = (
    _Known("slurm", ("SLURM_JOB_ID",), ("SLURM_RESTART_COUNT",), ("SLURMD_NODENAME",), 30.0, first="0"),
    _Known("dstack", ("DSTACK_RUN_ID",), ("DSTACK_JOB_ID",)),
    _Known("skypilot", ("SKYPILOT_TASK_ID",), grace=30.0),
    _Known("ray", ("RAY_JOB_SUBMISSION_ID", "RAY_JOB_ID"), grace=3.0),
    _Known("vast", ("CONTAINER_ID",), form=r"\d{1,18}"),
    _Known("runpod", ("RUNPOD_POD_ID",)),
    _Known(
        "kubernetes",
        ("KUBERNETES_JOB_NAME", "POD_NAME", "HOSTNAME"),
        ("KUBERNETES_POD_UID",),
        ("KUBERNETES_NODE_NAME",),
        30.0,
        only_with="KUBERNETES_SERVICE_HOST",
    ),
)
"""An engine first, then the provider of its machine: the engine decides what an exit code does. Kubernetes last: the
others run on it."""
OTHER_GRACE: Final = 10.0
"""Of `docker stop`, the shortest of the rest; a shell has none."""


def instance(environ: Mapping[str, str]) -> Instance:
    """The instance that ``environ`` describes; empty texts where it names none."""
    found, label = _known(environ), _first(environ, (LABEL_VARIABLE,))
    if found is None:
        return Instance(label=label)
    attempt = _first(environ, found.attempts) or found.first
    return Instance(found.provider, _first(environ, found.ids), attempt, _first(environ, found.nodes), label)


def grace_seconds(environ: Mapping[str, str]) -> float:
    """Seconds that the engine allows between its signal and SIGKILL: its default, which its operator can change."""
    found = _known(environ)
    return OTHER_GRACE if found is None else found.grace


def _known(environ: Mapping[str, str]) -> _Known | None:
    for known in _KNOWN:
        name = _first(environ, known.ids)
        if name and re.fullmatch(known.form or ".*", name) and (not known.only_with or environ.get(known.only_with)):
            return known
    return None


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((environ[name] for name in names if _TEXT.fullmatch(environ.get(name, ""))), "")
