"""The W&B identity of a run: the W&B run, or runs, that its figures continue.

Names are ``shared`` (one W&B run) or ``trainer`` and ``orchestrator`` (prime-rl before v0.5.0 has two). Values come
from the disk, from the environment, or from the store, where anyone with write access to the bucket can have written
them: podwatch uses only values that have the form of an id, and only as an id.
"""

import re
from collections.abc import Mapping

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
