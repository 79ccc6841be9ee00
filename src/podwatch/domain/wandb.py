"""The W&B identity of a run: in which W&B run, or runs, its figures go on (facts/prime-rl.md section 6).

Names are ``shared`` (one W&B run) or ``trainer`` and ``orchestrator`` (prime-rl before v0.5.0 has two). Values come
from the disk, from the environment, or from the store, which anybody who may write the bucket could have written:
only what looks like an id is ever used, and only as an id.
"""

import re
from collections.abc import Mapping

NAMES = ("shared", "trainer", "orchestrator")
FROM_STORE = "wandb.from-store"
"""Journal key: the ids that came with the last save fetched from the store. A new pod knows no others."""
_PAIR = frozenset({"trainer", "orchestrator"})
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
"""What W&B makes and takes, without a dash in front: an id is also an argument of a command."""


def is_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def valid_ids(ids: object) -> dict[str, str]:
    """The entries that are ids under a name we know; nothing for anything else."""
    if not isinstance(ids, Mapping):
        return {}
    return {n: ids[n] for n in NAMES if isinstance(ids.get(n), str) and is_id(ids[n])}


def given_in(environment: Mapping[str, str], variables: tuple[str, ...]) -> dict[str, str]:
    """The id that the owner set for training; the first of ``variables`` that holds one counts."""
    value = next((environment[v] for v in variables if is_id(environment.get(v, ""))), "")
    return {"shared": value} if value else {}


def identity(
    known: Mapping[str, str], found: Mapping[str, str], given: Mapping[str, str] | None = None
) -> dict[str, str]:
    """What counts: ``given`` by the owner, else ``found`` on disk, else ``known`` from the record or the store.

    Never a mixture. Two runs are told by two ids: while only one of them is on disk again, it looks like a shared one.
    """
    known, found = valid_ids(known), valid_ids(found)
    partly = found.keys() == {"shared"} and known.keys() >= _PAIR and found["shared"] in known.values()
    ids = known if partly or not found else found
    if ids.keys() >= _PAIR:  # an id for one run would be claimed by both
        return {name: ids[name] for name in ("trainer", "orchestrator")}
    return dict(given or ids)
