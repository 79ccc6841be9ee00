"""The run: its lineage and starts, its pause, its W&B identity; and the guard that every deletion,
publication, restart and fresh start asks first.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Lineage:
    """A branch of the training history. A step back on purpose or a fresh start opens a new one.

    ``id`` is random; ``parent`` and ``parent_step`` say where it left the older lineage (empty and None for a fresh
    run). For the status: ``left_step`` is the newest checkpoint of the lineage that an operator's own start left, and
    ``opened_wall`` (epoch seconds) the time of that start; None and 0 if podwatch opened the lineage.
    """

    id: str
    parent: str = ""
    parent_step: int | None = None
    left_step: int | None = None
    opened_wall: float = 0.0


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
    environment_names: tuple[str, ...] = ()
    config_digests: tuple[tuple[str, str], ...] = ()
    command: tuple[str, ...] = ()
    """``[trainer] command`` as configured at that time, without secrets."""


# -- maintenance pause -----------------------------------------------------------------------------------------------
# podwatch watches and backs up checkpoints, but neither stops nor starts training.


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause: who requested it, when and why. Times are epoch seconds, because it survives podwatch and a reboot.

    ``until``: None if it lasts until `podwatch unpause`. ``held_by``: the processes that hold the GPUs after the pause
    expired, so that it continues.
    """

    since: float
    until: float | None = None
    by: str = ""
    reason: str = ""
    held_by: str = ""


# -- W&B identity ----------------------------------------------------------------------------------------------------
# The W&B run, or runs, that this run's figures continue. Names are ``shared`` (one W&B run) or ``trainer`` and
# ``orchestrator`` (prime-rl before v0.5.0 has two). Values come from the disk, from the environment, or from the
# store, where anyone with write access to the bucket can have written them: podwatch uses only values that have the
# form of an id, and only as an id.

NAMES = ("shared", "trainer", "orchestrator")
FROM_STORE = "wandb.from-store"
"""Journal key: the ids in the last save fetched from the store. A new pod has no others."""
_PAIR = frozenset({"trainer", "orchestrator"})
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
"""The form of W&B's ids, without a leading dash, because an id is also an argument of a command."""


def is_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def valid_ids(ids: object) -> dict[str, str]:
    """The entries that are valid ids under a known name."""
    if not isinstance(ids, Mapping):
        return {}
    return {n: ids[n] for n in NAMES if isinstance(ids.get(n), str) and is_id(ids[n])}


def given_in(environment: Mapping[str, str], variables: tuple[str, ...]) -> dict[str, str]:
    """The id that the operator set in the environment: the first of ``variables`` that contains one."""
    value = next((environment[v] for v in variables if is_id(environment.get(v, ""))), "")
    return {"shared": value} if value else {}


def identity(
    known: Mapping[str, str], found: Mapping[str, str], given: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The ids to use: ``given`` by the operator, else ``found`` on disk, else ``known`` from the record or the store.

    Never a mixture. Two W&B runs have two ids; while only one of them is on disk, it looks like a shared one.
    """
    known, found = valid_ids(known), valid_ids(found)
    partly = found.keys() == {"shared"} and known.keys() >= _PAIR and found["shared"] in known.values()
    ids = known if partly or not found else found
    if ids.keys() >= _PAIR:  # both processes would use an id for a single run
        return {name: ids[name] for name in ("trainer", "orchestrator")}
    return dict(given or ids)


class Mutation(StrEnum):
    """The kinds of change that podwatch makes outside its own files."""

    DELETE = "delete"
    """Delete or move checkpoints and other files in the trainer's directories."""
    PUBLISH = "publish"
    """Upload, publish, and delete in the store."""
    RESTART = "restart"
    """Stop or start training, and move checkpoints above the resume step to quarantine."""
    FRESH_START = "fresh-start"
    """Start training without a checkpoint, or leave newer checkpoints of an unknown run unused."""


Source = Callable[[Mutation], str]
"""Returns why the mutation is not allowed now; empty if this source allows it. Called often and from any thread, so it
reads immutable values only."""


class MutationGuard:
    """Retention, sync and recovery ask it before they act; each component that can block a mutation adds a source."""

    def __init__(self, *sources: Source) -> None:
        self._sources = list(sources)

    def add(self, source: Source) -> None:
        self._sources.append(source)

    def blocked_reason(self, mutation: Mutation = Mutation.DELETE) -> str:
        """The first reason against ``mutation``; empty if it is allowed. Does not block the thread."""
        return next((reason for source in self._sources if (reason := source(mutation))), "")
